"""Rows on their way into the parts of a checkpoint, and their signs on the way back."""

from persia._core.base.types cimport uint32_t, uint64_t

cdef extern from "part_rows.h" nogil:
    enum:
        PERSIA_NUM_LEVELS

    ctypedef void (*persia_copy_rows_t)(
        char *out, const char *rows, size_t width, const uint32_t *places, size_t n
    ) noexcept nogil
    ctypedef size_t (*persia_strangers_t)(
        const uint64_t *signs, size_t n, uint64_t first, uint64_t count) noexcept nogil

    int persia_all_once(const uint64_t *signs, size_t n) noexcept nogil
    const persia_copy_rows_t[PERSIA_NUM_LEVELS] persia_copy_rows
    const persia_strangers_t[PERSIA_NUM_LEVELS] persia_strangers
