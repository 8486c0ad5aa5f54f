"""A snapshot of a store, and the consumers of its changes.

    begin_snapshot  every shard: copy the order, begin an epoch    training waits, 10 ns a row
    blocks          shard after shard: rows, and images of those   beside training
                    that changed meanwhile
    commit          the consumer's cursor goes on to this epoch
"""

import threading

import numpy as np

cimport cython

from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

from persia._core.store.blocks import RowBlock

from persia._core.base.halves cimport dtype_name
from persia._core.base.types cimport int64_t, sign_t, uint8_t
from persia._core.shard.changes cimport images_free, log_trim
from persia._core.shard.recency cimport NUM_CLOCKS
from persia._core.shard.shard cimport PyThread_acquire_lock, PyThread_release_lock
from persia._core.shard.slabs cimport MAX_SLABS, Slab
from persia._core.store.snapshot_part cimport (
    Columns, images_count, images_read, part_begin, part_copied_bytes, part_end, part_prepare,
    part_read, part_take_images,
)

from persia.errors import InternalError, StoreError


@cython.internal
@cython.final
cdef class Arrays:
    """A block that is being filled."""

    cdef object signs, values, states, orders, uses, ages
    cdef Columns columns

    def __cinit__(self, uint32_t count, uint32_t dim, uint32_t dtype, uint32_t words):
        cdef uint64_t[::1] signs, orders, ages
        cdef uint32_t[::1] uses
        cdef uint32_t[:, ::1] states
        cdef uint8_t[:, ::1] values
        self.signs = np.empty(count, np.uint64)
        self.values = np.empty((count, dim), np.float32 if dtype == 0 else np.uint16)
        self.states = np.empty((count, words), np.uint32)
        self.orders = np.empty(count, np.uint64)
        self.uses = np.empty(count, np.uint32)
        self.ages = np.empty(count, np.uint64)
        signs, orders, ages, uses = self.signs, self.orders, self.ages, self.uses
        states = self.states
        values = self.values.view(np.uint8)
        self.columns.signs = &signs[0]
        self.columns.values = <char *> &values[0, 0]
        self.columns.states = &states[0, 0] if words else NULL
        self.columns.orders = &orders[0]
        self.columns.uses = &uses[0]
        self.columns.ages = &ages[0]

    cdef object block(self, uint32_t policy, uint32_t dtype, Py_ssize_t count):
        """Of the first ``count`` rows."""
        return RowBlock(
            policy, dtype_name(dtype), self.signs[:count], self.values[:count],
            self.states[:count], self.orders[:count], self.uses[:count], self.ages[:count])


