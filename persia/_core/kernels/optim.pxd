"""Optimizer settings as a C struct, and the kernels that step rows by them."""

cimport cython

from persia._core.base.types cimport uint32_t, uint64_t
from persia._core.kernels.native cimport NativeLibrary, persia_optimizer_t, persia_block_t

ctypedef int (*persia_native_step_t)(const persia_block_t *rows) noexcept nogil

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
        const persia_optimizer_t *native        # with the interface of users, or NULL
        const persia_native_step_t *native_steps
        const double *native_params             # in _params
        const uint32_t *native_widths           # in _widths
        const char *native_name
        bint is_trusted
        bint is_guarded
        bint guards_rows

    ctypedef struct persia_call_t:
        uint64_t number                         # of the update
        uint32_t num_failed                     # rows that are as they were
        uint32_t first_failed                   # place of the first of them
        int code                                # that the kernel returned for it, or a reason

    # Steps ``n`` rows. values[i] is row i's embedding (dim floats); states[i] its state, which
    # is right behind the embedding where ``states`` is NULL; grads[i] is its gradient (dim
    # floats). Same bytes for every instruction-set variant.
    ctypedef void (*persia_step_t)(
        float *const *values, float *const *states, const float *const *grads, size_t n,
        size_t dim, const persia_optim_t *settings, persia_call_t *call) noexcept nogil


@cython.final
cdef class RowOptimizer:
    cdef persia_optim_t settings
    cdef readonly str name
    cdef readonly double weight_bound
    cdef readonly dict options      # complete, for checkpoints and messages
    cdef object _tables             # keeps Adam's correction table alive
    cdef NativeLibrary library      # that a user's kernel is of, or None
    cdef readonly dict kept_words   # where that is not here: words of state by dim; or None
    cdef object _params, _widths    # kept alive for ``settings``

    # Number of 4-byte words of state behind a row of ``dim`` floats; NO_WIDTH if it keeps none
    # of that dim.
    cdef uint32_t state_width(self, uint32_t dim) noexcept nogil
    cdef void fill_state(self, float *state, uint32_t dim) noexcept nogil
    # Raise an ExtensionError that names ``what`` if its library is not here.
    cdef int need_kernel(self, str what) except -1
    # The kernel of the level that is selected now; ask once per batch.
    cdef persia_step_t step(self) noexcept nogil

# What a failure of a user's kernel is, in words: "returned 7", "wrote a NaN ...".
cdef str failure_text(int code)
cdef str failed_rows(uint64_t count, bint is_guarded)
