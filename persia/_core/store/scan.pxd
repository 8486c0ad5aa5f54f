"""Rows of one prefix, read piece by piece while requests change them."""

from persia._core.base.types cimport row_t, uint32_t, uint64_t
from persia._core.shard.recency cimport NUM_CLOCKS
from persia._core.shard.row_format cimport Format
from persia._core.shard.shard cimport Shard

cdef struct Scan:
    uint64_t prefix                 # of the signs wanted
    uint64_t mask                   # its bits
    Format format                   # of their rows
    uint64_t[NUM_CLOCKS] clocks     # by which rows have expired
    row_t at                        # the next place to look at, of one shard
    bint is_over                    # it has no more
    uint64_t count                  # rows found, of all shards
    uint64_t room                   # rows to find at most
    uint64_t looks                  # places looked at
    uint64_t *signs                 # NULL: rows are only counted
    float *values
    uint32_t *states                # NULL: left out


cdef void scan_begin(
    Scan *scan, uint64_t prefix, uint32_t prefix_bits, const uint64_t *clocks) noexcept nogil
# Signs, values, states or None, and where to go on or None.
cdef tuple scan_rows(
    Scan *scan, Shard *shards, uint32_t num_shards, uint64_t cursor, uint32_t max_rows,
    bint with_states)
cdef uint64_t scan_count(Scan *scan, Shard *shards, uint32_t num_shards) noexcept
