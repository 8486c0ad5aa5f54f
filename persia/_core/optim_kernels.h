/* One step of an optimizer on whole rows.
 *
 *     values[i] -> | embedding, dim floats | state |
 *
 *     sgd                no state
 *     sgd_momentum       velocity, dim
 *     adagrad            sum of squares, dim
 *     adagrad_shared     one sum of mean squares for the whole row
 *     adam               m, dim | v, dim | step count, a u32 in a float's place
 *
 * The formulas are torch.optim's (SGD, Adagrad, Adam). The two _original kernels keep the old
 * PERSIA's order instead: step by the old accumulator with eps under the root, accumulate
 * afterwards. Weight decay is coupled L2 everywhere: g + weight_decay * w.
 *
 * A new kernel is a row function, a PERSIA_STEP line, a kind and an entry in the table.
 */
#ifndef PERSIA_OPTIM_KERNELS_H
#define PERSIA_OPTIM_KERNELS_H

#include <math.h>

#include "kernels.h"

typedef enum {
    PERSIA_SGD,
    PERSIA_SGD_MOMENTUM,
    PERSIA_ADAGRAD,
    PERSIA_ADAGRAD_ORIGINAL,
    PERSIA_ADAGRAD_SHARED,
    PERSIA_ADAGRAD_SHARED_ORIGINAL,
    PERSIA_ADAM,
    PERSIA_NUM_KINDS
} persia_kind_t;

/* How many rows ahead are fetched: a step takes 5 to 15 ns, a miss about 100. */
#define PERSIA_STEP_AHEAD 10

/* A NaN stays a NaN, as in torch.clamp: a bound shall not hide that a row is lost. */
PERSIA_INLINE float persia_bounded(float w, float bound)
{
    w = bound < w ? bound : w;
    return w < -bound ? -bound : w;
}

PERSIA_INLINE float persia_decayed(float g, float w, float weight_decay)
{
    /* Not always-add: 0 * Inf would turn an infinite weight into NaN without any decay. */
    return weight_decay != 0.0f ? g + weight_decay * w : g;
}

/* Mean of the squared (decayed) gradient. Lane k adds the elements k, k + 8, k + 16, ... in
 * order; the lanes join as ((0+4)+(2+6)) + ((1+5)+(3+7)). This order is part of the result. */
PERSIA_INLINE float persia_mean_square(
    const float *restrict w, const float *restrict g, size_t dim, float weight_decay)
{
    float lane[8] = {0};
    size_t j = 0;
    for (; j + 8 <= dim; j += 8)
        for (size_t k = 0; k < 8; k++) {
            const float d = persia_decayed(g[j + k], w[j + k], weight_decay);
            lane[k] += d * d;
        }
    for (size_t k = 0; j + k < dim; k++) {
        const float d = persia_decayed(g[j + k], w[j + k], weight_decay);
        lane[k] += d * d;
    }
    const float sum = ((lane[0] + lane[4]) + (lane[2] + lane[6]))
                      + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
    return sum / (float)dim;
}

PERSIA_INLINE double persia_power(double base, uint32_t exponent)
{
    double result = 1.0;
    for (; exponent; exponent >>= 1, base *= base)
        if (exponent & 1)
            result *= base;
    return result;
}

/* One function for the table and beyond it, so that there is no seam. Needs t >= 1. */
static inline persia_correction_t persia_correction(const persia_optim_t *o, uint32_t t)
{
    const persia_correction_t c = {
        (float)(o->lr_exact / (1.0 - persia_power(o->beta1_exact, t))),
        (float)(1.0 / sqrt(1.0 - persia_power(o->beta2_exact, t))),
    };
    return c;
}

/* --- one row ------------------------------------------------------------------------------- */

PERSIA_INLINE void persia_sgd_row(
    float *restrict w, float *restrict s, const float *restrict g, size_t dim,
    const persia_optim_t *o)
{
    (void)s;
    const float lr = o->lr, decay = o->weight_decay, bound = o->weight_bound;
    for (size_t j = 0; j < dim; j++)
        w[j] = persia_bounded(w[j] - lr * persia_decayed(g[j], w[j], decay), bound);
}

