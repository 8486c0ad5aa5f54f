"""Which rows of a shard have changed: a stamp in each row, and an epoch for each snapshot.

    epoch      1 ------ snapshot ---- 2 -------------- snapshot ---- 3 ----------
    row a      changed: stamp 1, logged          (2 begins: nothing)
    row b      stamp 0      |        changed: image kept, stamp 2, logged
                            |        changed again: nothing
                            +-- the snapshot reads rows whose stamp is at most 1

Invariants, true between calls:

    I1  A row's stamp is at most the epoch, unless the epoch is 0: changes are not noted.
    I2  A row that was live when a snapshot began and has a stamp in since..last of its watcher
        is as it was then, or done.
    I3  While the log is on: a row with a stamp above ``lost`` is in the log of the epoch that
        is its stamp; so is the sign of each row dropped in such an epoch.
    I4  Blocks of the log are in the order of their epochs, and one block is of one epoch.

Not taken: a list of changes without stamps in the rows (a row used in every batch would be in
it as often); a scan of all stamps in place of the log (a megabyte read for a kilobyte of
changes).
"""

from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from persia._core.shard.slabs cimport PLACE_BITS, PLACE_MASK


# --- images: rows that change or go before a snapshot has read them --------------------------
#
# The bytes are bounded before a request begins (see ``snapshot``): here a copy is never
# refused. ``done`` says that the snapshot has the row, read or copied.
cdef void keep_image(Watcher *watcher, const Slabs *slabs, row_t row) noexcept nogil:
    """Copy the row unless the snapshot has it."""
    cdef uint64_t place = watcher.starts[row >> PLACE_BITS] + (row & PLACE_MASK)
    cdef uint32_t num_bytes = slabs.views[row >> PLACE_BITS].stride
    cdef size_t needed = sizeof(Image) + num_bytes
    cdef ImageBlock *block = watcher.images.last
    cdef Image *image
    if is_done(watcher, place) or watcher.is_lost:
        return
    if block == NULL or block.num_used + needed > block.num_bytes:
        block = add_image_block(&watcher.images, needed)
        if block == NULL:
            # The reader gets an error; the request that changes the row goes on.
            watcher.is_lost = True
            return
    image = <Image *> (<char *> (block + 1) + block.num_used)
    image.row = row
    image.num_bytes = num_bytes
    memcpy(image + 1, row_at(slabs, row), num_bytes)
    block.num_used += needed
    watcher.images.num_bytes += needed
    set_done(watcher, place)


cdef ImageBlock *add_image_block(Images *images, size_t needed) noexcept nogil:
    cdef size_t num_bytes = max(needed, <size_t> IMAGE_BYTES)
    cdef ImageBlock *block = <ImageBlock *> malloc(sizeof(ImageBlock) + num_bytes)
    if block == NULL:
        return NULL
    block.next = NULL
    block.num_used = 0
    block.num_bytes = num_bytes
    if images.last == NULL:
        images.first = block
    else:
        images.last.next = block
    images.last = block
    return block


cdef void images_free(Images *images) noexcept nogil:
    cdef ImageBlock *block = images.first
    cdef ImageBlock *following
    while block != NULL:
        following = block.next
        free(block)
        block = following
    images.first = NULL
    images.last = NULL
    images.num_bytes = 0


cdef inline void keep_images(Changes *changes, const Slabs *slabs, row_t row) noexcept nogil:
    cdef uint32_t stamp = row_at(slabs, row).stamp
    cdef Watcher *watcher = changes.watchers
    while watcher != NULL:
        if watcher.since <= stamp <= watcher.last:
            keep_image(watcher, slabs, row)
        watcher = watcher.next


cdef void note_change(Changes *changes, const Slabs *slabs, row_t row) noexcept nogil:
    keep_images(changes, slabs, row)
    row_at(slabs, row).stamp = changes.epoch
    if changes.log.is_on:
        log_row(&changes.log, changes.epoch, row)