@cython.final
@cython.no_gc_clear     # the end of the parts needs the store
cdef class Snapshot:
    """See the stub for the contract of each method."""

    def __cinit__(self, store, watch, consumer, uint64_t side_bytes, double wait_seconds):
        self.store = store
        self.watch = watch
        self.consumer = consumer
        self.side_bytes = side_bytes
        self.wait_seconds = wait_seconds
        self.lock = threading.Lock()
        self.given = threading.Condition()

    def __dealloc__(self):
        cdef uint32_t i
        # ``deleted`` may be asked for after the end, so the dropped signs stay until now.
        self.end_parts()
        for i in range(self.num_parts):
            free(self.parts[i].dropped)
        free(self.parts)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    cdef int begin(
        self, Shard **shards, uint32_t num_shards, uint32_t since,
        const uint64_t *clocks
    ) except -1:
        """Watch every shard; 1: the log has not all changes. On failure, none is watched."""
        cdef uint32_t i
        cdef bint is_partial = False
        cdef bint sweeps = self.consumer is not None
        self.parts = <SnapshotPart *> calloc(num_shards, sizeof(SnapshotPart))
        if self.parts == NULL:
            raise MemoryError(f"a snapshot of {num_shards} shards")
        self.num_parts = num_shards
        for i in range(num_shards):
            self.parts[i].shard = shards[i]
            with nogil:
                part_begin(&self.parts[i], since, self.last, clocks, sweeps)
        for i in range(num_shards):
            if self.parts[i].status < 0:
                self.end_parts()
                raise MemoryError(f"a copy of the order of shard {i} of {num_shards}")
            self.num_rows += (
                self.parts[i].num_changed if since else self.parts[i].order.num_rows)
            self.copied_bytes += part_copied_bytes(
                &self.parts[i], self.parts[i].num_changed if since else <uint64_t> -1)
            is_partial = is_partial or self.parts[i].is_partial
        return is_partial

    cdef int check(self) except -1:
        if self.failure is not None:
            raise StoreError(self.failure)
        if self.is_closed:
            raise StoreError("the snapshot is closed")
        return 0

    cdef uint64_t image_bytes(self) noexcept:
        cdef uint64_t total = self.taken.num_bytes
        cdef uint32_t i
        for i in range(self.num_parts):
            total += self.parts[i].watcher.images.num_bytes
        return total

    @property
    def fill(self):
        with self.lock:
            return <double> self.image_bytes() / max(self.side_bytes, <uint64_t> 1)

    def allow(self, uint64_t side_bytes):
        self.side_bytes = side_bytes
        self._notify()

    cdef void end_parts(self) noexcept:
        cdef uint32_t i
        with nogil:
            for i in range(self.num_parts):
                part_end(&self.parts[i])
            images_free(&self.taken)

    def blocks(self, max_rows=65536):
        with self.lock:
            self.check()
            if self.is_begun:
                raise StoreError("the blocks of a snapshot are given out once")
            self.is_begun = True
        return self._all_blocks(max_rows)

    def _all_blocks(self, uint32_t max_rows):
        cdef uint32_t number, slab, policy
        cdef Cursor cursor
        for number in range(self.num_parts):
            for slab, policy in self._groups(number):
                cursor.slab = slab
                cursor.policy = policy
                cursor.chunk = 0
                cursor.place = 0
                while True:
                    if 2 * self.image_bytes() > self.side_bytes:
                        for other in range(number, self.num_parts):
                            yield from self._images(other, max_rows)
                    block = self.read_block(number, &cursor, max_rows)
                    if block is None:
                        break
                    if len(block):
                        yield block
            yield from self._images(number, max_rows)
            self._end_part(number)
        with self.lock:
            self.is_read = True
        self._notify()

    def _groups(self, uint32_t number):
        """The (slab, policy) of the rows of a shard."""
        cdef SnapshotPart *part = &self.parts[number]
        cdef uint32_t slab, policy
        cdef int status
        with self.lock:
            self.check()
            with nogil:
                status = part_prepare(part)
            if status < 0:
                raise MemoryError(f"the places of the rows of shard {number}")
            return [
                (slab, policy)
                for slab in range(<uint32_t> MAX_SLABS) for policy in range(part.num_policies)
                if part.left[slab * part.num_policies + policy]]

    cdef object read_block(self, uint32_t number, Cursor *cursor, uint32_t max_rows):
        """Up to ``max_rows`` rows of the cursor's slab and policy; None: there are no more."""
        cdef SnapshotPart *part = &self.parts[number]
        cdef const Slab *slab
        cdef Arrays arrays
        cdef int64_t written = 0
        cdef uint32_t count
        with self.lock:
            self.check()
            slab = &part.slabs[cursor.slab]
            count = <uint32_t> min(
                <uint64_t> max_rows,
                part.left[cursor.slab * part.num_policies + cursor.policy])
            if count == 0 or cursor.chunk == part.watcher.num_chunks:
                return None
            arrays = Arrays(count, slab.dim, slab.dtype, slab.state_words)
            with nogil:
                written = part_read(part, cursor, &arrays.columns, count)
        if written < 0:
            self._lose(number)
        return arrays.block(cursor.policy, slab.dtype, written)

    def _images(self, uint32_t number, uint32_t max_rows):
        """Yield what changed in a shard before it was read."""
        cdef SnapshotPart *part = &self.parts[number]
        cdef ImageCursor at
        cdef uint32_t slab, policy
        cdef int status
        if part.watcher.images.first == NULL:
            return
        self._groups(number)        # so that the part is prepared
        with self.lock:
            self.check()
            with nogil:
                status = part_take_images(part, &self.taken)
            counts = np.zeros((MAX_SLABS, part.num_policies), np.uint64)
            self.count_images(part, counts)
        if status < 0:
            self._lose(number)
        for slab, policy in np.argwhere(counts).tolist():
            at.block = self.taken.first
            at.offset = 0
            left = int(counts[slab, policy])
            while left:
                yield self.image_block(number, slab, policy, &at, min(left, max_rows))
                left -= min(left, max_rows)
        with self.lock:
            with nogil:         # hundreds of megabytes, which the system takes back
                images_free(&self.taken)
        self._notify()

    cdef void count_images(self, SnapshotPart *part, uint64_t[:, ::1] counts) noexcept:
        with nogil:
            images_count(part, &self.taken, &counts[0, 0])

    cdef object image_block(
        self, uint32_t number, uint32_t slab, uint32_t policy, ImageCursor *at, uint32_t count
    ):
        cdef SnapshotPart *part = &self.parts[number]
        cdef Arrays arrays
        with self.lock:
            self.check()
            arrays = Arrays(
                count, part.slabs[slab].dim, part.slabs[slab].dtype,
                part.slabs[slab].state_words)
            with nogil:
                images_read(part, at, slab, policy, &arrays.columns, count)
            return arrays.block(policy, part.slabs[slab].dtype, count)

    def _end_part(self, uint32_t number):
        """The shard was read; it need not be watched any more."""
        cdef SnapshotPart *part = &self.parts[number]
        cdef uint32_t i
        cdef uint64_t left = 0
        with self.lock:
            self.check()
            for i in range(MAX_SLABS * part.num_policies):
                left += part.left[i]
            if left:
                raise InternalError(
                    f"snapshot: {left} rows of shard {number} were neither read nor kept")
            with nogil:
                part_end(part)

    def _lose(self, number):
        self._give_up(
            f"the snapshot has lost rows of shard {number}: they were cleared before they were "
            f"read, or there was no memory for copies")
        self.check()

    def _notify(self):
        with self.given:
            self.given.notify_all()

    def deleted(self):
        cdef uint32_t i
        cdef sign_t[::1] view
        parts = [np.empty(0, np.uint64)]
        for i in range(self.num_parts):
            if self.parts[i].num_dropped:
                view = <sign_t[:self.parts[i].num_dropped]> self.parts[i].dropped
                parts.append(np.array(view))
        return np.unique(np.concatenate(parts))

    def commit(self):
        with self.lock:
            self.check()
            if not self.is_read:
                raise StoreError("a snapshot is committed once all its blocks were read")
        self._end(True)

    def close(self):
        self._end(False)

    def _end(self, committed):
        with self.lock:
            if self.is_closed:
                return
            self.is_closed = True
            self.end_parts()
        # Not under ``lock``: the watch takes its own lock.
        self.watch._ended(self, committed)
        self._notify()

    def _give_up(self, why):
        with self.lock:
            # The first reason stays: a later one is often its consequence.
            if self.failure is None and not self.is_closed:
                self.failure = why
        self._end(False)

    def _wait_until_read(self):
        with self.given:
            is_over = self.given.wait_for(
                lambda: self.is_closed or self.is_read, self.wait_seconds)
        if not is_over:
            self._give_up(
                f"the snapshot was cancelled: all rows were cleared, and it was not read for "
                f"{self.wait_seconds} seconds")

    def _make_room(self):
        with self.given:
            has_room = self.given.wait_for(
                lambda: self.is_closed or self.image_bytes() <= self.side_bytes,
                self.wait_seconds)
        if not has_room:
            self._give_up(
                "the snapshot was cancelled: copies of rows that changed before they were read "
                f"take {self.image_bytes()} bytes of {self.side_bytes}, and nothing was read "
                f"for {self.wait_seconds} seconds")


