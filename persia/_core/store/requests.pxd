"""What each kind of request does in one shard; each is a ``handler_t``."""

from persia._core.base.types cimport row_t, sign_t, uint32_t, uint64_t
from persia._core.shard.shard cimport Shard
from persia._core.shard.slabs cimport Slab
from persia._core.store.request cimport Request, RequestResult


cdef void train_shard(
    Shard *shard, Request request, uint32_t begin, uint32_t end,
    RequestResult *result) noexcept nogil
cdef void eval_shard(
    Shard *shard, Request request, uint32_t begin, uint32_t end,
    RequestResult *result) noexcept nogil
cdef void update_shard(
    Shard *shard, Request request, uint32_t begin, uint32_t end,
    RequestResult *result) noexcept nogil
cdef void read_shard(
    Shard *shard, Request request, uint32_t begin, uint32_t end,
    RequestResult *result) noexcept nogil
cdef void write_shard(
    Shard *shard, Request request, uint32_t begin, uint32_t end,
    RequestResult *result) noexcept nogil
cdef void delete_shard(
    Shard *shard, Request request, uint32_t begin, uint32_t end,
    RequestResult *result) noexcept nogil

# Have a crash of a user's scorer say its name.
cdef void watch_scorers() noexcept
# A row that is in no order yet, with nothing in it; NO_ROW: see the result.
cdef row_t new_row(
    Shard *shard, Request request, uint64_t hash, sign_t sign,
    RequestResult *result) noexcept nogil
cdef void drop_new_row(Shard *shard, uint64_t hash, row_t row) noexcept nogil
# Say in the result what a row is that the request does not expect.
cdef void note_shape(const Slab *slab, sign_t sign, RequestResult *result) noexcept nogil