PERSIA_INLINE void persia_sgd_momentum_row(
    float *restrict w, float *restrict s, const float *restrict g, size_t dim,
    const persia_optim_t *o)
{
    const float lr = o->lr, decay = o->weight_decay, bound = o->weight_bound;
    const float momentum = o->momentum;
    for (size_t j = 0; j < dim; j++) {
        const float velocity = s[j] * momentum + persia_decayed(g[j], w[j], decay);
        s[j] = velocity;
        w[j] = persia_bounded(w[j] - lr * velocity, bound);
    }
}

PERSIA_INLINE void persia_adagrad_row(
    float *restrict w, float *restrict s, const float *restrict g, size_t dim,
    const persia_optim_t *o)
{
    const float lr = o->lr, decay = o->weight_decay, bound = o->weight_bound;
    const float eps = o->eps, keep = o->g_square_momentum;
    for (size_t j = 0; j < dim; j++) {
        const float d = persia_decayed(g[j], w[j], decay);
        const float sum = s[j] * keep + d * d;
        s[j] = sum;
        w[j] = persia_bounded(w[j] - lr * d / (sqrtf(sum) + eps), bound);
    }
}

PERSIA_INLINE void persia_adagrad_original_row(
    float *restrict w, float *restrict s, const float *restrict g, size_t dim,
    const persia_optim_t *o)
{
    const float lr = o->lr, decay = o->weight_decay, bound = o->weight_bound;
    const float eps = o->eps, keep = o->g_square_momentum;
    for (size_t j = 0; j < dim; j++) {
        const float d = persia_decayed(g[j], w[j], decay);
        const float sum = s[j];
        s[j] = sum * keep + d * d;
        w[j] = persia_bounded(w[j] - lr * d / sqrtf(sum + eps), bound);
    }
}

PERSIA_INLINE void persia_adagrad_shared_row(
    float *restrict w, float *restrict s, const float *restrict g, size_t dim,
    const persia_optim_t *o)
{
    const float lr = o->lr, decay = o->weight_decay, bound = o->weight_bound;
    const float sum = s[0] * o->g_square_momentum + persia_mean_square(w, g, dim, decay);
    const float divisor = sqrtf(sum) + o->eps;
    s[0] = sum;
    for (size_t j = 0; j < dim; j++)
        w[j] = persia_bounded(w[j] - lr * persia_decayed(g[j], w[j], decay) / divisor, bound);
}

PERSIA_INLINE void persia_adagrad_shared_original_row(
    float *restrict w, float *restrict s, const float *restrict g, size_t dim,
    const persia_optim_t *o)
{
    const float lr = o->lr, decay = o->weight_decay, bound = o->weight_bound;
    const float sum = s[0];
    const float divisor = sqrtf(sum + o->eps);
    s[0] = sum * o->g_square_momentum + persia_mean_square(w, g, dim, decay);
    for (size_t j = 0; j < dim; j++)
        w[j] = persia_bounded(w[j] - lr * persia_decayed(g[j], w[j], decay) / divisor, bound);
}

PERSIA_INLINE void persia_adam_row(
    float *restrict w, float *restrict s, const float *restrict g, size_t dim,
    const persia_optim_t *o)
{
    const float decay = o->weight_decay, bound = o->weight_bound, eps = o->eps;
    const float beta1 = o->beta1, rest1 = o->beta1_rest;
    const float beta2 = o->beta2, rest2 = o->beta2_rest;
    float *restrict m = s;
    float *restrict v = s + dim;
    uint32_t count; /* of the steps of this row; travels with it, so it survives everything */
    memcpy(&count, s + 2 * dim, sizeof count);
    count += count != UINT32_MAX;
    memcpy(s + 2 * dim, &count, sizeof count);
    const persia_correction_t c =
        count <= o->num_corrections ? o->corrections[count - 1] : persia_correction(o, count);
    for (size_t j = 0; j < dim; j++) {
        const float d = persia_decayed(g[j], w[j], decay);
        const float first = beta1 * m[j] + rest1 * d;
        const float second = beta2 * v[j] + rest2 * d * d;
        m[j] = first;
        v[j] = second;
        const float divisor = sqrtf(second) * c.inverse_root + eps;
        w[j] = persia_bounded(w[j] - c.step_size * first / divisor, bound);
    }
}

