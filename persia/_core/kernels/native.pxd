"""Kernels of libraries that have the interface of persia_kernels.h."""

cimport cython

from persia._core.base.types cimport uint32_t, uint64_t

cdef extern from "persia_kernels.h" nogil:
    ctypedef struct persia_block_t:
        size_t num_rows
        size_t dim
        float *const *values
        float *const *states
        const float *const *grads
        double lr
        uint64_t step
        const double *params
        float bound
        int *codes

    ctypedef struct persia_optimizer_t:
        uint32_t size
        uint32_t num_params
        const char *const *param_names
        const double *param_defaults
        uint32_t (*state_width)(uint32_t dim, const double *params) noexcept nogil
        void (*init)(float *state, uint32_t dim, const double *params) noexcept nogil
        int (*step)(const persia_block_t *rows) noexcept nogil
        uint32_t guards

    ctypedef struct persia_initializer_t:
        uint32_t size
        uint32_t num_params
        const char *const *param_names
        const double *param_defaults
        int (*fill)(
            float *values, uint32_t dim, uint64_t seed, uint64_t sign,
            const double *params) noexcept nogil

    ctypedef struct persia_use_t:
        uint64_t sign
        uint64_t draw
        uint32_t dim
        uint32_t num_state_words
        const float *values
        const float *state
        uint32_t before
        uint32_t is_new

    ctypedef struct persia_scorer_t:
        uint32_t size
        uint32_t (*score)(const persia_use_t *use) noexcept nogil

    ctypedef struct persia_hash_t:
        uint32_t size
        int (*hash)(const uint64_t *ids, size_t num_ids, uint64_t *hashes) noexcept nogil

    ctypedef struct persia_kernels_t:
        uint32_t version
        uint32_t size
        const persia_optimizer_t *optimizer
        const persia_initializer_t *initializer
        const persia_scorer_t *scorer
        const persia_hash_t *hash

cdef enum:
    MAX_WIDTH = 0x30002         # words of state; with values and header, a row fits its chunk
    NO_WIDTH = 0xFFFFFFFF       # of a dim for which the kernel keeps more than that


@cython.final
cdef class NativeLibrary:
    # NULL where it has none.
    cdef const persia_optimizer_t *optimizer
    cdef const persia_initializer_t *initializer
    cdef const persia_scorer_t *scorer
    cdef const persia_hash_t *hash
    cdef readonly bint guards_rows  # its optimizer does
    cdef readonly str name          # "native:", the user's name of it, and its sha256
    cdef readonly dict params       # of the optimizer: name -> default
    cdef readonly dict initializer_params
    cdef bytes label                # what a crash is reported by
    cdef dict _widths
    cdef object widths(self, object params)
    cdef object try_dim(self, uint32_t dim, uint32_t width, const double[::1] params)
    cdef object try_guard(
        self, uint32_t dim, uint32_t width, const double[::1] params, uint32_t offset)
    cdef object try_fill(self, uint32_t dim, const double[::1] params)
    cdef object try_score(self, uint32_t dim)
    cdef object try_hash(self)

# The library that was loaded under this name, or a ConfigError, also if it has not this kernel:
# "optimizer", "initializer", "scorer" or "hash".
cdef NativeLibrary library_with(str kernel, str name)
