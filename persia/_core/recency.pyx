"""Exact least-recently-used order without a random access at each use.

A linked list costs two more cache misses a touch (the row's neighbours). Here a touch appends
the row to the newest segment and clears one bit of the segment where the row stood:

    oldest                                             newest
    +-----------+     +-----------+     +-----------+
    | r7 .. r2  | <-> | r9 r4     | <-> | r1 r3 ... |   rows, in order of use
    | live bits |     | live bits |     | live bits |   1: the row stands here still
    +-----------+     +-----------+     +-----------+
                          row.position = (segment, offset)

Dead entries are dropped without reading any row:

    tidy   when less than 4/5 of a segment's entries are live, the others are squeezed out. An
           entry keeps its offset: ``held`` says which offsets are still there, so no row has
           to learn a new position.
    free   a segment without live entries goes at once.
    merge  two neighbours with at most 256 live entries each become one; only this renumbers
           rows, at most 512 of them, once per 2048 appends.

Invariants, true between calls:

    I1  Every live row has exactly one live entry, and it stands at the row's position.
    I2  num_held is the number of held bits, num_live of live bits; live is a subset of held.
    I3  In every segment but the newest: 4 * num_held <= 5 * num_live. Between requests also
        in the newest. So entries are at most 1.25 times the live rows.
    I4  Order of use = order of segments, then of offsets.
    I5  Of two neighbours, the newest left out, at least one has more than 256 live entries
        (unless memory ran out), so that segments stay few.

Not taken: (row, stamp) pairs as queue entries (twice the memory, and a cache miss an entry to
find out whether it is dead).
"""

from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memset

from persia._core.slabs cimport persia_lowest_bit, persia_popcount, persia_prefetch_write


cdef int recency_init(Recency *recency) noexcept nogil:
    """An empty order; -1: no memory, and ``recency_free`` is safe."""
    memset(recency, 0, sizeof(Recency))
    recency.free_segment = NO_SEGMENT
    recency.oldest = NO_SEGMENT
    recency.newest = NO_SEGMENT
    return 0


cdef void recency_free(Recency *recency) noexcept nogil:
    cdef uint32_t number, i
    for number in range(recency.num_segments):
        free(segment_at(recency, number).rows)
    for i in range(recency.num_blocks):
        free(recency.blocks[i])
    free(recency.blocks)
    recency_init(recency)


cdef uint64_t recency_bytes(const Recency *recency) noexcept nogil:
    return (
        recency.bytes_held
        + <uint64_t> recency.num_blocks * SEGMENT_BLOCK * sizeof(Segment)
        + recency.block_capacity * sizeof(Segment *))


cdef uint32_t new_segment(Recency *recency, uint32_t num_entries) noexcept nogil:
    """An unlinked empty segment with room for so many entries; NO_SEGMENT: no memory."""
    cdef uint32_t number = recency.free_segment
    cdef uint32_t capacity
    cdef Segment **blocks
    cdef Segment *segment
    if number == NO_SEGMENT:
        if recency.num_segments == MAX_SEGMENTS:
            return NO_SEGMENT
        if recency.num_segments == recency.num_blocks * SEGMENT_BLOCK:
            if recency.num_blocks == recency.block_capacity:
                capacity = recency.block_capacity * 2 if recency.block_capacity else 4
                blocks = <Segment **> realloc(recency.blocks, capacity * sizeof(Segment *))
                if blocks == NULL:
                    return NO_SEGMENT
                recency.blocks = blocks
                recency.block_capacity = capacity
            segment = <Segment *> calloc(SEGMENT_BLOCK, sizeof(Segment))
            if segment == NULL:
                return NO_SEGMENT
            recency.blocks[recency.num_blocks] = segment
            recency.num_blocks += 1
        number = recency.num_segments
        segment = segment_at(recency, number)
        segment.rows = <row_t *> malloc(num_entries * sizeof(row_t))
        if segment.rows == NULL:
            return NO_SEGMENT
        recency.num_segments += 1
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
    memset(segment.held, 0, sizeof(segment.held))
    memset(segment.live, 0, sizeof(segment.live))
    return number