/* --- whole batches --------------------------------------------------------------------------- */

/* state_words must be the row's state width, for the prefetch only. The common dims are
 * literals to the compiler, so their rows have neither loop counters nor remainders. */
#define PERSIA_STEP(name, state_words)                                                   \
    PERSIA_INLINE void name##_loop(                                                      \
        float *const *values, const float *const *grads, size_t n, size_t dim,           \
        const persia_optim_t *settings)                                                  \
    {                                                                                    \
        const persia_optim_t o = *settings; /* a store to a row cannot change the copy */ \
        for (size_t i = 0; i < n; i++) {                                                 \
            if (i + PERSIA_STEP_AHEAD < n) {                                             \
                PERSIA_FETCH_LINES(values[i + PERSIA_STEP_AHEAD],                        \
                                   4 * (dim + (state_words)), 1);                        \
                PERSIA_FETCH_LINES(grads[i + PERSIA_STEP_AHEAD], 4 * dim, 0);            \
            }                                                                            \
            name##_row(values[i], values[i] + dim, grads[i], dim, &o);                   \
        }                                                                                \
    }                                                                                    \
    PERSIA_INLINE void name##_body(                                                      \
        float *const *values, const float *const *grads, size_t n, size_t dim,           \
        const persia_optim_t *settings)                                                  \
    {                                                                                    \
        switch (dim) {                                                                   \
        case 8: name##_loop(values, grads, n, 8, settings); break;                       \
        case 16: name##_loop(values, grads, n, 16, settings); break;                     \
        case 32: name##_loop(values, grads, n, 32, settings); break;                     \
        case 64: name##_loop(values, grads, n, 64, settings); break;                     \
        default: name##_loop(values, grads, n, dim, settings);                           \
        }                                                                                \
    }                                                                                    \
    PERSIA_VARIANTS(                                                                     \
        void, name,                                                                      \
        (float *const *values, const float *const *grads, size_t n, size_t dim,          \
         const persia_optim_t *settings),                                                \
        (values, grads, n, dim, settings))

PERSIA_STEP(persia_sgd, 0)
PERSIA_STEP(persia_sgd_momentum, dim)
PERSIA_STEP(persia_adagrad, dim)
PERSIA_STEP(persia_adagrad_original, dim)
PERSIA_STEP(persia_adagrad_shared, 1)
PERSIA_STEP(persia_adagrad_shared_original, 1)
PERSIA_STEP(persia_adam, 2 * dim + 1)

static const persia_step_t persia_steps[PERSIA_NUM_KINDS][PERSIA_NUM_LEVELS] = {
    [PERSIA_SGD] = PERSIA_LEVELS(persia_sgd),
    [PERSIA_SGD_MOMENTUM] = PERSIA_LEVELS(persia_sgd_momentum),
    [PERSIA_ADAGRAD] = PERSIA_LEVELS(persia_adagrad),
    [PERSIA_ADAGRAD_ORIGINAL] = PERSIA_LEVELS(persia_adagrad_original),
    [PERSIA_ADAGRAD_SHARED] = PERSIA_LEVELS(persia_adagrad_shared),
    [PERSIA_ADAGRAD_SHARED_ORIGINAL] = PERSIA_LEVELS(persia_adagrad_shared_original),
    [PERSIA_ADAM] = PERSIA_LEVELS(persia_adam),
};

#endif
