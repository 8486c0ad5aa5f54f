"""Shards made whole again from what a killed process left in its server's state file."""

from persia._core.base.types cimport uint32_t, uint64_t
from persia._core.shard.shard cimport Shard

# Map the control page, and give each shard its part of the file.
cdef int map_state(
    Shard *shards, uint32_t num_shards, int fd, uint64_t **control, uint64_t *crash_in
) except -1
# Fill shards that are empty and have their policies; the clocks go on from the latest of them.
cdef int attach_shards(
    Shard *shards, uint32_t num_shards, const uint64_t *control, uint64_t *clocks
) except -1
