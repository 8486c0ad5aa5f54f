"""The orders of use of one shard as they were at a moment, and where a row stood in them."""

from persia._core.base.types cimport position_t, row_t, uint32_t, uint64_t
from persia._core.shard.eviction cimport Eviction
from persia._core.shard.recency cimport SEGMENT_WORDS, Recency
from persia._core.shard.slabs cimport Slabs

cdef struct Entries:
    row_t *rows
    uint64_t capacity

cdef struct SegmentCopy:
    uint64_t first_order            # rank of its first live row in the order of eviction
    uint64_t age                    # since its last use, by its policy's clock; 0: no ttl
    uint64_t first_entry            # in ``entries``
    uint32_t policy
    uint32_t uses                   # class of LFU
    uint32_t num_words              # of the two below that are in use
    uint64_t[SEGMENT_WORDS] held
    uint64_t[SEGMENT_WORDS] live

cdef struct OrderCopy:
    SegmentCopy *segments
    uint32_t num_segments
    uint64_t num_rows               # live and not expired
    Entries entries                 # of all segments, dead ones included


# Expired rows are left out. ``spare`` is used, and empty afterwards, if it is large enough.
# -1: no memory; ``order_free`` is safe.
cdef int order_copy(
    OrderCopy *copy, const Recency *recency, const Eviction *eviction, const uint64_t *clocks,
    Entries *spare) noexcept nogil
cdef void order_free(OrderCopy *copy) noexcept nogil
# For each place (those of chunk c begin at starts[c]): segment << OFFSET_BITS | number among
# its live rows, or NO_POSITION. ``listed`` has a bit for each place that counts; NULL: all.
cdef void order_invert(
    const OrderCopy *copy, const uint32_t *starts, const uint64_t *listed, position_t *where
) noexcept nogil
