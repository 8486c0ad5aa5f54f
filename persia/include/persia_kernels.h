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
 * features, one with a hash by a slot; a library may have several of them.
 *
 * Every function may be called from several threads at once, for other rows each time. So kernels
 * keep nothing between calls, take no lock and allocate nothing that outlives a call; a call should
 * end within microseconds, as the shard of its rows is locked meanwhile. The result for a row may
 * depend on its values, state and gradient, the learning rate, the step and the parameters alone:
 * which rows come in one call depends on the number of servers.
 */
#ifndef PERSIA_KERNELS_INTERFACE_H
#define PERSIA_KERNELS_INTERFACE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Of this interface. A server takes libraries of its own version and of earlier ones. Later
 * versions add members at the ends of structs; `size` says which of them a library has. */
#define PERSIA_KERNELS_VERSION 2

/* Rows to step. None of the arrays overlap; each is aligned to 4 bytes, not to more. */
typedef struct {
    size_t num_rows;            /* at least 1, at most 32; 256 of an optimizer that guards them */
    size_t dim;                 /* floats of a row, at least 1 */
    float *const *values;       /* [num_rows] of [dim]: the embeddings, changed in place */
    float *const *states;       /* [num_rows] of [state_width(dim)] words of 4 bytes, as well */
    const float *const *grads;  /* [num_rows] of [dim]: sums over the samples of the batch */
    double lr;                  /* learning rate of this update */
    uint64_t step;              /* number of the batch at its trainer, from 0, with gaps */
    const double *params;       /* [num_params], as the trainer gave them, or their defaults */
    /* For an optimizer that guards its rows. */
    float bound;                /* of values, either side of 0; infinity if there is none */
    int *codes;                 /* [num_rows] of 0: of rows that failed, which are as they were */
} persia_block_t;

enum {
    PERSIA_GUARDED_WORDS = 2048,    /* the most of a row and its state, for it to be guarded so */
    PERSIA_WROTE_NAN = INT32_MIN    /* code of a row that a NaN was written into without a cause */
};

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
    /* 1: step guards rows of up to PERSIA_GUARDED_WORDS words itself, as PERSIA_STEP_ROWS does.
     * It then keeps values within the bound, leaves a row as it was that would have a NaN though
     * row and gradient had none, writes a code other than 0 for it, and returns other than 0 at
     * the end. Servers take no copies of rows then, and do not look at what became of them. */
    uint32_t guards;
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

