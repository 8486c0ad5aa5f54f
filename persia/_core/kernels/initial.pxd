cimport cython

from persia._core.base.types cimport uint32_t, uint64_t
from persia._core.kernels.native cimport NativeLibrary, persia_initializer_t


@cython.final
cdef class Initializer:
    cdef int method
    cdef double[4] parameters       # what the method needs, worked out once
    cdef readonly str name
    cdef readonly dict options      # complete, for checkpoints and messages
    cdef const persia_initializer_t *native     # of a user's library, or NULL
    cdef const char *native_name
    cdef const double *native_params            # in _params
    cdef NativeLibrary library      # that ``native`` is of, or None
    cdef object _params

    # 0, or why there are no values: only a user's kernel fails.
    cdef int fill(
        self, uint64_t seed, uint64_t sign, float *out, uint32_t dim) noexcept nogil

# The error of a row that a user's kernel has no values for.
cdef object no_values(Initializer initializer, int code, uint64_t sign)
