"""The order of use of one shard's rows: a list of segments of row numbers.

    position u32   | segment (21 bits) | offset in the segment (11 bits) |
"""

from persia._core.slabs cimport NO_POSITION, Row, Slabs, persia_prefetch_write, row_at
from persia._core.types cimport position_t, row_t, uint16_t, uint32_t, uint64_t

cdef enum:
    OFFSET_BITS = 11
    SEGMENT_ENTRIES = 2048
    OFFSET_MASK = 2047
    SEGMENT_WORDS = 32              # of 64 offsets each
    SEGMENT_BLOCK = 64              # segments allocated at a time, so that they never move
    MAX_SEGMENTS = 2097151          # the last one would contain NO_POSITION
    NO_SEGMENT = 0xFFFFFFFF
    THIN = 256                      # live entries at which neighbours are merged

cdef struct Segment:
    row_t *rows                     # entries still held, in order of use
    uint32_t num_held
    uint32_t num_live
    uint32_t num_used               # offsets given out; SEGMENT_ENTRIES closes the segment
    uint32_t previous, next         # towards older and newer; next also links free segments
    uint64_t[SEGMENT_WORDS] held    # offsets that have an entry in rows
    uint64_t[SEGMENT_WORDS] live    # those whose row was not used again since

cdef struct Recency:
    Segment **blocks
    uint32_t num_blocks
    uint32_t block_capacity
    uint32_t num_segments           # ever made
    uint32_t free_segment           # first unused one, or NO_SEGMENT
    uint32_t oldest, newest
    uint64_t num_live
    uint64_t num_held
    uint64_t bytes_held             # of the rows arrays


cdef inline Segment *segment_at(const Recency *recency, uint32_t number) noexcept nogil:
    return &recency.blocks[number // SEGMENT_BLOCK][number % SEGMENT_BLOCK]


cdef inline void recency_prefetch(
    const Recency *recency, position_t position
) noexcept nogil:
    """Fetch what a touch of the row at this position will change."""
    cdef Segment *segment = segment_at(recency, position >> OFFSET_BITS)
    persia_prefetch_write(segment)
    persia_prefetch_write(&segment.live[(position & OFFSET_MASK) // 64])


cdef int recency_init(Recency *recency) noexcept nogil
cdef void recency_free(Recency *recency) noexcept nogil
# The row becomes the newest; its old entry, if it has one, dies. -1: no memory; the row's
# old place is kept.
cdef int recency_touch(Recency *recency, Slabs *slabs, row_t row) noexcept nogil
cdef void recency_remove(Recency *recency, Slabs *slabs, row_t row) noexcept nogil
# Between requests the newest segment must not hold more dead entries than the others.
cdef void recency_settle(Recency *recency) noexcept nogil
# Up to ``count`` rows, oldest first, without removing them; the number written.
cdef uint32_t recency_oldest(
    const Recency *recency, row_t *rows, uint32_t count) noexcept nogil
# Walks all live rows, oldest first: ``cursor`` is 0 at first; 0 rows written is the end.
cdef uint32_t recency_walk(
    const Recency *recency, uint32_t *segment, uint32_t *offset, row_t *rows, uint32_t count
) noexcept nogil
cdef uint64_t recency_bytes(const Recency *recency) noexcept nogil
