/* Kernels of one's own for PERSIA's parameter servers: C99, and no other header of PERSIA.
 *
 *     #include "persia_kernels.h"
 *
 *     static int step(const persia_block_t *rows)
 *     {
 *         const float lr = (float)rows->lr;
 *         for (size_t i = 0; i < rows->num_rows; i++)
 *             for (size_t j = 0; j < rows->dim; j++)
 *                 rows->values[i][j] -= lr * rows->grads[i][j];
 *         return 0;
 *     }
 *
 *     static const persia_optimizer_t optimizer = {.size = sizeof optimizer, .step = step};
 *     PERSIA_EXPORT_KERNELS(.optimizer = &optimizer)
 *
 * A library with that function is named by `persia.embedding.optim.Native`, one with an initializer
 * by `persia.embedding.NativeInitialValues`, one with a scorer by the eviction policy of a group of
 * features; a library may have several of them. What may be called when: every function from several threads at once, for other rows each time. So kernels keep
 * nothing between calls, take no lock and allocate nothing that outlives a call; a call should
 * end within microseconds, as the shard of its rows is locked meanwhile. The result for a row may
 * depend on its values, state and gradient, the learning rate, the step and the parameters
 * alone: which rows come in one call depends on the number of servers.
 */
#ifndef PERSIA_KERNELS_INTERFACE_H
#define PERSIA_KERNELS_INTERFACE_H

#include <stddef.h>
#include <stdint.h>

/* Of this interface. A server takes libraries of its own version and of earlier ones. Later
 * versions add members at the ends of structs; `size` says which of them a library has. */
#define PERSIA_KERNELS_VERSION 2

/* Rows to step. None of the arrays overlap; each is aligned to 4 bytes, not to more. */
typedef struct {
    size_t num_rows;            /* at least 1, at most 32 */
    size_t dim;                 /* floats of a row, at least 1 */
    float *const *values;       /* [num_rows] of [dim]: the embeddings, changed in place */
    float *const *states;       /* [num_rows] of [state_width(dim)] words of 4 bytes, as well */
    const float *const *grads;  /* [num_rows] of [dim]: sums over the samples of the batch */
    double lr;                  /* learning rate of this update */
    uint64_t step;              /* number of the batch at its trainer, from 0, with gaps */
    const double *params;       /* [num_params], as the trainer gave them, or their defaults */
} persia_block_t;

typedef struct {
    uint32_t size;              /* sizeof(persia_optimizer_t) */
    uint32_t num_params;        /* beside the learning rate; may be 0 */
    const char *const *param_names;     /* [num_params], identifiers; NULL if there are none */
    const double *param_defaults;       /* [num_params], finite */
    /* Words of 4 bytes that a row of dim floats keeps. NULL: none. */
    uint32_t (*state_width)(uint32_t dim, const double *params);
    /* Writes the state of a row that was never stepped. NULL: all words are 0. */
    void (*init)(float *state, uint32_t dim, const double *params);
    /* Steps the rows; 0, or an error code of the library's own. All rows of a call that returns
     * an error are put back, and each is tried alone. Rows alone that return an error, or have a
     * NaN though row and gradient had none, are put back and reported. Where the trainer has
     * switched the guard off they are reported only. Needed. */
    int (*step)(const persia_block_t *rows);
} persia_optimizer_t;

/* First values of the rows that training creates. */
typedef struct {
    uint32_t size;              /* sizeof(persia_initializer_t) */
    uint32_t num_params;        /* may be 0 */
    const char *const *param_names;     /* [num_params], identifiers; NULL if there are none */
    const double *param_defaults;       /* [num_params], finite */
    /* Writes the dim values of one row; 0, or an error code of the library's own. A value may
     * depend on seed, sign, its column, dim and the parameters alone: a row that was evicted and
     * comes back begins as it did the first time, on any server. A row with an error, or with a
     * value that is not finite, is not created, and is reported by its sign. Needed. */
    int (*fill)(float *values, uint32_t dim, uint64_t seed, uint64_t sign, const double *params);
} persia_initializer_t;

