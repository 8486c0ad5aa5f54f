"""mix64, the one hash of PERSIA, and the fields of a hash.

             63          50 49      40 39                              0
            +--------------+----------+---------------------------------+
    hash =  |    bucket    |  shard   |  place and tag in the index     |
            +--------------+----------+---------------------------------+

mix64 is the first output of SplitMix64 seeded with the sign: a bijection, so two signs never
share all bits. Vectors: 0 gives 0xe220a8397b1dcdaf, 1234567 gives 6457827717110365317.
"""

from libc.stdlib cimport free, malloc
from numpy cimport PyArray_DATA, PyArray_SIZE, ndarray

from persia._core.base.arrays cimport as_ids, as_vector, new_i64, new_u32, new_u64
from persia._core.base.types cimport int64_t, uint16_t, uint32_t, uint64_t

import numpy as np

from persia.errors import ConfigError


cdef void mix_array(const uint64_t *values, size_t n, uint64_t *hashes) noexcept nogil:
    """Hash ``n`` values; the two buffers may be one."""
    cdef size_t i
    for i in range(n):
        hashes[i] = mix64(values[i])


cdef int route_signs(
    const uint64_t *signs, size_t n, const uint16_t *owner, uint32_t num_servers,
    uint32_t *order, int64_t *starts
) noexcept nogil:
    """Counting sort of positions by owner; 0, or -1 without memory.

    Needs ``starts`` of num_servers + 1 zeros and every owner below num_servers.
    """
    cdef size_t i
    cdef uint32_t server
    if num_servers == 1:
        for i in range(n):
            order[i] = <uint32_t>i
        starts[1] = <int64_t>n
        return 0
    # The owner of each sign is kept, so that the second pass neither hashes nor looks it up.
    cdef uint16_t *server_of = <uint16_t *>malloc((n + 1) * sizeof(uint16_t))
    if server_of == NULL:
        return -1
    for i in range(n):
        server = owner[bucket_of(mix64(signs[i]))]
        server_of[i] = <uint16_t>server
        starts[server + 1] += 1
    for server in range(num_servers):
        starts[server + 1] += starts[server]
    # starts[s] walks to the end of s, which is the start of s + 1: shifted back below.
    for i in range(n):
        server = server_of[i]
        order[starts[server]] = <uint32_t>i
        starts[server] += 1
    for server in range(num_servers, 0, -1):
        starts[server] = starts[server - 1]
    starts[0] = 0
    free(server_of)
    return 0


def mix64_array(values):
    """Hash an array, u64 [n]; returns u64 [n]."""
    cdef ndarray source = as_ids(values, "values")
    cdef size_t n = PyArray_SIZE(source)
    cdef ndarray hashes = new_u64(n)
    cdef const uint64_t *source_data = <const uint64_t *>PyArray_DATA(source)
    cdef uint64_t *hashes_data = <uint64_t *>PyArray_DATA(hashes)
    with nogil:
        mix_array(source_data, n, hashes_data)
    return hashes


def bucket(uint64_t sign):
    """Return the bucket of a sign, 0..16383: what decides its server and its file."""
    return bucket_of(mix64(sign))


def owners(num_servers):
    """Return the owner of each bucket, u16 [16384]: contiguous ranges, as even as they come."""
    _check_num_servers(num_servers)
    return (np.arange(NUM_BUCKETS, dtype=np.int64) * num_servers >> 14).astype(np.uint16)


def route(signs, owner, num_servers):
    """Group signs by the server that owns them.

    Args:
        signs: u64 [n].
        owner: u16 [16384], the server of each bucket.
        num_servers: 1..16384.

    Returns:
        ``order``, u32 [n], and ``starts``, i64 [num_servers + 1]: server s owns the signs at
        ``order[starts[s]:starts[s + 1]]``, in the order in which they came.
    """
    _check_num_servers(num_servers)
    cdef ndarray source = as_ids(signs, "signs")
    cdef ndarray table = as_vector(owner, c"u", 2, "owner")
    if table.size != NUM_BUCKETS:
        raise ConfigError(f"owner must have {NUM_BUCKETS} buckets, got {table.size}")
    # An owner beyond the servers would be counted past the end of ``starts``.
    if table.max() >= num_servers:
        raise ConfigError(
            f"owner must name servers below {num_servers}, got {table.max()} "
            f"for bucket {table.argmax()}"
        )
    cdef size_t n = PyArray_SIZE(source)
    cdef uint32_t count = num_servers
    cdef ndarray order = new_u32(n)
    cdef ndarray starts = new_i64(count + 1)
    starts.fill(0)
    cdef const uint64_t *source_data = <const uint64_t *>PyArray_DATA(source)
    cdef const uint16_t *table_data = <const uint16_t *>PyArray_DATA(table)
    cdef uint32_t *order_data = <uint32_t *>PyArray_DATA(order)
    cdef int64_t *starts_data = <int64_t *>PyArray_DATA(starts)
    with nogil:
        status = route_signs(source_data, n, table_data, count, order_data, starts_data)
    if status != 0:
        raise MemoryError(f"cannot route {n} signs: no memory for their owners")
    return order, starts


def _check_num_servers(num_servers):
    if not 1 <= num_servers <= NUM_BUCKETS:
        raise ConfigError(f"num_servers must be in 1..{NUM_BUCKETS}, got {num_servers}")
