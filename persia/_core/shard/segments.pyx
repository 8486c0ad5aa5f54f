"""The segments of a shard's orders of use: their memory, their links, what leaves them.

Segments are numbered, and come from blocks that never move; a free one keeps its number and
has no array. What they mean, and the invariants, are in ``recency``.
"""

from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memset

from persia._core.shard.persistent_shard cimport (
    KEPT_SEGMENTS, KEY_STEP, KeptSegment, kept_back, kept_segment, persia_stores_before,
)
from persia._core.shard.recency cimport (
    NEVER, NO_ORDER, NO_SEGMENT, MAX_SEGMENTS, SEGMENT_BLOCK, SEGMENT_ENTRIES, Block, Order,
    Recency, Segment, expiry_at, segment_at,
)
from persia._core.shard.slabs cimport CACHE_LINE
from persia._core.base.types cimport row_t, uint64_t


cdef extern from "stdlib.h" nogil:
    int posix_memalign(void **block, size_t alignment, size_t num_bytes) noexcept


cdef Block *new_block() noexcept nogil:
    """Zeroed, and from the begin of a line, so that a segment's counts lie in one."""
    cdef void *block = NULL
    if posix_memalign(&block, CACHE_LINE, sizeof(Block)) != 0:
        return NULL
    memset(block, 0, sizeof(Block))
    return <Block *> block


cdef uint32_t new_segment(Recency *recency, uint32_t num_entries) noexcept nogil:
    cdef uint32_t number = recency.free_segment
    cdef Segment *segment
    if number == NO_SEGMENT:
        if recency.num_segments == MAX_SEGMENTS:
            return NO_SEGMENT
        if recency.num_segments == recency.num_blocks * SEGMENT_BLOCK and (
                add_block(recency) < 0):
            return NO_SEGMENT
        number = recency.num_segments
        segment = segment_at(recency, number)
        segment.rows = <row_t *> malloc(num_entries * sizeof(row_t))
        if segment.rows == NULL:
            return NO_SEGMENT
        recency.num_segments += 1
        if recency.kept != NULL:
            recency.kept.shard.num_segments = recency.num_segments
            persia_stores_before()
    else:
        segment = segment_at(recency, number)
        segment.rows = <row_t *> malloc(num_entries * sizeof(row_t))
        if segment.rows == NULL:
            return NO_SEGMENT
        recency.free_segment = segment.next
    recency.bytes_held += num_entries * sizeof(row_t)
    segment.num_held = 0
    segment.num_live = 0
    segment.num_used = 0
    segment.num_timed = 0
    memset(segment.held, 0, sizeof(segment.held))
    memset(segment.live, 0, sizeof(segment.live))
    return number


cdef int add_block(Recency *recency) noexcept nogil:
    cdef uint32_t capacity
    cdef uint64_t place
    cdef Block **blocks
    cdef Block *block
    if recency.num_blocks == recency.block_capacity:
        capacity = recency.block_capacity * 2 if recency.block_capacity else 4
        blocks = <Block **> realloc(recency.blocks, capacity * sizeof(Block *))
        if blocks == NULL:
            return -1
        recency.blocks = blocks
        recency.block_capacity = capacity
    if recency.kept != NULL:
        place = <uint64_t> recency.num_blocks * SEGMENT_BLOCK * sizeof(KeptSegment)
        if kept_back(
                recency.kept, <char *> recency.kept.segments + place, KEPT_SEGMENTS + place,
                SEGMENT_BLOCK * sizeof(KeptSegment)) < 0:
            return -1
    block = new_block()
    if block == NULL:
        return -1
    recency.blocks[recency.num_blocks] = block
    recency.num_blocks += 1
    return 0


cdef int number_segments(Recency *recency, uint32_t count) noexcept nogil:
    while recency.num_segments < count:
        if recency.num_segments == recency.num_blocks * SEGMENT_BLOCK and (
                add_block(recency) < 0):
            return -1
        segment_at(recency, recency.num_segments).order = NO_ORDER
        expiry_at(recency, recency.num_segments)[0] = NEVER
        recency.num_segments += 1
    return 0


cdef void list_free_segment(Recency *recency, uint32_t number) noexcept nogil:
    segment_at(recency, number).next = recency.free_segment
    recency.free_segment = number


cdef uint32_t segment_capacity(const Recency *recency, uint32_t number) noexcept nogil:
    cdef Segment *segment = segment_at(recency, number)
    if number == recency.orders[segment.order].open:
        return SEGMENT_ENTRIES
    return segment.num_held


cdef void segment_unlink(Recency *recency, Segment *segment) noexcept nogil:
    cdef Order *order = &recency.orders[segment.order]
    if segment.previous != NO_SEGMENT:
        segment_at(recency, segment.previous).next = segment.next
    else:
        order.oldest = segment.next
    if segment.next != NO_SEGMENT:
        segment_at(recency, segment.next).previous = segment.previous
    else:
        order.newest = segment.previous


cdef void segment_link(
    Recency *recency, uint32_t number, uint32_t order, uint32_t following
) noexcept nogil:
    cdef Segment *segment = segment_at(recency, number)
    cdef Order *to = &recency.orders[order]
    cdef uint32_t before = to.newest if following == NO_SEGMENT else (
        segment_at(recency, following).previous)
    if recency.kept != NULL:
        # Before a row stands in it. Keys of other segments stay what they are.
        if following == NO_SEGMENT:
            recency.kept.newest_key += KEY_STEP
            kept_segment(recency.kept, number, order, recency.kept.newest_key)
        else:
            kept_segment(
                recency.kept, number, order,
                recency.kept.segments[following].key - KEY_STEP)
    segment.order = order
    segment.previous = before
    segment.next = following
    if before != NO_SEGMENT:
        segment_at(recency, before).next = number
    else:
        to.oldest = number
    if following != NO_SEGMENT:
        segment_at(recency, following).previous = number
    else:
        to.newest = number


cdef void drop_segment(Recency *recency, uint32_t number) noexcept nogil:
    cdef Segment *segment = segment_at(recency, number)
    recency.bytes_held -= segment_capacity(recency, number) * sizeof(row_t)
    recency.num_held -= segment.num_held
    segment_unlink(recency, segment)
    free(segment.rows)
    segment.rows = NULL
    segment.num_held = 0
    segment.order = NO_ORDER
    expiry_at(recency, number)[0] = NEVER
    list_free_segment(recency, number)


cdef void segment_squeeze(Recency *recency, Segment *segment) noexcept nogil:
    cdef uint32_t word, taken = 0, kept = 0
    cdef uint64_t held, live
    for word in range((segment.num_used + 63) // 64):
        held = segment.held[word]
        live = segment.live[word]
        while held:
            # Written whether it lives or not: which entries died, no branch predictor knows.
            segment.rows[kept] = segment.rows[taken]
            kept += (live & held & (0 - held)) != 0
            taken += 1
            held &= held - 1
        segment.held[word] = live
    recency.num_held -= segment.num_held - kept
    segment.num_held = kept


cdef void segment_trim(Recency *recency, Segment *segment, uint32_t capacity) noexcept nogil:
    cdef row_t *rows = <row_t *> realloc(segment.rows, segment.num_held * sizeof(row_t))
    if rows != NULL:        # otherwise the longer array serves as well
        segment.rows = rows
    recency.bytes_held -= (capacity - segment.num_held) * sizeof(row_t)