/* A use of a row, which is a training lookup of its id. */
typedef struct {
    uint64_t sign;
    uint64_t draw;              /* random bits for the row and batch, the same when it is repeated */
    uint32_t dim;
    uint32_t num_state_words;
    const float *values;        /* [dim], as the last update left them */
    const float *state;         /* [num_state_words] of the optimizer, as well */
    uint32_t before;            /* class of the row before this use; 0 where it is new */
    uint32_t is_new;            /* 1: the row was created by this use, or had another policy */
} persia_use_t;

/* Which rows are evicted first. It has no parameters: other constants make another library. */
typedef struct {
    uint32_t size;              /* sizeof(persia_scorer_t) */
    /* The row's class from this use on, 0 to 15; larger ones count as 15. Rows of the lowest
     * class go first, and in one class the least recently used. Needed. */
    uint32_t (*score)(const persia_use_t *use);
} persia_scorer_t;

/* Kernels that a library does not have are NULL. */
typedef struct {
    uint32_t version;           /* PERSIA_KERNELS_VERSION */
    uint32_t size;              /* sizeof(persia_kernels_t) */
    const persia_optimizer_t *optimizer;
    const persia_initializer_t *initializer;    /* this and all below: from version 2 on */
    const persia_scorer_t *scorer;
} persia_kernels_t;

/* --- what a library exports ------------------------------------------------------------------ */

#ifdef __cplusplus
#define PERSIA_KERNELS_LINKAGE extern "C" __attribute__((visibility("default")))
#else
#define PERSIA_KERNELS_LINKAGE __attribute__((visibility("default")))
#endif

/* Defines the function by which PERSIA finds the kernels; arguments are members by name. */
#define PERSIA_EXPORT_KERNELS(...)                                                           \
    PERSIA_KERNELS_LINKAGE const persia_kernels_t *persia_kernels(void);                     \
    PERSIA_KERNELS_LINKAGE const persia_kernels_t *persia_kernels(void)                      \
    {                                                                                        \
        static const persia_kernels_t kernels = {                                            \
            .version = PERSIA_KERNELS_VERSION, .size = sizeof(persia_kernels_t), __VA_ARGS__}; \
        return &kernels;                                                                     \
    }

/* --- aids, which nothing depends on ---------------------------------------------------------- */

/* Before a function: it is compiled for several instruction sets of x86, and the best of them
 * is taken when the library is loaded. Functions that it calls must be inlined into it. */
#if defined(__x86_64__) && defined(__linux__) && !defined(__SANITIZE_ADDRESS__) \
    && !defined(__SANITIZE_THREAD__) && !defined(PERSIA_ONE_TARGET)
#define PERSIA_EACH_CPU __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define PERSIA_EACH_CPU
#endif

/* Before a function of one row: it is part of the loop over rows. */
#define PERSIA_ROW_INLINE static inline __attribute__((always_inline))

/* A hash of 64 bits, by which PERSIA's own initial values are drawn as well: draw j of a row is
 * persia_mix64(persia_mix64(sign ^ persia_mix64(seed)) + j). This is SplitMix64's. */
PERSIA_ROW_INLINE uint64_t persia_mix64(uint64_t x)
{
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

/* Before a loop over the floats of a row: gcc then leaves it to its vectoriser. */
#if defined(__clang__)
#define PERSIA_ROW_LOOP
#else
#define PERSIA_ROW_LOOP _Pragma("GCC unroll 1")
#endif

/* Calls row(i, dim) for each row, with usual dims as literals, for which compilers make better
 * loops. `row` is a macro or an inlined function of the row's number and dim. */
#define PERSIA_FOR_EACH_ROW(rows, row)                                           \
    switch ((rows)->dim) {                                                       \
    case 8: PERSIA_EACH_ROW_(rows, row, 8); break;                               \
    case 16: PERSIA_EACH_ROW_(rows, row, 16); break;                             \
    case 32: PERSIA_EACH_ROW_(rows, row, 32); break;                             \
    case 64: PERSIA_EACH_ROW_(rows, row, 64); break;                             \
    default: PERSIA_EACH_ROW_(rows, row, (rows)->dim);                           \
    }
#define PERSIA_EACH_ROW_(rows, row, dim)                    \
    for (size_t i_ = 0; i_ < (rows)->num_rows; i_++)        \
        row(i_, dim)

#endif
