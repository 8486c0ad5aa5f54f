"""Exact orders of use without a random access at each use.

A linked list costs two more cache misses a touch (the row's neighbours). Here a touch appends
the row to the newest segment and clears one bit of the segment where the row stood:

    oldest                                             newest
    +-----------+     +-----------+     +-----------+
    | r7 .. r2  | <-> | r9 r4     | <-> | r1 r3 ... |   rows, in order of use
    | live bits |     | live bits |     | live bits |   1: the row stands here still
    +-----------+     +-----------+     +-----------+
                          row.position = (segment, offset)

A shard has several such orders, one for each kind of rows and frequency (see ``eviction``), of
segments from one pool. A segment knows its order, and so does a row by its position; a touch
may move the row from any order to any other.

Invariants, true between calls:

    I1  Every live row has exactly one live entry, and it stands at the row's position.
    I2  num_held is the number of held bits, num_live of live bits; live is a subset of held.
    I3  In every segment but an open one: 4 * num_held <= 5 * num_live. Between requests also
        there. So entries are at most 1.25 times the live rows.
    I4  Order of use = order of segments, then of offsets.
    I5  Of two neighbours, open ones left out, at least one has more than 256 live entries, or
        their uses are further apart than one grain (unless memory ran out), so that segments
        stay few.
    I6  Only the newest segment of an order is open; first_use <= last_use <= first_use + grain.
    I7  Between requests num_timed is num_used, so last_use and tick are of the last use.

Not taken: (row, stamp) pairs as queue entries (twice the memory, and a cache miss an entry to
find out whether it is dead).
"""

from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, memset

from persia._core.base.cpu cimport isa_level
from persia._core.shard.persistent_shard cimport (
    FILE_SEGMENTS, KEY_STEP, SavedSegment, ShardFile, file_back, file_segment,
    persia_stores_before,
)
from persia._core.shard.slabs cimport (
    CACHE_LINE, persia_lowest_bit, persia_popcount, persia_prefetch_write,
)

cdef extern from "recency_kernels.h" nogil:
    ctypedef uint32_t (*persia_squeeze_t)(
        row_t *rows, const uint64_t *held, const uint64_t *live, uint32_t num_words) noexcept
    const persia_squeeze_t *persia_squeeze

cdef extern from "stdlib.h" nogil:
    int posix_memalign(void **block, size_t alignment, size_t num_bytes) noexcept

# --- segments: their memory, their links, what leaves them -----------------------------------

# Segments are numbered, and come from blocks that never move; a free one keeps its number and
# has no array.


cdef Block *new_block() noexcept nogil:
    """Zeroed, and from the begin of a line, so that a segment's counts lie in one."""
    cdef void *block = NULL
    if posix_memalign(&block, CACHE_LINE, sizeof(Block)) != 0:
        return NULL
    memset(block, 0, sizeof(Block))
    return <Block *> block


cdef uint32_t new_segment(Recency *recency, uint32_t num_entries) noexcept nogil:
    """An unlinked empty segment with room for ``num_entries``; NO_SEGMENT: no memory."""
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
        if recency.file != NULL:
            recency.file.shard.num_segments = recency.num_segments
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
    if recency.file != NULL:
        place = <uint64_t> recency.num_blocks * SEGMENT_BLOCK * sizeof(SavedSegment)
        if file_back(
                recency.file, <char *> recency.file.segments + place, FILE_SEGMENTS + place,
                SEGMENT_BLOCK * sizeof(SavedSegment)) < 0:
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
    """Entries that its array has room for: all while it is open, then exact."""
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
    if recency.file != NULL:
        # Before a row stands in it. Keys of other segments stay what they are.
        if following == NO_SEGMENT:
            recency.file.newest_key += KEY_STEP
            file_segment(recency.file, number, order, recency.file.newest_key)
        else:
            file_segment(
                recency.file, number, order,
                recency.file.segments[following].key - KEY_STEP)
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
    """Unlink and free a segment without live entries."""
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
    """Drop dead entries; the array keeps its size."""
    cdef uint32_t num_words = (segment.num_used + 63) // 64
    cdef uint32_t num_kept = persia_squeeze[isa_level()](
        segment.rows, segment.held, segment.live, num_words)
    memcpy(segment.held, segment.live, num_words * sizeof(uint64_t))
    recency.num_held -= segment.num_held - num_kept
    segment.num_held = num_kept


