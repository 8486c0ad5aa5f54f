/* One step of an optimizer on whole rows.
 *
 *     values[i] -> | embedding, dim floats | state |
 *
 *     sgd                no state
 *     sgd_momentum       velocity, dim
 *     adagrad            sum of squares, dim
 *     adagrad_shared     one sum of mean squares for the whole row
 *     adam               m, dim | v, dim | step count, a u32 in a float's place
 *     rowwise_adam       m, dim | one v for the whole row | step count
 *     rmsprop            mean square, dim
 *     rmsprop_momentum   mean square, dim | velocity, dim
 *     ftrl               z, dim | sum of squares, dim
 *     lion               m, dim
 *
 * The formulas are torch.optim's (SGD, Adagrad, Adam, RMSprop) and the papers' (FTRL-Proximal,
 * Lion). The two _original kernels keep the old PERSIA's order instead: step by the old
 * accumulator with eps under the root, accumulate afterwards. Weight decay is coupled L2,
 * g + weight_decay * w; only Lion's is decoupled.
 *
 * A new kernel is a row function and a line of PERSIA_OPTIMIZERS.
 */
#ifndef PERSIA_OPTIM_KERNELS_H
#define PERSIA_OPTIM_KERNELS_H

#include <math.h>

#include "kernels.h"

/* A kernel's number, its function, and the state of a row: vectors of dim words, and words. */
#define PERSIA_OPTIMIZERS(X)                                             \
    X(PERSIA_SGD, persia_sgd, 0, 0)                                      \
    X(PERSIA_SGD_MOMENTUM, persia_sgd_momentum, 1, 0)                    \
    X(PERSIA_ADAGRAD, persia_adagrad, 1, 0)                              \
    X(PERSIA_ADAGRAD_ORIGINAL, persia_adagrad_original, 1, 0)            \
    X(PERSIA_ADAGRAD_SHARED, persia_adagrad_shared, 0, 1)                \
    X(PERSIA_ADAGRAD_SHARED_ORIGINAL, persia_adagrad_shared_original, 0, 1) \
    X(PERSIA_ADAM, persia_adam, 2, 1)                                    \
    X(PERSIA_ROWWISE_ADAM, persia_rowwise_adam, 1, 2)                    \
    X(PERSIA_RMSPROP, persia_rmsprop, 1, 0)                              \
    X(PERSIA_RMSPROP_MOMENTUM, persia_rmsprop_momentum, 2, 0)            \
    X(PERSIA_FTRL, persia_ftrl, 2, 0)                                    \
    X(PERSIA_LION, persia_lion, 1, 0)

#define PERSIA_KIND(kind, name, vectors, words) kind,
enum { PERSIA_OPTIMIZERS(PERSIA_KIND) PERSIA_NUM_KINDS };

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

typedef float persia_lanes_t __attribute__((vector_size(32)));
typedef float persia_half_lanes_t __attribute__((vector_size(16)));

/* Mean of the squared (decayed) gradient. Lane k adds the elements k, k + 8, k + 16, ... in
 * order; the lanes join as ((0+4)+(2+6)) + ((1+5)+(3+7)). This order is part of the result.
 * A vector type, because gcc takes an array of lanes apart into scalars (half the speed). */
PERSIA_INLINE float persia_mean_square(
    const float *restrict w, const float *restrict g, size_t dim, float weight_decay)
{
    persia_lanes_t sums = {0}, d, values;
    size_t j = 0;
    for (; j + 8 <= dim; j += 8) {
        memcpy(&d, g + j, sizeof d);
        if (weight_decay != 0.0f) {
            memcpy(&values, w + j, sizeof values);
            d += weight_decay * values;
        }
        sums += d * d;
    }
    if (j < dim) {
        float rest[8] = {0};
        for (size_t k = 0; j + k < dim; k++)
            rest[k] = persia_decayed(g[j + k], w[j + k], weight_decay);
        memcpy(&d, rest, sizeof d);
        sums += d * d;
    }
    persia_half_lanes_t lower, upper;
    memcpy(&lower, &sums, sizeof lower);
    memcpy(&upper, (const char *)&sums + sizeof lower, sizeof upper);
    lower += upper;
    return ((lower[0] + lower[2]) + (lower[1] + lower[3])) / (float)dim;
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

/* Of embedding w and state s, by gradient g. */
#define PERSIA_ROW(name)                                                                      \
    PERSIA_INLINE void name##_row(float *restrict w, float *restrict s,                       \
                                  const float *restrict g, size_t dim, const persia_optim_t *o)

PERSIA_ROW(persia_sgd)
{
    (void)s;
    const float lr = o->lr, decay = o->weight_decay, bound = o->weight_bound;
    PERSIA_ROW_LOOP
    for (size_t j = 0; j < dim; j++)
        w[j] = persia_bounded(w[j] - lr * persia_decayed(g[j], w[j], decay), bound);
}

