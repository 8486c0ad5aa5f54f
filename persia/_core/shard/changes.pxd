"""Notes of rows that change: images for snapshots under way, entries for the change log."""

from persia._core.base.types cimport row_t, sign_t, uint32_t, uint64_t
from persia._core.shard.slabs cimport Row, Slabs, row_at

cdef enum:
    LOG_BYTES = 4080                # of a block's entries, so that a block is a page
    IMAGE_BYTES = 65536             # of a block of images, unless one image alone takes more

cdef struct LogBlock:
    LogBlock *next                  # younger
    uint32_t epoch                  # of all its entries
    uint32_t count
    char[LOG_BYTES] entries         # row_t or sign_t

cdef struct LogList:
    LogBlock *oldest
    LogBlock *newest

cdef struct ChangeLog:
    LogList rows                    # row numbers that changed, each once an epoch
    LogList signs                   # of rows that were dropped
    bint is_on                      # it has a consumer
    uint32_t lost                   # changes of this epoch and before are not all here
    uint64_t num_bytes
    uint64_t max_bytes

cdef struct Image:                  # of a row before it changed; the row's bytes follow
    row_t row
    uint32_t num_bytes              # of the row, a multiple of 8

cdef struct ImageBlock:
    ImageBlock *next                # later
    size_t num_used                 # bytes of images
    size_t num_bytes                # that fit

cdef struct Images:
    ImageBlock *first
    ImageBlock *last
    uint64_t num_bytes              # of images and their headers

cdef struct Watcher:                # one snapshot's eye on one shard
    Watcher *next
    uint32_t since                  # the snapshot has rows with a stamp in since..last
    uint32_t last
    uint32_t num_chunks             # at the moment of the snapshot
    uint32_t *starts                # places of the chunks before each chunk; num_chunks + 1
    uint64_t *done                  # a bit per place: the row is read or an image kept
    Images images
    bint is_lost                    # there was no memory for an image, or the rows are gone

cdef struct Entries:                # of a copy of the orders of use
    row_t *rows
    uint64_t capacity

cdef struct Changes:
    uint32_t epoch                  # 0: changes are not noted
    Watcher *watchers
    ChangeLog log
    Entries spare                   # memory for the next copy of the order


cdef inline bint is_done(const Watcher *watcher, uint64_t place) noexcept nogil:
    return (watcher.done[place // 64] >> (place % 64)) & 1


cdef inline void set_done(Watcher *watcher, uint64_t place) noexcept nogil:
    watcher.done[place // 64] |= <uint64_t> 1 << (place % 64)


# The row is about to change, for the first time in this epoch.
cdef void note_change(Changes *changes, const Slabs *slabs, row_t row) noexcept nogil
cdef void note_drop(Changes *changes, const Slabs *slabs, row_t row) noexcept nogil
cdef void note_insert(Changes *changes, row_t row) noexcept nogil
# All rows are about to go at once.
cdef void note_clear(Changes *changes) noexcept nogil
# Forget the changes of this epoch and before.
cdef void log_trim(ChangeLog *log, uint32_t epoch) noexcept nogil
# No snapshot is under way.
cdef void changes_free(Changes *changes) noexcept nogil
cdef void images_free(Images *images) noexcept nogil


# What the store calls. A stamp is never above the epoch, so one comparison finds out whether
# anything is to be done: not if the epoch is 0, and not if the row changed before in it. (A
# process that attaches to a state file sets all stamps to 0.)

cdef inline void row_changes(
    Changes *changes, const Slabs *slabs, row_t row, const Row *at
) noexcept nogil:
    """Before values or state change. A use alone is none: a snapshot has copied the order."""
    if at.stamp < changes.epoch:
        note_change(changes, slabs, row)


cdef inline void row_drops(Changes *changes, const Slabs *slabs, row_t row) noexcept nogil:
    if changes.epoch:
        note_drop(changes, slabs, row)


cdef inline void row_enters(Changes *changes, const Slabs *slabs, row_t row) noexcept nogil:
    """After the row was made."""
    row_at(slabs, row).stamp = changes.epoch
    if changes.log.is_on:
        note_insert(changes, row)
