"""A walk over everything that a shard holds, for tests and the debug build."""

from persia._core.shard.shard cimport Shard


# The first invariant that does not hold, or NULL. The lock is held.
cdef const char *broken_invariant(Shard *shard) noexcept nogil
