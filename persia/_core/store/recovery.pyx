"""What a killed process left, read once from front to back, becomes a shard again."""

import os

from libc.stdlib cimport free, malloc, qsort
from libc.string cimport memcpy, memset

from persia._core.base.hashing cimport mix64, shard_of
from persia._core.base.threads cimport ThreadPool, persia_work_t
from persia._core.base.types cimport NO_ROW, position_t, row_t
from persia._core.shard.eviction cimport Eviction, eviction_attach
from persia._core.shard.persistent_shard cimport (
    FILE_HEADER, FILE_PAGE, FILE_SHARD, IMAGE_BYTES, Journal, Part, SavedSegment, ShardFile,
    file_init, persia_back, persia_map_file, persia_stores_before,
)
from persia._core.shard.recency cimport (
    MAX_SEGMENTS, NO_ORDER, NO_SEGMENT, NUM_CLOCKS, OFFSET_BITS, OFFSET_MASK, SEGMENT_ENTRIES,
    SEGMENT_WORDS, Recency, Segment, join, list_free_segment, number_segments, segment_at,
    segment_link, segment_trim, set_last_use,
)
from persia._core.shard.row_format cimport STEP_ROWS, width_of_values
from persia._core.shard.sign_index cimport SignIndex, home_bucket, index_find, index_insert
from persia._core.shard.slabs cimport (
    CHUNK_BYTES, PLACE_BITS, Row, Slab, Slabs, is_place, persia_lowest_bit,
    persia_prefetch_write, row_at, row_values, slabs_attach, slabs_scan,
)
from persia._core.store.request cimport MAX_SHARDS

from persia.errors import StoreError

cdef enum:
    AHEAD = 16      # rows fetched early

cdef struct Ranked:
    uint64_t order
    uint64_t key
    uint32_t number

# What is wrong with a file is a text; an empty one says that memory was lacking.
cdef const char *NO_MEMORY = b""

cdef struct Attaching:
    Shard *shards
    uint32_t num_shards
    const char *broken[MAX_SHARDS]  # of each shard; NULL: it is whole


cdef int map_state(
    Shard *shards, uint32_t num_shards, int fd, uint64_t **control, uint64_t *crash_in
) except -1:
    cdef uint32_t i
    if os.fstat(fd).st_size < FILE_HEADER + num_shards * FILE_SHARD:
        raise StoreError(f"the state file is too short for {num_shards} shards")
    # The file's second page; the first is of the process that made the file.
    control[0] = <uint64_t *> persia_map_file(fd, FILE_PAGE, FILE_PAGE, FILE_PAGE)
    if control[0] == NULL or persia_back(fd, FILE_PAGE, FILE_PAGE) < 0:
        raise MemoryError("the state file cannot be mapped")
    for i in range(num_shards):
        shards[i].file = <ShardFile *> malloc(sizeof(ShardFile))
        if shards[i].file == NULL:
            raise MemoryError(f"shard {i} of {num_shards}")
        memset(shards[i].file, 0, sizeof(ShardFile))
        if file_init(shards[i].file, fd, i, control[0], crash_in) < 0:
            raise MemoryError(f"shard {i} of the state file cannot be mapped")
    return 0


cdef int attach_shards(
    Shard *shards, uint32_t num_shards, const uint64_t *control, uint64_t *clocks
) except -1:
    cdef Attaching attaching
    cdef ThreadPool threads
    cdef uint32_t i, clock
    if control[0]:
        raise StoreError("the state file is void: it ran out of memory before the end")
    attaching.shards = shards
    attaching.num_shards = num_shards
    threads = ThreadPool(min(num_shards, os.cpu_count() or 1), "persia-recovery")
    threads.work(<persia_work_t> attach_part, &attaching, num_shards)
    for i in range(num_shards):
        if attaching.broken[i] != NULL:
            if attaching.broken[i][0]:
                raise StoreError(f"shard {i}: {attaching.broken[i].decode()}")
            # The file is as it was: the attempt may be repeated.
            raise MemoryError(f"no memory for shard {i}")
        for clock in range(<uint32_t> NUM_CLOCKS):
            clocks[clock] = max(clocks[clock], shards[i].recency.clocks[clock])
    return 0


cdef void attach_part(Attaching *attaching, uint32_t number, uint32_t worker) noexcept nogil:
    cdef Shard *shard = &attaching.shards[number]
    attaching.broken[number] = attach_shard(
        &shard.slabs, &shard.index, &shard.recency, &shard.eviction, shard.file, number,
        attaching.num_shards)
    shard.sketch.num_counted = shard.file.shard.num_counted
    shard.sketch.next_halved = shard.file.shard.next_halved
    if shard.sketch.next_halved >= max(shard.sketch.num_lines, <uint64_t> 1):
        shard.sketch.next_halved = 0


