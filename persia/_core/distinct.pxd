"""Numbering of distinct u64 values in first-seen order."""

from numpy cimport ndarray

from persia._core.types cimport uint32_t, uint64_t

cdef struct Distinct:
    uint32_t *table         # 0 is empty, else 1 + the number of a value
    size_t mask             # length of the table - 1; a power of two - 1
    int shift               # 64 - log2(length of the table): a hash's first slot
    uint64_t *values        # the values by number; room for as many as were announced
    uint32_t count          # numbers given so far


# 0, or -1 without memory; free it either way. ``most`` values may be numbered in all.
cdef int distinct_init(Distinct *self, size_t most) noexcept nogil
cdef void distinct_free(Distinct *self) noexcept nogil
cdef void distinct_number(
    Distinct *self, const uint64_t *values, size_t n, uint32_t *numbers) noexcept nogil
# Fills ``numbers`` [n] and returns the distinct values; ``what`` names them in a MemoryError.
cdef ndarray distinct_of(str what, const uint64_t *values, size_t n, uint32_t *numbers)
