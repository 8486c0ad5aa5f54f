"""How one shard's rows of a moment are read while they go on changing."""

from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset

from persia._core.shard.changes cimport (
    Changes, Image, LogBlock, LogList, images_free, is_done, set_done,
)
from persia._core.shard.eviction cimport (
    LFU_CLASSES, LRU, MAX_POLICIES, Eviction, policy_order,
)
from persia._core.shard.recency cimport (
    NO_SEGMENT, OFFSET_BITS, OFFSET_MASK, Order, Recency, Segment, recency_expired, segment_at,
)
from persia._core.shard.row_format cimport width_of_values
from persia._core.shard.shard cimport (
    PyThread_acquire_lock, PyThread_release_lock, shard_expire, shard_leave,
)
from persia._core.shard.slabs cimport (
    NO_POSITION, PLACE_BITS, PLACE_MASK, Row, Slabs, row_at, row_values,
)

# --- a copy of the orders of use -------------------------------------------------------------
#
#     segments   | r7 .. r2 | r9 r4 | r1 r3 |     memcpy, the only part that training waits for
#     where      place of r7 -> 0.0,  of r2 -> 0.1,  of r9 -> 1.0 ...            later, unlocked
#
# The copy costs four bytes an entry and no look at any row. Its memory is kept for the next
# one: fresh pages would cost more than the copying. Afterwards it is turned round once, so that
# rows can be read in the order of memory and still know their places.

cdef struct OrderCursor:            # over one policy's segments in the order of eviction
    uint32_t segment                # the next one, or NO_SEGMENT: no more
    uint32_t grade                  # orders of the policy passed so far, and this one


cdef uint32_t nth_order(const Eviction *eviction, uint32_t policy, uint32_t n) noexcept nogil:
    """What is still to be drained comes before class 0."""
    return policy_order(&eviction.policies[policy], n - 1 if n else LFU_CLASSES)


cdef void settle(
    OrderCursor *cursor, const Recency *recency, const Eviction *eviction, uint32_t policy
) noexcept nogil:
    """Go on to the policy's next order that has a segment."""
    cdef uint32_t count = (
        1 if eviction.policies[policy].kind == LRU else LFU_CLASSES + 1)
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
# Expired rows are left out. ``spare`` is used, and empty afterwards, if it is large enough.
# -1: no memory; ``order_free`` is safe.
cdef int order_copy(
    OrderCopy *copy, const Recency *recency, const Eviction *eviction, const uint64_t *clocks,
    Entries *spare
) noexcept nogil:
    cdef OrderCursor[MAX_POLICIES] cursors
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


# For each place (those of chunk c begin at starts[c]): segment << OFFSET_BITS | number among
# its live rows, or NO_POSITION. ``listed`` has a bit for each place that counts; NULL: all.
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


# --- a part ----------------------------------------------------------------------------------


# begin: copy the order (4 bytes a row) and link the watcher, under the lock. Training waits for
# this and for nothing else.
cdef int part_begin(
    SnapshotPart *part, uint32_t since, uint32_t last, const uint64_t *clocks, bint sweeps
) noexcept nogil:
    cdef int status
    PyThread_acquire_lock(part.shard.lock, 1)
    if sweeps:
        # In the epoch that ends: what has expired is deleted for who reads changes, as it is
        # in no snapshot of all rows.
        shard_expire(part.shard, clocks)
    status = begin(part, since, last, clocks)
    PyThread_release_lock(part.shard.lock)
    part.status = status
    return status


cdef int begin(
    SnapshotPart *part, uint32_t since, uint32_t last, const uint64_t *clocks
) noexcept nogil:
    cdef Changes *changes = &part.shard.changes
    changes.epoch = last + 1
    part.num_policies = part.shard.eviction.num_policies
    part.watcher.since = since
    part.watcher.last = last
    part.is_partial = since != 0 and changes.log.lost >= since
    memcpy(part.slabs, part.shard.slabs.slabs, sizeof(part.slabs))
    if copy_places(part) < 0 or order_copy(
            &part.order, &part.shard.recency, &part.shard.eviction, clocks,
            &changes.spare) < 0:
        return -1
    if since and not part.is_partial and copy_log(part) < 0:
        return -1
    part.watcher.next = changes.watchers
    changes.watchers = &part.watcher
    part.is_watching = True
    return 0


