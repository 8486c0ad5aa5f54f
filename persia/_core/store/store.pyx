"""The embedding store: rows by sign; those that its policies rank last go first.

    sign --mix64--> shard --index--> row number --slabs--> | header | values | state |
                                          \\--recency--> order of use

A request holds distinct signs of one dim. It is split by shard (stable, so that the order
inside a shard is the order of the request) and each shard is served once, under its lock: see
``serve``. Shards do not know each other, so threads take disjoint shards and the result does
not depend on their number. Policies hold within a shard, LRU exactly; a training lookup is a
use, an update or an evaluation is not.

Values: a new row is a pure function of (seed, sign), an admission of (seed, sign, batch id);
so a repeated call repeats itself, and the number of servers, shards and threads does not show
as long as nothing is evicted.
"""

import os

from concurrent.futures import ThreadPoolExecutor

import numpy as np

cimport cython

from cpython.mem cimport PyMem_Calloc, PyMem_Free
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from persia._core.shard.restore_order cimport (
    Arrivals, arrivals_expect, arrivals_free, arrivals_settle,
)
from persia._core.shard.changes cimport LogBlock, changes_free
from persia._core.base.threads cimport ThreadPool
from persia._core.store.snapshot cimport Watch
from persia._core.shard.eviction cimport (
    LFU, LRU, MAX_POLICIES, Policy, eviction_free, eviction_nth_order, eviction_policy,
    policy_num_draining, policy_num_rows,
)
from persia._core.base.halves cimport dtype_name, dtype_number, rounding_key
from persia._core.base.hashing cimport mix64
from persia._core.kernels.initial cimport Initializer
from persia._core.store.invariants cimport broken_invariant
from persia._core.shard.persistent_shard cimport (
    KEPT_HEADER, KEPT_PAGE, KEPT_SHARD, NUM_SLOTS, Kept, kept_free, kept_init, persia_back,
    persia_map_file,
)
from persia._core.shard.recency cimport (
    CLOCK_MS, CLOCK_STEPS, NO_CLOCK, NO_ORDER, NUM_CLOCKS, OFFSET_BITS, recency_expired,
    recency_walk,
)
from persia._core.store.recovery cimport recovery_attach
from persia._core.store.request cimport (
    MAX_SHARDS, STATUS_DIM, STATUS_NO_MEMORY, STATUS_OTHER, STATUS_SHAPES, Split, split_of,
)
from persia._core.store.restore cimport restore_shard
from persia._core.shard.row_format cimport Format, read_values, set_format
from persia._core.store.requests cimport (
    delete_shard, eval_shard, read_shard, train_shard, update_shard, write_shard,
)
from persia._core.shard.shard cimport (
    PyThread_acquire_lock, PyThread_release_lock, PyThread_type_lock, shard_bytes, shard_clear,
    shard_free, shard_init, shard_settle,
)
from persia._core.shard.sign_index cimport index_expect
from persia._core.shard.sketch cimport MAX_COUNT
from persia._core.shard.slabs cimport (
    CACHE_LINE, PLACE_BITS, Row, row_at, row_values, slabs_trim,
)
from persia._core.base.types cimport NO_ROW, row_t, uint8_t

from persia.errors import (
    ConfigError, DataError, DimMismatch, InternalError, NotConfigured, StoreError,
)

cdef extern from "portable.h":
    const bint PERSIA_DEBUG
    void persia_unmap(void *start, size_t num_bytes) noexcept nogil

cdef extern from "pythread.h" nogil:
    PyThread_type_lock PyThread_allocate_lock() noexcept
    void PyThread_free_lock(PyThread_type_lock lock) noexcept

# Defaults of what cuts may take beside the rows.
MAX_SIDE_BYTES = 64 << 20
MAX_LOG_BYTES = 64 << 20

cdef enum:
    LOG_BLOCKS = 2          # that a shard has to have; fewer would lose every epoch
    MAX_DIM = 65536         # a row must fit its chunk several times
    WALKED_ROWS = 64
    # Above this a hand-off is worth it; it may have to wake a thread.
    MIN_THREADED_SIGNS = 2048
    # Rows of a lookup that are more than this leave the cache before they are read.
    STREAMED_BYTES = 1 << 20
    # Of smaller rows, under a memory limit, more may come than were prepared for.
    EXPECTED_ROW_BYTES = 128

# Keys the admission draws, so that they are not those of the initial values.
cdef uint64_t ADMISSION = <uint64_t> 0xAD3175510B5E5EED
# Clocks do not begin at 0, so that a restored row may have been used before they did.
cdef uint64_t CLOCK_BASE = <uint64_t> 1 << 40
cdef Initializer ZEROS = Initializer("zeros")


