"""Numbering of distinct u64 values in first-seen order; see the end of the .pyx."""

from numpy cimport ndarray

from persia._core.base.types cimport uint32_t, uint64_t

cdef struct Numbering:
    uint64_t *values        # [room] what was taken; then the distinct ones, by number
    uint32_t *slots         # [room] the first slot of each value; then what the passes need
    uint32_t *table         # [2 * room] never cleared: a slot is written before it is read
    size_t room             # a power of two
    size_t num_taken
    int shift               # 64 - log2(entries in use): a hash's slot


# Begins a numbering of at most ``most`` values; give it back whatever happens. Needs the GIL.
cdef int begin(Numbering *self, size_t most) except -1
# Begins another one of at most ``most`` values, which fit the room of the one before.
cdef void restart(Numbering *self, size_t most) noexcept nogil
cdef void give_back(Numbering *self) noexcept
# Copies ``n`` more values, each read once: their owner may write them meanwhile.
cdef void take(Numbering *self, const uint64_t *values, size_t n) noexcept nogil
# Fills ``numbers`` for all that was taken, once; returns how many differ.
cdef size_t finish(Numbering *self, uint32_t *numbers) noexcept nogil
# The distinct values after ``finish``.
cdef ndarray distinct_values(const Numbering *self, size_t count)
# All of it for one array: fills ``numbers`` [n] and returns the distinct values.
cdef ndarray distinct_of(const uint64_t *values, size_t n, uint32_t *numbers)
