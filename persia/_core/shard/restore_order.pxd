"""Rows that were restored, in whatever order they came, until they are put in their own."""

from persia._core.base.types cimport row_t, sign_t, uint32_t, uint64_t
from persia._core.shard.recency cimport Recency
from persia._core.shard.slabs cimport Slabs

cdef enum:
    TTL_PARTS = 1048576             # to which ages are kept

cdef struct RestoredRow:                # 16 bytes
    row_t row
    uint32_t tag                    # low bits of its sign: whether the row is still that one
    uint32_t order                  # its place in the order it came from
    uint32_t age                    # in parts of its ttl

cdef struct RestoredRows:
    RestoredRow *rows
    uint64_t count
    uint64_t capacity


# A row was restored and is in an order of use; -1: no memory.
cdef int restored_add(
    RestoredRows *restored, row_t row, sign_t sign, uint64_t order, uint64_t age, uint64_t ttl
) noexcept nogil
# Use all rows again, in their order and at their time, and forget them; -1: no memory. Spare is
# only room, to put them in order, and is left to the next shard.
cdef int restored_settle(
    RestoredRows *restored, RestoredRows *spare, Recency *recency, Slabs *slabs,
    const uint64_t *clocks
) noexcept nogil
cdef int restored_expect(RestoredRows *restored, uint64_t num_rows) noexcept nogil
cdef void restored_free(RestoredRows *restored) noexcept nogil
