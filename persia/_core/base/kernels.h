/* What every kernel header shares: the instruction-set variants and the optimizer settings.
 *
 * A kernel is ONE plain C loop, written as an always-inline function without a target of its own.
 * PERSIA_VARIANTS calls it from one function per instruction set, and the compiler vectorises
 * the inlined loop for each. All variants give the same bytes, because
 *
 *   - the build passes -ffp-contract=off and no fast-math, so no variant fuses or reorders;
 *   - elementwise loops have no order to change, square root and division are exact;
 *   - the one reduction (persia_mean_square) adds in 8 fixed lanes and a fixed tree.
 *
 * The alternative not taken is intrinsics per instruction set: three copies of each formula.
 */
#ifndef PERSIA_KERNELS_H
#define PERSIA_KERNELS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "persia_kernels.h"

#define PERSIA_INLINE static inline __attribute__((always_inline))

/* PERSIA_ROW_LOOP stands before a loop over a row. gcc peels a loop of 8 or 16 rounds into scalars
 * before its vectoriser sees it, and then cannot prove that the rows are apart (half the speed). */
#if defined(__clang__)
#define PERSIA_SAME_OR_APART
#else
/* The same for rows that are one row or have nothing in common. */
#define PERSIA_SAME_OR_APART _Pragma("GCC ivdep") _Pragma("GCC unroll 1")
#endif

#if defined(__x86_64__)
#define PERSIA_NUM_LEVELS 3
#define PERSIA_AVX2 __attribute__((target("avx2,f16c")))
#define PERSIA_AVX512 __attribute__((target("avx2,f16c,avx512f,avx512vl,avx512bw,avx512dq")))
/* Defines name_baseline, name_avx2 and name_avx512, each with this body. */
#define PERSIA_VARIANTS(result, name, parameters, ...)         \
    static result name##_baseline parameters __VA_ARGS__       \
    PERSIA_AVX2 static result name##_avx2 parameters __VA_ARGS__ \
    PERSIA_AVX512 static result name##_avx512 parameters __VA_ARGS__
/* The variants in the order of isa_level(), for an array of PERSIA_NUM_LEVELS. */
#define PERSIA_LEVELS(name) { name##_baseline, name##_avx2, name##_avx512 }
#else
#define PERSIA_NUM_LEVELS 1
#define PERSIA_VARIANTS(result, name, parameters, ...) \
    static result name##_baseline parameters __VA_ARGS__
#define PERSIA_LEVELS(name) { name##_baseline }
#endif

#if defined(__x86_64__)

/* The highest level that this processor and its operating system can run: 0 baseline, 1 avx2 and f16c, 2 avx512 f/vl/bw/dq on top. */
static inline int persia_best_level(void)
{
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d))
        return 0;
    /* 27: the system saves extended registers; 28: avx; 29: f16c. */
    const unsigned needed = 1u << 27 | 1u << 28 | 1u << 29;
    if ((c & needed) != needed)
        return 0;
    unsigned saved, saved_high;
    __asm__ volatile("xgetbv" : "=a"(saved), "=d"(saved_high) : "c"(0));
    if ((saved & 0x06) != 0x06) /* xmm and ymm */
        return 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b & 1u << 5))
        return 0;
    /* 16: f; 17: dq; 30: bw; 31: vl. State bits 5..7: masks, zmm. */
    const unsigned wide = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;
    return (b & wide) == wide && (saved & 0xE6) == 0xE6 ? 2 : 1;
}

#else

static inline int persia_best_level(void) { return 0; }

#endif

/* The common dims become literals to the compiler: rows without counters or remainders. For a
 * loop that returns something, `loop` is an assignment of it. */
#define PERSIA_BY_DIM(loop, dim, ...)                \
    switch (dim) {                                   \
    case 8: loop(8, __VA_ARGS__); break;             \
    case 16: loop(16, __VA_ARGS__); break;           \
    case 32: loop(32, __VA_ARGS__); break;           \
    case 64: loop(64, __VA_ARGS__); break;           \
    default: loop(dim, __VA_ARGS__);                 \
    }

/* Fetches the cache lines of `bytes` at `address`, at most 5: a longer row runs on under the
 * hardware's own prefetcher. `for_write` must be a literal. */
#define PERSIA_FETCH_LINES(address, bytes, for_write)                                    \
    do {                                                                                 \
        const char *start_ = (const char *)(address);                                    \
        const size_t last_ = (bytes) - 1;                                                \
        for (size_t at_ = 0; at_ < last_ && at_ < 256; at_ += 64)                        \
            __builtin_prefetch(start_ + at_, for_write);                                 \
        if (last_ < 256)                                                                 \
            __builtin_prefetch(start_ + last_, for_write); /* a row may straddle a line */ \
    } while (0)

/* An Adam step's two corrections for one step count t, computed in double. */
typedef struct {
    float step_size;    /* lr / (1 - beta1^t) */
    float inverse_root; /* 1 / sqrt(1 - beta2^t) */
} persia_correction_t;

/* Settings of an optimizer; a kernel reads only its own. Owned by a RowOptimizer. */
typedef struct {
    int kind; /* of optim_kernels.h */
    float lr;
    float weight_decay;        /* 0 is none */
    float weight_bound;        /* |value| after a step is at most this; infinity is no bound */
    float momentum;
    float beta1, beta2;        /* RMSprop's alpha is beta2 */
    float beta1_rest, beta2_rest; /* 1 - beta, rounded once from double */
    float eps;
    float beta, l1, l2;        /* FTRL's */
    float g_square_momentum;
    float initial_accumulator;
    double lr_exact, beta1_exact, beta2_exact; /* for step counts beyond the table */
    const persia_correction_t *corrections;    /* [num_corrections], entry t - 1 for count t */
    uint32_t num_corrections;
    /* Of a kernel that has the interface of persia_kernels.h; otherwise NULL. */
    const persia_optimizer_t *native;
    int (*const *native_steps)(const persia_block_t *rows); /* [PERSIA_NUM_LEVELS] */
    const double *native_params;
    const uint32_t *native_widths; /* of state, by dim up to the largest */
    const char *native_name;
    int is_trusted;                /* it cannot fail */
    int is_guarded;                /* rows are kept, to be put back if it fails for them */
    int guards_rows;               /* it does so itself */
} persia_optim_t;

/* What a call of a step is about, and what became of it. */
typedef struct {
    uint64_t number;       /* of the update */
    /* Old values and state of the rows, one row behind the other, where the caller keeps them;
     * otherwise NULL, and what may be put back is copied. */
    float *kept;
    uint32_t num_failed;   /* rows that are as they were, because the kernel failed */
    uint32_t first_failed; /* place of the first of them */
    int code;              /* that the kernel returned for it, or PERSIA_WROTE_NAN */
} persia_call_t;

#define PERSIA_NO_MEMORY (INT32_MIN + 1) /* beside PERSIA_WROTE_NAN */

PERSIA_INLINE persia_call_t persia_new_call(uint64_t number, void *kept)
{
    const persia_call_t call = {.number = number, .kept = (float *)kept};
    return call;
}

/* Steps n rows. values[i] is row i's embedding (dim floats); states[i] its state, which is right
 * behind the embedding where `states` is NULL; grads[i] is its gradient (dim floats). None of
 * them overlap. */
typedef void (*persia_step_t)(
    float *const *values, float *const *states, const float *const *grads, size_t n, size_t dim,
    const persia_optim_t *settings, persia_call_t *call);

#endif
