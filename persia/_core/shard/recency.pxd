"""The orders of use of one shard's rows: lists of segments of row numbers.

    position u32   | segment (21 bits) | offset in the segment (11 bits) |
"""

from persia._core.base.types cimport int64_t, position_t, row_t, uint32_t, uint64_t
from persia._core.shard.persistent_shard cimport ShardFile, persia_stores_before
from persia._core.shard.slabs cimport NO_POSITION, Row, Slabs, persia_prefetch_write, row_at

cdef enum:
    OFFSET_BITS = 11
    SEGMENT_ENTRIES = 2048
    OFFSET_MASK = 2047
    SEGMENT_WORDS = 32              # of 64 offsets each
    SEGMENT_BLOCK = 64              # segments allocated at a time, so that they never move
    MAX_SEGMENTS = 2097151          # the last one would contain NO_POSITION
    NO_SEGMENT = 0xFFFFFFFF
    NO_ORDER = 0xFFFFFFFF
    GRAINS = 16                     # of a ttl; rows expire up to one grain late
    THIN = 256                      # live entries at which neighbours are merged

cdef enum:                          # clocks; a request brings their times
    NO_CLOCK = 0                    # stands still
    CLOCK_MS = 1                    # milliseconds
    CLOCK_STEPS = 2
    NUM_CLOCKS = 3
    CLOCK_SHIFT = 62                # times are below 2**62

cdef extern from *:
    """
    #define PERSIA_NEVER ((1ULL << 62) - 1)
    """
    const uint64_t NEVER "PERSIA_NEVER"  # as a time; NO_CLOCK never gets there

cdef struct Segment:
    row_t *rows                     # entries still held, in order of use
    uint32_t num_held
    uint32_t num_live
    uint32_t num_used               # offsets given out
    uint32_t num_timed              # of these, those that last_use and tick speak of
    uint32_t previous, next         # towards older and newer; next also links free segments
    uint32_t order                  # it is in; NO_ORDER: the segment is free
    uint64_t first_use, last_use    # times of the order's clock
    uint64_t tick                   # of the last use
    uint64_t[SEGMENT_WORDS] held    # offsets that have an entry in rows
    uint64_t[SEGMENT_WORDS] live    # those whose row was not used again since

cdef struct Block:
    uint64_t[SEGMENT_BLOCK] expiry  # of each segment: clock << CLOCK_SHIFT | time, or NEVER
    Segment[SEGMENT_BLOCK] segments

cdef struct Order:
    uint32_t oldest, newest         # segments, or NO_SEGMENT
    uint32_t open                   # the newest one while it takes entries, or NO_SEGMENT
    uint32_t clock
    uint64_t ttl                    # rows expire so long after their last use; 0: never
    uint64_t grain                  # most time between two uses of one segment
    uint64_t num_live

cdef struct Recency:
    ShardFile *file                      # where a new process reads it all, or NULL
    Block **blocks
    uint32_t num_blocks
    uint32_t block_capacity
    uint32_t num_segments           # ever made
    uint32_t free_segment           # first unused one, or NO_SEGMENT
    Order *orders
    uint32_t num_orders
    bint has_ttl                    # of any order
    uint64_t[NUM_CLOCKS] clocks     # times; they never go back
    uint64_t tick                   # counts requests that use rows
    uint64_t num_live
    uint64_t num_held
    uint64_t bytes_held             # of the rows arrays


