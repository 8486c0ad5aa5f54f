"""Memory of one shard: chunks of 2 MiB, cut into rows or into index tables.

A slab is the set of chunks whose rows have one shape (dim, dtype, state words). A freed row is
reused by its slab; an empty chunk may change its slab; nothing ever moves, so a row number
stays good until its row is dropped.

Invariants, true between calls:

    I1  num_live of a chunk counts its rows that are not free; of a slab, of its chunks.
    I2  A chunk is in its slab's open list if and only if a row can be taken from it.
    I3  bytes_used counts places touched since their chunk was last empty, times their stride,
        and index blocks.

Not taken: one malloc per row (48 bytes of overhead in the original), and slabs that grow by
moving (they stop the world).
"""

from libc.stdlib cimport free, realloc
from libc.string cimport memset

from persia._core.base.types cimport MAX_DIM, NO_ROW
from persia._core.shard.persistent_shard cimport (
    FILE_FORMATS, FILE_PAGE, FILE_ROWS, SavedFormat, crash_point, file_back, persia_back,
    persia_map_file, persia_stores_before,
)
from persia._core.shard.row_format cimport set_format

cdef extern from "portable.h" nogil:
    void *persia_map(size_t num_bytes, size_t alignment) noexcept
    void persia_unmap(void *start, size_t num_bytes) noexcept
    void persia_advise_huge(void *start, size_t num_bytes) noexcept
    void persia_populate(void *start, size_t num_bytes) noexcept
    int persia_empty(void *start, size_t num_bytes) noexcept
    int persia_collapse(void *start, size_t num_bytes) noexcept

cdef extern from *:
    """
    #define PERSIA_REGION_BYTES ((size_t)0x200000 * 16)
    """
    const size_t REGION_BYTES "PERSIA_REGION_BYTES"

cdef enum:
    # What a format that was read may have; see ``optim``.
    NUM_DTYPES = 3
    MAX_STATE_WORDS = 2 * MAX_DIM + 1


cdef void slabs_init(Slabs *slabs) noexcept nogil:
    memset(slabs, 0, sizeof(Slabs))


cdef void slabs_free(Slabs *slabs) noexcept nogil:
    """Give everything back; the struct is as after ``slabs_init``."""
    cdef ShardFile *file = slabs.file
    regions_free(&slabs.rows)
    regions_free(&slabs.blocks)
    free(slabs.views)
    free(slabs.states)
    slabs_init(slabs)
    slabs.file = file


cdef void regions_free(Regions *regions) noexcept nogil:
    cdef uint32_t i
    for i in range(regions.count):
        persia_unmap(regions.starts[i], REGION_BYTES)
    free(regions.starts)


cdef Spare slabs_spare(Slabs *slabs) noexcept nogil:
    cdef Spare spare
    spare.rows = slabs.rows
    spare.blocks = slabs.blocks
    memset(&slabs.rows, 0, sizeof(Regions))
    memset(&slabs.blocks, 0, sizeof(Regions))
    return spare


cdef void slabs_reuse(Slabs *slabs, const Spare *spare) noexcept nogil:
    slabs.rows = used_regions(&spare.rows)
    slabs.blocks = used_regions(&spare.blocks)
    slabs.num_ahead = slabs.rows.num_used


cdef Regions used_regions(const Regions *regions) noexcept nogil:
    cdef Regions used = regions[0]
    used.num_used = max(used.num_used, used.num_taken)
    used.num_taken = 0
    return used


cdef void slabs_trim(Slabs *slabs) noexcept nogil:
    regions_trim(&slabs.rows)
    regions_trim(&slabs.blocks)
    slabs.num_ahead = min(slabs.num_ahead, max(slabs.rows.num_used, slabs.rows.num_taken))


cdef void regions_trim(Regions *regions) noexcept nogil:
    cdef uint32_t count = (
        regions.num_taken + <uint32_t> CHUNKS_PER_REGION - 1) // <uint32_t> CHUNKS_PER_REGION
    while regions.count > count:
        regions.count -= 1
        persia_unmap(regions.starts[regions.count], REGION_BYTES)
    regions.num_used = min(regions.num_used, count * <uint32_t> CHUNKS_PER_REGION)
    if is_used(regions) and persia_empty(
            regions.starts[count - 1] + (
                <size_t> CHUNK_BYTES * (regions.num_taken % CHUNKS_PER_REGION)),
            <size_t> CHUNK_BYTES * (regions.num_used - regions.num_taken)) == 0:
        regions.num_used = regions.num_taken


