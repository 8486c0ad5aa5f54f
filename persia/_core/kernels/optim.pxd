"""Optimizer settings as a C struct, and the kernels that step rows by them."""

cimport cython

from persia._core.base.types cimport uint32_t

cdef extern from "kernels.h" nogil:
    ctypedef struct persia_correction_t:
        float step_size
        float inverse_root

    ctypedef struct persia_optim_t:
        int kind
        float lr
        float weight_decay          # 0 is none
        float weight_bound          # infinity is no bound
        float momentum
        float beta1
        float beta2
        float beta1_rest            # 1 - beta, rounded once from double
        float beta2_rest
        float eps
        float beta                  # this and the next two are FTRL's
        float l1
        float l2
        float g_square_momentum
        float initial_accumulator
        double lr_exact             # for step counts beyond the table
        double beta1_exact
        double beta2_exact
        const persia_correction_t *corrections  # entry t - 1 for step count t; in _tables
        uint32_t num_corrections

    # Steps ``n`` rows. values[i] is row i's embedding (dim floats); states[i] its state, which
    # is right behind the embedding where ``states`` is NULL; grads[i] is its gradient (dim
    # floats). Same bytes for every instruction-set variant.
    ctypedef void (*persia_step_t)(
        float *const *values, float *const *states, const float *const *grads, size_t n,
        size_t dim, const persia_optim_t *settings) noexcept nogil


@cython.final
cdef class RowOptimizer:
    cdef persia_optim_t settings
    cdef readonly str name
    cdef readonly double weight_bound
    cdef readonly dict options      # complete, for checkpoints and messages
    cdef object _tables             # keeps Adam's correction table alive

    # Number of 4-byte words of state behind a row of ``dim`` floats.
    cdef uint32_t state_width(self, uint32_t dim) noexcept nogil
    cdef void fill_state(self, float *state, uint32_t dim) noexcept nogil
    # The kernel of the level that is selected now; ask once per batch.
    cdef persia_step_t step(self) noexcept nogil
