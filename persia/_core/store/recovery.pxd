"""A shard made whole again from what a killed process left in its server's file."""

from persia._core.shard.eviction cimport Eviction
from persia._core.shard.persistent_shard cimport Kept
from persia._core.shard.recency cimport Recency
from persia._core.shard.sign_index cimport SignIndex
from persia._core.shard.slabs cimport Slabs
from persia._core.base.types cimport uint32_t

# Into a shard that is empty and has its policies; NULL, or what is wrong with the file. What
# was wrong is found before anything in the file is changed, but for places that hold no row.
cdef const char *recovery_attach(
    Slabs *slabs, SignIndex *index, Recency *recency, Eviction *eviction, Kept *kept,
    uint32_t number, uint32_t num_shards) noexcept nogil
