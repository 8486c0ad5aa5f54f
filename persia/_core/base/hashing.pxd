"""mix64 and the fields of it (design: 63..50 bucket, 49..40 shard)."""

from persia._core.base.types cimport uint32_t, uint64_t

# The bucket says which server owns a sign: 16,384 of them, fixed for ever, because files are
# split by bucket; a table maps bucket to server and may change. The fields are disjoint. Were
# they not, the signs of a server, which share bucket bits, would share index bits too and
# cluster there.
cdef enum:
    NUM_BUCKETS = 16384     # u14


cdef inline uint64_t mix64(uint64_t x) noexcept nogil:
    """First output of SplitMix64 seeded with ``x`` (Steele, Lea, Flood 2014): a bijection."""
    x += <uint64_t>0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * <uint64_t>0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * <uint64_t>0x94D049BB133111EB
    return x ^ (x >> 31)


cdef inline uint32_t bucket_of(uint64_t hash) noexcept nogil:
    return <uint32_t>(hash >> 50)


cdef inline uint32_t shard_of(uint64_t hash, uint32_t num_shards) noexcept nogil:
    """Scale ten hash bits onto ``num_shards`` (1..1024) shards, without a division."""
    return (<uint32_t>(hash >> 40) & 1023) * num_shards >> 10