cdef char *next_chunk(Regions *regions, ShardFile *file) noexcept nogil:
    """The next 2 MiB of address space, zeroed if new, or of the file; NULL if there is none."""
    cdef char **starts
    cdef char *region
    cdef uint32_t capacity
    cdef uint32_t number = regions.num_taken // CHUNKS_PER_REGION
    if number == regions.count:
        if regions.count == regions.capacity:
            capacity = regions.capacity * 2 if regions.capacity else 4
            starts = <char **> realloc(regions.starts, capacity * sizeof(char *))
            if starts == NULL:
                return NULL
            regions.starts = starts
            regions.capacity = capacity
        if file == NULL:
            region = <char *> persia_map(REGION_BYTES, CHUNK_BYTES)
        else:
            region = <char *> persia_map_file(
                file.fd, file.offset + FILE_ROWS + regions.count * REGION_BYTES,
                REGION_BYTES, CHUNK_BYTES)
        if region == NULL:
            return NULL
        regions.starts[regions.count] = region
        regions.count += 1
    return regions.starts[number] + (
        <size_t> CHUNK_BYTES * (regions.num_taken % CHUNKS_PER_REGION))


cdef inline bint is_used(const Regions *regions) noexcept nogil:
    """Whether the next chunk has been taken before."""
    return regions.num_taken < regions.num_used


cdef char *map_chunk(Slabs *slabs, Regions *regions, ShardFile *file) noexcept nogil:
    """Take the next chunk; NULL if there is none."""
    cdef char *chunk = next_chunk(regions, file)
    if chunk != NULL:
        regions.num_taken += 1
        slabs.num_mapped += 1
    return chunk


cdef int back_rows(Slabs *slabs, uint32_t chunk, uint32_t num_bytes) noexcept nogil:
    """Have memory for the next bytes of a kept chunk."""
    cdef uint32_t backed = slabs.states[chunk].bytes_backed
    num_bytes = min(num_bytes, CHUNK_BYTES - backed)
    if num_bytes and file_back(
            slabs.file, slabs.views[chunk].base + backed,
            FILE_ROWS + <uint64_t> chunk * CHUNK_BYTES + backed, num_bytes) < 0:
        return -1
    slabs.states[chunk].bytes_backed += num_bytes
    return 0


cdef int slabs_slab(Slabs *slabs, const Format *format) noexcept nogil:
    cdef uint32_t i
    cdef Slab *slab
    for i in range(slabs.num_slabs):
        slab = &slabs.slabs[i]
        if has_format(slab, format):
            return <int> i
    if slabs.num_slabs == MAX_SLABS:
        return -1
    slab = &slabs.slabs[slabs.num_slabs]
    slab.dim = format.dim
    slab.dtype = format.dtype
    slab.state_words = format.state_words
    # 8, not 16: the u64 sign must be aligned, the vector loads need not be, and 16 would cost
    # one-word states (shared Adagrad) 8 bytes a row.
    slab.stride = ~<uint32_t> 7 & (
        <uint32_t> sizeof(Row) + 4 * (format.value_words + format.state_words) + 7)
    slab.open = NO_CHUNK
    slab.num_live = 0
    if slabs.file != NULL:
        note_format(slabs.file, slabs.num_slabs, format)
    slabs.num_slabs += 1
    return <int> (slabs.num_slabs - 1)


cdef void note_format(ShardFile *file, uint32_t number, const Format *format) noexcept nogil:
    cdef SavedFormat *at = &file.shard.formats[number]
    at.dim = format.dim
    at.dtype = format.dtype
    at.state_words = format.state_words
    persia_stores_before()
    file.shard.num_formats = number + 1
    persia_stores_before()


cdef void open_chunk(Slabs *slabs, uint32_t chunk) noexcept nogil:
    cdef Slab *slab = &slabs.slabs[slabs.views[chunk].slab]
    slabs.states[chunk].previous = NO_CHUNK
    slabs.states[chunk].next = slab.open
    if slab.open != NO_CHUNK:
        slabs.states[slab.open].previous = chunk
    slab.open = chunk


cdef void close_chunk(Slabs *slabs, uint32_t chunk) noexcept nogil:
    cdef ChunkState *state = &slabs.states[chunk]
    if state.previous != NO_CHUNK:
        slabs.states[state.previous].next = state.next
    else:
        slabs.slabs[slabs.views[chunk].slab].open = state.next
    if state.next != NO_CHUNK:
        slabs.states[state.next].previous = state.previous


