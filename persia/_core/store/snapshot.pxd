"""A snapshot: the rows of a store as they were at one moment, read while training goes on."""

cimport cython

from persia._core.base.types cimport uint32_t, uint64_t
from persia._core.shard.changes cimport Images
from persia._core.shard.shard cimport Shard
from persia._core.store.snapshot_part cimport Cursor, ImageCursor, SnapshotPart


@cython.final
cdef class Snapshot:
    cdef SnapshotPart *parts
    cdef Images taken               # of the part that is being read
    cdef uint32_t num_parts
    cdef readonly uint64_t num_rows
    cdef readonly uint64_t copied_bytes
    cdef readonly uint64_t side_bytes
    cdef double wait_seconds
    cdef readonly bint is_full
    cdef readonly bint is_read
    cdef readonly bint is_closed
    cdef readonly object consumer   # its name, or None
    cdef readonly uint32_t last     # epoch
    cdef str failure
    cdef bint is_begun              # reading
    cdef object watch               # that began it
    cdef object store               # whose memory the parts are of
    cdef object lock                # held by a step of reading, and to end the snapshot
    cdef object given               # condition: images were given out, or the snapshot ended

    cdef int begin(
        self, Shard **shards, uint32_t num_shards, uint32_t since,
        const uint64_t *clocks) except -1
    cdef int check(self) except -1
    cdef uint64_t image_bytes(self) noexcept
    cdef void end_parts(self) noexcept
    cdef object read_block(self, uint32_t number, Cursor *cursor, uint32_t max_rows)
    cdef void count_images(self, SnapshotPart *part, uint64_t[:, ::1] counts) noexcept
    cdef object image_block(
        self, uint32_t number, uint32_t slab, uint32_t policy, ImageCursor *at, uint32_t count)


@cython.final
cdef class Watch:
    cdef Shard **shards
    cdef uint32_t num_shards
    cdef uint32_t epoch             # the one that goes on
    cdef readonly dict cursors      # last epoch that each consumer has; None: it has nothing
    cdef readonly tuple snapshots        # under way
    # held to begin and end snapshots, to open and close consumers
    cdef object lock

    cdef Snapshot begin(
        self, store, consumer, bint full, uint64_t side_bytes, double wait_seconds,
        const uint64_t *clocks)
    cdef int begin_epoch(
        self, Snapshot snapshot, uint32_t since, const uint64_t *clocks) except -1
    cdef int check_consumer(self, consumer) except -1
    cdef int check_idle(self, consumer) except -1
    cdef void set_epochs(self) noexcept
    cdef void trim_logs(self) noexcept
    cdef int open(self, str name, uint64_t max_bytes) except -1
    cdef int close(self, str name) except -1
    cdef int make_room(self) except -1
    cdef int before_clear(self) except -1
