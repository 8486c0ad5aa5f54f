"""How a row keeps its values: f32 as it is, or 2 bytes each, which every use converts.

A lookup widens on the way out. An update widens values into scratch memory, lets the
optimizer's one kernel step them, with the state where it is, and rounds them on the way back.
Weight bounds are the kernel's, so they come before the rounding.
"""

from libc.string cimport memset

from persia._core.base.halves cimport half_kernels


cdef uint32_t width_of_values(uint32_t dtype, uint32_t dim) noexcept nogil:
    return dim if dtype == FLOAT32 else (dim + 1) // 2


cdef void set_format(
    Format *format, uint32_t dtype, uint32_t dim, uint32_t state_words
) noexcept nogil:
    format.dtype = dtype
    format.dim = dim
    format.value_words = width_of_values(dtype, dim)
    format.state_words = state_words
    format.at_once = STEP_ROWS
    format.half = NULL
    if dtype != FLOAT32:
        format.half = half_kernels(dtype)
        if dim > SCRATCH_WORDS // STEP_ROWS:
            format.at_once = SCRATCH_WORDS // dim if dim < SCRATCH_WORDS else 1


cdef uint32_t scratch_size(const Format *format) noexcept nogil:
    if format.half == NULL:
        return 0
    return format.at_once * format.dim


cdef void steps_begin(HalfSteps *steps) noexcept nogil:
    steps.count = 0
    memset(steps.met, 0, sizeof(steps.met))


cdef void run_steps(
    const Format *format, HalfSteps *steps, persia_step_t step, const persia_optim_t *settings,
    uint64_t key, float *scratch, persia_call_t *call
) noexcept nogil:
    cdef float *copies[STEP_ROWS]
    cdef uint32_t i
    if steps.count == 0:
        return
    for i in range(steps.count):
        copies[i] = scratch + <size_t> i * format.dim
    format.half.widen_rows(<void **> steps.rows, scratch, steps.count, format.dim)
    step(copies, steps.states, steps.sums, steps.count, format.dim, settings, call)
    format.half.round_rows(
        <void **> steps.rows, scratch, steps.count, format.dim, key, steps.hashes)
    steps_begin(steps)
