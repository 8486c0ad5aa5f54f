from persia._core.base.types cimport uint32_t, uint64_t, uint8_t
from persia._core.shard.shard cimport Shard
from persia._core.store.request cimport Request, RequestResult

# A ``handler_t``: whole rows, for a shard whose lock is held.
cdef void restore_shard(
    Shard *shard, Request request, uint32_t begin, uint32_t end,
    RequestResult *result) noexcept nogil

# ``share`` of ``num_shares``: every num_shares-th shard from that one on, so that several
# threads may divide the shards among themselves.

# Make room for ``num_rows`` rows in all.
cdef int expect_rows(
    Shard *shards, uint32_t num_shards, uint64_t num_rows, uint32_t share, uint32_t num_shares
) except -1
# Put the restored rows in their order, and give back memory that they did not need.
cdef int settle_rows(
    Shard *shards, uint32_t num_shards, const uint64_t *clocks, uint32_t share,
    uint32_t num_shares) except -1

# Counters u8 [shards, bytes], and u64 [shards, 2]: appearances counted, next line to halve.
cdef tuple read_sketch(Shard *shards, uint32_t num_shards)
cdef int write_sketch(
    Shard *shards, uint32_t num_shards, const uint8_t[:, ::1] counts,
    const uint64_t[:, ::1] numbers) except -1