cdef int copy_places(SnapshotPart *part) noexcept nogil:
    """Number the places of all chunks, and make a bit for each."""
    cdef const Slabs *slabs = &part.shard.slabs
    cdef Watcher *watcher = &part.watcher
    cdef uint32_t i
    watcher.num_chunks = slabs.num_chunks
    watcher.starts = <uint32_t *> malloc((slabs.num_chunks + 1) * sizeof(uint32_t))
    part.chunk_slabs = <uint8_t *> malloc(slabs.num_chunks + 1)
    if watcher.starts == NULL or part.chunk_slabs == NULL:
        return -1
    watcher.starts[0] = 0
    for i in range(slabs.num_chunks):
        part.chunk_slabs[i] = <uint8_t> slabs.views[i].slab
        watcher.starts[i + 1] = watcher.starts[i] + slabs.states[i].num_touched
    watcher.done = <uint64_t *> calloc(
        watcher.starts[slabs.num_chunks] // 64 + 1, sizeof(uint64_t))
    return -1 if watcher.done == NULL else 0


cdef uint64_t part_copied_bytes(const SnapshotPart *part, uint64_t most_rows) noexcept nogil:
    cdef const uint32_t *starts = part.watcher.starts
    cdef uint64_t total = 0, num_rows = 0, largest = 0, count, size
    cdef uint32_t i
    for i in range(part.watcher.num_chunks):
        count = starts[i + 1] - starts[i]
        size = part.slabs[part.chunk_slabs[i]].stride + sizeof(Image)
        num_rows += count
        total += count * size
        largest = max(largest, size)
    return min(total, min(num_rows, most_rows) * largest)


cdef void *copy_entries(
    const LogList *entries, uint32_t since, size_t entry_bytes, uint64_t *count
) noexcept nogil:
    """The entries of these epochs in an array; NULL: no memory."""
    cdef const LogBlock *block = entries.oldest
    cdef char *copied
    count[0] = 0
    while block != NULL:
        if block.epoch >= since:
            count[0] += block.count
        block = block.next
    copied = <char *> malloc((count[0] + 1) * entry_bytes)
    if copied == NULL:
        return NULL
    count[0] = 0
    block = entries.oldest
    while block != NULL:
        if block.epoch >= since:
            memcpy(copied + count[0] * entry_bytes, block.entries, block.count * entry_bytes)
            count[0] += block.count
        block = block.next
    return copied


cdef int copy_log(SnapshotPart *part) noexcept nogil:
    cdef uint32_t since = part.watcher.since
    part.changed = <row_t *> copy_entries(
        &part.shard.changes.log.rows, since, sizeof(row_t), &part.num_changed)
    part.dropped = <sign_t *> copy_entries(
        &part.shard.changes.log.signs, since, sizeof(sign_t), &part.num_dropped)
    return -1 if part.changed == NULL or part.dropped == NULL else 0


cdef uint64_t *listed_places(const SnapshotPart *part) noexcept nogil:
    """A bit for each place that the log names; NULL: no memory."""
    cdef const uint32_t *starts = part.watcher.starts
    cdef uint64_t *listed = <uint64_t *> calloc(
        starts[part.watcher.num_chunks] // 64 + 1, sizeof(uint64_t))
    cdef uint64_t i, place
    cdef uint32_t chunk
    if listed == NULL:
        return NULL
    for i in range(part.num_changed):
        chunk = part.changed[i] >> PLACE_BITS
        place = <uint64_t> starts[chunk] + (part.changed[i] & PLACE_MASK)
        # The chunk may have been cut into fewer rows since this one was in it.
        if place < starts[chunk + 1]:
            listed[place // 64] |= <uint64_t> 1 << (place % 64)
    return listed


# prepare: turn the copy round, place -> order, without the lock.
cdef int part_prepare(SnapshotPart *part) noexcept nogil:
    cdef uint32_t num_places = part.watcher.starts[part.watcher.num_chunks]
    cdef uint64_t *listed = NULL
    if part.where != NULL:
        return 0
    if part.changed != NULL:
        listed = listed_places(part)
        if listed == NULL:
            return -1
    part.left = <uint64_t *> calloc(
        <size_t> MAX_SLABS * part.num_policies, sizeof(uint64_t))
    part.where = <position_t *> malloc((num_places + 1) * sizeof(position_t))
    if part.left != NULL and part.where != NULL:
        memset(part.where, 0xFF, num_places * sizeof(position_t))       # NO_POSITION
        order_invert(&part.order, part.watcher.starts, listed, part.where)
        give_back(part)
        count_rows(part)
    free(listed)
    return -1 if part.left == NULL or part.where == NULL else 0


cdef void give_back(SnapshotPart *part) noexcept nogil:
    """Leave the memory of the copy to the next snapshot."""
    cdef Entries *spare = &part.shard.changes.spare
    PyThread_acquire_lock(part.shard.lock, 1)
    if spare.capacity == 0:
        spare[0] = part.order.entries
        memset(&part.order.entries, 0, sizeof(Entries))
    PyThread_release_lock(part.shard.lock)


cdef inline uint64_t *left_of(
    const SnapshotPart *part, uint32_t slab, uint32_t policy
) noexcept nogil:
    return &part.left[slab * part.num_policies + policy]


cdef void count_rows(SnapshotPart *part) noexcept nogil:
    cdef uint32_t chunk, i
    for chunk in range(part.watcher.num_chunks):
        for i in range(part.watcher.starts[chunk], part.watcher.starts[chunk + 1]):
            if part.where[i] != <position_t> NO_POSITION:
                left_of(
                    part, part.chunk_slabs[chunk],
                    part.order.segments[part.where[i] >> OFFSET_BITS].policy)[0] += 1


cdef inline void put_row(
    const SnapshotPart *part, const Slab *slab, position_t where, Row *row, Columns *columns,
    uint32_t at
) noexcept nogil:
    cdef const SegmentCopy *segment = &part.order.segments[where >> OFFSET_BITS]
    cdef size_t value_bytes = <size_t> slab.dim * (4 if slab.dtype == 0 else 2)
    columns.signs[at] = row.sign
    columns.orders[at] = segment.first_order + (where & OFFSET_MASK)
    columns.uses[at] = segment.uses
    columns.ages[at] = segment.age
    memcpy(columns.values + at * value_bytes, row_values(row), value_bytes)
    if slab.state_words:
        memcpy(
            columns.states + <size_t> at * slab.state_words,
            row_values(row) + width_of_values(slab.dtype, slab.dim),
            slab.state_words * sizeof(uint32_t))


# read: rows come in the order of memory, since that is what memory is fast at; their places in
# the order of eviction come out beside them. A row is given out once: either as it is read, or
# as an image, whichever comes first sets ``done``. The lock is held for a thousand rows at a
# time.
cdef int64_t part_read(
    SnapshotPart *part, Cursor *cursor, Columns *columns, uint32_t count
) noexcept nogil:
    cdef uint32_t written = 0
    cdef bint is_lost = False
    while written < count and cursor.chunk < part.watcher.num_chunks and not is_lost:
        PyThread_acquire_lock(part.shard.lock, 1)
        is_lost = part.watcher.is_lost
        if not is_lost:
            written = read_held(
                part, cursor, columns, written, min(count, written + HELD_ROWS))
        PyThread_release_lock(part.shard.lock)
        shard_leave(part.shard)
    left_of(part, cursor.slab, cursor.policy)[0] -= written
    return -1 if is_lost else <int64_t> written


cdef uint32_t read_held(
    SnapshotPart *part, Cursor *cursor, Columns *columns, uint32_t written, uint32_t end
) noexcept nogil:
    """Go on until the columns are full up to ``end`` or enough was looked at."""
    cdef Watcher *watcher = &part.watcher
    cdef const Slab *slab = &part.slabs[cursor.slab]
    cdef uint32_t looks = 0, start, num_places
    cdef position_t where
    while cursor.chunk < watcher.num_chunks and written < end and looks < HELD_PLACES:
        start = watcher.starts[cursor.chunk]
        num_places = watcher.starts[cursor.chunk + 1] - start
        if part.chunk_slabs[cursor.chunk] != cursor.slab:
            cursor.place = num_places
        while cursor.place < num_places and written < end:
            where = part.where[start + cursor.place]
            if where != <position_t> NO_POSITION and (
                    part.order.segments[where >> OFFSET_BITS].policy == cursor.policy
                    and not is_done(watcher, <uint64_t> start + cursor.place)):
                set_done(watcher, <uint64_t> start + cursor.place)
                put_row(
                    part, slab, where,
                    row_at(&part.shard.slabs, (cursor.chunk << PLACE_BITS) | cursor.place),
                    columns, written)
                written += 1
            cursor.place += 1
            looks += 1
        if cursor.place == num_places:
            cursor.chunk += 1
            cursor.place = 0
    return written


# images: rows that changed before they were read, taken under the lock and read without it.
cdef int part_take_images(SnapshotPart *part, Images *images) noexcept nogil:
    cdef bint is_lost
    PyThread_acquire_lock(part.shard.lock, 1)
    is_lost = part.watcher.is_lost
    images[0] = part.watcher.images
    memset(&part.watcher.images, 0, sizeof(Images))
    PyThread_release_lock(part.shard.lock)
    return -1 if is_lost else 0


cdef inline Image *next_image(ImageCursor *at) noexcept nogil:
    """The image at the cursor, which moves on; NULL: there are no more."""
    cdef Image *image
    while at.block != NULL and at.offset == at.block.num_used:
        at.block = at.block.next
        at.offset = 0
    if at.block == NULL:
        return NULL
    image = <Image *> (<char *> (at.block + 1) + at.offset)
    at.offset += sizeof(Image) + image.num_bytes
    return image


cdef inline position_t where_of(const SnapshotPart *part, row_t row) noexcept nogil:
    return part.where[part.watcher.starts[row >> PLACE_BITS] + (row & PLACE_MASK)]


cdef void images_count(
    const SnapshotPart *part, const Images *images, uint64_t *counts
) noexcept nogil:
    cdef ImageCursor at
    cdef Image *image
    cdef position_t where
    at.block = images.first
    at.offset = 0
    while True:
        image = next_image(&at)
        if image == NULL:
            return
        where = where_of(part, image.row)
        # A row that had expired by then is none of the snapshot's.
        if where != <position_t> NO_POSITION:
            counts[
                part.chunk_slabs[image.row >> PLACE_BITS] * part.num_policies
                + part.order.segments[where >> OFFSET_BITS].policy] += 1


cdef uint32_t images_read(
    SnapshotPart *part, ImageCursor *at, uint32_t slab, uint32_t policy, Columns *columns,
    uint32_t count
) noexcept nogil:
    cdef uint32_t written = 0
    cdef Image *image
    cdef position_t where
    while written < count:
        image = next_image(at)
        if image == NULL:
            break
        where = where_of(part, image.row)
        if where != <position_t> NO_POSITION and (
                part.chunk_slabs[image.row >> PLACE_BITS] == slab
                and part.order.segments[where >> OFFSET_BITS].policy == policy):
            put_row(part, &part.slabs[slab], where, <Row *> (image + 1), columns, written)
            written += 1
    left_of(part, slab, policy)[0] -= written
    return written


cdef void unlink(SnapshotPart *part) noexcept nogil:
    cdef Watcher **link = &part.shard.changes.watchers
    while link[0] != &part.watcher:
        link = &link[0].next
    link[0] = part.watcher.next
    part.is_watching = False


cdef void part_end(SnapshotPart *part) noexcept nogil:
    if part.is_watching:
        PyThread_acquire_lock(part.shard.lock, 1)
        unlink(part)
        PyThread_release_lock(part.shard.lock)
    images_free(&part.watcher.images)
    order_free(&part.order)
    free(part.watcher.starts)
    free(part.watcher.done)
    free(part.where)
    free(part.chunk_slabs)
    free(part.left)
    free(part.changed)          # and not ``dropped``, which is asked for later
    part.watcher.starts = NULL
    part.watcher.done = NULL
    part.where = NULL
    part.chunk_slabs = NULL
    part.left = NULL
    part.changed = NULL