cdef uint32_t rows_capacity(const Recency *recency, uint32_t number) noexcept nogil:
    """Entries the segment's array has room for: full while open, exact once closed."""
    cdef Segment *segment = segment_at(recency, number)
    if number == recency.newest:
        return SEGMENT_ENTRIES
    return segment.num_held


cdef void drop_segment(Recency *recency, uint32_t number) noexcept nogil:
    """Unlink and free a segment without live entries."""
    cdef Segment *segment = segment_at(recency, number)
    recency.bytes_held -= rows_capacity(recency, number) * sizeof(row_t)
    recency.num_held -= segment.num_held
    if segment.previous != NO_SEGMENT:
        segment_at(recency, segment.previous).next = segment.next
    else:
        recency.oldest = segment.next
    if segment.next != NO_SEGMENT:
        segment_at(recency, segment.next).previous = segment.previous
    else:
        recency.newest = segment.previous
    free(segment.rows)
    segment.rows = NULL
    segment.num_held = 0
    segment.next = recency.free_segment
    recency.free_segment = number


cdef void squeeze(Recency *recency, Segment *segment) noexcept nogil:
    """Drop dead entries; the array keeps its size."""
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


cdef void trim(Recency *recency, Segment *segment, uint32_t capacity) noexcept nogil:
    """Give back the array's unused end. ``capacity`` is what it had; num_held is not 0."""
    cdef row_t *rows = <row_t *> realloc(segment.rows, segment.num_held * sizeof(row_t))
    if rows != NULL:        # otherwise the longer array serves as well
        segment.rows = rows
    recency.bytes_held -= (capacity - segment.num_held) * sizeof(row_t)


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
        squeeze(recency, segment)
        trim(recency, segment, before)
    join(recency, slabs, number)


cdef bint is_thin(const Recency *recency, uint32_t number) noexcept nogil:
    """Whether the segment may be merged; the newest is still growing and stays out of it."""
    return (
        number != NO_SEGMENT and number != recency.newest
        and segment_at(recency, number).num_live <= THIN)


cdef void join(Recency *recency, Slabs *slabs, uint32_t number) noexcept nogil:
    """Restore I5 around one segment."""
    while is_thin(recency, number):
        if is_thin(recency, segment_at(recency, number).previous):
            number = merge(recency, slabs, segment_at(recency, number).previous)
        elif is_thin(recency, segment_at(recency, number).next):
            number = merge(recency, slabs, number)
        else:
            return


cdef uint32_t merge(Recency *recency, Slabs *slabs, uint32_t number) noexcept nogil:
    """Make one segment of this one and the next; its number, or NO_SEGMENT: no memory."""
    cdef uint32_t target = new_segment(
        recency,
        segment_at(recency, number).num_live
        + segment_at(recency, segment_at(recency, number).next).num_live)
    cdef Segment *into
    cdef Segment *segment
    cdef uint32_t _part, word, taken, following
    cdef uint64_t held, live
    if target == NO_SEGMENT:
        return NO_SEGMENT
    into = segment_at(recency, target)
    # Linked in front of the two, which go as soon as they are copied.
    segment = segment_at(recency, number)
    into.previous = segment.previous
    into.next = number
    if segment.previous != NO_SEGMENT:
        segment_at(recency, segment.previous).next = target
    else:
        recency.oldest = target
    segment.previous = target
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


cdef int open_segment(Recency *recency, Slabs *slabs) noexcept nogil:
    """Close the newest segment and start another; -1: no memory."""
    cdef uint32_t number = new_segment(recency, SEGMENT_ENTRIES)
    cdef uint32_t closed = recency.newest
    cdef Segment *segment
    if number == NO_SEGMENT:
        return -1
    segment_at(recency, number).previous = closed
    segment_at(recency, number).next = NO_SEGMENT
    recency.newest = number
    if closed == NO_SEGMENT:
        recency.oldest = number
        return 0
    segment = segment_at(recency, closed)
    segment.next = number
    if 4 * segment.num_held > 5 * segment.num_live:
        squeeze(recency, segment)
    if segment.num_held:
        trim(recency, segment, SEGMENT_ENTRIES)
        join(recency, slabs, closed)
    else:
        recency.bytes_held -= SEGMENT_ENTRIES * sizeof(row_t)
        drop_segment(recency, closed)
    return 0