/* A use of a row: a training lookup of its id, or a write of its values, once they are there. */
typedef struct {
    uint64_t sign;
    uint64_t draw;              /* random bits for row and batch, the same when it is repeated */
    uint32_t dim;
    uint32_t num_state_words;
    const float *values;        /* [dim], as the last update or this write left them */
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

/* Where ids have their rows: an id's hash takes its place. It has no parameters. */
typedef struct {
    uint32_t size;              /* sizeof(persia_hash_t) */
    /* Writes the hash of each id; 0, or an error code of the library's own, by which the batch
     * is refused. It may depend on the id alone. As many low bits as signs have for ids are used;
     * ids that are equal in these share a row. Needed. */
    int (*hash)(const uint64_t *ids, size_t num_ids, uint64_t *hashes);
} persia_hash_t;

/* Kernels that a library does not have are NULL. */
typedef struct {
    uint32_t version;           /* PERSIA_KERNELS_VERSION */
    uint32_t size;              /* sizeof(persia_kernels_t) */
    const persia_optimizer_t *optimizer;
    const persia_initializer_t *initializer;    /* this and all below: from version 2 on */
    const persia_scorer_t *scorer;
    const persia_hash_t *hash;
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

/* --- rows that a step guards ----------------------------------------------------------------- */

/* Steps all rows by row(values, state, grad, dim), a macro or an inlined function of one row,
 * and guards them; the value is what a step returns. `words` is the state's width, a constant
 * expression of `dim` such as 2 * dim. With it the optimizer has `.guards = 1`:
 *
 *     #define ROW(values, state, grad, dim) step_row(values, state, grad, dim, rows->lr)
 *         return PERSIA_STEP_ROWS(rows, ROW, 2 * dim);
 *
 * Where row() has no branch, its copies of rows of a usual dim stay in registers. */
#define PERSIA_STEP_ROWS(rows, row, words)                                               \
    __extension__({                                                                      \
        const persia_block_t *const block_ = (rows);                                     \
        const float bound_ = block_->bound;                                              \
        float kept_[PERSIA_GUARDED_WORDS] __attribute__((aligned(64)));                  \
        int code_ = 0;                                                                   \
        switch (block_->dim) {                                                           \
        case 8: PERSIA_TRY_ROWS_(row, 8, words); break;                                  \
        case 16: PERSIA_TRY_ROWS_(row, 16, words); break;                                \
        case 32: PERSIA_TRY_ROWS_(row, 32, words); break;                                \
        case 64: PERSIA_TRY_ROWS_(row, 64, words); break;                                \
        default: {                                                                       \
            const size_t dim = block_->dim;                                              \
            PERSIA_KEEP_ROWS_(row, dim, words, 0, block_->num_rows);                     \
        }                                                                                \
        }                                                                                \
        code_;                                                                           \
    })

/* Steps copies of two rows at a time, and writes them if no value is beyond the bound or a NaN:
 * the look at them costs as much for two as for one. */
#define PERSIA_TRY_ROWS_(row, row_dim, words)                                            \
    do {                                                                                 \
        enum { dim = (row_dim), words_ = (words) };                                      \
        size_t at_ = 0;                                                                  \
        for (; at_ + 2 <= block_->num_rows; at_ += 2) {                                  \
            float values_[2][dim], states_[2][words_ + 1];                               \
            persia_seen_t seen_ = {{0}, {0}, 0};                                         \
            PERSIA_TRY_ROW_(row, 0, dim, words_)                                         \
            PERSIA_TRY_ROW_(row, 1, dim, words_)                                         \
            if (__builtin_expect(persia_is_beyond(&seen_), 0)) {                         \
                PERSIA_KEEP_ROWS_(row, dim, words_, at_, at_ + 2);                       \
                continue;                                                                \
            }                                                                            \
            PERSIA_WRITE_ROW_(0, dim, words_)                                            \
            PERSIA_WRITE_ROW_(1, dim, words_)                                            \
        }                                                                                \
        PERSIA_KEEP_ROWS_(row, dim, words_, at_, block_->num_rows);                      \
    } while (0)
#define PERSIA_TRY_ROW_(row, k, dim, words)                                              \
    persia_copy_words(values_[k], block_->values[at_ + (k)], dim);                       \
    persia_copy_words(states_[k], block_->states[at_ + (k)], words);                     \
    row(values_[k], states_[k], block_->grads[at_ + (k)], dim);                          \
    persia_see_row(&seen_, values_[k], dim, bound_);
#define PERSIA_WRITE_ROW_(k, dim, words)                                                 \
    persia_copy_words(block_->values[at_ + (k)], values_[k], dim);                       \
    persia_copy_words(block_->states[at_ + (k)], states_[k], words);

/* Steps rows in place, and keeps what each was. Of rows too wide for that servers have copies. */
#define PERSIA_KEEP_ROWS_(row, dim, words, begin, end)                                   \
    do {                                                                                 \
        const size_t num_words_ = (words);                                               \
        const int is_kept_ = (dim) + num_words_ <= PERSIA_GUARDED_WORDS;                 \
        for (size_t i_ = (begin); i_ < (end); i_++) {                                    \
            persia_seen_t last_ = {{0}, {0}, 0};                                         \
            if (is_kept_) {                                                              \
                persia_copy_words(kept_, block_->values[i_], dim);                       \
                persia_copy_words(kept_ + (dim), block_->states[i_], num_words_);        \
            }                                                                            \
            row(block_->values[i_], block_->states[i_], block_->grads[i_], dim);         \
            if (is_kept_)                                                                \
                persia_see_row(&last_, block_->values[i_], dim, bound_);                 \
            if (persia_is_beyond(&last_))                                                \
                code_ |= persia_settle(block_, i_, i_ + 1, kept_, num_words_);           \
        }                                                                                \
    } while (0)

typedef int32_t persia_ints4_t __attribute__((vector_size(16)));
typedef int32_t persia_ints8_t __attribute__((vector_size(32)));
typedef int32_t persia_ints16_t __attribute__((vector_size(64)));

/* Signs of differences from a bound, of all values that were looked at. */
typedef struct {
    persia_ints16_t line;
    persia_ints8_t lanes;
    int32_t rest;
} persia_seen_t;

/* Looks for values beyond the bound, and NaNs. Without signs, floats are in the order of their
 * bits, and NaNs are the largest: a difference from the bound below 0 says both. Where dim is a
 * literal there is no loop left. */
PERSIA_ROW_INLINE void persia_see_row(persia_seen_t *seen, const float *w, size_t dim, float bound)
{
    int32_t most, one;
    persia_ints8_t eight;
    persia_ints16_t sixteen;
    size_t j = 0;
    memcpy(&most, &bound, sizeof most);
    for (; j + 16 <= dim; j += 16) {
        memcpy(&sixteen, w + j, sizeof sixteen);
        seen->line |= most - (sixteen & INT32_MAX);
    }
    if (dim & 8) {
        memcpy(&eight, w + j, sizeof eight);
        seen->lanes |= most - (eight & INT32_MAX);
        j += 8;
    }
    for (; j < dim; j++) {
        memcpy(&one, w + j, sizeof one);
        seen->rest |= most - (one & INT32_MAX);
    }
}

PERSIA_ROW_INLINE int persia_is_beyond(const persia_seen_t *seen)
{
    persia_ints8_t lower, upper;
    persia_ints4_t four, others;
    uint64_t pairs[2];
    memcpy(&lower, &seen->line, sizeof lower);
    memcpy(&upper, (const char *)&seen->line + sizeof lower, sizeof upper);
    lower |= upper | seen->lanes;
    memcpy(&four, &lower, sizeof four);
    memcpy(&others, (const char *)&lower + sizeof four, sizeof others);
    four |= others;
    memcpy(pairs, &four, sizeof pairs);
    return ((pairs[0] | pairs[1]) & 0x8000000080000000u) != 0 || seen->rest < 0;
}

/* Copies words of 4 bytes; where their number is a literal there is no loop left. */
PERSIA_ROW_INLINE void persia_copy_words(float *to, const float *from, size_t count)
{
    persia_ints8_t eight;
    persia_ints16_t sixteen;
    size_t j = 0;
    for (; j + 16 <= count; j += 16) {
        memcpy(&sixteen, from + j, sizeof sixteen);
        memcpy(to + j, &sixteen, sizeof sixteen);
    }
    if (count & 8) {
        memcpy(&eight, from + j, sizeof eight);
        memcpy(to + j, &eight, sizeof eight);
        j += 8;
    }
    for (; j < count; j++)
        memcpy(to + j, from + j, sizeof(float));
}

/* Bounds the values of rows from `begin` to `end`, and puts a row back that has a NaN though it
 * had none, and its gradient neither; `kept` has the rows as they were, each behind the one
 * before. NULL: nothing is put back, and what a row had is not known. A NaN stays one, and
 * infinity may make one. Returns the code of those rows, or 0. */
__attribute__((noinline, unused)) static int persia_settle(
    const persia_block_t *rows, size_t begin, size_t end, const float *kept, size_t words)
{
    const size_t dim = rows->dim;
    const float bound = rows->bound;
    int code = 0;
    for (size_t i = begin; i < end; i++) {
        float *w = rows->values[i];
        const float *grad = rows->grads[i];
        const float *old = kept == NULL ? grad : kept + (i - begin) * (dim + words);
        int has_nan = 0, was_finite = 1;
        for (size_t j = 0; j < dim; j++) {
            const float most = bound < w[j] ? bound : w[j];
            w[j] = most < -bound ? -bound : most;
            has_nan |= most != most;
        }
        for (size_t j = 0; has_nan && j < dim; j++)
            was_finite &= __builtin_isfinite(old[j]) && __builtin_isfinite(grad[j]);
        if (!has_nan || !was_finite)
            continue;
        if (kept != NULL) {
            memcpy(w, old, dim * sizeof(float));
            memcpy(rows->states[i], old + dim, words * sizeof(float));
        }
        rows->codes[i] = code = PERSIA_WROTE_NAN;
    }
    return code;
}

#endif