cdef bint is_streamed(Batch batch) noexcept:
    """Whether the rows of this lookup are handed on past the caches."""
    return (
        batch.format.half == NULL and batch.dim % 4 == 0 and <size_t> batch.rows_out % 16 == 0
        and <size_t> batch.num_signs * batch.dim * sizeof(float) >= STREAMED_BYTES)


@cython.final
cdef class EmbeddingStore:
    """See the stub for the contract of each method."""

    def __cinit__(
        self, capacity, *, num_shards=16, seed=0, memory_limit=0, num_threads=1,
        policies=(), sketch_bytes=0, state_file=None, attach=False
    ):
        self.shards = NULL
        self.control = NULL
        self.crash_in = 0
        self.batches = []
        self.optimizer = None
        memset(self.clocks, 0, sizeof(self.clocks))
        self.clocks[CLOCK_MS] = self.clocks[CLOCK_STEPS] = CLOCK_BASE
        if not 1 <= capacity < 2**63:
            raise ConfigError(f"capacity must be in 1..2**63-1 rows, got {capacity}")
        if not 1 <= num_shards <= MAX_SHARDS:
            raise ConfigError(f"num_shards must be in 1..{MAX_SHARDS}, got {num_shards}")
        if not 0 <= memory_limit < 2**63:
            raise ConfigError(f"memory_limit must be in 0..2**63-1 bytes, got {memory_limit}")
        if not 1 <= num_threads <= 1024:
            raise ConfigError(f"num_threads must be in 1..1024, got {num_threads}")
        self.capacity = capacity
        self.seed = seed & 0xFFFFFFFFFFFFFFFF
        self.memory_limit = memory_limit
        # A shard of a handful of rows would make LRU coarse; 64 each is the least.
        self.num_shards = max(1, min(num_shards, capacity // 64))
        self.num_threads = min(num_threads, self.num_shards)
        self.shards = <Shard *> PyMem_Calloc(self.num_shards, sizeof(Shard))
        if self.shards == NULL:
            raise MemoryError(f"{self.num_shards} shards")
        self.policies = (("lru", None, 0), *policies)
        kinds = [numbers_of(kind, clock, ttl) for kind, clock, ttl in self.policies]
        if len(set(kinds)) < len(kinds):
            raise ConfigError(f"a policy comes twice in {self.policies}")
        if len(kinds) > MAX_POLICIES:
            raise ConfigError(f"a store has at most {MAX_POLICIES} policies, got {len(kinds)}")
        if not 0 <= sketch_bytes < 2**63:
            raise ConfigError(f"sketch_bytes must be in 0..2**63-1, got {sketch_bytes}")
        # Divided over shards; a remainder is worth a line each.
        self.sketch_bytes = sketch_bytes
        self.watch = Watch(self.num_shards)
        if state_file is not None:
            self.open_state(state_file)
        cdef uint32_t i
        for i in range(self.num_shards):
            self.shards[i].capacity = self.capacity // self.num_shards + (
                i < self.capacity % self.num_shards)
            self.shards[i].byte_limit = self.memory_limit // self.num_shards
            self.shards[i].lock = PyThread_allocate_lock()
            if self.shards[i].lock == NULL or (
                    shard_init(&self.shards[i], self.shard_sketch_bytes()) < 0):
                raise MemoryError(f"shard {i} of {self.num_shards}")
            self.watch.shards[i] = &self.shards[i]
            for number, (kind, clock, ttl) in enumerate(kinds):
                if eviction_policy(
                        &self.shards[i].eviction, &self.shards[i].recency, kind, clock,
                        ttl) != <int> number:
                    raise MemoryError(f"policy {number} of shard {i}")
        if attach:
            self.attach_rows()
        self.crew = ThreadPool(self.num_threads)
        self.alone = ThreadPool(1)

    def __dealloc__(self):
        cdef uint32_t i
        if self.shards == NULL:
            return
        for i in range(self.num_shards):
            shard_free(&self.shards[i])
            changes_free(&self.shards[i].changes)
            eviction_free(&self.shards[i].eviction)
            if self.shards[i].kept != NULL:
                kept_free(self.shards[i].kept)
                free(self.shards[i].kept)
            if self.shards[i].lock != NULL:
                PyThread_free_lock(self.shards[i].lock)
        if self.control != NULL:
            persia_unmap(self.control, KEPT_PAGE)
        PyMem_Free(self.shards)

    cdef int open_state(self, int file) except -1:
        cdef uint32_t i
        if os.fstat(file).st_size < KEPT_HEADER + self.num_shards * KEPT_SHARD:
            raise StoreError(f"the state file is too short for {self.num_shards} shards")
        # The file's second page; who made the file made it too.
        self.control = <uint64_t *> persia_map_file(file, KEPT_PAGE, KEPT_PAGE, KEPT_PAGE)
        if self.control == NULL or persia_back(file, KEPT_PAGE, KEPT_PAGE) < 0:
            raise MemoryError("the state file cannot be mapped")
        for i in range(self.num_shards):
            self.shards[i].kept = <Kept *> malloc(sizeof(Kept))
            if self.shards[i].kept == NULL:
                raise MemoryError(f"shard {i} of {self.num_shards}")
            memset(self.shards[i].kept, 0, sizeof(Kept))
            if kept_init(
                    self.shards[i].kept, file, i, self.control, &self.crash_in) < 0:
                raise MemoryError(f"shard {i} of the state file cannot be mapped")
        return 0

    cdef int attach_rows(self) except -1:
        cdef uint32_t i, clock
        if self.control[0]:
            raise StoreError("the state file is void: it ran out of memory before the end")
        with ThreadPoolExecutor(min(self.num_shards, os.cpu_count() or 1)) as pool:
            for broken in pool.map(self._attach_shard, range(self.num_shards)):
                if broken is not None:
                    # Then the file is as good as before.
                    raise (MemoryError if broken.endswith("no memory") else StoreError)(broken)
        for i in range(self.num_shards):
            for clock in range(<uint32_t> NUM_CLOCKS):
                self.clocks[clock] = max(
                    self.clocks[clock], self.shards[i].recency.clocks[clock])
        return 0

    def _attach_shard(self, uint32_t number):
        cdef Shard *shard = &self.shards[number]
        cdef const char *broken
        with nogil:
            broken = recovery_attach(
                &shard.slabs, &shard.index, &shard.recency, &shard.eviction, shard.kept,
                number, self.num_shards)
            if broken == NULL:
                shard.sketch.num_counted = shard.kept.shard.num_counted
                shard.sketch.next_halved = shard.kept.shard.next_halved
                if shard.sketch.next_halved >= max(shard.sketch.num_lines, <uint64_t> 1):
                    shard.sketch.next_halved = 0
        return None if broken == NULL else f"shard {number}: {broken.decode()}"

    def state_is_void(self):
        return self.control != NULL and self.control[0] != 0

    def crash_after(self, uint64_t points):
        self.crash_in = points

    def reseed(self, uint64_t seed):
        if len(self):
            raise ConfigError(f"{len(self)} rows began with seed {self.seed}: clear them first")
        self.seed = seed

    def clock_times(self):
        return (
            int(self.clocks[CLOCK_MS] - CLOCK_BASE), int(self.clocks[CLOCK_STEPS] - CLOCK_BASE))

    def close(self):
        """Let the store's threads go; a later request runs on its caller's."""
        self.crew.close()

    def __len__(self):
        cdef uint64_t total = 0
        cdef uint32_t i
        for i in range(self.num_shards):
            total += self.shards[i].recency.num_live
        return total

    def configure(self, RowOptimizer optimizer not None):
        cdef uint32_t i, slab, dim
        for i in range(self.num_shards):
            for slab in range(self.shards[i].slabs.num_slabs):
                dim = self.shards[i].slabs.slabs[slab].dim
                if self.shards[i].slabs.slabs[slab].num_live and (
                        self.shards[i].slabs.slabs[slab].state_words
                        != optimizer.state_width(dim)):
                    raise ConfigError(
                        f"optimizer {optimizer.name} keeps {optimizer.state_width(dim)} words "
                        f"of state for dim {dim}, the {len(self)} rows held keep "
                        f"{self.shards[i].slabs.slabs[slab].state_words}: clear them first")
        self.optimizer = optimizer

    cdef Batch begin(
        self, const uint64_t[::1] signs, serve_t serve_shard, uint32_t dim,
        RowOptimizer optimizer, uint32_t dtype, Split split=None
    ):
        """A request on these signs, split by shard; its arguments are still to be filled in.

        A ``split`` that is given is taken if it is of these signs, and made if not.
        """
        cdef Batch batch
        if self.watch.cuts and serve_shard != eval_shard and serve_shard != read_shard:
            self.watch.make_room()
        if signs.shape[0] >= NO_ROW:
            raise DataError(f"a request holds at most 2**32-2 signs, got {signs.shape[0]}")
        batch = self.batches.pop() if self.batches else Batch()
        batch.crew = self.crew if signs.shape[0] >= MIN_THREADED_SIGNS else self.alone
        batch.reserve(<uint32_t> signs.shape[0], self.num_shards)
        batch.shards = self.shards
        batch.serve_shard = serve_shard
        batch.signs = &signs[0] if signs.shape[0] else NULL
        batch.dim = dim
        batch.optimizer = optimizer
        batch.state_words = 0 if optimizer is None else optimizer.state_width(dim)
        set_format(&batch.format, dtype, dim, batch.state_words)
        batch.seed = self.seed
        self.set_policy(batch, 0)
        batch.slot = 0
        batch.tag = 0
        batch.admit_at = 1
        batch.is_repeated = False
        batch.admission_key = mix64(mix64(self.seed ^ ADMISSION))
        memcpy(batch.clocks, self.clocks, sizeof(self.clocks))
        if split is not None and split.is_of(batch.signs, batch.num_signs, batch.num_shards):
            batch.use(split)
        else:
            batch.split(split)
        return batch

    cdef RequestResult run(self, Batch batch) except *:
        """Serve the request on all threads, give its scratch back, raise what it met."""
        cdef RequestResult tally = batch.serve()
        dim = batch.dim
        dtype = dtype_name(batch.format.dtype)
        batch.held = None
        batch.optimizer = None
        batch.initializer = None
        self.batches.append(batch)
        if PERSIA_DEBUG:
            self.check()
        if tally.status == STATUS_NO_MEMORY:
            raise MemoryError(f"no memory for another row of dim {dim} ({len(self)} held)")
        if tally.status == STATUS_SHAPES:
            raise ConfigError(f"no more than 64 shapes of rows fit; dim {dim} is one more")
        if tally.status == STATUS_DIM:
            raise DimMismatch(
                f"sign {tally.sign:#018x} is stored with dim {tally.dim} of "
                f"{dtype_name(tally.dtype)} and {tally.state_words} words of state; the "
                f"request is for dim {dim} of {dtype}")
        if tally.status == STATUS_OTHER:
            raise StoreError(
                "an update was cut short, and its repetition brings other signs: what it has "
                "not stepped yet stays as it is")
        return tally

    def lookup_train(
        self, const uint64_t[::1] signs not None, Initializer initializer not None,
        double admit_probability, uint64_t batch_id, float[:, ::1] rows_out not None,
        uint32_t[::1] hints_out not None, RowOptimizer optimizer=None, *,
        uint32_t policy=0, uint32_t admit_at=1, bint repeated=False,
        dtype="float32",
    ):
        cdef Batch batch
        cdef Split split
        cdef RequestResult tally
        cdef uint32_t number = dtype_number(dtype)
        optimizer = self.chosen(optimizer, "a training lookup")
        check_rows("rows_out", signs.shape[0], rows_out.shape[0], rows_out.shape[1])
        check_length("hints_out", signs.shape[0], hints_out.shape[0])
        if not 0.0 <= admit_probability <= 1.0:
            raise ConfigError(f"admit_probability must be in 0..1, got {admit_probability}")
        self.check_policy(policy)
        if not 1 <= admit_at <= (MAX_COUNT if self.sketch_bytes else 1):
            raise ConfigError(
                f"admit_at must be in 1..{MAX_COUNT}, and 1 without sketch_bytes, "
                f"got {admit_at}")
        if signs.shape[0] == 0:
            return 0, 0
        split = split_of(hints_out.base)
        batch = self.begin(
            signs, train_shard, <uint32_t> rows_out.shape[1], optimizer, number, split)
        batch.initializer = initializer
        batch.admission_key = mix64(mix64(self.seed ^ ADMISSION) ^ batch_id)
        batch.admit_all = admit_probability >= 1.0
        self.set_policy(batch, policy)
        batch.admit_at = admit_at
        batch.is_repeated = repeated
        batch.admission_below = 0 if batch.admit_all else <uint64_t> (
            admit_probability * 18446744073709551616.0)
        batch.rows_out = &rows_out[0, 0]
        batch.is_streamed = is_streamed(batch)
        batch.hints_out = &hints_out[0]
        batch.held = (signs, rows_out, hints_out)
        tally = self.run(batch)
        if split is not None:
            split.signs, split.signs_at = signs.base, &signs[0]
        return tally.num_missing, tally.num_refused

    def lookup_eval(
        self, const uint64_t[::1] signs not None, float[:, ::1] rows_out not None, *,
        dtype="float32",
    ):
        cdef Batch batch
        cdef uint32_t number = dtype_number(dtype)
        check_rows("rows_out", signs.shape[0], rows_out.shape[0], rows_out.shape[1])
        if signs.shape[0] == 0:
            return 0
        batch = self.begin(signs, eval_shard, <uint32_t> rows_out.shape[1], None, number)
        batch.rows_out = &rows_out[0, 0]
        batch.is_streamed = is_streamed(batch)
        batch.held = (signs, rows_out)
        return self.run(batch).num_missing

    def update(
        self, const uint64_t[::1] signs not None, const uint32_t[::1] hints,
        const float[:, ::1] gradients not None, RowOptimizer optimizer=None, *,
        dtype="float32", uint64_t number=0, uint32_t slot=0, uint64_t tag=0
    ):
        cdef Batch batch
        cdef Split split
        cdef uint32_t row_dtype = dtype_number(dtype)
        optimizer = self.chosen(optimizer, "an update")
        check_rows("gradients", signs.shape[0], gradients.shape[0], gradients.shape[1])
        if hints is not None:
            check_length("hints", signs.shape[0], hints.shape[0])
        if slot > NUM_SLOTS or (slot != 0) != (tag != 0):
            raise DataError(
                f"a slot in 1..{NUM_SLOTS} and a tag, or neither: got {slot} and {tag}")
        if signs.shape[0] == 0:
            return 0
        split = None if hints is None else split_of(hints.base)
        if split is not None and not split.is_of(
                &signs[0], <uint32_t> signs.shape[0], self.num_shards):
            split = None        # it stays what it is
        batch = self.begin(
            signs, update_shard, <uint32_t> gradients.shape[1], optimizer, row_dtype, split)
        batch.rounding_key = rounding_key(self.seed, number)
        batch.slot = slot
        batch.tag = tag
        batch.hints = NULL
        if hints is not None:
            batch.hints = &hints[0]
        batch.gradients = &gradients[0, 0]
        batch.held = (signs, hints, gradients)
        return self.run(batch).num_missing

    def read(
        self, const uint64_t[::1] signs not None, uint32_t dim, state_words=None, *,
        dtype="float32",
    ):
        cdef Batch batch
        cdef uint32_t number = dtype_number(dtype)
        cdef float[:, ::1] values_view
        cdef uint32_t[:, ::1] states_view
        cdef uint8_t[::1] found_view
        cdef uint32_t words
        if state_words is None:
            words = self.chosen(None, "reading without state_words").state_width(dim)
        else:
            words = state_words
        found = np.zeros(signs.shape[0], dtype=np.uint8)
        values = np.zeros((signs.shape[0], dim), dtype=np.float32)
        states = np.zeros((signs.shape[0], words), dtype=np.uint32)
        if signs.shape[0]:
            check_rows("values", signs.shape[0], signs.shape[0], dim)
            batch = self.begin(signs, read_shard, dim, None, number)
            found_view = found
            values_view = values
            states_view = states
            batch.found = &found_view[0]
            batch.held = (signs, found, values, states)
            batch.rows_out = &values_view[0, 0]
            batch.states_out = &states_view[0, 0] if words else NULL
            batch.state_words = words
            set_format(&batch.format, number, dim, words)
            self.run(batch)
        return found.astype(bool), values, states

    def write(
        self, const uint64_t[::1] signs not None, const float[:, ::1] values not None,
        const uint32_t[:, ::1] states, RowOptimizer optimizer=None, *, uint32_t policy=0,
        dtype="float32"
    ):
        cdef Batch batch
        cdef uint32_t number = dtype_number(dtype)
        cdef uint32_t dim
        optimizer = self.chosen(optimizer, "writing rows")
        self.check_policy(policy)
        check_rows("values", signs.shape[0], values.shape[0], values.shape[1])
        dim = <uint32_t> values.shape[1]
        words = optimizer.state_width(dim)
        if states is not None and (
                states.shape[0] != signs.shape[0] or states.shape[1] != words):
            raise DataError(
                f"states must be [{signs.shape[0]}, {words}] for {optimizer.name} and "
                f"dim {dim}, got [{states.shape[0]}, {states.shape[1]}]")
        if signs.shape[0] == 0:
            return
        batch = self.begin(signs, write_shard, dim, optimizer, number)
        batch.initializer = ZEROS
        self.set_policy(batch, policy)
        batch.gradients = &values[0, 0]
        batch.held = (signs, values, states)
        batch.states = NULL
        if states is not None and words:
            batch.states = &states[0, 0]
        self.run(batch)

    def expect(self, uint64_t num_rows, uint32_t share=0, uint32_t num_shares=1):
        cdef uint32_t i
        cdef int status
        cdef uint64_t each
        check_share(share, num_shares)
        num_rows = min(num_rows, self.capacity)
        each = num_rows // self.num_shards
        if self.memory_limit:
            # An index for rows that will not fit would take the room of those that do.
            each = min(each, self.shards[0].byte_limit // EXPECTED_ROW_BYTES)
        for i in range(share, self.num_shards, num_shares):
            with nogil:
                PyThread_acquire_lock(self.shards[i].lock, 1)
                # More than the mean, as signs are spread by a hash.
                status = arrivals_expect(&self.shards[i].arrivals, each + each // 64)
                if status == 0:
                    status = index_expect(&self.shards[i].index, &self.shards[i].slabs, each)
                PyThread_release_lock(self.shards[i].lock)
            if status < 0:
                raise MemoryError(f"{num_rows} rows in {self.num_shards} shards")

    def restore(self, block not None, RowOptimizer optimizer=None):
        cdef Batch batch
        cdef const uint64_t[::1] signs, orders, ages
        cdef const uint32_t[::1] uses
        cdef const uint32_t[:, ::1] states
        cdef const uint8_t[:, ::1] values
        cdef uint32_t number = dtype_number(block.dtype)
        block.check()
        self.check_policy(block.policy)
        check_rows("values", len(block), len(block), block.dim)
        if len(block) == 0:
            return 0
        signs, orders, ages, uses = block.signs, block.orders, block.ages, block.uses
        states, values = block.states, block.values.view(np.uint8)
        batch = self.begin(signs, restore_shard, block.dim, optimizer, number)
        batch.states = NULL
        if optimizer is None:
            batch.state_words = block.state_words
            set_format(&batch.format, number, batch.dim, batch.state_words)
            # A row without state copies none, from an address that is not NULL.
            batch.states = &states[0, 0] if batch.state_words else &uses[0]
        batch.policy = block.policy
        batch.raw_values = <const char *> &values[0, 0]
        batch.orders, batch.uses, batch.ages = &orders[0], &uses[0], &ages[0]
        batch.held = (signs, values, states, orders, uses, ages)
        self.run(batch)
        return len(block)

    def end_restore(self, uint32_t share=0, uint32_t num_shares=1):
        cdef uint32_t i
        cdef int status = 0
        cdef Shard *shard
        cdef Arrivals spare
        check_share(share, num_shares)
        memset(&spare, 0, sizeof(spare))
        for i in range(share, self.num_shards, num_shares):
            shard = &self.shards[i]
            with nogil:
                PyThread_acquire_lock(shard.lock, 1)
                status = arrivals_settle(
                    &shard.arrivals, &spare, &shard.recency, &shard.slabs, self.clocks)
                shard_settle(shard)
                slabs_trim(&shard.slabs)
                PyThread_release_lock(shard.lock)
            if status < 0:
                break
        arrivals_free(&spare)
        if status < 0:
            raise MemoryError(f"the order of the rows restored to shard {i}")

    def sketch(self):
        cdef uint32_t i
        cdef uint8_t[:, ::1] view
        counts = np.zeros((self.num_shards, self.sketch_size()), np.uint8)
        numbers = np.zeros((self.num_shards, 2), np.uint64)
        if counts.shape[1]:
            view = counts
            for i in range(self.num_shards):
                with nogil:
                    PyThread_acquire_lock(self.shards[i].lock, 1)
                    memcpy(&view[i, 0], self.shards[i].sketch.lines, view.shape[1])
                    PyThread_release_lock(self.shards[i].lock)
                numbers[i] = (
                    self.shards[i].sketch.num_counted, self.shards[i].sketch.next_halved)
        return counts, numbers

    def restore_sketch(
        self, const uint8_t[:, ::1] counts not None, const uint64_t[:, ::1] numbers not None
    ):
        cdef uint32_t i
        cdef uint64_t num_bytes = self.sketch_size()
        if (counts.shape[0], counts.shape[1]) != (self.num_shards, num_bytes) or (
                (numbers.shape[0], numbers.shape[1]) != (self.num_shards, 2)):
            raise DataError(
                f"counts of ids not admitted must be [{self.num_shards}, {num_bytes}] and "
                f"[{self.num_shards}, 2] for this store, got "
                f"[{counts.shape[0]}, {counts.shape[1]}] and "
                f"[{numbers.shape[0]}, {numbers.shape[1]}]")
        if num_bytes == 0:
            return
        for i in range(self.num_shards):
            if numbers[i, 1] >= num_bytes // CACHE_LINE:
                raise DataError(
                    f"next line to halve must be below {num_bytes // CACHE_LINE}, "
                    f"got {numbers[i, 1]} for shard {i}")
        for i in range(self.num_shards):
            with nogil:
                PyThread_acquire_lock(self.shards[i].lock, 1)
                memcpy(self.shards[i].sketch.lines, &counts[i, 0], num_bytes)
                self.shards[i].sketch.num_counted = numbers[i, 0]
                self.shards[i].sketch.next_halved = numbers[i, 1]
                PyThread_release_lock(self.shards[i].lock)

    cdef uint64_t sketch_size(self) noexcept:
        """Bytes of counters a shard."""
        return self.shards[0].sketch.num_lines * CACHE_LINE

    def delete(self, const uint64_t[::1] signs not None):
        cdef Batch batch
        if signs.shape[0] == 0:
            return 0
        batch = self.begin(signs, delete_shard, 0, None, 0)
        batch.held = (signs,)
        return signs.shape[0] - self.run(batch).num_missing

    def clear(self, *, bint reuse=False):
        cdef uint32_t i
        cdef Shard *shard
        cdef uint64_t sketch_bytes = self.shard_sketch_bytes()
        cdef int status
        self.watch.before_clear()
        for i in range(self.num_shards):
            shard = &self.shards[i]
            with nogil:
                PyThread_acquire_lock(shard.lock, 1)
                status = shard_clear(shard, sketch_bytes, reuse)
                PyThread_release_lock(shard.lock)
            if status < 0:
                raise MemoryError(f"shard {i} of {self.num_shards}")

    def open_changes(self, str name not None, *, max_bytes=MAX_LOG_BYTES):
        if not self.num_shards * LOG_BLOCKS * sizeof(LogBlock) <= max_bytes < 2**63:
            raise ConfigError(
                f"max_bytes of the change log must be in "
                f"{self.num_shards * LOG_BLOCKS * sizeof(LogBlock)}..2**63-1 for "
                f"{self.num_shards} shards, got {max_bytes}")
        self.watch.open(name, max_bytes)

    def close_changes(self, str name not None):
        self.watch.close(name)

    def begin_cut(
        self, changes=None, *, full=False, side_bytes=MAX_SIDE_BYTES, wait_seconds=10.0
    ):
        if not 0 <= side_bytes < 2**63:
            raise ConfigError(f"side_bytes must be in 0..2**63-1, got {side_bytes}")
        if not 0.0 <= wait_seconds <= 3600.0:
            raise ConfigError(f"wait_seconds must be in 0..3600, got {wait_seconds}")
        if changes is not None:
            self.watch.before_changes(changes)
        return self.watch.begin(self, changes, full, side_bytes, wait_seconds, self.clocks)

    def shard_entries(self, uint32_t number):
        cdef Shard *shard
        cdef uint32_t segment, offset, i, count, slab, dim, words, nth, order
        cdef row_t[WALKED_ROWS] rows
        cdef uint64_t[::1] signs_view
        cdef float[:, ::1] values_view
        cdef uint32_t[:, ::1] states_view
        cdef Py_ssize_t at
        cdef Row *row
        cdef Format format
        if number >= self.num_shards:
            raise DataError(f"shard must be in 0..{self.num_shards - 1}, got {number}")
        shard = &self.shards[number]
        blocks = []
        with nogil:
            PyThread_acquire_lock(shard.lock, 1)
        try:
            for slab in range(shard.slabs.num_slabs):
                count = <uint32_t> shard.slabs.slabs[slab].num_live
                if count == 0:
                    continue
                dim = shard.slabs.slabs[slab].dim
                words = shard.slabs.slabs[slab].state_words
                set_format(&format, shard.slabs.slabs[slab].dtype, dim, words)
                signs = np.empty(count, dtype=np.uint64)
                values = np.empty((count, dim), dtype=np.float32)
                states = np.empty((count, words), dtype=np.uint32)
                signs_view = signs
                values_view = values
                states_view = states
                at = 0
                with nogil:
                    nth = 0
                    while True:
                        order = eviction_nth_order(&shard.eviction, nth)
                        if order == NO_ORDER:
                            break
                        nth += 1
                        segment = shard.recency.orders[order].oldest
                        offset = 0
                        while True:
                            count = recency_walk(
                                &shard.recency, &segment, &offset, rows, WALKED_ROWS)
                            if count == 0:
                                break
                            for i in range(count):
                                if shard.slabs.views[rows[i] >> PLACE_BITS].slab != slab:
                                    continue
                                row = row_at(&shard.slabs, rows[i])
                                if recency_expired(
                                        &shard.recency, row.position >> OFFSET_BITS,
                                        self.clocks):
                                    continue
                                signs_view[at] = row.sign
                                read_values(&format, &values_view[at, 0], row_values(row))
                                if words:
                                    memcpy(
                                        &states_view[at, 0],
                                        row_values(row) + format.value_words,
                                        words * sizeof(float))
                                at += 1
                blocks.append((signs[:at], values[:at], states[:at]))
        finally:
            PyThread_release_lock(shard.lock)
        return blocks

    def iterate(self):
        for number in range(self.num_shards):
            yield from self.shard_entries(number)

    def policy_stats(self):
        cdef uint32_t i, number
        cdef Shard *shard
        totals = [
            dict.fromkeys(("rows", "draining", "evicted", "expired"), 0)
            for _ in self.policies]
        for i in range(self.num_shards):
            shard = &self.shards[i]
            with nogil:
                PyThread_acquire_lock(shard.lock, 1)
            for number, total in enumerate(totals):
                total["rows"] += policy_num_rows(
                    &shard.eviction.policies[number], &shard.recency)
                total["draining"] += policy_num_draining(
                    &shard.eviction.policies[number], &shard.recency)
                total["evicted"] += shard.eviction.policies[number].num_evicted
                total["expired"] += shard.eviction.policies[number].num_expired
            PyThread_release_lock(shard.lock)
        return totals

    def stats(self):
        cdef uint32_t i, number
        cdef Shard *shard
        totals = dict.fromkeys(
            ("rows", "bytes", "evicted", "evicted_lru", "evicted_lfu", "expired", "inserted",
             "refused", "missing", "entries"), 0)
        limited = False
        for i in range(self.num_shards):
            shard = &self.shards[i]
            with nogil:
                PyThread_acquire_lock(shard.lock, 1)
            totals["rows"] += shard.recency.num_live
            totals["bytes"] += shard_bytes(shard)
            for number in range(shard.eviction.num_policies):
                totals["evicted"] += shard.eviction.policies[number].num_evicted
                kind = "evicted_lfu" if shard.eviction.policies[number].kind == LFU else (
                    "evicted_lru")
                totals[kind] += shard.eviction.policies[number].num_evicted
                totals["expired"] += shard.eviction.policies[number].num_expired
            totals["inserted"] += shard.num_inserted
            totals["refused"] += shard.num_refused
            totals["missing"] += shard.num_missing
            totals["entries"] += shard.recency.num_held
            limited = limited or shard.is_limited
            PyThread_release_lock(shard.lock)
        totals["memory_limited"] = limited
        return totals

    def check(self):
        cdef uint32_t i
        cdef const char *broken
        for i in range(self.num_shards):
            with nogil:
                PyThread_acquire_lock(self.shards[i].lock, 1)
                broken = broken_invariant(&self.shards[i])
                PyThread_release_lock(self.shards[i].lock)
            if broken != NULL:
                raise InternalError(f"shard {i}: {broken.decode()}")

    def set_clocks(self, uint64_t milliseconds, uint64_t steps):
        if max(milliseconds, steps) >= 1 << 60:
            raise DataError(f"times must be below 2**60, got {milliseconds} and {steps}")
        # A request that read an earlier time may come later; clocks do not go back.
        self.clocks[CLOCK_MS] = max(self.clocks[CLOCK_MS], CLOCK_BASE + milliseconds)
        self.clocks[CLOCK_STEPS] = max(self.clocks[CLOCK_STEPS], CLOCK_BASE + steps)

    cdef uint64_t shard_sketch_bytes(self) noexcept:
        return (self.sketch_bytes + self.num_shards - 1) // self.num_shards

    cdef void set_policy(self, Batch batch, uint32_t policy) noexcept:
        cdef Policy *of_first = &self.shards[0].eviction.policies[policy]
        batch.policy = policy
        batch.order_of_use = of_first.first if of_first.kind == LRU else NO_ORDER

    cdef int check_policy(self, uint32_t policy) except -1:
        if policy >= len(self.policies):
            raise ConfigError(
                f"policy must be in 0..{len(self.policies) - 1}, got {policy}")
        return 0

    cdef RowOptimizer chosen(self, RowOptimizer given, str what):
        """The optimizer given with the call, or else the store's own."""
        if given is None and self.optimizer is None:
            raise NotConfigured(f"{what} needs an optimizer; configure() gives the store one")
        return self.optimizer if given is None else given


cdef tuple numbers_of(str kind, clock, ttl):
    """A policy as the core's (kind, clock, ttl)."""
    kinds = {"lru": LRU, "lfu": LFU}
    clocks = {None: NO_CLOCK, "milliseconds": CLOCK_MS, "steps": CLOCK_STEPS}
    if kind not in kinds or clock not in clocks or (clock is None) != (ttl == 0):
        raise ConfigError(
            f"a policy is (lru or lfu, None or milliseconds or steps, ttl), "
            f"got ({kind!r}, {clock!r}, {ttl!r})")
    if not 0 <= ttl < 2**61:
        raise ConfigError(f"a ttl must be in 0..2**61-1, got {ttl}")
    return kinds[kind], clocks[clock], ttl


cdef int check_share(uint32_t share, uint32_t num_shares) except -1:
    if not share < num_shares:
        raise DataError(f"share must be in 0..num_shares - 1, got {share} of {num_shares}")
    return 0


cdef int check_length(str name, Py_ssize_t expected, Py_ssize_t got) except -1:
    if expected != got:
        raise DataError(f"{name} must have one element a sign, {expected}, got {got}")
    return 0


cdef int check_rows(
    str name, Py_ssize_t num_signs, Py_ssize_t num_rows, Py_ssize_t dim
) except -1:
    if num_rows != num_signs:
        raise DataError(f"{name} must have one row a sign, {num_signs}, got {num_rows}")
    if not 1 <= dim <= MAX_DIM:
        raise DataError(f"{name} must have 1..{MAX_DIM} columns (the dim), got {dim}")
    return 0