cdef void note_drop(Changes *changes, const Slabs *slabs, row_t row) noexcept nogil:
    keep_images(changes, slabs, row)
    if changes.log.is_on:
        log_sign(&changes.log, changes.epoch, row_at(slabs, row).sign)


cdef void note_insert(Changes *changes, row_t row) noexcept nogil:
    log_row(&changes.log, changes.epoch, row)


cdef void note_clear(Changes *changes) noexcept nogil:
    cdef Watcher *watcher = changes.watchers
    while watcher != NULL:
        watcher.is_lost = True
        watcher = watcher.next
    log_lose(&changes.log, changes.epoch)


# --- the log: what changed in each epoch, for consumers that ask later ------------------
#
# An entry whose epoch is not the row's stamp is out of date: the row changed again later, or
# its place has another row now. Readers skip it.
cdef void log_row(ChangeLog *log, uint32_t epoch, row_t row) noexcept nogil:
    cdef LogBlock *block = room(log, &log.rows, epoch, sizeof(row_t))
    if block != NULL:
        (<row_t *> block.entries)[block.count] = row
        block.count += 1


cdef void log_sign(ChangeLog *log, uint32_t epoch, sign_t sign) noexcept nogil:
    cdef LogBlock *block = room(log, &log.signs, epoch, sizeof(sign_t))
    if block != NULL:
        (<sign_t *> block.entries)[block.count] = sign
        block.count += 1


# Where the log would outgrow ``max_bytes``, its oldest epoch is given up. A consumer that needs
# that epoch gets all rows instead.
cdef LogBlock *room(
    ChangeLog *log, LogList *entries, uint32_t epoch, size_t entry_bytes
) noexcept nogil:
    """The block that the next entry of this epoch goes to; NULL: the epoch is lost."""
    cdef LogBlock *block = entries.newest
    if block != NULL and block.epoch == epoch and (
            (block.count + 1) * entry_bytes <= <size_t> LOG_BYTES):
        return block
    if log.lost == epoch:
        return NULL
    while log.num_bytes + sizeof(LogBlock) > log.max_bytes:
        # The oldest epoch goes, which may be this one.
        log_lose(log, oldest_epoch(log, epoch))
        if log.lost == epoch:
            return NULL
    block = <LogBlock *> malloc(sizeof(LogBlock))
    if block == NULL:
        log_lose(log, epoch)
        return NULL
    block.next = NULL
    block.epoch = epoch
    block.count = 0
    if entries.newest == NULL:
        entries.oldest = block
    else:
        entries.newest.next = block
    entries.newest = block
    log.num_bytes += sizeof(LogBlock)
    return block


cdef uint32_t oldest_epoch(const ChangeLog *log, uint32_t epoch) noexcept nogil:
    if log.rows.oldest != NULL:
        epoch = min(epoch, log.rows.oldest.epoch)
    if log.signs.oldest != NULL:
        epoch = min(epoch, log.signs.oldest.epoch)
    return epoch


cdef void log_lose(ChangeLog *log, uint32_t epoch) noexcept nogil:
    log.lost = epoch
    log_trim(log, epoch)


cdef void log_trim(ChangeLog *log, uint32_t epoch) noexcept nogil:
    trim(log, &log.rows, epoch)
    trim(log, &log.signs, epoch)


cdef void trim(ChangeLog *log, LogList *entries, uint32_t epoch) noexcept nogil:
    cdef LogBlock *block
    while entries.oldest != NULL and entries.oldest.epoch <= epoch:
        block = entries.oldest
        entries.oldest = block.next
        log.num_bytes -= sizeof(LogBlock)
        free(block)
    if entries.oldest == NULL:
        entries.newest = NULL


cdef void changes_free(Changes *changes) noexcept nogil:
    log_trim(&changes.log, <uint32_t> 0xFFFFFFFF)
    free(changes.spare.rows)
