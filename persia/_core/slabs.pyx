"""Memory of one shard: chunks of 2 MiB, cut into rows or into index tables.

A slab is the set of chunks whose rows have one shape (dim, dtype, state words). A freed row is
reused by its slab; an empty chunk may change its slab; nothing ever moves, so a row number
stays good until its row is dropped.

Invariants, true between calls:

    I1  num_live of a chunk counts its rows that are not free; of a slab, of its chunks.
    I2  A chunk is in its slab's open list if and only if a row can be taken from it.
    I3  bytes_used counts places touched since their chunk was last empty, times their stride,
        and index blocks.

The first chunks of a shard start on small pages, because a huge page is resident as a whole
and many small shards would pay 2 MiB for a few rows. One of rows moves to a huge page once it
is full, so that nothing is wasted: the rows that came first are often those used most. One of
index tables moves once a quarter of it is used: then the shard has a hundred thousand rows. So
at most SMALL_CHUNKS times in the life of a shard 2 MiB are copied, half a millisecond each.

Not taken: one malloc per row (48 bytes of overhead in the original), and slabs that grow by
moving (they stop the world).
"""

from libc.stdlib cimport free, realloc
from libc.string cimport memset

from persia._core.types cimport NO_ROW

cdef extern from "portable.h" nogil:
    void *persia_map(size_t num_bytes, size_t alignment) noexcept
    void persia_unmap(void *start, size_t num_bytes) noexcept
    void persia_advise_huge(void *start, size_t num_bytes) noexcept
    void persia_collapse(void *start, size_t num_bytes) noexcept


cdef void slabs_init(Slabs *slabs) noexcept nogil:
    memset(slabs, 0, sizeof(Slabs))


cdef void slabs_free(Slabs *slabs) noexcept nogil:
    """Give everything back; the struct is as after ``slabs_init``."""
    cdef uint32_t i
    for i in range(slabs.num_regions):
        persia_unmap(slabs.regions[i], <size_t> CHUNK_BYTES * CHUNKS_PER_REGION)
    free(slabs.regions)
    free(slabs.views)
    free(slabs.states)
    slabs_init(slabs)


cdef char *map_chunk(Slabs *slabs) noexcept nogil:
    """Take 2 MiB of zeroed address space; NULL if there is none."""
    cdef char **regions
    cdef char *region
    cdef char *chunk
    cdef uint32_t capacity
    if slabs.region_chunks_left == 0:
        if slabs.num_regions == slabs.region_capacity:
            capacity = slabs.region_capacity * 2 if slabs.region_capacity else 4
            regions = <char **> realloc(slabs.regions, capacity * sizeof(char *))
            if regions == NULL:
                return NULL
            slabs.regions = regions
            slabs.region_capacity = capacity
        region = <char *> persia_map(<size_t> CHUNK_BYTES * CHUNKS_PER_REGION, CHUNK_BYTES)
        if region == NULL:
            return NULL
        slabs.regions[slabs.num_regions] = region
        slabs.num_regions += 1
        slabs.region_chunks_left = CHUNKS_PER_REGION
    chunk = slabs.regions[slabs.num_regions - 1] + (
        <size_t> CHUNK_BYTES * (CHUNKS_PER_REGION - slabs.region_chunks_left))
    slabs.region_chunks_left -= 1
    if slabs.num_mapped >= SMALL_CHUNKS:
        persia_advise_huge(chunk, CHUNK_BYTES)
    slabs.num_mapped += 1
    return chunk


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
    slabs.num_slabs += 1
    return <int> (slabs.num_slabs - 1)


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
    open_chunk(slabs, chunk)


cdef bint add_chunk(Slabs *slabs, uint32_t slab) noexcept nogil:
    cdef ChunkView *views
    cdef ChunkState *states
    cdef uint32_t capacity
    cdef char *base
    cdef bint is_small = slabs.num_mapped < SMALL_CHUNKS
    if slabs.num_chunks == MAX_CHUNKS:
        return False
    if slabs.num_chunks == slabs.chunk_capacity:
        capacity = slabs.chunk_capacity * 2 if slabs.chunk_capacity else 8
        views = <ChunkView *> realloc(slabs.views, capacity * sizeof(ChunkView))
        if views == NULL:
            return False
        slabs.views = views
        states = <ChunkState *> realloc(slabs.states, capacity * sizeof(ChunkState))
        if states == NULL:
            return False
        slabs.states = states
        slabs.chunk_capacity = capacity
    base = map_chunk(slabs)
    if base == NULL:
        return False
    slabs.views[slabs.num_chunks].base = base
    slabs.states[slabs.num_chunks].is_small = is_small
    slabs.num_chunks += 1
    cut_chunk(slabs, slabs.num_chunks - 1, slab)
    return True


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
        state.num_touched += 1
        slabs.bytes_used += slabs.views[chunk].stride
        if state.is_small and state.num_touched == state.num_places:
            persia_collapse(slabs.views[chunk].base, CHUNK_BYTES)
            state.is_small = False
        row = row_at(slabs, (chunk << PLACE_BITS) | place)
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
    state.freed = row & PLACE_MASK
    state.num_live -= 1
    slabs.slabs[slabs.views[chunk].slab].num_live -= 1
    if was_full:
        open_chunk(slabs, chunk)
    if state.num_live == 0:
        # Anybody's memory now, so nobody's bytes: otherwise a store whose rows change their
        # shape would be over its memory limit with empty chunks.
        slabs.bytes_used -= <uint64_t> state.num_touched * slabs.views[chunk].stride
        state.num_touched = 0
        state.freed = NO_ROW


cdef void *slabs_new_block(Slabs *slabs) noexcept nogil:
    cdef void *block
    cdef bint is_small = slabs.num_mapped < SMALL_CHUNKS
    if slabs.block_left == 0:
        block = map_chunk(slabs)
        if block == NULL:
            return NULL
        slabs.is_block_small = is_small
        slabs.block_next = <char *> block
        slabs.block_left = CHUNK_BYTES
    block = slabs.block_next
    slabs.block_next += BLOCK_BYTES
    slabs.block_left -= BLOCK_BYTES
    if slabs.is_block_small and slabs.block_left <= CHUNK_BYTES // 4 * 3:
        persia_collapse(slabs.block_next + slabs.block_left - CHUNK_BYTES, CHUNK_BYTES)
        slabs.is_block_small = False
    slabs.bytes_used += BLOCK_BYTES
    return block