# Rows are not written, but for stamps of a change log that ended with the process. Nothing in
# the file is trusted: numbers that lead out of a table, two rows in one place, a sign twice or
# in the wrong shard end the attempt.
cdef const char *attach_shard(
    Slabs *slabs, SignIndex *index, Recency *recency, Eviction *eviction, ShardFile *file,
    uint32_t number, uint32_t num_shards
) noexcept nogil:
    """Into a shard that is empty and has its policies; NULL, or what is wrong with the file.

    What is wrong is found before the file is changed, but for places that hold no row.
    """
    cdef const char *broken = slabs_attach(slabs)
    cdef row_t *rows
    cdef uint32_t chunk, count
    if broken == NULL:
        broken = broken_journal(slabs, file)
    if broken == NULL and not eviction_attach(eviction, file):
        broken = b"a policy begins with a class that there is not"
    if broken == NULL:
        broken = attach_segments(recency, file)
    if broken != NULL:
        return broken
    rows = <row_t *> malloc(CHUNK_BYTES // sizeof(Row) * sizeof(row_t))
    if rows == NULL:
        return NO_MEMORY
    for chunk in range(slabs.num_chunks):
        count = slabs_scan(slabs, chunk, rows)
        broken = enter_rows(slabs, index, recency, rows, count, number, num_shards)
        if broken != NULL:
            break
    free(rows)
    if broken == NULL:
        broken = link_segments(recency, slabs, file)
    if broken == NULL:
        undo(slabs, file)
    return broken


# --- the rows in hand -----------------------------------------------------------------------


cdef const char *broken_journal(const Slabs *slabs, const ShardFile *file) noexcept nogil:
    cdef const Journal *journal = &file.shard.journal
    cdef const Slab *slab
    cdef uint64_t i
    if journal.num_held > STEP_ROWS or journal.part > sizeof(file.shard.parts) // sizeof(Part):
        return b"the journal holds more than it can"
    for i in range(journal.num_held):
        if not is_place(slabs, journal.rows[i]):
            return b"the journal names a row that there is not"
        slab = &slabs.slabs[slabs.views[journal.rows[i] >> PLACE_BITS].slab]
        if journal.row_bytes != 4 * (
                width_of_values(slab.dtype, slab.dim) + slab.state_words) or (
                journal.num_held * journal.row_bytes > IMAGE_BYTES):
            return b"the journal holds rows of another shape"
    return NULL


# A process may have been killed in the middle of a step. The rows in hand get their old images,
# unless the update had got beyond them: then the step was whole, and the images are of before.
cdef void undo(Slabs *slabs, ShardFile *file) noexcept nogil:
    """Put back the rows in hand; done twice, it is done."""
    cdef Journal *journal = &file.shard.journal
    cdef const Part *part
    cdef uint64_t i
    if journal.part and journal.num_held:
        part = &file.shard.parts[journal.part - 1]
        if part.tag != journal.tag or part.num_done != journal.num_done:
            journal.num_held = 0
    for i in range(journal.num_held, 0, -1):
        memcpy(
            row_values(row_at(slabs, journal.rows[i - 1])),
            file.images + (i - 1) * journal.row_bytes, journal.row_bytes)
    persia_stores_before()
    journal.num_held = 0
    persia_stores_before()


# --- rows -----------------------------------------------------------------------------------


# Every place of every chunk is free or a row, whose position names its segment. Rows enter the
# index AHEAD at a time, so that their lines are on their way.
cdef const char *enter_rows(
    Slabs *slabs, SignIndex *index, Recency *recency, const row_t *rows, uint32_t count,
    uint32_t number, uint32_t num_shards
) noexcept nogil:
    cdef uint64_t[AHEAD] hashes
    cdef uint32_t i, at
    cdef uint64_t hash
    cdef Row *row
    cdef const char *broken
    for i in range(count + AHEAD):
        if i >= AHEAD:
            at = i - AHEAD
            row = row_at(slabs, rows[at])
            hash = hashes[at % AHEAD]
            if shard_of(hash, num_shards) != number:
                return b"a row is of another shard"
            if index_find(index, slabs, hash, row.sign) != NO_ROW:
                return b"two rows have one sign"
            if index_insert(index, slabs, hash, rows[at]) < 0:
                return NO_MEMORY
            broken = enter(recency, rows[at], row.position)
            if broken != NULL:
                return broken
        if i < count:
            row = row_at(slabs, rows[i])
            if row.stamp:
                row.stamp = 0
            hash = mix64(row.sign)
            hashes[i % AHEAD] = hash
            persia_prefetch_write(home_bucket(index, hash))
            prefetch_entry(recency, row.position)
    return NULL


cdef inline void prefetch_entry(const Recency *recency, position_t position) noexcept nogil:
    cdef uint32_t number = position >> OFFSET_BITS
    cdef Segment *segment
    if number < recency.num_segments:
        segment = segment_at(recency, number)
        persia_prefetch_write(&segment.live[(position & OFFSET_MASK) // 64])
        if segment.rows != NULL:
            persia_prefetch_write(&segment.rows[position & OFFSET_MASK])


cdef const char *enter(Recency *recency, row_t row, position_t position) noexcept nogil:
    """Note the row where it stands; between two rows there may be room still."""
    cdef uint32_t number = position >> OFFSET_BITS
    cdef uint32_t offset = position & OFFSET_MASK
    cdef uint64_t bit = <uint64_t> 1 << (offset % 64)
    cdef Segment *segment
    if number >= recency.num_segments:
        return b"a row stands in a segment that there is not"
    segment = segment_at(recency, number)
    if segment.rows == NULL:
        segment.rows = <row_t *> malloc(SEGMENT_ENTRIES * sizeof(row_t))
        if segment.rows == NULL:
            return NO_MEMORY
        recency.bytes_held += SEGMENT_ENTRIES * sizeof(row_t)
    if segment.live[offset // 64] & bit:
        return b"two rows stand in one place of the order of use"
    segment.live[offset // 64] |= bit
    segment.rows[offset] = row
    segment.num_live += 1
    return NULL


# --- orders of use --------------------------------------------------------------------------


cdef const char *attach_segments(Recency *recency, ShardFile *file) noexcept nogil:
    """Make the segments; what is in them is still to come."""
    cdef uint64_t count = file.shard.num_segments
    cdef uint32_t i
    cdef int made
    if count > MAX_SEGMENTS:
        return b"more segments than there can be"
    for i in range(3):
        recency.clocks[i] = file.shard.clocks[i]
        if recency.clocks[i] >> 61:
            return b"a clock shows a time that there is not"
    recency.tick = file.shard.tick
    made = number_segments(recency, <uint32_t> count)
    return NO_MEMORY if made < 0 else NULL


cdef int compare(const void *one, const void *other) noexcept nogil:
    cdef const Ranked *a = <const Ranked *> one
    cdef const Ranked *b = <const Ranked *> other
    if a.order != b.order:
        return -1 if a.order < b.order else 1
    if a.key != b.key:
        return -1 if a.key < b.key else 1
    return 0


# Segments are sorted by the order and the key that were written down of each. The entries that
# are missing between two of a segment's are those that had died.
cdef const char *link_segments(Recency *recency, Slabs *slabs, ShardFile *file) noexcept nogil:
    """Make lists of the segments that have rows, and bring them within the invariants."""
    cdef Ranked *ranked = <Ranked *> malloc((recency.num_segments + 1) * sizeof(Ranked))
    cdef uint32_t i, count = 0
    cdef SavedSegment *at
    cdef const char *broken = NULL
    if ranked == NULL:
        return NO_MEMORY
    for i in range(recency.num_segments, 0, -1):
        if segment_at(recency, i - 1).num_live == 0:
            list_free_segment(recency, i - 1)
            continue
        at = &file.segments[i - 1]
        file.newest_key = max(file.newest_key, at.key)
        recency.tick = max(recency.tick, at.tick)
        ranked[count].order = at.order
        ranked[count].key = at.key
        ranked[count].number = i - 1
        count += 1
        if at.order >= recency.num_orders:
            broken = b"a segment is in an order that there is not"
        elif at.last_use >> 61:
            broken = b"a segment was used at a time that there is not"
    if broken == NULL:
        qsort(ranked, count, sizeof(Ranked), compare)
        # With their old keys: another process may have to read them again.
        recency.file = NULL
        for i in range(count):
            link(recency, slabs, ranked[i].number, &file.segments[ranked[i].number])
        recency.file = file
        for i in range(count):
            # Unless it has become part of another.
            if segment_at(recency, ranked[i].number).order != NO_ORDER:
                join(recency, slabs, ranked[i].number)
    free(ranked)
    return broken


cdef void link(
    Recency *recency, Slabs *slabs, uint32_t number, const SavedSegment *saved
) noexcept nogil:
    cdef Segment *segment = segment_at(recency, number)
    cdef uint32_t word, taken = 0
    cdef uint64_t live, grain = recency.orders[saved.order].grain
    for word in range(<uint32_t> SEGMENT_WORDS):
        live = segment.live[word]
        segment.held[word] = live
        while live:
            segment.rows[taken] = segment.rows[word * 64 + persia_lowest_bit(live)]
            taken += 1
            live &= live - 1
    segment.num_held = taken
    segment.num_used = SEGMENT_ENTRIES
    segment.num_timed = SEGMENT_ENTRIES
    segment.first_use = min(
        max(saved.first_use, saved.last_use - min(grain, saved.last_use)), saved.last_use)
    segment.tick = saved.tick
    segment_trim(recency, segment, SEGMENT_ENTRIES)
    segment_link(recency, number, <uint32_t> saved.order, NO_SEGMENT)
    set_last_use(recency, number, saved.last_use)
    recency.num_held += taken
    recency.num_live += taken
    recency.orders[saved.order].num_live += taken
