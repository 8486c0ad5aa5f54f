"""Values of 2 bytes: what they are called, and the functions between them and f32."""

from persia._core.base.types cimport uint16_t, uint32_t, uint64_t

cdef extern from "half_kernels.h" nogil:
    # Of n values, or between n rows of dim values and a matrix of them; see the header.
    ctypedef struct persia_half_t:
        void (*widen)(const uint16_t *source, float *to, size_t n) noexcept nogil
        void (*narrow)(const float *source, uint16_t *to, size_t n) noexcept nogil
        void (*widen_rows)(
            void *const *rows, float *matrix, size_t n, size_t dim) noexcept nogil
        void (*round_rows)(
            void *const *rows, float *matrix, size_t n, size_t dim,
            uint64_t update_key, const uint64_t *hashes) noexcept nogil

# The number of a dtype by its name: 0 is float32.
cdef uint32_t dtype_number(object name) except? 0xFFFFFFFF
cdef str dtype_name(uint32_t dtype)
# For dtypes of 2 bytes, of the level that is selected now; ask once per request.
cdef const persia_half_t *half_kernels(uint32_t dtype) noexcept nogil
# What an update's rounding draws by, beside the sign.
cdef uint64_t rounding_key(uint64_t seed, uint64_t number) noexcept nogil