cdef void segment_trim(Recency *recency, Segment *segment, uint32_t capacity) noexcept nogil:
    cdef row_t *rows = <row_t *> realloc(segment.rows, segment.num_held * sizeof(row_t))
    if rows != NULL:        # otherwise the longer array serves as well
        segment.rows = rows
    recency.bytes_held -= (capacity - segment.num_held) * sizeof(row_t)


# --- orders ----------------------------------------------------------------------------------


cdef void recency_init(Recency *recency) noexcept nogil:
    memset(recency, 0, sizeof(Recency))
    recency.free_segment = NO_SEGMENT


cdef void recency_free(Recency *recency) noexcept nogil:
    cdef uint32_t number, i
    cdef ShardFile *file = recency.file
    for number in range(recency.num_segments):
        free(segment_at(recency, number).rows)
    for i in range(recency.num_blocks):
        free(recency.blocks[i])
    free(recency.blocks)
    free(recency.orders)
    recency_init(recency)
    recency.file = file


cdef int64_t recency_add_orders(
    Recency *recency, uint32_t count, uint32_t clock, uint64_t ttl
) noexcept nogil:
    cdef uint32_t first = recency.num_orders
    cdef uint32_t i
    cdef Order *orders = <Order *> realloc(recency.orders, (first + count) * sizeof(Order))
    if orders == NULL:
        return -1
    recency.orders = orders
    for i in range(first, first + count):
        memset(&orders[i], 0, sizeof(Order))
        orders[i].oldest = NO_SEGMENT
        orders[i].newest = NO_SEGMENT
        orders[i].open = NO_SEGMENT
        orders[i].clock = clock
        orders[i].ttl = ttl
        orders[i].grain = ttl // GRAINS
    recency.num_orders = first + count
    recency.has_ttl = recency.has_ttl or ttl != 0
    return first


cdef uint64_t recency_bytes(const Recency *recency) noexcept nogil:
    return (
        recency.bytes_held
        + <uint64_t> recency.num_blocks * sizeof(Block)
        + recency.block_capacity * sizeof(Block *)
        + recency.num_orders * sizeof(Order))


# Dead entries are dropped without a look at any row. When less than 4/5 of a segment's entries
# live, the others are squeezed out: an entry keeps its offset, and ``held`` says which offsets
# are still there, so no row learns a new position. A segment without live entries is freed.
cdef void tidy(Recency *recency, Slabs *slabs, uint32_t number) noexcept nogil:
    """Restore I3 and I5 for a closed segment after one of its entries died."""
    cdef Segment *segment = segment_at(recency, number)
    cdef uint32_t before = segment.num_held
    if segment.num_live == 0:
        before = segment.previous
        drop_segment(recency, number)
        if before != NO_SEGMENT:
            join(recency, slabs, before)
        return
    if 4 * segment.num_held > 5 * segment.num_live:
        segment_squeeze(recency, segment)
        segment_trim(recency, segment, before)
    join(recency, slabs, number)


cdef bint is_thin(const Recency *recency, uint32_t number) noexcept nogil:
    """Whether the segment may be merged; an open one is still growing and stays out of it."""
    cdef const Segment *segment
    if number == NO_SEGMENT:
        return False
    segment = segment_at(recency, number)
    return segment.num_live <= THIN and number != recency.orders[segment.order].open


cdef bint recency_mergeable(const Recency *recency, uint32_t number) noexcept nogil:
    cdef const Segment *segment
    cdef const Segment *following
    if not is_thin(recency, number):
        return False
    segment = segment_at(recency, number)
    if not is_thin(recency, segment.next):
        return False
    following = segment_at(recency, segment.next)
    return (
        max(segment.last_use, following.last_use)
        - min(segment.first_use, following.first_use)) <= recency.orders[segment.order].grain


cdef void join(Recency *recency, Slabs *slabs, uint32_t number) noexcept nogil:
    cdef uint32_t before
    while number != NO_SEGMENT:
        before = segment_at(recency, number).previous
        if recency_mergeable(recency, before):
            number = merge(recency, slabs, before)
        elif recency_mergeable(recency, number):
            number = merge(recency, slabs, number)
        else:
            return