PERSIA_ROW(persia_sgd_momentum)
{
    const float lr = o->lr, decay = o->weight_decay, bound = o->weight_bound;
    const float momentum = o->momentum;
    PERSIA_ROW_LOOP
    for (size_t j = 0; j < dim; j++) {
        const float velocity = s[j] * momentum + persia_decayed(g[j], w[j], decay);
        s[j] = velocity;
        w[j] = persia_bounded(w[j] - lr * velocity, bound);
    }
}

PERSIA_ROW(persia_adagrad)
{
    const float lr = o->lr, decay = o->weight_decay, bound = o->weight_bound;
    const float eps = o->eps, keep = o->g_square_momentum;
    PERSIA_ROW_LOOP
    for (size_t j = 0; j < dim; j++) {
        const float d = persia_decayed(g[j], w[j], decay);
        const float sum = s[j] * keep + d * d;
        s[j] = sum;
        w[j] = persia_bounded(w[j] - lr * d / (sqrtf(sum) + eps), bound);
    }
}

PERSIA_ROW(persia_adagrad_original)
{
    const float lr = o->lr, decay = o->weight_decay, bound = o->weight_bound;
    const float eps = o->eps, keep = o->g_square_momentum;
    PERSIA_ROW_LOOP
    for (size_t j = 0; j < dim; j++) {
        const float d = persia_decayed(g[j], w[j], decay);
        const float sum = s[j];
        s[j] = sum * keep + d * d;
        w[j] = persia_bounded(w[j] - lr * d / sqrtf(sum + eps), bound);
    }
}

PERSIA_ROW(persia_adagrad_shared)
{
    const float lr = o->lr, decay = o->weight_decay, bound = o->weight_bound;
    const float sum = s[0] * o->g_square_momentum + persia_mean_square(w, g, dim, decay);
    const float divisor = sqrtf(sum) + o->eps;
    s[0] = sum;
    PERSIA_ROW_LOOP
    for (size_t j = 0; j < dim; j++)
        w[j] = persia_bounded(w[j] - lr * persia_decayed(g[j], w[j], decay) / divisor, bound);
}

PERSIA_ROW(persia_adagrad_shared_original)
{
    const float lr = o->lr, decay = o->weight_decay, bound = o->weight_bound;
    const float sum = s[0];
    const float divisor = sqrtf(sum + o->eps);
    s[0] = sum * o->g_square_momentum + persia_mean_square(w, g, dim, decay);
    PERSIA_ROW_LOOP
    for (size_t j = 0; j < dim; j++)
        w[j] = persia_bounded(w[j] - lr * persia_decayed(g[j], w[j], decay) / divisor, bound);
}

/* Counts a step in the row's own count, which travels with it and so survives everything. */
PERSIA_INLINE persia_correction_t persia_next_step(float *words, const persia_optim_t *o)
{
    uint32_t count;
    memcpy(&count, words, sizeof count);
    count += count != UINT32_MAX;
    memcpy(words, &count, sizeof count);
    return count <= o->num_corrections ? o->corrections[count - 1] : persia_correction(o, count);
}