cdef void bury(Recency *recency, Slabs *slabs, position_t position) noexcept nogil:
    """The entry at this position dies."""
    cdef uint32_t number = position >> OFFSET_BITS
    cdef uint32_t offset = position & OFFSET_MASK
    cdef Segment *segment = segment_at(recency, number)
    segment.live[offset // 64] &= ~(<uint64_t> 1 << (offset % 64))
    segment.num_live -= 1
    if number != recency.newest and (
            4 * segment.num_held > 5 * segment.num_live or segment.num_live == THIN):
        tidy(recency, slabs, number)


cdef int recency_touch(Recency *recency, Slabs *slabs, row_t row) noexcept nogil:
    cdef Row *at = row_at(slabs, row)
    cdef position_t old
    cdef Segment *segment
    cdef uint32_t offset
    if recency.newest == NO_SEGMENT or (
            segment_at(recency, recency.newest).num_used == SEGMENT_ENTRIES):
        if open_segment(recency, slabs) < 0:
            return -1
    # Only now: a merge while the newest segment was closed may have renumbered this very row.
    old = at.position
    segment = segment_at(recency, recency.newest)
    offset = segment.num_used
    segment.num_used += 1
    segment.rows[segment.num_held] = row
    segment.num_held += 1
    segment.num_live += 1
    segment.held[offset // 64] |= <uint64_t> 1 << (offset % 64)
    segment.live[offset // 64] |= <uint64_t> 1 << (offset % 64)
    recency.num_held += 1
    at.position = (recency.newest << OFFSET_BITS) | offset
    if old == NO_POSITION:
        recency.num_live += 1
    else:
        bury(recency, slabs, old)
    return 0


cdef void recency_remove(Recency *recency, Slabs *slabs, row_t row) noexcept nogil:
    cdef Row *at = row_at(slabs, row)
    cdef position_t position = at.position
    at.position = NO_POSITION
    recency.num_live -= 1
    bury(recency, slabs, position)


cdef void recency_settle(Recency *recency) noexcept nogil:
    cdef Segment *segment
    if recency.newest == NO_SEGMENT:
        return
    segment = segment_at(recency, recency.newest)
    if 4 * segment.num_held > 5 * segment.num_live:
        squeeze(recency, segment)


cdef uint32_t recency_walk(
    const Recency *recency, uint32_t *segment, uint32_t *offset, row_t *rows, uint32_t count
) noexcept nogil:
    """Continue at (segment, offset), which are moved; the first call passes ``oldest``, 0."""
    cdef uint32_t written = 0
    cdef uint32_t word, index, i
    cdef uint64_t live, below
    cdef Segment *at
    while segment[0] != NO_SEGMENT and written < count:
        at = segment_at(recency, segment[0])
        word = offset[0] // 64
        index = 0
        for i in range(word):
            index += persia_popcount(at.held[i])
        while word < SEGMENT_WORDS and written < count:
            # Offsets below the cursor were given out by an earlier call.
            live = at.live[word] & ~((<uint64_t> 1 << (offset[0] % 64)) - 1)
            while live and written < count:
                i = persia_lowest_bit(live)
                below = at.held[word] & ((<uint64_t> 1 << i) - 1)
                rows[written] = at.rows[index + persia_popcount(below)]
                written += 1
                live &= live - 1
                offset[0] = word * 64 + i + 1
            if live == 0:
                index += persia_popcount(at.held[word])
                word += 1
                offset[0] = word * 64
        if offset[0] >= SEGMENT_ENTRIES:
            segment[0] = at.next
            offset[0] = 0
    return written


cdef uint32_t recency_oldest(
    const Recency *recency, row_t *rows, uint32_t count
) noexcept nogil:
    cdef uint32_t segment = recency.oldest
    cdef uint32_t offset = 0
    return recency_walk(recency, &segment, &offset, rows, count)
