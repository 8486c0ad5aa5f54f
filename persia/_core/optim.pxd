"""Optimizer settings as a C struct, and the kernels that step rows by them."""

from persia._core.types cimport uint32_t

cdef extern from "kernels.h" nogil:
    ctypedef struct persia_optim_t:
        pass
    # Steps ``n`` rows. values[i] is row i's embedding (dim floats, its state right behind);
    # grads[i] is its gradient (dim floats). Same bytes for every instruction-set variant.
    ctypedef void (*persia_step_t)(
        float *const *values, const float *const *grads, size_t n, size_t dim,
        const persia_optim_t *settings) noexcept nogil


cdef class RowOptimizer:
    cdef persia_optim_t settings
    cdef readonly str name
    cdef readonly dict options      # as given, for checkpoints and messages
    cdef object _tables             # keeps Adam's correction tables alive

    # Number of 4-byte words of state behind a row of ``dim`` floats.
    cdef uint32_t state_width(self, uint32_t dim) noexcept nogil
    cdef void fill_state(self, float *state, uint32_t dim) noexcept nogil
    cdef persia_step_t step(self) noexcept nogil
