# Nothing of this module is seen from Python; its C interface is in the .pxd.
"""What a killed process left, read once from front to back, becomes a shard again.

    undo      rows in hand get their old images, unless the update had got beyond them
    scan      every place of every chunk: free, or a row, whose position names its segment
    index     sixteen signs at a time, so that their lines are on their way
    orders    segments sorted by what was written down of each; the entries that are missing
              between two of a segment's are those that had died

Rows are not written, but for stamps of a change log that ended with the process. Nothing in the
file is believed: numbers that lead out of a table, two rows in one place, a sign twice or in
the wrong shard end the attempt.
"""

from libc.stdlib cimport free, malloc, qsort
from libc.string cimport memcpy

from persia._core.shard.eviction cimport eviction_attach
from persia._core.base.hashing cimport mix64, shard_of
from persia._core.shard.persistent_shard cimport (
    IMAGE_BYTES, Journal, KeptSegment, Part, persia_stores_before,
)
from persia._core.shard.recency cimport (
    MAX_SEGMENTS, NO_ORDER, NO_SEGMENT, OFFSET_BITS, OFFSET_MASK, SEGMENT_ENTRIES,
    SEGMENT_WORDS, Segment, join, segment_at, set_last_use,
)
from persia._core.shard.row_format cimport STEP_ROWS, width_of_values
from persia._core.shard.segments cimport (
    list_free_segment, number_segments, segment_link, segment_trim,
)
from persia._core.shard.sign_index cimport home_bucket, index_find, index_insert
from persia._core.shard.slabs cimport (
    CHUNK_BYTES, PLACE_BITS, Row, Slab, is_place, persia_lowest_bit,
    persia_prefetch_write, row_at, row_values, slabs_attach, slabs_scan,
)
from persia._core.base.types cimport NO_ROW, position_t, row_t, uint64_t

cdef enum:
    AHEAD = 16

cdef struct Ranked:
    uint64_t order
    uint64_t key
    uint32_t number

cdef const char *NO_MEMORY = b"no memory"


cdef const char *recovery_attach(
    Slabs *slabs, SignIndex *index, Recency *recency, Eviction *eviction, Kept *kept,
    uint32_t number, uint32_t num_shards
) noexcept nogil:
    cdef const char *broken = slabs_attach(slabs)
    cdef row_t *rows
    cdef uint32_t chunk, count
    if broken == NULL:
        broken = broken_journal(slabs, kept)
    if broken == NULL and not eviction_attach(eviction, kept):
        broken = b"a policy begins with a class that there is not"
    if broken == NULL:
        broken = attach_segments(recency, kept)
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
        broken = link_segments(recency, slabs, kept)
    if broken == NULL:
        undo(slabs, kept)
    return broken


# --- the rows in hand -----------------------------------------------------------------------


cdef const char *broken_journal(const Slabs *slabs, const Kept *kept) noexcept nogil:
    cdef const Journal *journal = &kept.shard.journal
    cdef const Slab *slab
    cdef uint64_t i
    if journal.num_held > STEP_ROWS or journal.part > sizeof(kept.shard.parts) // sizeof(Part):
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


cdef void undo(Slabs *slabs, Kept *kept) noexcept nogil:
    """Put back the rows in hand; done twice, it is done."""
    cdef Journal *journal = &kept.shard.journal
    cdef const Part *part
    cdef uint64_t i
    if journal.part and journal.num_held:
        part = &kept.shard.parts[journal.part - 1]
        if part.tag != journal.tag or part.num_done != journal.num_done:
            journal.num_held = 0
    for i in range(journal.num_held, 0, -1):
        memcpy(
            row_values(row_at(slabs, journal.rows[i - 1])),
            kept.images + (i - 1) * journal.row_bytes, journal.row_bytes)
    persia_stores_before()
    journal.num_held = 0
    persia_stores_before()


# --- rows -----------------------------------------------------------------------------------


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


cdef const char *attach_segments(Recency *recency, Kept *kept) noexcept nogil:
    """Make the segments; what is in them is still to come."""
    cdef uint64_t count = kept.shard.num_segments
    cdef uint32_t i
    cdef int made
    if count > MAX_SEGMENTS:
        return b"more segments than there can be"
    for i in range(3):
        recency.clocks[i] = kept.shard.clocks[i]
        if recency.clocks[i] >> 61:
            return b"a clock shows a time that there is not"
    recency.tick = kept.shard.tick
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


cdef const char *link_segments(Recency *recency, Slabs *slabs, Kept *kept) noexcept nogil:
    """Make lists of the segments that have rows, and bring them within the invariants."""
    cdef Ranked *ranked = <Ranked *> malloc((recency.num_segments + 1) * sizeof(Ranked))
    cdef uint32_t i, count = 0
    cdef KeptSegment *at
    cdef const char *broken = NULL
    if ranked == NULL:
        return NO_MEMORY
    for i in range(recency.num_segments, 0, -1):
        if segment_at(recency, i - 1).num_live == 0:
            list_free_segment(recency, i - 1)
            continue
        at = &kept.segments[i - 1]
        kept.newest_key = max(kept.newest_key, at.key)
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
        recency.kept = NULL
        for i in range(count):
            link(recency, slabs, ranked[i].number, &kept.segments[ranked[i].number])
        recency.kept = kept
        for i in range(count):
            # Unless it has become part of another.
            if segment_at(recency, ranked[i].number).order != NO_ORDER:
                join(recency, slabs, ranked[i].number)
    free(ranked)
    return broken


cdef void link(
    Recency *recency, Slabs *slabs, uint32_t number, const KeptSegment *kept
) noexcept nogil:
    cdef Segment *segment = segment_at(recency, number)
    cdef uint32_t word, taken = 0
    cdef uint64_t live, grain = recency.orders[kept.order].grain
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
        max(kept.first_use, kept.last_use - min(grain, kept.last_use)), kept.last_use)
    segment.tick = kept.tick
    segment_trim(recency, segment, SEGMENT_ENTRIES)
    segment_link(recency, number, <uint32_t> kept.order, NO_SEGMENT)
    set_last_use(recency, number, kept.last_use)
    recency.num_held += taken
    recency.num_live += taken
    recency.orders[kept.order].num_live += taken
