"""The embedding store: rows by sign; those that its policies rank last go first.

    sign --mix64--> shard --index--> row number --slabs--> | header | values | state |
                                          \\--recency--> order of use

A request holds distinct signs of one dim. It is split by shard (stable, so that the order
inside a shard is the order of the request) and each shard does its part once, under its lock:
see ``requests``. Shards do not know each other, so threads take disjoint shards and the result
does not depend on their number. Policies hold within a shard, LRU exactly; a training lookup is
a use, an update or an evaluation is not.
"""

import numpy as np

cimport cython

from cpython.mem cimport PyMem_Calloc, PyMem_Free
from libc.stdlib cimport free
from libc.string cimport memcpy

from persia._core.base.arrays cimport check_length, check_rows
from persia._core.base.halves cimport dtype_name, dtype_number, rounding_key
from persia._core.base.hashing cimport mix64
from persia._core.base.threads cimport ThreadPool
from persia._core.base.types cimport NO_ROW, uint32_t, uint64_t, uint8_t
from persia._core.kernels.initial cimport Initializer, no_values
from persia._core.kernels.native cimport (
    NO_WIDTH, NativeLibrary, library_with, persia_scorer_t,
)
from persia._core.kernels.optim cimport RowOptimizer, failed_rows, failure_text
from persia._core.shard.changes cimport changes_free
from persia._core.shard.eviction cimport (
    LFU, LRU, MAX_POLICIES, SCORED, Policy, eviction_free, eviction_policy,
)
from persia._core.shard.persistent_shard cimport FILE_PAGE, NUM_SLOTS, file_free
from persia._core.shard.recency cimport CLOCK_MS, CLOCK_STEPS, NO_CLOCK, NO_ORDER, NUM_CLOCKS
from persia._core.shard.row_format cimport set_format
from persia._core.shard.shard cimport (
    PyThread_acquire_lock, PyThread_release_lock, PyThread_type_lock, Shard, shard_clear,
    shard_free, shard_init,
)
from persia._core.shard.sketch cimport MAX_COUNT
from persia._core.store.inspect cimport check_invariants, policy_counts, row_counts
from persia._core.store.recovery cimport attach_shards, map_state
from persia._core.store.request cimport (
    MAX_SHARDS, STATUS_DIM, STATUS_NO_MEMORY, STATUS_NO_VALUES, STATUS_OTHER, STATUS_SHAPES,
    Request, RequestResult, Split, handler_t, split_of,
)
from persia._core.store.requests cimport (
    delete_shard, eval_shard, read_shard, train_shard, update_shard, watch_scorers,
    write_shard,
)
from persia._core.store.restore cimport (
    expect_rows, read_sketch, restore_shard, settle_rows, write_sketch,
)
from persia._core.store.scan cimport Scan, scan_begin, scan_count, scan_rows
from persia._core.store.snapshot cimport Watch

from persia._core.kernels.native import is_native

from persia.errors import (
    ConfigError, DataError, DimMismatch, KernelError, NotConfigured, StoreError,
)

cdef extern from "portable.h":
    const bint PERSIA_DEBUG
    void persia_unmap(void *start, size_t num_bytes) noexcept nogil

cdef extern from "pythread.h" nogil:
    PyThread_type_lock PyThread_allocate_lock() noexcept
    void PyThread_free_lock(PyThread_type_lock lock) noexcept

# Defaults of what snapshots may take beside the rows.
MAX_SIDE_BYTES = 64 << 20
MAX_LOG_BYTES = 64 << 20

cdef enum:
    # Above this a hand-off is worth it; it may have to wake a thread.
    MIN_THREADED_SIGNS = 2048
    # Rows of a lookup that are more than this leave the cache before they are read.
    STREAMED_BYTES = 1 << 20

# A new row is a pure function of (seed, sign), an admission of (seed, sign, batch id); so a
# repeated call repeats itself, and the number of servers, shards and threads does not show as
# long as nothing is evicted. Keys the admission draws, so that they are not those of the
# initial values.
cdef uint64_t ADMISSION = <uint64_t> 0xAD3175510B5E5EED
# Clocks do not begin at 0, so that a restored row may have been used before they did.
cdef uint64_t CLOCK_BASE = <uint64_t> 1 << 40


cdef bint is_streamed(Request request) noexcept:
    """Whether the rows of this lookup are handed on past the caches."""
    return (
        request.format.half == NULL and request.dim % 4 == 0
        and <size_t> request.rows_out % 16 == 0
        and <size_t> request.num_signs * request.dim * sizeof(float) >= STREAMED_BYTES)