@cython.final
cdef class Watch:
    """Epochs, consumers and snapshots of one store."""

    def __cinit__(self, uint32_t num_shards):
        self.shards = <Shard **> calloc(num_shards, sizeof(Shard *))
        if self.shards == NULL:
            raise MemoryError(f"{num_shards} shards")
        self.num_shards = num_shards
        self.epoch = 1
        self.cursors = {}
        self.snapshots = ()
        self.lock = threading.Lock()

    def __dealloc__(self):
        free(self.shards)

    cdef void set_epochs(self) noexcept:
        """Without snapshots and consumers the epoch is 0, and changes cost nothing."""
        cdef uint32_t i
        cdef uint32_t epoch = self.epoch if self.snapshots or self.cursors else 0
        cdef bint is_on = len(self.cursors) > 0
        with nogil:
            for i in range(self.num_shards):
                PyThread_acquire_lock(self.shards[i].lock, 1)
                self.shards[i].changes.epoch = epoch
                self.shards[i].changes.log.is_on = is_on
                PyThread_release_lock(self.shards[i].lock)

    cdef void trim_logs(self) noexcept:
        """Drop what every consumer has committed; without consumers, all."""
        cdef uint32_t i, epoch
        needed = [cursor for cursor in self.cursors.values() if cursor is not None]
        needed += [one.last for one in self.snapshots if one.consumer is not None]
        # 0: no consumer has committed yet.
        epoch = min(needed, default=0) if self.cursors else 0xFFFFFFFF
        with nogil:
            for i in range(self.num_shards):
                PyThread_acquire_lock(self.shards[i].lock, 1)
                log_trim(&self.shards[i].changes.log, epoch)
                PyThread_release_lock(self.shards[i].lock)

    cdef Snapshot begin(
        self, store, consumer, bint full, uint64_t side_bytes, double wait_seconds,
        const uint64_t *clocks
    ):
        cdef Snapshot snapshot
        cdef uint32_t since = 0
        cdef uint64_t[NUM_CLOCKS] now
        if consumer is not None:
            with self.lock:
                self.check_idle(consumer)
            self.make_room()                # for rows that it drops because they have expired
        memcpy(now, clocks, sizeof(now))    # of all shards, whatever requests say meanwhile
        with self.lock:
            if consumer is not None:
                self.check_idle(consumer)
                if not full and self.cursors[consumer] is not None:
                    since = self.cursors[consumer] + 1
            try:
                snapshot = Snapshot(store, self, consumer, side_bytes, wait_seconds)
                # Two epochs are used up then; numbers of epochs have no other meaning.
                if self.begin_epoch(snapshot, since, now):
                    # The log was too short: everything is given out instead.
                    snapshot.end_parts()
                    snapshot = Snapshot(store, self, consumer, side_bytes, wait_seconds)
                    self.begin_epoch(snapshot, 0, now)
                self.snapshots = (*self.snapshots, snapshot)
            finally:
                self.set_epochs()
        return snapshot

    cdef int begin_epoch(
        self, Snapshot snapshot, uint32_t since, const uint64_t *clocks
    ) except -1:
        snapshot.last = self.epoch
        snapshot.is_full = since == 0
        self.epoch += 1
        return snapshot.begin(self.shards, self.num_shards, since, clocks)

    cdef int check_consumer(self, consumer) except -1:
        if consumer not in self.cursors:
            raise StoreError(
                f"expected a consumer of changes among {sorted(self.cursors)}, "
                f"got {consumer!r}")
        return 0

    cdef int check_idle(self, consumer) except -1:
        self.check_consumer(consumer)
        if any(other.consumer == consumer for other in self.snapshots):
            raise StoreError(f"consumer {consumer!r} has a snapshot under way; end it first")
        return 0

    def _ended(self, snapshot, committed):
        with self.lock:
            self.snapshots = tuple(other for other in self.snapshots if other is not snapshot)
            if committed and snapshot.consumer in self.cursors:
                self.cursors[snapshot.consumer] = snapshot.last
                self.trim_logs()
            self.set_epochs()

    cdef int open(self, str name, uint64_t max_bytes) except -1:
        cdef uint32_t i
        with self.lock:
            if name in self.cursors:
                raise StoreError(f"consumer {name!r} of changes is open already")
            self.cursors[name] = None
            for i in range(self.num_shards):
                self.shards[i].changes.log.max_bytes = max_bytes // self.num_shards
            self.set_epochs()
        return 0

    cdef int close(self, str name) except -1:
        cdef Snapshot snapshot
        with self.lock:
            self.check_consumer(name)
            del self.cursors[name]
            for snapshot in self.snapshots:
                # From here changes are not noted for it: a later consumer of this name
                # must not go on from it.
                if snapshot.consumer == name:
                    snapshot.consumer = None
            self.set_epochs()
            self.trim_logs()
        return 0

    # Images are bounded without anything waiting inside a shard: a request that may make images
    # asks for room before it begins, while it holds no lock, and is then run whole. So there
    # are at most ``side_bytes`` of images, and those of the requests under way. Where the
    # reader makes no room for ``wait_seconds``, the snapshot is given up and training goes on:
    # a checkpoint can be taken again.
    cdef int make_room(self) except -1:
        """Before a request that may change rows."""
        for snapshot in self.snapshots:
            snapshot._make_room()
        return 0

    cdef int before_clear(self) except -1:
        """Let every reader finish, or give its snapshot up."""
        for snapshot in self.snapshots:
            snapshot._wait_until_read()
        return 0