# Only this renumbers rows: at most 512 of them, once per 2048 appends.
cdef uint32_t merge(Recency *recency, Slabs *slabs, uint32_t number) noexcept nogil:
    """Make one segment of this one and the next; its number, or NO_SEGMENT: no memory."""
    cdef Segment *segment = segment_at(recency, number)
    cdef Segment *other = segment_at(recency, segment.next)
    cdef uint32_t target = new_segment(recency, segment.num_live + other.num_live)
    cdef Segment *into
    cdef uint32_t _part, word, taken, following
    cdef uint64_t held, live
    if target == NO_SEGMENT:
        return NO_SEGMENT
    # Linked in front of the two, which go as soon as they are copied.
    into = segment_at(recency, target)
    into.first_use = min(segment.first_use, other.first_use)
    into.tick = max(segment.tick, other.tick)
    segment_link(recency, target, segment.order, number)
    if recency.file != NULL:
        # Not before its neighbour, where others may stand: in the place of the two.
        file_segment(
            recency.file, target, segment.order, recency.file.segments[number].key)
    set_last_use(recency, target, max(segment.last_use, other.last_use))
    for _part in range(2):
        segment = segment_at(recency, number)
        following = segment.next
        taken = 0
        for word in range((segment.num_used + 63) // 64):
            held = segment.held[word]
            live = segment.live[word]
            while held:
                if live & held & (0 - held):
                    into.rows[into.num_used] = segment.rows[taken]
                    persia_prefetch_write(row_at(slabs, segment.rows[taken]))
                    into.num_used += 1
                taken += 1
                held &= held - 1
        drop_segment(recency, number)
        number = following
    for word in range(into.num_used):
        row_at(slabs, into.rows[word]).position = (target << OFFSET_BITS) | word
        into.held[word // 64] |= <uint64_t> 1 << (word % 64)
    for word in range(<uint32_t> SEGMENT_WORDS):
        into.live[word] = into.held[word]
    into.num_held = into.num_used
    into.num_live = into.num_used
    recency.num_held += into.num_used
    return target


cdef int open_segment(Recency *recency, Slabs *slabs, uint32_t order) noexcept nogil:
    """Start another segment and close the one before; -1: no memory."""
    cdef uint32_t number = new_segment(recency, SEGMENT_ENTRIES)
    cdef Order *to = &recency.orders[order]
    cdef uint32_t closed = to.open
    if number == NO_SEGMENT:
        return -1
    segment_link(recency, number, order, NO_SEGMENT)
    segment_at(recency, number).first_use = recency.clocks[to.clock]
    set_last_use(recency, number, recency.clocks[to.clock])
    # Before the old one is shut: a merge must not take the open segment for a closed one.
    to.open = number
    if closed != NO_SEGMENT:
        note_time(recency, closed)
        shut(recency, slabs, closed)
    return 0


# Rows expire by the segment, unread. So a segment is closed before its uses are further apart
# than one grain, a sixteenth of the ttl.
cdef void set_last_use(Recency *recency, uint32_t number, uint64_t time) noexcept nogil:
    cdef Segment *segment = segment_at(recency, number)
    cdef const Order *order = &recency.orders[segment.order]
    segment.last_use = time
    expiry_at(recency, number)[0] = NEVER if order.ttl == 0 else (
        <uint64_t> order.clock << CLOCK_SHIFT | (time + order.ttl))
    if recency.file != NULL:
        recency.file.segments[number].first_use = segment.first_use
        recency.file.segments[number].last_use = time
        recency.file.segments[number].tick = segment.tick


cdef void note_time(Recency *recency, uint32_t number) noexcept nogil:
    """Once a request, whose time it is, and not at each use."""
    cdef Segment *segment = segment_at(recency, number)
    if segment.num_used != segment.num_timed:
        segment.num_timed = segment.num_used
        segment.tick = recency.tick
        set_last_use(
            recency, number, recency.clocks[recency.orders[segment.order].clock])


cdef void shut(Recency *recency, Slabs *slabs, uint32_t number) noexcept nogil:
    """Bring a segment that is open no longer under I3 and I5."""
    cdef Segment *segment = segment_at(recency, number)
    if 4 * segment.num_held > 5 * segment.num_live:
        segment_squeeze(recency, segment)
    if segment.num_held:
        segment_trim(recency, segment, SEGMENT_ENTRIES)
        join(recency, slabs, number)
    else:
        recency.bytes_held -= SEGMENT_ENTRIES * sizeof(row_t)
        drop_segment(recency, number)


cdef void fetch_open(const Recency *recency) noexcept nogil:
    """Fetch where uses will be entered, of all orders: the first use may be of any."""
    cdef uint32_t i
    cdef Segment *segment
    for i in range(recency.num_orders):
        if recency.orders[i].open != NO_SEGMENT:
            persia_prefetch_write(segment_at(recency, recency.orders[i].open))
    for i in range(recency.num_orders):
        if recency.orders[i].open != NO_SEGMENT:
            segment = segment_at(recency, recency.orders[i].open)
            persia_prefetch_write(&segment.rows[segment.num_held])
            persia_prefetch_write(&segment.held[(segment.num_used % SEGMENT_ENTRIES) // 64])
            persia_prefetch_write(&segment.live[(segment.num_used % SEGMENT_ENTRIES) // 64])


cdef void recency_begin(
    Recency *recency, Slabs *slabs, const uint64_t *clocks
) noexcept nogil:
    cdef uint32_t i, number
    cdef Order *order
    recency.tick += 1
    if recency.num_orders > 1:
        fetch_open(recency)
    if not recency.has_ttl:
        return
    for i in range(<uint32_t> NUM_CLOCKS):
        recency.clocks[i] = max(recency.clocks[i], clocks[i])
    for i in range(recency.num_orders):
        order = &recency.orders[i]
        number = order.open
        if number != NO_SEGMENT and recency.clocks[order.clock] > (
                segment_at(recency, number).first_use + order.grain):
            order.open = NO_SEGMENT
            shut(recency, slabs, number)


cdef void recency_drain(
    Recency *recency, Slabs *slabs, uint32_t source, uint32_t target, uint32_t count
) noexcept nogil:
    cdef Order *from_ = &recency.orders[source]
    cdef Order *to = &recency.orders[target]
    cdef uint32_t number
    cdef Segment *segment
    while count and from_.newest != NO_SEGMENT:
        count -= 1
        number = from_.newest
        if number == from_.open:
            from_.open = NO_SEGMENT
            shut(recency, slabs, number)
            continue
        segment = segment_at(recency, number)
        segment_unlink(recency, segment)
        segment_link(recency, number, target, to.oldest)
        from_.num_live -= segment.num_live
        to.num_live += segment.num_live
        join(recency, slabs, number)


cdef int recency_touch_at(
    Recency *recency, Slabs *slabs, row_t row, uint32_t order, uint64_t time
) noexcept nogil:
    cdef Order *to = &recency.orders[order]
    cdef uint64_t now = recency.clocks[to.clock]
    cdef uint32_t open_ = to.open
    cdef Segment *segment
    cdef int status
    if open_ != NO_SEGMENT:
        segment = segment_at(recency, open_)
        if not segment.first_use <= time <= segment.first_use + to.grain:
            to.open = NO_SEGMENT
            shut(recency, slabs, open_)
    recency.clocks[to.clock] = time
    status = recency_touch(recency, slabs, row, row_at(slabs, row), order)
    recency.clocks[to.clock] = now
    if status == 0:
        segment = segment_at(recency, to.open)
        if time > segment.last_use:
            set_last_use(recency, to.open, time)
        segment.num_timed = segment.num_used
        segment.tick = recency.tick
    return status


cdef void recency_remove(Recency *recency, Slabs *slabs, row_t row) noexcept nogil:
    cdef Row *at = row_at(slabs, row)
    cdef position_t position = at.position
    at.position = NO_POSITION
    persia_stores_before()
    recency.num_live -= 1
    recency.orders[segment_at(recency, position >> OFFSET_BITS).order].num_live -= 1
    bury(recency, slabs, position)


cdef void recency_end(Recency *recency) noexcept nogil:
    cdef uint32_t i
    for i in range(recency.num_orders):
        if recency.orders[i].open != NO_SEGMENT:
            note_time(recency, recency.orders[i].open)


cdef void recency_settle(Recency *recency) noexcept nogil:
    cdef Segment *segment
    cdef uint32_t i
    for i in range(recency.num_orders):
        if recency.orders[i].open != NO_SEGMENT:
            segment = segment_at(recency, recency.orders[i].open)
            if 4 * segment.num_held > 5 * segment.num_live:
                segment_squeeze(recency, segment)


cdef uint32_t recency_oldest(
    const Recency *recency, uint32_t number, row_t *rows, uint32_t count
) noexcept nogil:
    cdef const Segment *segment = segment_at(recency, number)
    cdef uint32_t word = 0, written = 0, first = 0
    cdef uint64_t live, below
    while word < SEGMENT_WORDS and written < count:
        live = segment.live[word]
        while live and written < count:
            below = segment.held[word] & ((<uint64_t> 1 << persia_lowest_bit(live)) - 1)
            rows[written] = segment.rows[first + persia_popcount(below)]
            written += 1
            live &= live - 1
        first += persia_popcount(segment.held[word])
        word += 1
    return written
