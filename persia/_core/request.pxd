"""One request to the store, and what it finds."""

from persia._core.crew cimport Crew
from persia._core.initial cimport Initializer
from persia._core.optim cimport RowOptimizer
from persia._core.recency cimport NUM_CLOCKS
from persia._core.row_format cimport Format
from persia._core.shard cimport Shard
from persia._core.types cimport row_t, sign_t, uint8_t, uint32_t, uint64_t

cdef enum:
    MAX_SHARDS = 1024           # as many as ten bits of a hash can tell apart
    STATUS_OK = 0
    STATUS_NO_MEMORY = 1
    STATUS_DIM = 2
    STATUS_SHAPES = 3
    STATUS_OTHER = 4            # not the update that was cut short

cdef struct Tally:              # what a request found in a shard, or in all
    uint64_t num_missing
    uint64_t num_refused
    int status
    sign_t sign                 # the one that status is about
    uint32_t dim                # stored with it
    uint32_t dtype
    uint32_t state_words
    float *scratch              # not a finding; NULL where rows are f32


cdef class Batch                # below; the two types name each other

ctypedef void (*serve_t)(
    Shard *shard, Batch batch, uint32_t begin, uint32_t end, Tally *tally) noexcept nogil


cdef class Batch:
    cdef uint32_t num_signs
    cdef uint32_t capacity
    cdef sign_t *sorted         # the signs in shard order
    cdef uint32_t *order        # their places in the request
    cdef uint32_t *starts       # first place of each shard; num_shards + 1
    cdef uint32_t *places       # of each shard and part of the split: counts, then places
    cdef uint32_t num_shards
    cdef uint32_t num_parts     # of the split
    cdef Tally *tallies         # of each shard
    cdef Shard *shards
    cdef serve_t serve_shard
    cdef Crew crew
    cdef bint has_failed        # a shard has; those that were not begun yet are left alone
    # Arguments; which of them are set depends on the kind of request.
    cdef const sign_t *signs
    cdef const row_t *hints
    cdef const float *gradients     # or the values of a write
    cdef const uint32_t *states
    cdef const char *raw_values     # of a restore, as rows keep them
    cdef const uint64_t *orders
    cdef const uint32_t *uses
    cdef const uint64_t *ages
    cdef float *rows_out
    cdef row_t *hints_out
    cdef uint32_t *states_out
    cdef uint8_t *found
    cdef uint32_t dim
    cdef uint32_t state_words
    cdef Format format              # of its rows
    cdef uint64_t rounding_key      # of an update
    cdef uint64_t seed
    cdef uint64_t admission_key
    cdef uint64_t admission_below   # draws below this are admitted
    cdef bint admit_all
    cdef uint32_t admit_at          # appearance; above 1 the sketch counts, nothing is drawn
    cdef bint is_repeated           # the sketch has counted it
    cdef uint32_t policy
    cdef uint32_t order_of_use      # that all rows enter, or NO_ORDER: it depends on the row
    cdef uint64_t[NUM_CLOCKS] clocks
    cdef Initializer initializer
    cdef RowOptimizer optimizer
    cdef uint32_t slot              # of an update that may be cut short, or 0
    cdef uint64_t tag               # of this part of it
    cdef object held            # what the pointers point into

    # Make room; ``is_shared`` says that several threads will serve it.
    cdef int reserve(self, uint32_t num_signs, uint32_t num_shards, bint is_shared) except -1
    cdef void release(self) noexcept
    # Order the signs by shard.
    cdef int split(self) except -1
    # Serve each shard, under its lock, until one fails.
    cdef Tally serve(self) except *