cdef void cut_chunk(Slabs *slabs, uint32_t chunk, uint32_t slab) noexcept nogil:
    """Make an unused or empty chunk one of the slab's, all places untouched."""
    cdef uint32_t stride = slabs.slabs[slab].stride
    slabs.views[chunk].stride = stride
    slabs.views[chunk].slab = slab
    slabs.states[chunk].num_places = CHUNK_BYTES // stride
    slabs.states[chunk].num_touched = 0
    slabs.states[chunk].num_live = 0
    slabs.states[chunk].freed = NO_ROW
    if slabs.file != NULL:
        # One store: what the places were cut for, and that none of them is anything yet.
        slabs.file.shard.chunks[chunk] = slab
        persia_stores_before()
    open_chunk(slabs, chunk)


cdef bint grow_chunks(Slabs *slabs, uint32_t count) noexcept nogil:
    """Make room for the descriptions of ``count`` chunks."""
    cdef ChunkView *views
    cdef ChunkState *states
    cdef uint32_t capacity = slabs.chunk_capacity if slabs.chunk_capacity else 8
    if count <= slabs.chunk_capacity:
        return True
    while capacity < count:
        capacity *= 2
    views = <ChunkView *> realloc(slabs.views, capacity * sizeof(ChunkView))
    if views == NULL:
        return False
    slabs.views = views
    states = <ChunkState *> realloc(slabs.states, capacity * sizeof(ChunkState))
    if states == NULL:
        return False
    slabs.states = states
    slabs.chunk_capacity = capacity
    return True


# The first chunks of a shard start on small pages, because a huge page is resident as a whole
# and many small shards would pay 2 MiB for a few rows. One of rows moves to a huge page once it
# is full, so that nothing is wasted: the rows that came first are often those used most. One of
# index tables moves once a quarter of it is used: then the shard has a hundred thousand rows.
# So at most SMALL_CHUNKS times in the life of a shard 2 MiB are copied, half a millisecond
# each.
cdef bint add_chunk(Slabs *slabs, uint32_t slab) noexcept nogil:
    cdef ChunkState *state
    cdef char *base
    cdef uint32_t chunk = slabs.num_chunks
    cdef bint is_small = slabs.num_mapped < SMALL_CHUNKS
    if chunk == MAX_CHUNKS or not grow_chunks(slabs, chunk + 1):
        return False
    base = map_chunk(slabs, &slabs.rows, slabs.file)
    if base == NULL:
        return False
    slabs.views[chunk].base = base
    state = &slabs.states[chunk]
    state.is_small = is_small
    state.bytes_backed = CHUNK_BYTES
    if slabs.file == NULL:
        if not is_small:
            persia_advise_huge(base, CHUNK_BYTES)
    elif not back_chunk(slabs, chunk):
        return False
    slabs.num_chunks += 1
    cut_chunk(slabs, chunk, slab)
    if slabs.file != NULL:
        slabs.file.shard.num_chunks = slabs.num_chunks
        persia_stores_before()
        crash_point(slabs.file)
    return True


cdef bint back_chunk(Slabs *slabs, uint32_t chunk) noexcept nogil:
    """Memory for a chunk that is new, as one huge page if it can be had, and for its entry."""
    cdef ChunkState *state = &slabs.states[chunk]
    cdef char *entry = <char *> &slabs.file.shard.chunks[chunk]
    if file_back(
            slabs.file, entry, entry - <char *> slabs.file.shard, sizeof(uint64_t)) < 0:
        return False
    state.bytes_backed = 0
    if state.is_small:
        return back_rows(slabs, chunk, SMALL_BACKED) == 0
    # A huge page is made of what is there, and of an empty range none is.
    if back_rows(slabs, chunk, FILE_PAGE) < 0:
        return False
    if chunk < slabs.num_ahead:
        pass            # it is one
    elif persia_collapse(slabs.views[chunk].base, CHUNK_BYTES) == 0:
        state.bytes_backed = CHUNK_BYTES
    return back_rows(slabs, chunk, CHUNK_BYTES) == 0


# The first touch of a huge page waits until the system has found and cleared it: 0.1 ms to some
# ms. So when an eighth of a chunk is left, the request that wanted rows makes the next one
# resident, after it has released the shard's lock: other requests are served meanwhile.
cdef Ahead slabs_ahead(Slabs *slabs) noexcept nogil:
    cdef Ahead ahead
    ahead.base = NULL
    ahead.file = NULL
    ahead.offset = 0
    if slabs.num_ahead <= slabs.num_chunks < MAX_CHUNKS:
        ahead.base = next_chunk(&slabs.rows, slabs.file)
        ahead.file = slabs.file
        if slabs.file != NULL:
            ahead.offset = (
                slabs.file.offset + FILE_ROWS + <uint64_t> slabs.num_chunks * CHUNK_BYTES)
        slabs.num_ahead = slabs.num_chunks + 1
    return ahead


