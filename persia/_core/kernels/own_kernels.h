/* Optimizers of PERSIA's own that have the interface of persia_kernels.h, as a user's have.
 *
 *     nesterov   velocity, dim                                   torch.optim.SGD(nesterov=True)
 *     adadelta   mean square, dim | mean square of steps, dim    torch.optim.Adadelta
 *     adamw      m, dim | v, dim | step count                    torch.optim.AdamW
 *     amsgrad    m, dim | v, dim | largest v, dim | step count   torch.optim.Adam(amsgrad=True)
 *     lamb       m, dim | v, dim | step count                    You et al. 2020, a row is a layer
 *
 * The step count is a u32 in a float's place, and saturates. Parameters come in the order of the
 * options in OPTIONS of optim.pyx, without the learning rate.
 */
#ifndef PERSIA_OWN_KERNELS_H
#define PERSIA_OWN_KERNELS_H

#include <math.h>

#include "optim_kernels.h"

/* Of embedding w and state s, by gradient g, with learning rate lr and parameters p. */
#define PERSIA_OWN_ROW(name)                                                                  \
    PERSIA_INLINE void persia_##name##_row(float *restrict w, float *restrict s,              \
                                           const float *restrict g, size_t dim, double lr,    \
                                           const double *p)

PERSIA_OWN_ROW(nesterov)
{
    const float rate = (float)lr, momentum = (float)p[0], decay = (float)p[1];
    PERSIA_ROW_LOOP
    for (size_t j = 0; j < dim; j++) {
        const float d = persia_decayed(g[j], w[j], decay);
        const float velocity = momentum * s[j] + d;
        s[j] = velocity;
        w[j] = w[j] - rate * (d + momentum * velocity);
    }
}

PERSIA_OWN_ROW(adadelta)
{
    const float rate = (float)lr, rho = (float)p[0], rest = (float)(1.0 - p[0]);
    const float eps = (float)p[1], decay = (float)p[2];
    float *restrict squares = s;
    float *restrict steps = s + dim;
    PERSIA_ROW_LOOP
    for (size_t j = 0; j < dim; j++) {
        const float d = persia_decayed(g[j], w[j], decay);
        const float square = rho * squares[j] + rest * d * d;
        const float move = sqrtf(steps[j] + eps) / sqrtf(square + eps) * d;
        squares[j] = square;
        steps[j] = rho * steps[j] + rest * move * move;
        w[j] = w[j] - rate * move;
    }
}

typedef struct {
    float beta1, rest1, beta2, rest2, eps, decay;
    double correction1; /* 1 - beta1^t */
    float inverse_root; /* 1 / sqrt(1 - beta2^t) */
} persia_moments_t;

/* Counts a step in the row's own count; what follows from it is computed in double. */
PERSIA_INLINE persia_moments_t persia_next_moments(float *words, const double *p)
{
    uint32_t count;
    memcpy(&count, words, sizeof count);
    count += count != UINT32_MAX;
    memcpy(words, &count, sizeof count);
    const persia_moments_t moments = {
        (float)p[0], (float)(1.0 - p[0]), (float)p[1], (float)(1.0 - p[1]), (float)p[2],
        (float)p[3], 1.0 - persia_power(p[0], count),
        (float)(1.0 / sqrt(1.0 - persia_power(p[1], count))),
    };
    return moments;
}

PERSIA_OWN_ROW(adamw)
{
    float *restrict m = s;
    float *restrict v = s + dim;
    const persia_moments_t o = persia_next_moments(s + 2 * dim, p);
    const float step_size = (float)(lr / o.correction1), kept = (float)(1.0 - lr * p[3]);
    PERSIA_ROW_LOOP
    for (size_t j = 0; j < dim; j++) {
        const float first = o.beta1 * m[j] + o.rest1 * g[j];
        const float second = o.beta2 * v[j] + o.rest2 * g[j] * g[j];
        m[j] = first;
        v[j] = second;
        w[j] = kept * w[j] - step_size * first / (sqrtf(second) * o.inverse_root + o.eps);
    }
}

PERSIA_OWN_ROW(amsgrad)
{
    float *restrict m = s;
    float *restrict v = s + dim;
    float *restrict largest = s + 2 * dim;
    const persia_moments_t o = persia_next_moments(s + 3 * dim, p);
    const float step_size = (float)(lr / o.correction1);
    PERSIA_ROW_LOOP
    for (size_t j = 0; j < dim; j++) {
        const float d = persia_decayed(g[j], w[j], o.decay);
        const float first = o.beta1 * m[j] + o.rest1 * d;
        const float second = o.beta2 * v[j] + o.rest2 * d * d;
        /* A NaN stays one, as in torch.maximum. */
        const float most = second <= largest[j] ? largest[j] : second;
        m[j] = first;
        v[j] = second;
        largest[j] = most;
        w[j] = w[j] - step_size * first / (sqrtf(most) * o.inverse_root + o.eps);
    }
}

