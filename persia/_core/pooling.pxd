"""Rows to pooled outputs and back: the kernels of one instruction-set level as a table."""

from persia._core.types cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

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
