"""A part of a server's rows that one lock guards: index, order of use and slabs."""

from persia._core.arrivals cimport Arrivals
from persia._core.changes cimport Changes
from persia._core.eviction cimport Eviction
from persia._core.kept cimport Kept
from persia._core.recency cimport Recency
from persia._core.sign_index cimport SignIndex
from persia._core.sketch cimport Sketch
from persia._core.slabs cimport Slabs
from persia._core.types cimport row_t, uint32_t, uint64_t

cdef extern from "pythread.h" nogil:
    ctypedef void *PyThread_type_lock
    int PyThread_acquire_lock(PyThread_type_lock lock, int wait) noexcept
    void PyThread_release_lock(PyThread_type_lock lock) noexcept

cdef struct Shard:
    Slabs slabs
    SignIndex index
    Recency recency
    Eviction eviction
    Sketch sketch               # of ids without a row; no lines: nothing is admitted by count
    Changes changes             # noted for cuts and consumers
    Arrivals arrivals           # restored, and not in their order yet
    Kept *kept                  # in the state file; NULL: rows end with the process
    PyThread_type_lock lock     # held for every access to the fields of this struct
    uint64_t capacity           # rows
    uint64_t soft_capacity      # rows; lowered when the byte limit is met
    uint64_t byte_limit         # 0: none
    uint64_t byte_peak          # most bytes since they were within the limit, or the limit
    uint64_t num_inserted
    uint64_t num_refused        # admissions
    uint64_t num_missing        # evaluation lookups and updates that met no row
    bint is_limited             # the byte limit was met


cdef int shard_init(Shard *shard, uint64_t sketch_bytes) noexcept nogil
cdef void shard_free(Shard *shard) noexcept nogil
cdef uint64_t shard_bytes(const Shard *shard) noexcept nogil
cdef void shard_drop(Shard *shard, row_t row) noexcept nogil
# Bring the rows within ttl, capacity and limit, then the orders within their bounds.
cdef void shard_end_request(Shard *shard, uint32_t num_signs) noexcept nogil
