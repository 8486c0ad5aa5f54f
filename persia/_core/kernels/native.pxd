"""Kernels of libraries that have the interface of persia_kernels.h."""

cimport cython

from persia._core.base.types cimport uint32_t, uint64_t

cdef extern from "persia_kernels.h" nogil:
    ctypedef struct persia_block_t:
        size_t num_rows
        size_t dim
        float *const *values
        float *const *states
        const float *const *grads
        double lr
        uint64_t step
        const double *params

    ctypedef struct persia_optimizer_t:
        uint32_t size
        uint32_t num_params
        const char *const *param_names
        const double *param_defaults
        uint32_t (*state_width)(uint32_t dim, const double *params) noexcept nogil
        void (*init)(float *state, uint32_t dim, const double *params) noexcept nogil
        int (*step)(const persia_block_t *rows) noexcept nogil

    ctypedef struct persia_kernels_t:
        uint32_t version
        uint32_t size
        const persia_optimizer_t *optimizer

cdef enum:
    MAX_WIDTH = 0x30002         # words of state; with values and header, a row fits its chunk
    NO_WIDTH = 0xFFFFFFFF       # of a dim for which the kernel keeps more than that


@cython.final
cdef class NativeLibrary:
    cdef const persia_optimizer_t *optimizer
    cdef readonly str name          # "native:", the user's name of it, and its sha256
    cdef readonly dict params       # name -> default
    cdef bytes label                # what a crash is reported by
    cdef dict _widths
    cdef object widths(self, object params)
    cdef object try_dim(self, uint32_t dim, uint32_t width, const double[::1] params)

# The library that was loaded under this name of an optimizer, or a ConfigError.
cdef NativeLibrary library_of(str name)
