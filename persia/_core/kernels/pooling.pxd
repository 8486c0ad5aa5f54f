"""Rows to pooled outputs and back: the kernels of one instruction-set level as a table."""

from persia._core.base.types cimport int32_t, int64_t, uint32_t, uint64_t, uint8_t

cdef extern from "pooling_kernels.h" nogil:
    enum:
        PERSIA_SUM
        PERSIA_MEAN
        PERSIA_SQRT
        PERSIA_MAX
        PERSIA_NUM_LEVELS

    ctypedef struct persia_bags_t:
        const uint32_t *slots       # [num_distinct * rounds] or NULL
        size_t rounds
        const uint32_t *inverse     # [num_ids]
        size_t num_ids
        const uint32_t *offsets     # [num_samples + 1] or NULL
        size_t num_samples
        const float *weights        # [num_ids] or NULL
        size_t dim
        float *scratch              # [dim]

    ctypedef struct persia_pooling_t:
        void (*pool)(
            int mode, const persia_bags_t *bags, const float *rows, float *out,
            int32_t *argmax) noexcept nogil
        void (*pool_grad)(
            int mode, const persia_bags_t *bags, const float *grad, const int32_t *argmax,
            const uint8_t *skip, float *out) noexcept nogil
        size_t (*grad_fresh)(
            int mode, const persia_bags_t *bags, const float *grad, float *out) noexcept nogil
        void (*gather)(
            const float *rows, const uint32_t *slots, size_t rounds, size_t num_distinct,
            size_t dim, float *out) noexcept nogil
        void (*scatter_add)(
            const float *grad, const uint32_t *slots, size_t rounds, size_t num_distinct,
            size_t dim, float *out) noexcept nogil
        void (*index_add)(
            const float *grad, const int64_t *index, size_t n, size_t dim,
            float *out) noexcept nogil
        int (*any_nonfinite)(const float *values, size_t n) noexcept nogil
        uint32_t (*max_u32)(const uint32_t *values, size_t n) noexcept nogil
        uint64_t (*max_u64)(const int64_t *values, size_t n) noexcept nogil
        size_t (*descents)(const uint32_t *values, size_t n) noexcept nogil

    const persia_pooling_t[PERSIA_NUM_LEVELS] persia_pooling


cdef enum Kind:
    POOL
    POOL_GRAD
    SCATTER_ADD


cdef struct Call:
    Kind kind
    int mode
    persia_bags_t bags          # of SCATTER_ADD slots, rounds, dim, and num_ids: rows of source
    const float *source         # rows, or a gradient
    float *out
    int32_t *argmax             # written by POOL, read by POOL_GRAD; NULL but for max
    const uint8_t *skip


cdef const persia_pooling_t *kernels() noexcept nogil
cdef int mode_number(object mode) except -1
cdef float *first_out(float[:, ::1] matrix) noexcept

# Each checks its arguments as the function of its name does, and writes nothing but ``call``,
# which needs a scratch of ``dim`` floats, and the arrays, when it is made.
cdef object fill_pool(
    Call *call, object mode, const float[:, ::1] rows, const uint32_t[::1] slots,
    Py_ssize_t rounds, const uint32_t[::1] inverse, const uint32_t[::1] offsets,
    float[:, ::1] out, const float[::1] weights)
cdef int fill_pool_grad(
    Call *call, object mode, const float[:, ::1] grad, const uint32_t[::1] slots,
    Py_ssize_t rounds, const uint32_t[::1] inverse, const uint32_t[::1] offsets,
    const int32_t[:, ::1] argmax, const uint8_t[::1] skip, float[:, ::1] out,
    const float[::1] weights) except -1
cdef int fill_scatter_add(
    Call *call, const float[:, ::1] grad, const uint32_t[::1] slots, Py_ssize_t rounds,
    float[:, ::1] out) except -1
cdef void make(const Call *call) noexcept nogil
