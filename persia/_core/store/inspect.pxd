"""What a store holds: its rows in the order of eviction, its counts, and whether it is
sound."""

from persia._core.base.types cimport uint32_t, uint64_t
from persia._core.shard.shard cimport Shard

# A (signs, values, states) for each shape of rows; those that have expired are left out.
cdef list rows_of_shard(Shard *shard, const uint64_t *clocks)
# For each policy: rows, draining, evicted, expired.
cdef list policy_counts(Shard *shards, uint32_t num_shards, uint32_t num_policies)
cdef dict row_counts(Shard *shards, uint32_t num_shards)
# InternalError names the first invariant that does not hold.
cdef int check_invariants(Shard *shards, uint32_t num_shards) except -1