cdef void back_ahead(const Ahead *ahead) noexcept nogil:
    if ahead.file == NULL:
        persia_populate(ahead.base, CHUNK_BYTES)
    elif not ahead.file.is_void[0] and (
            persia_back(ahead.file.fd, ahead.offset, FILE_PAGE) == 0):
        # What cannot be had is asked for again when it is needed, and then said.
        persia_collapse(ahead.base, CHUNK_BYTES)
        persia_back(ahead.file.fd, ahead.offset, CHUNK_BYTES)


cdef bint take_empty_chunk(Slabs *slabs, uint32_t slab) noexcept nogil:
    """Recut a chunk of another shape that has no live row; False if there is none."""
    cdef uint32_t chunk
    for chunk in range(slabs.num_chunks):
        if slabs.states[chunk].num_live == 0 and slabs.views[chunk].slab != slab:
            close_chunk(slabs, chunk)
            cut_chunk(slabs, chunk, slab)
            return True
    return False


cdef row_t slabs_new_row(Slabs *slabs, uint32_t slab) noexcept nogil:
    cdef uint32_t chunk, place
    cdef ChunkState *state
    cdef Row *row
    if slabs.slabs[slab].open == NO_CHUNK:
        if not (slabs.num_slabs > 1 and take_empty_chunk(slabs, slab)):
            if not add_chunk(slabs, slab):
                return NO_ROW
    chunk = slabs.slabs[slab].open
    state = &slabs.states[chunk]
    if state.freed != NO_ROW:
        place = state.freed
        row = row_at(slabs, (chunk << PLACE_BITS) | place)
        state.freed = <uint32_t> row.sign
    else:
        place = state.num_touched
        if (place + 1) * slabs.views[chunk].stride > state.bytes_backed and (
                back_rows(
                    slabs, chunk, max(<uint32_t> SMALL_BACKED, slabs.views[chunk].stride)) < 0):
            return NO_ROW
        row = row_at(slabs, (chunk << PLACE_BITS) | place)
        if slabs.file != NULL:
            row.position = NO_POSITION
            persia_stores_before()
            slabs.file.shard.chunks[chunk] += <uint64_t> 1 << 32
            persia_stores_before()
        state.num_touched += 1
        slabs.bytes_used += slabs.views[chunk].stride
        if state.num_touched == state.num_places - state.num_places // 8:
            slabs.is_room_wanted = slabs.num_mapped >= SMALL_CHUNKS
        if state.is_small and state.num_touched == state.num_places:
            persia_collapse(slabs.views[chunk].base, CHUNK_BYTES)
            state.is_small = False
    state.num_live += 1
    slabs.slabs[slab].num_live += 1
    if state.freed == NO_ROW and state.num_touched == state.num_places:
        close_chunk(slabs, chunk)
    row.position = NO_POSITION
    row.stamp = 0
    return (chunk << PLACE_BITS) | place


cdef void slabs_drop_row(Slabs *slabs, row_t row) noexcept nogil:
    cdef uint32_t chunk = row >> PLACE_BITS
    cdef ChunkState *state = &slabs.states[chunk]
    cdef Row *at = row_at(slabs, row)
    cdef bint was_full = state.freed == NO_ROW and state.num_touched == state.num_places
    at.sign = state.freed
    at.position = NO_POSITION
    # The freed place is the next to be given out: its line is likely in the cache.
    state.freed = row & PLACE_MASK
    state.num_live -= 1
    slabs.slabs[slabs.views[chunk].slab].num_live -= 1
    if was_full:
        open_chunk(slabs, chunk)
    if state.num_live == 0:
        # The chunk may go to another slab, so its bytes count for none: otherwise a store whose
        # rows change their shape would be over its memory limit with empty chunks.
        slabs.bytes_used -= <uint64_t> state.num_touched * slabs.views[chunk].stride
        state.num_touched = 0
        state.freed = NO_ROW
        if slabs.file != NULL:
            slabs.file.shard.chunks[chunk] = slabs.views[chunk].slab
            persia_stores_before()