cdef inline Segment *segment_at(const Recency *recency, uint32_t number) noexcept nogil:
    return &recency.blocks[number // SEGMENT_BLOCK].segments[number % SEGMENT_BLOCK]


cdef inline uint64_t *expiry_at(const Recency *recency, uint32_t number) noexcept nogil:
    return &recency.blocks[number // SEGMENT_BLOCK].expiry[number % SEGMENT_BLOCK]


cdef inline void recency_prefetch(
    const Recency *recency, position_t position
) noexcept nogil:
    """Fetch what a touch of the row at this position will change."""
    cdef Segment *segment = segment_at(recency, position >> OFFSET_BITS)
    persia_prefetch_write(segment)
    persia_prefetch_write(&segment.live[(position & OFFSET_MASK) // 64])


cdef inline bint recency_expired(
    const Recency *recency, uint32_t number, const uint64_t *clocks
) noexcept nogil:
    """Whether the rows of this segment have outlived their order's ttl at these times."""
    cdef uint64_t expiry = expiry_at(recency, number)[0]
    return clocks[expiry >> CLOCK_SHIFT] >= expiry & NEVER


# Start another segment and close the one before; -1: no memory.
cdef int open_segment(Recency *recency, Slabs *slabs, uint32_t order) noexcept nogil
# Restore I3 and I5 for a closed segment after one of its entries died.
cdef void tidy(Recency *recency, Slabs *slabs, uint32_t number) noexcept nogil


cdef inline void bury(Recency *recency, Slabs *slabs, position_t position) noexcept nogil:
    """The entry at this position dies."""
    cdef uint32_t number = position >> OFFSET_BITS
    cdef uint32_t offset = position & OFFSET_MASK
    cdef Segment *segment = segment_at(recency, number)
    segment.live[offset // 64] &= ~(<uint64_t> 1 << (offset % 64))
    segment.num_live -= 1
    if (4 * segment.num_held > 5 * segment.num_live or segment.num_live == THIN) and (
            number != recency.orders[segment.order].open):
        tidy(recency, slabs, number)


# Inline, and slow paths apart: a lookup does this for each of its rows.
cdef inline int recency_touch(
    Recency *recency, Slabs *slabs, row_t row, Row *at, uint32_t order
) noexcept nogil:
    """The row becomes the newest of the order; its old entry, in whatever order, dies.

    -1: no memory; the row's old place is kept.
    """
    cdef Order *to = &recency.orders[order]
    cdef uint32_t open_ = to.open, offset, before
    cdef position_t old
    cdef uint64_t bit
    cdef Segment *segment
    if open_ == NO_SEGMENT or segment_at(recency, open_).num_used == SEGMENT_ENTRIES:
        if open_segment(recency, slabs, order) < 0:
            return -1
        open_ = to.open
    # Only now: a merge while the open segment was closed may have renumbered this very row.
    old = at.position
    segment = segment_at(recency, open_)
    offset = segment.num_used
    bit = <uint64_t> 1 << (offset % 64)
    segment.num_used = offset + 1
    segment.rows[segment.num_held] = row
    segment.num_held += 1
    segment.num_live += 1
    segment.held[offset // 64] |= bit
    segment.live[offset // 64] |= bit
    recency.num_held += 1
    persia_stores_before()      # what the row holds is there before it is one
    at.position = (open_ << OFFSET_BITS) | offset
    persia_stores_before()
    if old == NO_POSITION:
        recency.num_live += 1
        to.num_live += 1
        return 0
    before = segment_at(recency, old >> OFFSET_BITS).order
    if before != order:
        recency.orders[before].num_live -= 1
        to.num_live += 1
    bury(recency, slabs, old)
    return 0


cdef void recency_init(Recency *recency) noexcept nogil
# Restore invariant I5 around one segment.
cdef void join(Recency *recency, Slabs *slabs, uint32_t number) noexcept nogil
cdef void set_last_use(Recency *recency, uint32_t number, uint64_t time) noexcept nogil
cdef void recency_free(Recency *recency) noexcept nogil
# Add empty orders of one kind; the number of the first, or -1: no memory.
cdef int64_t recency_add_orders(
    Recency *recency, uint32_t count, uint32_t clock, uint64_t ttl) noexcept nogil
# Before the uses of a request: the clocks go on, segments open for too long are closed.
cdef void recency_begin(
    Recency *recency, Slabs *slabs, const uint64_t *clocks) noexcept nogil
# ``recency_touch`` for a use at an earlier time of the order's clock.
cdef int recency_touch_at(
    Recency *recency, Slabs *slabs, row_t row, uint32_t order, uint64_t time) noexcept nogil
cdef void recency_remove(Recency *recency, Slabs *slabs, row_t row) noexcept nogil
# After the uses of a request: open segments note its time.
cdef void recency_end(Recency *recency) noexcept nogil
# Between requests an open segment must not hold more dead entries than the others.
cdef void recency_settle(Recency *recency) noexcept nogil
# Move up to ``count`` segments from the new end of an order to the old end of another.
cdef void recency_drain(
    Recency *recency, Slabs *slabs, uint32_t source, uint32_t target, uint32_t count
) noexcept nogil
# The oldest ``count`` live rows of a segment that has as many.
cdef uint32_t recency_oldest(
    const Recency *recency, uint32_t number, row_t *rows, uint32_t count) noexcept nogil
# Whether invariant I5 forbids this segment and the next to be two.
cdef bint recency_mergeable(const Recency *recency, uint32_t number) noexcept nogil
cdef uint64_t recency_bytes(const Recency *recency) noexcept nogil

# Of segments, for ``recovery``.

# Give all numbers below this a segment that is free but not in the list of free ones; -1: no
# memory.
cdef int number_segments(Recency *recency, uint32_t count) noexcept nogil
cdef void list_free_segment(Recency *recency, uint32_t number) noexcept nogil
# Enter an unlinked segment into an order before another; NO_SEGMENT: as the newest.
cdef void segment_link(
    Recency *recency, uint32_t number, uint32_t order, uint32_t following) noexcept nogil
# Give back the array's unused end. ``capacity`` is what it had; num_held is not 0.
cdef void segment_trim(
    Recency *recency, Segment *segment, uint32_t capacity) noexcept nogil
