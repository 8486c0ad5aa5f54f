"""Initial values of a row: a pure function of (settings, seed, sign)."""

from persia._core.types cimport uint32_t, uint64_t

cdef class Initializer:
    cdef int method
    cdef double[4] parameters
    cdef readonly str name
    cdef readonly dict options

    cdef void fill(self, uint64_t seed, uint64_t sign, float *out, uint32_t dim) noexcept nogil
