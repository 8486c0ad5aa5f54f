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
 * A library with that function is named by `persia.embedding.optim.Native`. What may be called
 * when: every function from several threads at once, for other rows each time. So kernels keep
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
#define PERSIA_KERNELS_VERSION 1

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

typedef struct {
    uint32_t version;           /* PERSIA_KERNELS_VERSION */
    uint32_t size;              /* sizeof(persia_kernels_t) */
    const persia_optimizer_t *optimizer;
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