@cython.final
cdef class EmbeddingStore:
    """See the stub for the contract of each method."""

    cdef Shard *shards
    cdef readonly uint32_t num_shards
    cdef readonly uint64_t capacity
    cdef readonly uint64_t seed
    cdef readonly uint64_t memory_limit
    cdef readonly uint32_t num_threads
    cdef readonly uint64_t sketch_bytes
    cdef readonly tuple policies
    cdef uint64_t[NUM_CLOCKS] clocks
    cdef readonly RowOptimizer optimizer
    cdef readonly Watch watch
    cdef list requests           # scratch, reused
    cdef list scorers            # by policy
    cdef uint64_t *control      # a page of the state file, or NULL
    cdef uint64_t crash_in
    cdef ThreadPool threads      # serves large requests
    cdef ThreadPool alone        # the caller's thread

    def __cinit__(
        self, capacity, *, num_shards=16, seed=0, memory_limit=0, num_threads=1,
        policies=(), sketch_bytes=0, state_file=None, attach=False
    ):
        self.requests = []
        self.clocks[CLOCK_MS] = self.clocks[CLOCK_STEPS] = CLOCK_BASE
        if not 1 <= capacity < 2**63:
            raise ConfigError(f"capacity must be in 1..2**63-1 rows, got {capacity}")
        if not 1 <= num_shards <= MAX_SHARDS:
            raise ConfigError(f"num_shards must be in 1..{MAX_SHARDS}, got {num_shards}")
        if not 1 <= num_threads <= 1024:
            raise ConfigError(f"num_threads must be in 1..1024, got {num_threads}")
        self.capacity = capacity
        self.seed = seed & 0xFFFFFFFFFFFFFFFF
        self.memory_limit = memory_limit
        # A shard of a handful of rows would make LRU coarse; 64 each is the least.
        self.num_shards = max(1, min(num_shards, capacity // 64))
        self.num_threads = min(num_threads, self.num_shards)
        # Zeroed: what was not reached when this raises is safe to free.
        self.shards = <Shard *> PyMem_Calloc(self.num_shards, sizeof(Shard))
        if self.shards == NULL:
            raise MemoryError(f"{self.num_shards} shards")
        self.policies = (("lru", None, 0), *policies)
        kinds = [numbers_of(kind, clock, ttl) for kind, clock, ttl in self.policies]
        if len(set(map(tuple, self.policies))) < len(kinds):
            raise ConfigError(f"a policy comes twice in {self.policies}")
        if len(kinds) > MAX_POLICIES:
            raise ConfigError(f"a store has at most {MAX_POLICIES} policies, got {len(kinds)}")
        # Kept for as long as shards point into them; None for policies of PERSIA's own.
        self.scorers = [
            library_with("scorer", kind) if is_native(kind) else None
            for kind, _, _ in self.policies]
        if any(one is not None for one in self.scorers):
            watch_scorers()
        # Divided over shards; a remainder is worth a line each.
        self.sketch_bytes = sketch_bytes
        self.watch = Watch(self.num_shards)
        if state_file is not None:
            map_state(
                self.shards, self.num_shards, state_file, &self.control, &self.crash_in)
        cdef uint32_t i
        cdef NativeLibrary library
        cdef const persia_scorer_t *scorer
        cdef const char *label
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
                library = self.scorers[number]
                scorer, label = NULL, NULL
                if library is not None:
                    scorer, label = library.scorer, library.label
                if eviction_policy(
                        &self.shards[i].eviction, &self.shards[i].recency, kind, clock, ttl,
                        scorer, label) != <int> number:
                    raise MemoryError(f"policy {number} of shard {i}")
        if attach:
            attach_shards(self.shards, self.num_shards, self.control, self.clocks)
        self.threads = ThreadPool(self.num_threads)
        self.alone = ThreadPool(1)

    def __dealloc__(self):
        cdef uint32_t i
        if self.shards == NULL:
            return
        for i in range(self.num_shards):
            shard_free(&self.shards[i])
            changes_free(&self.shards[i].changes)
            eviction_free(&self.shards[i].eviction)
            if self.shards[i].file != NULL:
                file_free(self.shards[i].file)
                free(self.shards[i].file)
            if self.shards[i].lock != NULL:
                PyThread_free_lock(self.shards[i].lock)
        if self.control != NULL:
            persia_unmap(self.control, FILE_PAGE)
        PyMem_Free(self.shards)

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
        self.threads.close()

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

    cdef Request begin(
        self, const uint64_t[::1] signs, handler_t handler, uint32_t dim,
        RowOptimizer optimizer, uint32_t dtype, Split split=None
    ):
        """A request on these signs, split by shard; its arguments are still to be filled in.

        A ``split`` that is given is taken if it is of these signs, and made if not.
        """
        cdef Request request
        if self.watch.snapshots and handler != eval_shard and handler != read_shard:
            self.watch.make_room()
        if signs.shape[0] >= NO_ROW:
            raise DataError(f"a request holds at most 2**32-2 signs, got {signs.shape[0]}")
        request = self.requests.pop() if self.requests else Request()
        request.threads = self.threads if signs.shape[0] >= MIN_THREADED_SIGNS else self.alone
        request.reserve(<uint32_t> signs.shape[0], self.num_shards)
        request.shards = self.shards
        request.handler = handler
        request.signs = &signs[0] if signs.shape[0] else NULL
        request.dim = dim
        request.optimizer = optimizer
        request.state_words = 0 if optimizer is None else optimizer.state_width(dim)
        if request.state_words == NO_WIDTH:
            optimizer.state_words(dim)      # raises
        set_format(&request.format, dtype, dim, request.state_words)
        request.seed = self.seed
        self.set_policy(request, 0)
        request.slot = 0
        request.tag = 0
        request.admit_at = 1
        request.is_repeated = False
        request.admission_key = mix64(mix64(self.seed ^ ADMISSION))
        memcpy(request.clocks, self.clocks, sizeof(self.clocks))
        if split is not None and split.is_of(
                request.signs, request.num_signs, request.num_shards):
            request.use(split)
        else:
            request.split(split)
        return request

    cdef RequestResult run(self, Request request) except *:
        """Serve the request on all threads, give its scratch back, raise what it met."""
        cdef RequestResult result = request.serve()
        dim = request.dim
        dtype = dtype_name(request.format.dtype)
        optimizer, initializer = request.optimizer, request.initializer
        request.held = None
        request.optimizer = None
        request.initializer = None
        self.requests.append(request)
        if PERSIA_DEBUG:
            self.check()
        if result.status == STATUS_NO_MEMORY:
            raise MemoryError(f"no memory for another row of dim {dim} ({len(self)} held)")
        if result.status == STATUS_SHAPES:
            raise ConfigError(f"no more than 64 shapes of rows fit; dim {dim} is one more")
        if result.status == STATUS_DIM:
            raise DimMismatch(
                f"sign {result.sign:#018x} is stored with dim {result.dim} of "
                f"{dtype_name(result.dtype)} and {result.state_words} words of state; the "
                f"request is for dim {dim} of {dtype}")
        if result.status == STATUS_NO_VALUES:
            raise no_values(initializer, result.code, result.sign)
        if result.status == STATUS_OTHER:
            raise StoreError(
                "an update was cut short, and its repetition brings other signs: what it has "
                "not stepped yet stays as it is")
        if result.num_failed:
            raise KernelError(
                f"optimizer {optimizer.name}: the kernel {failure_text(result.code)}, the row "
                f"of sign {result.failed:#018x}; "
                f"{failed_rows(result.num_failed, optimizer.settings.is_guarded)}")
        return result

    def lookup_train(
        self, const uint64_t[::1] signs not None, Initializer initializer not None,
        double admit_probability, uint64_t batch_id, float[:, ::1] rows_out not None,
        uint32_t[::1] hints_out not None, RowOptimizer optimizer=None, *,
        uint32_t policy=0, uint32_t admit_at=1, bint repeated=False,
        dtype="float32",
    ):
        cdef Request request
        cdef Split split
        cdef RequestResult result
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
        request = self.begin(
            signs, train_shard, <uint32_t> rows_out.shape[1], optimizer, number, split)
        request.initializer = initializer
        request.admission_key = mix64(mix64(self.seed ^ ADMISSION) ^ batch_id)
        request.admit_all = admit_probability >= 1.0
        self.set_policy(request, policy)
        request.admit_at = admit_at
        request.is_repeated = repeated
        request.admission_below = 0 if request.admit_all else <uint64_t> (
            admit_probability * 18446744073709551616.0)
        request.rows_out = &rows_out[0, 0]
        request.is_streamed = is_streamed(request)
        request.hints_out = &hints_out[0]
        request.held = (signs, rows_out, hints_out)
        result = self.run(request)
        if split is not None:
            split.signs, split.signs_at = signs.base, &signs[0]
        return result.num_missing, result.num_refused

    def lookup_eval(
        self, const uint64_t[::1] signs not None, float[:, ::1] rows_out not None, *,
        dtype="float32",
    ):
        cdef Request request
        cdef uint32_t number = dtype_number(dtype)
        check_rows("rows_out", signs.shape[0], rows_out.shape[0], rows_out.shape[1])
        if signs.shape[0] == 0:
            return 0
        request = self.begin(signs, eval_shard, <uint32_t> rows_out.shape[1], None, number)
        request.rows_out = &rows_out[0, 0]
        request.is_streamed = is_streamed(request)
        request.held = (signs, rows_out)
        return self.run(request).num_missing

    def update(
        self, const uint64_t[::1] signs not None, const uint32_t[::1] hints,
        const float[:, ::1] gradients not None, RowOptimizer optimizer=None, *,
        dtype="float32", uint64_t number=0, uint32_t slot=0, uint64_t tag=0
    ):
        cdef Request request
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
        request = self.begin(
            signs, update_shard, <uint32_t> gradients.shape[1], optimizer, row_dtype, split)
        request.number = number
        request.rounding_key = rounding_key(self.seed, number)
        request.slot = slot
        request.tag = tag
        request.hints = NULL
        if hints is not None:
            request.hints = &hints[0]
        request.gradients = &gradients[0, 0]
        request.held = (signs, hints, gradients)
        return self.run(request).num_missing

    def read(
        self, const uint64_t[::1] signs not None, uint32_t dim, state_words=None, *,
        dtype="float32",
    ):
        cdef Request request
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
            request = self.begin(signs, read_shard, dim, None, number)
            found_view = found
            values_view = values
            states_view = states
            request.found = &found_view[0]
            request.held = (signs, found, values, states)
            request.rows_out = &values_view[0, 0]
            request.states_out = &states_view[0, 0] if words else NULL
            request.state_words = words
            set_format(&request.format, number, dim, words)
            self.run(request)
        return found.astype(bool), values, states

    def write(
        self, const uint64_t[::1] signs not None, const float[:, ::1] values not None,
        const uint32_t[:, ::1] states, RowOptimizer optimizer=None, *, uint32_t policy=0,
        dtype="float32", bint keep_states=False
    ):
        cdef Request request
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
        # Without an initializer: new rows begin with what is written.
        request = self.begin(signs, write_shard, dim, optimizer, number)
        self.set_policy(request, policy)
        request.gradients = &values[0, 0]
        request.held = (signs, values, states)
        request.states = NULL
        request.keeps_states = keep_states
        if states is not None and words:
            request.states = &states[0, 0]
        self.run(request)

    def restore(self, block not None, RowOptimizer optimizer=None):
        cdef Request request
        cdef const uint64_t[::1] signs, orders, ages
        cdef const uint32_t[::1] uses
        cdef const uint32_t[:, ::1] states
        cdef const uint8_t[:, ::1] values
        cdef uint32_t number = dtype_number(block.dtype)
        block.check()
        self.check_policy(block.policy)
        if len(block) == 0:
            return 0
        signs, orders, ages, uses = block.signs, block.orders, block.ages, block.uses
        states, values = block.states, block.values.view(np.uint8)
        request = self.begin(signs, restore_shard, block.dim, optimizer, number)
        request.states = NULL
        if optimizer is None:
            request.state_words = block.state_words
            set_format(&request.format, number, request.dim, request.state_words)
            # A row without state copies none, from an address that is not NULL.
            request.states = &states[0, 0] if request.state_words else &uses[0]
        request.policy = block.policy
        request.raw_values = <const char *> &values[0, 0]
        request.orders, request.uses, request.ages = &orders[0], &uses[0], &ages[0]
        request.held = (signs, values, states, orders, uses, ages)
        self.run(request)
        return len(block)

    def expect(self, uint64_t num_rows, uint32_t share=0, uint32_t num_shares=1):
        check_share(share, num_shares)
        expect_rows(
            self.shards, self.num_shards, min(num_rows, self.capacity), share, num_shares)

    def end_restore(self, uint32_t share=0, uint32_t num_shares=1):
        check_share(share, num_shares)
        settle_rows(self.shards, self.num_shards, self.clocks, share, num_shares)

    def sketch(self):
        return read_sketch(self.shards, self.num_shards)

    def restore_sketch(
        self, const uint8_t[:, ::1] counts not None, const uint64_t[:, ::1] numbers not None
    ):
        write_sketch(self.shards, self.num_shards, counts, numbers)

    def delete(self, const uint64_t[::1] signs not None):
        cdef Request request
        if signs.shape[0] == 0:
            return 0
        request = self.begin(signs, delete_shard, 0, None, 0)
        request.held = (signs,)
        return signs.shape[0] - self.run(request).num_missing

    def scan(
        self, uint64_t prefix, uint32_t prefix_bits, uint32_t dim, uint32_t state_words, *,
        dtype="float32", uint64_t cursor=0, uint32_t max_rows=65536, bint with_states=False
    ):
        cdef Scan scan
        scan_begin(&scan, prefix, prefix_bits, self.clocks)
        set_format(&scan.format, dtype_number(dtype), dim, state_words)
        return scan_rows(
            &scan, self.shards, self.num_shards, cursor, max_rows, with_states)

    def count(
        self, uint64_t prefix, uint32_t prefix_bits, uint32_t dim, uint32_t state_words, *,
        dtype="float32"
    ):
        cdef Scan scan
        scan_begin(&scan, prefix, prefix_bits, self.clocks)
        set_format(&scan.format, dtype_number(dtype), dim, state_words)
        return scan_count(&scan, self.shards, self.num_shards)

    def clear(self, *, bint reuse=False):
        cdef uint32_t i
        cdef Shard *shard
        cdef uint64_t sketch_bytes = self.shard_sketch_bytes()
        cdef int status
        # Readers first: rows that are gone cannot be copied for them.
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
        self.watch.open(name, max_bytes)

    def close_changes(self, str name not None):
        self.watch.close(name)

    def begin_snapshot(
        self, changes=None, *, full=False, side_bytes=MAX_SIDE_BYTES, wait_seconds=10.0
    ):
        return self.watch.begin(self, changes, full, side_bytes, wait_seconds, self.clocks)

    def policy_stats(self):
        return policy_counts(self.shards, self.num_shards, len(self.policies))

    def stats(self):
        return row_counts(self.shards, self.num_shards)

    def check(self):
        check_invariants(self.shards, self.num_shards)

    def set_clocks(self, uint64_t milliseconds, uint64_t steps):
        if max(milliseconds, steps) >= 1 << 60:
            raise DataError(f"times must be below 2**60, got {milliseconds} and {steps}")
        # A request that read an earlier time may come later; clocks do not go back.
        self.clocks[CLOCK_MS] = max(self.clocks[CLOCK_MS], CLOCK_BASE + milliseconds)
        self.clocks[CLOCK_STEPS] = max(self.clocks[CLOCK_STEPS], CLOCK_BASE + steps)

    cdef uint64_t shard_sketch_bytes(self) noexcept:
        return (self.sketch_bytes + self.num_shards - 1) // self.num_shards

    cdef void set_policy(self, Request request, uint32_t policy) noexcept:
        cdef Policy *of_first = &self.shards[0].eviction.policies[policy]
        request.policy = policy
        request.order_of_use = of_first.first if of_first.kind == LRU else NO_ORDER

    cdef int check_policy(self, uint32_t policy) except -1:
        if policy >= len(self.policies):
            raise ConfigError(
                f"policy must be in 0..{len(self.policies) - 1}, got {policy}")
        return 0

    cdef RowOptimizer chosen(self, RowOptimizer given, str what):
        """The optimizer given with the call, or else the store's own."""
        cdef RowOptimizer optimizer
        if given is None and self.optimizer is None:
            raise NotConfigured(f"{what} needs an optimizer; configure() gives the store one")
        optimizer = self.optimizer if given is None else given
        optimizer.need_kernel(what)
        return optimizer


cdef tuple numbers_of(str kind, clock, ttl):
    """A policy as the core's (kind, clock, ttl)."""
    kinds = {"lru": LRU, "lfu": LFU}
    clocks = {None: NO_CLOCK, "milliseconds": CLOCK_MS, "steps": CLOCK_STEPS}
    if is_native(kind):
        kinds[kind] = SCORED
    if kind not in kinds or clock not in clocks or (clock is None) != (ttl == 0):
        raise ConfigError(
            f"a policy is (lru, lfu or a library's name, None or milliseconds or steps, ttl), "
            f"got ({kind!r}, {clock!r}, {ttl!r})")
    if not 0 <= ttl < 2**61:
        raise ConfigError(f"a ttl must be in 0..2**61-1, got {ttl}")
    return kinds[kind], clocks[clock], ttl


cdef int check_share(uint32_t share, uint32_t num_shares) except -1:
    if not share < num_shares:
        raise DataError(f"share must be in 0..num_shares - 1, got {share} of {num_shares}")
    return 0