/* How far lamb goes: Adam's step, and the decay beside it. */
PERSIA_INLINE float persia_lamb_move(float w, float m, float v, float inverse1,
                                     const persia_moments_t *o)
{
    const float move = m * inverse1 / (sqrtf(v) * o->inverse_root + o->eps);
    return o->decay != 0.0f ? move + o->decay * w : move;
}

/* The norms are roots of means of squares, which are added in the order of persia_mean_square;
 * their ratio is that of the norms. */
PERSIA_OWN_ROW(lamb)
{
    float *restrict m = s;
    float *restrict v = s + dim;
    const persia_moments_t o = persia_next_moments(s + 2 * dim, p);
    const float inverse1 = (float)(1.0 / o.correction1);
    const float size = sqrtf(persia_mean_square(w, w, dim, 0.0f));
    persia_lanes_t sums = {0};
    float moves[8];
    for (size_t begin = 0; begin < dim; begin += 8) {
        const size_t count = dim - begin < 8 ? dim - begin : 8;
        memset(moves, 0, sizeof moves);
        for (size_t k = 0; k < count; k++) {
            const size_t j = begin + k;
            m[j] = o.beta1 * m[j] + o.rest1 * g[j];
            v[j] = o.beta2 * v[j] + o.rest2 * g[j] * g[j];
            moves[k] = persia_lamb_move(w[j], m[j], v[j], inverse1, &o);
        }
        persia_lanes_t lanes;
        memcpy(&lanes, moves, sizeof lanes);
        sums += lanes * lanes;
    }
    persia_half_lanes_t lower, upper;
    memcpy(&lower, &sums, sizeof lower);
    memcpy(&upper, (const char *)&sums + sizeof lower, sizeof upper);
    lower += upper;
    const float moved =
        sqrtf(((lower[0] + lower[2]) + (lower[1] + lower[3])) / (float)dim);
    const float trust = size > 0.0f && moved > 0.0f ? size / moved : 1.0f;
    const float rate = (float)lr * trust;
    PERSIA_ROW_LOOP
    for (size_t j = 0; j < dim; j++)
        w[j] = w[j] - rate * persia_lamb_move(w[j], m[j], v[j], inverse1, &o);
}

/* Number, name, and the state of a row: vectors of dim words, and words. */
#define PERSIA_OWN_OPTIMIZERS(X)      \
    X(PERSIA_NESTEROV, nesterov, 1, 0) \
    X(PERSIA_ADADELTA, adadelta, 2, 0) \
    X(PERSIA_ADAMW, adamw, 2, 1)       \
    X(PERSIA_AMSGRAD, amsgrad, 3, 1)   \
    X(PERSIA_LAMB, lamb, 2, 1)

enum { PERSIA_OWN_OPTIMIZERS(PERSIA_KIND) PERSIA_NUM_OWN };

#define PERSIA_OWN_LOOP(dim, name, rows)                                                      \
    for (size_t i_ = 0; i_ < (rows)->num_rows; i_++)                                          \
        persia_##name##_row((rows)->values[i_], (rows)->states[i_], (rows)->grads[i_], dim,   \
                            (rows)->lr, (rows)->params)

#define PERSIA_OWN_STEP(kind, name, vectors, words)                                           \
    PERSIA_VARIANTS(int, persia_##name##_step, (const persia_block_t *rows), {                 \
        PERSIA_BY_DIM(PERSIA_OWN_LOOP, rows->dim, name, rows)                                 \
        return 0;                                                                             \
    })                                                                                        \
    static uint32_t persia_##name##_width(uint32_t dim, const double *params)                 \
    {                                                                                         \
        (void)params;                                                                         \
        return (vectors) * dim + (words);                                                     \
    }

PERSIA_OWN_OPTIMIZERS(PERSIA_OWN_STEP)

typedef struct {
    const char *name;
    persia_optimizer_t optimizer; /* its step is the baseline's */
    int (*steps[PERSIA_NUM_LEVELS])(const persia_block_t *rows);
} persia_own_t;

#define PERSIA_OWN(kind, name, vectors, words)                                                \
    [kind] = {#name,                                                                          \
              {.size = sizeof(persia_optimizer_t), .state_width = persia_##name##_width,      \
               .step = persia_##name##_step_baseline},                                        \
              PERSIA_LEVELS(persia_##name##_step)},

static const persia_own_t persia_own[PERSIA_NUM_OWN] = {PERSIA_OWN_OPTIMIZERS(PERSIA_OWN)};

/* Have settings step by the optimizer with this name; NULL, and nothing done, if there is none. */
static inline const persia_optimizer_t *persia_use_own(persia_optim_t *o, const char *name)
{
    for (int i = 0; i < PERSIA_NUM_OWN; i++) {
        if (strcmp(persia_own[i].name, name) == 0) {
            o->native = &persia_own[i].optimizer;
            o->native_steps = persia_own[i].steps;
            o->is_trusted = 1;
            return o->native;
        }
    }
    return NULL;
}

#endif
