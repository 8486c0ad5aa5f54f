"""One server's rows, in shards."""

from persia._core.base.threads cimport ThreadPool
from persia._core.store.snapshot cimport Watch
from persia._core.kernels.optim cimport RowOptimizer
from persia._core.shard.recency cimport NUM_CLOCKS
from persia._core.store.request cimport Batch, Split, RequestResult, serve_t
from persia._core.shard.shard cimport Shard
from persia._core.base.types cimport uint32_t, uint64_t


cdef class EmbeddingStore:
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
    cdef list batches           # scratch, reused
    cdef uint64_t *control      # a page of the state file, or NULL
    cdef uint64_t crash_in
    cdef ThreadPool crew              # serves large requests
    cdef ThreadPool alone             # the caller's thread

    cdef Batch begin(
        self, const uint64_t[::1] signs, serve_t serve_shard, uint32_t dim,
        RowOptimizer optimizer, uint32_t dtype, Split split=*)
    cdef RequestResult run(self, Batch batch) except *
    cdef int open_state(self, int file) except -1
    cdef int attach_rows(self) except -1
    cdef uint64_t shard_sketch_bytes(self) noexcept
    cdef uint64_t sketch_size(self) noexcept
    cdef void set_policy(self, Batch batch, uint32_t policy) noexcept
    cdef int check_policy(self, uint32_t policy) except -1
    cdef RowOptimizer chosen(self, RowOptimizer given, str what)
