"""Segments of orders of use; see ``recency`` for what they hold."""

from persia._core.shard.recency cimport Recency, Segment
from persia._core.base.types cimport uint32_t

# An unlinked empty segment with room for so many entries; NO_SEGMENT: no memory.
cdef uint32_t new_segment(Recency *recency, uint32_t num_entries) noexcept nogil
# Give all numbers below this a segment that is free but not in the list of free ones; -1: no
# memory.
cdef int number_segments(Recency *recency, uint32_t count) noexcept nogil
cdef void list_free_segment(Recency *recency, uint32_t number) noexcept nogil
# Entries the segment's array has room for: all while it is open, then exact.
cdef uint32_t segment_capacity(const Recency *recency, uint32_t number) noexcept nogil
cdef void segment_unlink(Recency *recency, Segment *segment) noexcept nogil
# Enter an unlinked segment into an order before another; NO_SEGMENT: as the newest.
cdef void segment_link(
    Recency *recency, uint32_t number, uint32_t order, uint32_t following) noexcept nogil
# Unlink and free a segment without live entries.
cdef void drop_segment(Recency *recency, uint32_t number) noexcept nogil
# Drop dead entries; the array keeps its size.
cdef void segment_squeeze(Recency *recency, Segment *segment) noexcept nogil
# Give back the array's unused end. ``capacity`` is what it had; num_held is not 0.
cdef void segment_trim(
    Recency *recency, Segment *segment, uint32_t capacity) noexcept nogil
