cimport cython

from persia._core.base.types cimport uint32_t, uint64_t


@cython.final
cdef class Initializer:
    cdef int method
    cdef double[4] parameters       # what the method needs, worked out once
    cdef readonly str name
    cdef readonly dict options      # complete, for checkpoints and messages

    cdef void fill(self, uint64_t seed, uint64_t sign, float *out, uint32_t dim) noexcept nogil
