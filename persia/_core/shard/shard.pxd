"""A part of a server's rows that one lock guards: index, order of use and slabs."""

from persia._core.base.types cimport row_t, uint32_t, uint64_t
from persia._core.shard.changes cimport Changes
from persia._core.shard.eviction cimport Eviction
from persia._core.shard.persistent_shard cimport ShardFile
from persia._core.shard.recency cimport Recency
from persia._core.shard.sign_index cimport SignIndex
from persia._core.shard.sketch cimport Sketch
from persia._core.shard.slabs cimport Ahead, Slabs

cdef extern from "pythread.h" nogil:
    ctypedef void *PyThread_type_lock
    int PyThread_acquire_lock(PyThread_type_lock lock, int wait) noexcept
    void PyThread_release_lock(PyThread_type_lock lock) noexcept

cdef extern from "sched.h" nogil:
    int sched_yield() noexcept

cdef extern from *:
    """
    static inline void persia_count(uint32_t *count, uint32_t by)
    {
        __atomic_fetch_add(count, by, __ATOMIC_RELAXED);
    }
    static inline uint32_t persia_counted(const uint32_t *count)
    {
        return __atomic_load_n(count, __ATOMIC_RELAXED);
    }
    static inline void persia_done(uint32_t *count)
    {
        __atomic_fetch_sub(count, 1, __ATOMIC_RELEASE);
    }
    static inline int persia_is_done(const uint32_t *count)
    {
        return __atomic_load_n(count, __ATOMIC_ACQUIRE) == 0;
    }
    """
    void persia_count(uint32_t *count, uint32_t by) noexcept nogil
    uint32_t persia_counted(const uint32_t *count) noexcept nogil
    # What was done before the first is seen after the second has said so.
    void persia_done(uint32_t *count) noexcept nogil
    bint persia_is_done(const uint32_t *count) noexcept nogil

cdef enum:
    MAX_YIELDS = 256            # what a thread needs to wake up, and not for ever
    MAPPED_BYTES = 0x200000     # an array of restored rows of more is mapped

cdef struct RestoredRow:                # 16 bytes
    row_t row
    uint32_t tag                    # low bits of its sign: whether the row is still that one
    uint32_t order                  # its place in the order it came from
    uint32_t age                    # in parts of its ttl

cdef struct RestoredRows:
    RestoredRow *rows
    uint64_t count
    uint64_t capacity

cdef struct Shard:
    Slabs slabs
    SignIndex index
    Recency recency
    Eviction eviction
    Sketch sketch               # of ids without a row; no lines: nothing is admitted by count
    Changes changes             # noted for snapshots and consumers
    RestoredRows restored           # restored, and not in their order yet
    ShardFile *file                  # in the state file; NULL: rows end with the process
    PyThread_type_lock lock     # held for every access to the fields of this struct
    uint32_t num_waiting        # requests that wait for the lock; counted atomically
    uint32_t num_backing        # of requests that make a chunk resident; counted atomically
    uint64_t capacity           # rows
    uint64_t soft_capacity      # rows; lowered when the byte limit is met
    uint64_t byte_limit         # 0: none
    uint64_t byte_peak          # most bytes since they were within the limit, or the limit
    uint64_t num_inserted
    uint64_t num_refused        # admissions
    uint64_t num_missing        # evaluation lookups and updates that met no row
    bint is_limited             # the byte limit was met


cdef inline void shard_acquire(Shard *shard) noexcept nogil:
    """Take the lock for a request."""
    if not PyThread_acquire_lock(shard.lock, 0):
        persia_count(&shard.num_waiting, 1)
        PyThread_acquire_lock(shard.lock, 1)
        persia_count(&shard.num_waiting, 0xFFFFFFFF)       # one less


cdef inline void shard_leave(Shard *shard) noexcept nogil:
    """After a release by a thread that wants the lock again: let requests have it first.

    The lock is not fair: a waiting thread has to wake up, and would find it taken again.
    """
    cdef uint32_t _try
    for _try in range(<uint32_t> MAX_YIELDS):
        if persia_counted(&shard.num_waiting) == 0:
            return
        sched_yield()


cdef inline void shard_settle(Shard *shard) noexcept nogil:
    """Wait for those that make memory resident, before it goes: milliseconds at most."""
    while not persia_is_done(&shard.num_backing):
        sched_yield()


# A chunk to make resident once the lock is released, if rows will need it; the count of those
# who do that is one more then.
cdef Ahead shard_ahead(Shard *shard) noexcept nogil
cdef int shard_init(Shard *shard, uint64_t sketch_bytes) noexcept nogil
cdef void shard_free(Shard *shard) noexcept nogil
cdef void restored_free(RestoredRows *restored) noexcept nogil
# Drop everything; the memory may stay for rows that come, until slabs_trim. -1: no memory.
cdef int shard_clear(Shard *shard, uint64_t sketch_bytes, bint is_reused) noexcept nogil
cdef uint64_t shard_bytes(const Shard *shard) noexcept nogil
cdef void shard_drop(Shard *shard, row_t row) noexcept nogil
cdef void shard_expire(Shard *shard, const uint64_t *clocks) noexcept nogil
# Bring the rows within ttl, capacity and limit, then the orders within their bounds.
cdef void shard_end_request(Shard *shard, uint32_t num_signs) noexcept nogil
