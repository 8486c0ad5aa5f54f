"""One request to the store, and what it finds."""

from persia._core.base.threads cimport ThreadPool
from persia._core.base.types cimport row_t, sign_t, uint32_t, uint64_t, uint8_t
from persia._core.kernels.initial cimport Initializer
from persia._core.kernels.optim cimport RowOptimizer
from persia._core.shard.recency cimport NUM_CLOCKS
from persia._core.shard.row_format cimport Format
from persia._core.shard.shard cimport Shard

cdef enum:
    MAX_SHARDS = 1024           # as many as ten bits of a hash can tell apart
    STATUS_OK = 0
    STATUS_NO_MEMORY = 1
    STATUS_DIM = 2
    STATUS_SHAPES = 3
    STATUS_OTHER = 4            # not the update that was cut short
    STATUS_NO_VALUES = 5        # a user's kernel has no first values for the sign

cdef struct RequestResult:              # what a request found in a shard, or in all
    uint64_t num_missing
    uint64_t num_refused
    int status
    sign_t sign                 # the one that status is about
    uint32_t dim                # stored with it
    uint32_t dtype
    uint32_t state_words
    uint64_t num_failed         # rows that a user's kernel failed for, and are as they were
    sign_t failed               # the first of them
    int code                    # why; or why there are no values
    float *scratch              # not a finding; NULL where rows are f32


# A request's signs by shard: a function of the signs and the number of shards.
cdef class Split:
    cdef uint32_t num_signs
    cdef uint32_t num_shards
    cdef uint32_t room          # of signs, and of shards
    cdef uint32_t shard_room
    cdef sign_t *sorted         # the signs in shard order
    cdef uint32_t *order        # their places in the request
    cdef uint32_t *starts       # first place of each shard; num_shards + 1
    cdef object signs           # whose numbers are kept, once they are; or None
    cdef const sign_t *signs_at
    cdef object numbers         # the memory of those that ``kept_numbers`` made, or None

    cdef void release(self) noexcept

    cdef int reserve(self, uint32_t num_signs, uint32_t num_shards) except -1
    cdef bint is_of(self, const sign_t *signs, uint32_t count, uint32_t num_shards) noexcept

# The split that ``kept_numbers`` made with these numbers, or None.
cdef Split split_of(object numbers)


cdef class Request                # below; the two types name each other

ctypedef void (*handler_t)(
    Shard *shard, Request request, uint32_t begin, uint32_t end,
    RequestResult *result) noexcept nogil


cdef class Request:
    cdef uint32_t num_signs
    cdef Split own              # where no other is given
    cdef sign_t *sorted         # of the split of this request
    cdef uint32_t *order
    cdef uint32_t *starts
    cdef uint32_t *places       # of each shard and part of the split: counts, then places
    cdef size_t num_places      # that there is room for
    cdef uint32_t num_shards
    cdef uint32_t num_parts     # of the split
    cdef RequestResult *results         # of each shard
    cdef Shard *shards
    cdef handler_t handler
    cdef ThreadPool threads
    cdef bint has_failed        # a shard has; those that were not begun yet are left alone
    # Arguments; which of them are set depends on the kind of request.
    cdef const sign_t *signs
    cdef const row_t *hints
    cdef const float *gradients     # or the values of a write
    cdef const uint32_t *states
    cdef bint keeps_states          # of rows that are there, in a write without states
    cdef const char *raw_values     # of a restore, as rows keep them
    cdef const uint64_t *orders
    cdef const uint32_t *uses
    cdef const uint64_t *ages
    cdef float *rows_out
    cdef bint is_streamed           # rows_out, past the caches
    cdef row_t *hints_out
    cdef uint32_t *states_out
    cdef uint8_t *found
    cdef uint32_t dim
    cdef uint32_t state_words
    cdef Format format              # of its rows
    cdef uint64_t number            # of an update
    cdef uint64_t rounding_key
    cdef uint64_t seed
    cdef uint64_t admission_key
    cdef uint64_t admission_below   # draws below this are admitted
    cdef bint admit_all
    cdef uint32_t admit_at          # appearance; above 1 the sketch counts, nothing is drawn
    cdef bint is_repeated           # the sketch has counted it
    cdef uint32_t policy
    cdef uint32_t order_of_use      # that all rows enter, or NO_ORDER: it depends on the row
    cdef uint64_t[NUM_CLOCKS] clocks
    cdef Initializer initializer    # or None
    cdef RowOptimizer optimizer
    cdef uint32_t slot              # of an update that may be cut short, or 0
    cdef uint64_t tag               # of this part of it
    cdef object held            # what the pointers point into

    # Make room for all but the split.
    cdef int reserve(self, uint32_t num_signs, uint32_t num_shards) except -1
    cdef void use(self, Split split) noexcept
    # Order the signs by shard, into this split or the batch's own.
    cdef int split(self, Split into) except -1
    # Serve each shard, under its lock, until one fails.
    cdef RequestResult serve(self) except *