PERSIA_ROW(persia_adam)
{
    const float decay = o->weight_decay, bound = o->weight_bound, eps = o->eps;
    const float beta1 = o->beta1, rest1 = o->beta1_rest;
    const float beta2 = o->beta2, rest2 = o->beta2_rest;
    float *restrict m = s;
    float *restrict v = s + dim;
    const persia_correction_t c = persia_next_step(s + 2 * dim, o);
    PERSIA_ROW_LOOP
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

PERSIA_ROW(persia_rowwise_adam)
{
    const float decay = o->weight_decay, bound = o->weight_bound;
    const float beta1 = o->beta1, rest1 = o->beta1_rest;
    const persia_correction_t c = persia_next_step(s + dim + 1, o);
    const float second =
        o->beta2 * s[dim] + o->beta2_rest * persia_mean_square(w, g, dim, decay);
    const float divisor = sqrtf(second) * c.inverse_root + o->eps;
    s[dim] = second;
    PERSIA_ROW_LOOP
    for (size_t j = 0; j < dim; j++) {
        const float first = beta1 * s[j] + rest1 * persia_decayed(g[j], w[j], decay);
        s[j] = first;
        w[j] = persia_bounded(w[j] - c.step_size * first / divisor, bound);
    }
}

PERSIA_ROW(persia_rmsprop)
{
    const float lr = o->lr, decay = o->weight_decay, bound = o->weight_bound;
    const float eps = o->eps, keep = o->beta2, rest = o->beta2_rest;
    PERSIA_ROW_LOOP
    for (size_t j = 0; j < dim; j++) {
        const float d = persia_decayed(g[j], w[j], decay);
        const float mean = keep * s[j] + rest * d * d;
        s[j] = mean;
        w[j] = persia_bounded(w[j] - lr * d / (sqrtf(mean) + eps), bound);
    }
}

PERSIA_ROW(persia_rmsprop_momentum)
{
    const float lr = o->lr, decay = o->weight_decay, bound = o->weight_bound;
    const float eps = o->eps, keep = o->beta2, rest = o->beta2_rest, momentum = o->momentum;
    float *restrict v = s;
    float *restrict velocity = s + dim;
    PERSIA_ROW_LOOP
    for (size_t j = 0; j < dim; j++) {
        const float d = persia_decayed(g[j], w[j], decay);
        const float mean = keep * v[j] + rest * d * d;
        const float move = momentum * velocity[j] + d / (sqrtf(mean) + eps);
        v[j] = mean;
        velocity[j] = move;
        w[j] = persia_bounded(w[j] - lr * move, bound);
    }
}

/* FTRL-Proximal per element, with z times the learning rate, so that another rate weighs the
 * gradients to come and leaves the past alone:
 *
 *     z += lr * g - (sqrt(n + g^2) - sqrt(n)) * w,   n += g^2
 *     w  = 0 where |z| <= lr * l1, else -(z - sign(z) * lr * l1) / (beta + sqrt(n) + lr * l2)
 *
 * An element without any gradient yet (n is 0) keeps its initial value, and begins with the z
 * for which the second line gives that value; for an initial value of 0 this is the paper's 0. */
PERSIA_ROW(persia_ftrl)
{
    const float lr = o->lr, decay = o->weight_decay, bound = o->weight_bound;
    const float l1 = lr * o->l1, fixed = o->beta + lr * o->l2;
    float *restrict z = s;
    float *restrict n = s + dim;
    PERSIA_ROW_LOOP
    for (size_t j = 0; j < dim; j++) {
        const float d = persia_decayed(g[j], w[j], decay);
        const float before = n[j], sum = before + d * d, root = sqrtf(sum);
        const float edge = w[j] > 0.0f ? l1 : w[j] < 0.0f ? -l1 : 0.0f;
        const float begin = before == 0.0f ? 0.0f - (w[j] * fixed + edge) : z[j];
        const float now = begin + (lr * d - (root - sqrtf(before)) * w[j]);
        const float shrunk = now > 0.0f ? now - l1 : now + l1;
        const float beyond = fabsf(now) <= l1 ? 0.0f : shrunk;
        const float moved = 0.0f - beyond / (fixed + root);
        n[j] = sum;
        z[j] = now;
        w[j] = persia_bounded(sum == 0.0f ? w[j] : moved, bound);
    }
}

PERSIA_ROW(persia_lion)
{
    const float lr = o->lr, decay = o->weight_decay, bound = o->weight_bound;
    const float beta1 = o->beta1, rest1 = o->beta1_rest;
    const float beta2 = o->beta2, rest2 = o->beta2_rest;
    PERSIA_ROW_LOOP
    for (size_t j = 0; j < dim; j++) {
        const float mixed = beta1 * s[j] + rest1 * g[j];
        /* The sign of 0 is 0, and that of a NaN is a NaN. */
        const float sign = mixed > 0.0f ? 1.0f : mixed < 0.0f ? -1.0f : mixed;
        s[j] = beta2 * s[j] + rest2 * g[j];
        w[j] = persia_bounded(w[j] - lr * persia_decayed(sign, w[j], decay), bound);
    }
}

/* --- whole batches --------------------------------------------------------------------------- */

#define PERSIA_STEPPED                                                                   \
    float *const *values, float *const *states, const float *const *grads, size_t n
#define PERSIA_STEP(kind, name, vectors, words)                                          \
    PERSIA_INLINE void name##_loop(                                                      \
        size_t dim, PERSIA_STEPPED, const persia_optim_t *settings)                      \
    {                                                                                    \
        const persia_optim_t o = *settings; /* a store to a row cannot change the copy */ \
        for (size_t i = 0; i < n; i++) {                                                 \
            if (i + PERSIA_STEP_AHEAD < n) {                                             \
                PERSIA_FETCH_LINES(values[i + PERSIA_STEP_AHEAD],                        \
                                   4 * ((1 + (vectors)) * dim + (words)), 1);            \
                PERSIA_FETCH_LINES(grads[i + PERSIA_STEP_AHEAD], 4 * dim, 0);            \
            }                                                                            \
            name##_row(values[i], states ? states[i] : values[i] + dim, grads[i], dim,   \
                       &o);                                                              \
        }                                                                                \
    }                                                                                    \
    PERSIA_VARIANTS(                                                                     \
        void, name,                                                                      \
        (PERSIA_STEPPED, size_t dim, const persia_optim_t *settings, persia_call_t *call), \
        { (void)call; PERSIA_BY_DIM(name##_loop, dim, values, states, grads, n, settings) })

PERSIA_OPTIMIZERS(PERSIA_STEP)

typedef struct {
    persia_step_t steps[PERSIA_NUM_LEVELS];
    uint32_t vectors, words; /* of state */
} persia_kernel_t;

#define PERSIA_KERNEL(kind, name, vectors, words) [kind] = { PERSIA_LEVELS(name), vectors, words },

static const persia_kernel_t persia_kernels[PERSIA_NUM_KINDS] = {
    PERSIA_OPTIMIZERS(PERSIA_KERNEL)
};

#endif
