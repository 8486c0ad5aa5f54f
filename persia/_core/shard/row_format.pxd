"""How a row keeps its values.

    row     | values: f32, f16 or bf16 x dim | to a whole word | state u32 x w |
"""

from libc.string cimport memcpy

from persia._core.base.halves cimport persia_half_t
from persia._core.base.types cimport row_t, uint16_t, uint32_t, uint64_t
from persia._core.kernels.optim cimport persia_call_t, persia_optim_t, persia_step_t

cdef enum:
    STEP_ROWS = 32                  # rows handed to an optimizer kernel at once
    SCRATCH_WORDS = 8192            # of their values as f32, unless one row alone takes more
    MET_WORDS = 16                  # 1024 bits, so that few of 32 rows share one

# How a row's values are kept; those of 2 bytes are numbered as their kernels are, after f32.
cdef enum:
    FLOAT32 = 0

cdef struct Format:                 # of the rows of one request
    uint32_t dtype
    uint32_t dim
    uint32_t value_words            # of 4 bytes, before the state
    uint32_t state_words
    uint32_t at_once                # rows that a call of a kernel steps
    const persia_half_t *half       # NULL for f32

cdef struct HalfSteps:              # rows of 2-byte values, gathered for one call of a kernel
    uint32_t count
    row_t[STEP_ROWS] numbers
    float *rows[STEP_ROWS]
    float *states[STEP_ROWS]
    const float *sums[STEP_ROWS]
    uint64_t[STEP_ROWS] hashes
    uint64_t[MET_WORDS] met         # of the row numbers gathered, one bit each


cdef inline void copy_floats(float *out, const float *values, uint32_t count) noexcept nogil:
    cdef uint32_t i
    # Usual dims are multiples of 8; the fixed trip count becomes two or four vector moves
    # where a call of memcpy would cost more than the copy.
    if count % 8 == 0:
        for i in range(0, count, 8):
            memcpy(out + i, values + i, 32)
    else:
        memcpy(out, values, count * sizeof(float))


cdef inline void read_values(
    const Format *format, float *out, const float *row
) noexcept nogil:
    if format.half == NULL:
        copy_floats(out, row, format.dim)
    else:
        format.half.widen(<const uint16_t *> row, out, format.dim)


cdef inline void write_values(
    const Format *format, float *row, const float *values
) noexcept nogil:
    """Values of 2 bytes become the nearest ones."""
    if format.half == NULL:
        memcpy(row, values, format.dim * sizeof(float))
    else:
        format.half.narrow(values, <uint16_t *> row, format.dim)


# Of the values that a row of ``dim`` has, in words of 4 bytes.
cdef uint32_t width_of_values(uint32_t dtype, uint32_t dim) noexcept nogil
cdef void set_format(
    Format *format, uint32_t dtype, uint32_t dim, uint32_t state_words) noexcept nogil
# Floats that ``run_steps`` and initial values need to work in; 0 for f32 rows.
cdef uint32_t scratch_size(const Format *format) noexcept nogil
cdef void steps_begin(HalfSteps *steps) noexcept nogil
# Step the rows gathered, and begin to gather again. ``key`` is of the update, for rounding.
cdef void run_steps(
    const Format *format, HalfSteps *steps, persia_step_t step, const persia_optim_t *settings,
    uint64_t key, float *scratch, persia_call_t *call) noexcept nogil


# Some rows are converted at once, so that their copies are in the cache when the kernel reads
# them, and not still on their way there. A row must not be among them twice, or its first step
# would be lost: ``met`` has a bit for each row number modulo 1024, and a bit that is taken
# sends the rows gathered off first, rightly or by chance.
cdef inline bint steps_add(
    const Format *format, HalfSteps *steps, row_t number, float *row, const float *sums,
    uint64_t hash
) noexcept nogil:
    """False, and nothing done, if the rows gathered have to be stepped before this one."""
    cdef uint64_t *met = &steps.met[number % (64 * MET_WORDS) // 64]
    cdef uint64_t bit = <uint64_t> 1 << (number % 64)
    if steps.count == format.at_once or met[0] & bit:
        return False
    met[0] |= bit
    steps.numbers[steps.count] = number
    steps.rows[steps.count] = row
    steps.states[steps.count] = row + format.value_words
    steps.sums[steps.count] = sums
    steps.hashes[steps.count] = hash
    steps.count += 1
    return True
