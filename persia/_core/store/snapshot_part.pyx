"""How one shard's rows of a moment are read while they go on changing."""

from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset

from persia._core.shard.changes cimport (
    Changes, Image, LogBlock, LogList, images_free, is_done, set_done,
)
from persia._core.shard.recency cimport OFFSET_BITS, OFFSET_MASK
from persia._core.shard.recency_copy cimport (
    Entries, SegmentCopy, order_copy, order_free, order_invert,
)
from persia._core.shard.row_format cimport width_of_values
from persia._core.shard.shard cimport (
    PyThread_acquire_lock, PyThread_release_lock, shard_expire, shard_leave,
)
from persia._core.shard.slabs cimport (
    NO_POSITION, PLACE_BITS, PLACE_MASK, Row, Slabs, row_at, row_values,
)


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
