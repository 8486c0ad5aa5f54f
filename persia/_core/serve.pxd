"""What each kind of request does in one shard; each is a ``serve_t``."""

from persia._core.request cimport Batch, Tally
from persia._core.shard cimport Shard
from persia._core.types cimport uint32_t


cdef void train_shard(
    Shard *shard, Batch batch, uint32_t begin, uint32_t end, Tally *tally) noexcept nogil
cdef void eval_shard(
    Shard *shard, Batch batch, uint32_t begin, uint32_t end, Tally *tally) noexcept nogil
cdef void update_shard(
    Shard *shard, Batch batch, uint32_t begin, uint32_t end, Tally *tally) noexcept nogil
cdef void read_shard(
    Shard *shard, Batch batch, uint32_t begin, uint32_t end, Tally *tally) noexcept nogil
cdef void write_shard(
    Shard *shard, Batch batch, uint32_t begin, uint32_t end, Tally *tally) noexcept nogil
cdef void delete_shard(
    Shard *shard, Batch batch, uint32_t begin, uint32_t end, Tally *tally) noexcept nogil
