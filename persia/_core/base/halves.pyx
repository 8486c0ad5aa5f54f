"""Rows of 2-byte values: float16 and bfloat16 beside float32.

The kernels say how a value is converted; here are the names, and what chance depends on:

    key of an update   mix64(mix64(seed ^ ROUNDING) ^ number of the update)
    key of its row     mix64(key of the update ^ mix64(sign))
    draw of element j  persia_draw(key of the row, j)
"""

import numpy as np

from persia.errors import ConfigError, DataError

from persia._core.base.cpu cimport isa_level
from persia._core.base.hashing cimport mix64

cdef extern from "half_kernels.h" nogil:
    enum:
        PERSIA_NUM_HALVES
        PERSIA_NUM_LEVELS

    const persia_half_t[PERSIA_NUM_HALVES][PERSIA_NUM_LEVELS] persia_halves

DTYPES = ("float32", "float16", "bfloat16")

# Keys the draws, so that they are not those of initial values or admissions.
cdef uint64_t ROUNDING = <uint64_t> 0x5B0C4A5713D0F00D


cdef uint32_t dtype_number(object name) except? 0xFFFFFFFF:
    if name not in DTYPES:
        raise ConfigError(f"dtype: expected one of {', '.join(DTYPES)}, got {name!r}")
    return DTYPES.index(name)


cdef str dtype_name(uint32_t dtype):
    return DTYPES[dtype]


cdef const persia_half_t *half_kernels(uint32_t dtype) noexcept nogil:
    return &persia_halves[dtype - 1][isa_level()]


# So the order of rows, threads, shards and servers does not show. The number has to change from
# update to update: drawn from the row's own bits alone, the chance of a step too small to be
# seen would repeat itself, and the row could stand still for ever.
cdef uint64_t rounding_key(uint64_t seed, uint64_t number) noexcept nogil:
    return mix64(mix64(seed ^ ROUNDING) ^ number)


cdef const persia_half_t *kernels_of(object dtype) except NULL:
    cdef uint32_t number = dtype_number(dtype)
    if number == 0:
        raise ConfigError(f"dtype: expected one of {', '.join(DTYPES[1:])}, got {dtype!r}")
    return half_kernels(number)


def widen(const uint16_t[::1] values not None, dtype):
    """The values as f32, exactly."""
    cdef const persia_half_t *kernels = kernels_of(dtype)
    out = np.empty(values.shape[0], dtype=np.float32)
    cdef float[::1] view = out
    if values.shape[0]:
        with nogil:
            kernels.widen(&values[0], &view[0], values.shape[0])
    return out


def narrow(const float[::1] values not None, dtype):
    """The values rounded to nearest, ties to even, as their 16 bits."""
    cdef const persia_half_t *kernels = kernels_of(dtype)
    out = np.empty(values.shape[0], dtype=np.uint16)
    cdef uint16_t[::1] view = out
    if values.shape[0]:
        with nogil:
            kernels.narrow(&values[0], &view[0], values.shape[0])
    return out


def round_rows(
    const float[:, ::1] rows not None, const uint64_t[::1] signs not None, dtype,
    uint64_t seed, uint64_t number
):
    """The rows rounded by chance as an update of that number does, as their 16 bits."""
    cdef const persia_half_t *kernels = kernels_of(dtype)
    cdef uint64_t key = rounding_key(seed, number)
    cdef uint64_t hash
    cdef void *row
    cdef Py_ssize_t i
    if rows.shape[0] != signs.shape[0]:
        raise DataError(f"expected one sign a row, {rows.shape[0]}, got {signs.shape[0]}")
    out = np.empty((rows.shape[0], rows.shape[1]), dtype=np.uint16)
    cdef uint16_t[:, ::1] view = out
    # A copy, because the kernel rounds in place on its way.
    cdef float[:, ::1] matrix = np.array(rows)
    if rows.shape[1]:
        with nogil:
            for i in range(rows.shape[0]):
                row = &view[i, 0]
                hash = mix64(signs[i])
                kernels.round_rows(&row, &matrix[i, 0], 1, rows.shape[1], key, &hash)
    return out
