"""A copy of a shard's orders of use, taken in one go and read at leisure.

    segments   | r7 .. r2 | r9 r4 | r1 r3 |     memcpy, the only part that training waits for
    where      place of r7 -> 0.0,  of r2 -> 0.1,  of r9 -> 1.0 ...            later, unlocked

The copy costs four bytes an entry and no look at any row. Its memory is kept for the next one:
fresh pages would cost more than the copying. Afterwards it is turned round once,
so that rows can be read in the order of memory and still know their places.
"""

from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from persia._core.shard.eviction cimport LFU, LFU_CLASSES, MAX_POLICIES, policy_order
from persia._core.shard.recency cimport (
    NO_SEGMENT, OFFSET_BITS, Order, Segment, recency_expired, segment_at,
)
from persia._core.shard.slabs cimport PLACE_BITS, PLACE_MASK

cdef struct Cursor:                 # over one policy's segments in the order of eviction
    uint32_t segment                # the next one, or NO_SEGMENT: no more
    uint32_t grade                  # orders of the policy passed so far, and this one


cdef uint32_t nth_order(const Eviction *eviction, uint32_t policy, uint32_t n) noexcept nogil:
    """What is still to be drained comes before class 0."""
    return policy_order(&eviction.policies[policy], n - 1 if n else LFU_CLASSES)


cdef void settle(
    Cursor *cursor, const Recency *recency, const Eviction *eviction, uint32_t policy
) noexcept nogil:
    """Go on to the policy's next order that has a segment."""
    cdef uint32_t count = (
        LFU_CLASSES + 1 if eviction.policies[policy].kind == LFU else 1)
    while cursor.segment == NO_SEGMENT and cursor.grade < count:
        cursor.segment = recency.orders[nth_order(eviction, policy, cursor.grade)].oldest
        cursor.grade += 1


cdef int allocate(OrderCopy *copy, const Recency *recency, Entries *spare) noexcept nogil:
    memset(copy, 0, sizeof(OrderCopy))
    copy.segments = <SegmentCopy *> malloc(
        (recency.num_segments + 1) * sizeof(SegmentCopy))
    if spare.capacity < recency.num_held:
        # With some room, so that it serves the next time too.
        free(spare.rows)
        spare.capacity = recency.num_held + recency.num_held // 16 + 1
        spare.rows = <row_t *> malloc(spare.capacity * sizeof(row_t))
        if spare.rows == NULL:
            spare.capacity = 0
    copy.entries = spare[0]
    memset(spare, 0, sizeof(Entries))
    # An empty shard needs none.
    return -1 if copy.segments == NULL or copy.entries.capacity < recency.num_held else 0


# A row's rank is its place in the order in which rows would be evicted if nothing else
# happened: policies take turns by the ticks of their next segments, as in ``eviction_take``.
cdef int order_copy(
    OrderCopy *copy, const Recency *recency, const Eviction *eviction, const uint64_t *clocks,
    Entries *spare
) noexcept nogil:
    cdef Cursor[MAX_POLICIES] cursors
    cdef uint32_t i, best
    cdef uint64_t num_entries = 0
    cdef const Segment *segment
    if allocate(copy, recency, spare) < 0:
        return -1
    for i in range(eviction.num_policies):
        cursors[i].segment = NO_SEGMENT
        cursors[i].grade = 0
        settle(&cursors[i], recency, eviction, i)
    while True:
        best = MAX_POLICIES
        for i in range(eviction.num_policies):
            if cursors[i].segment != NO_SEGMENT and (
                    best == MAX_POLICIES or segment_at(recency, cursors[i].segment).tick
                    < segment_at(recency, cursors[best].segment).tick):
                best = i
        if best == MAX_POLICIES:
            return 0
        segment = segment_at(recency, cursors[best].segment)
        if segment.num_live and not recency_expired(
                recency, cursors[best].segment, clocks):
            add_segment(copy, segment, &recency.orders[segment.order], clocks, num_entries)
            copy.segments[copy.num_segments].policy = best
            copy.segments[copy.num_segments].uses = max(cursors[best].grade, <uint32_t> 2) - 2
            copy.num_segments += 1
            num_entries += segment.num_held
        cursors[best].segment = segment.next
        settle(&cursors[best], recency, eviction, best)


cdef void add_segment(
    OrderCopy *copy, const Segment *segment, const Order *order, const uint64_t *clocks,
    uint64_t first_entry
) noexcept nogil:
    cdef SegmentCopy *into = &copy.segments[copy.num_segments]
    cdef uint64_t now = clocks[order.clock]
    into.first_order = copy.num_rows
    into.age = 0
    if order.ttl and now > segment.last_use:
        into.age = now - segment.last_use
    into.first_entry = first_entry
    into.num_words = (segment.num_used + 63) // 64
    memcpy(into.held, segment.held, into.num_words * sizeof(uint64_t))
    memcpy(into.live, segment.live, into.num_words * sizeof(uint64_t))
    memcpy(copy.entries.rows + first_entry, segment.rows, segment.num_held * sizeof(row_t))
    copy.num_rows += segment.num_live


cdef void order_free(OrderCopy *copy) noexcept nogil:
    free(copy.entries.rows)
    free(copy.segments)
    memset(copy, 0, sizeof(OrderCopy))


cdef void order_invert(
    const OrderCopy *copy, const uint32_t *starts, const uint64_t *listed, position_t *where
) noexcept nogil:
    cdef const SegmentCopy *segment
    cdef const row_t *rows
    cdef uint32_t number, word, count
    cdef uint64_t held, live, place
    for number in range(copy.num_segments):
        segment = &copy.segments[number]
        rows = copy.entries.rows + segment.first_entry
        count = 0
        for word in range(segment.num_words):
            held = segment.held[word]
            live = segment.live[word]
            while held:
                if live & held & (0 - held):
                    place = <uint64_t> starts[rows[0] >> PLACE_BITS] + (rows[0] & PLACE_MASK)
                    if listed == NULL or (listed[place // 64] >> (place % 64)) & 1:
                        where[place] = (number << OFFSET_BITS) | count
                    count += 1
                rows += 1
                held &= held - 1