cdef const char *slabs_attach(Slabs *slabs) noexcept nogil:
    cdef ShardFile *file = slabs.file
    cdef const char *broken
    # What is read is not written meanwhile: this process may be killed too.
    slabs.file = NULL
    broken = attach_chunks(slabs, file)
    slabs.file = file
    return broken


cdef const char *attach_chunks(Slabs *slabs, ShardFile *file) noexcept nogil:
    cdef uint32_t i, slab
    cdef uint64_t num_touched
    cdef Format format
    if file.shard.num_formats > FILE_FORMATS or file.shard.num_chunks > MAX_CHUNKS:
        return b"more formats or chunks than there can be"
    for i in range(<uint32_t> file.shard.num_formats):
        format.dtype = file.shard.formats[i].dtype
        if format.dtype >= NUM_DTYPES:
            return b"a format has a dtype that is unknown"
        set_format(
            &format, format.dtype, file.shard.formats[i].dim, file.shard.formats[i].state_words)
        if not 1 <= format.dim <= MAX_DIM or format.state_words > MAX_STATE_WORDS:
            return b"a format has a dim or a state that no row has"
        if slabs_slab(slabs, &format) != <int> i:
            return b"a format comes twice"
    if not grow_chunks(slabs, <uint32_t> file.shard.num_chunks):
        return b""
    for i in range(<uint32_t> file.shard.num_chunks):
        slab = <uint32_t> file.shard.chunks[i]
        num_touched = file.shard.chunks[i] >> 32
        if slab >= slabs.num_slabs:
            return b"a chunk is of a format that there is not"
        slabs.views[i].base = map_chunk(slabs, &slabs.rows, file)
        if slabs.views[i].base == NULL:
            return b""
        slabs.num_chunks = i + 1
        cut_chunk(slabs, i, slab)
        if num_touched > slabs.states[i].num_places:
            return b"a chunk has more rows than places"
        # Backed up to here at least; beyond it that is asked for again, which costs nothing.
        slabs.states[i].is_small = num_touched < slabs.states[i].num_places
        slabs.states[i].bytes_backed = <uint32_t> num_touched * slabs.views[i].stride
        slabs.states[i].num_touched = <uint32_t> num_touched
        slabs.bytes_used += num_touched * slabs.views[i].stride
    return NULL


cdef uint32_t slabs_scan(Slabs *slabs, uint32_t chunk, row_t *rows) noexcept nogil:
    cdef ChunkState *state = &slabs.states[chunk]
    cdef uint32_t place, count = 0
    cdef Row *row
    # From the last on, so that the first free place is taken first.
    for place in range(state.num_touched, 0, -1):
        row = row_at(slabs, (chunk << PLACE_BITS) | (place - 1))
        if row.position == NO_POSITION:
            row.sign = state.freed
            state.freed = place - 1
        else:
            rows[count] = (chunk << PLACE_BITS) | (place - 1)
            count += 1
    state.num_live = count
    slabs.slabs[slabs.views[chunk].slab].num_live += count
    if count == 0:
        slabs.bytes_used -= <uint64_t> state.num_touched * slabs.views[chunk].stride
        state.num_touched = 0
        state.freed = NO_ROW
        slabs.file.shard.chunks[chunk] = slabs.views[chunk].slab
    elif state.freed == NO_ROW and state.num_touched == state.num_places:
        close_chunk(slabs, chunk)
    return count


cdef void *slabs_new_block(Slabs *slabs) noexcept nogil:
    cdef void *block
    cdef bint is_new = not is_used(&slabs.blocks)
    cdef bint is_small = slabs.num_mapped < SMALL_CHUNKS
    if slabs.block_left == 0:
        block = map_chunk(slabs, &slabs.blocks, NULL)
        if block == NULL:
            return NULL
        if not is_small:
            persia_advise_huge(block, CHUNK_BYTES)
        slabs.is_block_small = is_small
        slabs.is_block_used = not is_new
        slabs.block_next = <char *> block
        slabs.block_left = CHUNK_BYTES
    block = slabs.block_next
    slabs.block_next += BLOCK_BYTES
    slabs.block_left -= BLOCK_BYTES
    if slabs.is_block_small and slabs.block_left <= CHUNK_BYTES // 4 * 3:
        persia_collapse(slabs.block_next + slabs.block_left - CHUNK_BYTES, CHUNK_BYTES)
        slabs.is_block_small = False
    if slabs.is_block_used:
        memset(block, 0, BLOCK_BYTES)
    slabs.bytes_used += BLOCK_BYTES
    return block
