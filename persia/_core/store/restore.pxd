"""Whole rows from a file into a shard."""

from persia._core.store.request cimport Batch, RequestResult
from persia._core.shard.shard cimport Shard
from persia._core.base.types cimport uint32_t

# A ``serve_t``.
cdef void restore_shard(
    Shard *shard, Batch batch, uint32_t begin, uint32_t end, RequestResult *tally) noexcept nogil
