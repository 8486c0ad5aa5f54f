from persia._core.base.types cimport uint32_t
from persia._core.shard.shard cimport Shard

# For each policy: rows, draining, evicted, expired.
cdef list policy_counts(Shard *shards, uint32_t num_shards, uint32_t num_policies)
cdef dict row_counts(Shard *shards, uint32_t num_shards)
# InternalError names the first invariant that does not hold.
cdef int check_invariants(Shard *shards, uint32_t num_shards) except -1
