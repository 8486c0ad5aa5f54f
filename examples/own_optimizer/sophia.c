/* A step like Sophia's (Liu et al. 2023): a mean of gradients over one of their squares, which
 * stands for the diagonal of the Hessian, clipped to one learning rate per value. */
#include <math.h>

#include "persia_kernels.h"

static const char *const names[] = {"beta1", "beta2", "rho", "eps"};
static const double defaults[] = {0.96, 0.99, 0.05, 1e-12};

/* A row keeps both means: m, dim floats | h, dim floats. New rows begin with zeros. */
static uint32_t state_width(uint32_t dim, const double *params)
{
    (void)params;
    return 2 * dim;
}

PERSIA_ROW_INLINE void step_row(float *restrict w, float *restrict state,
                                const float *restrict g, size_t dim, double lr, const double *p)
{
    const float rate = (float)lr, beta1 = (float)p[0], rest1 = (float)(1.0 - p[0]);
    const float beta2 = (float)p[1], rest2 = (float)(1.0 - p[1]);
    const float rho = (float)p[2], eps = (float)p[3];
    float *restrict m = state, *restrict h = state + dim;
    PERSIA_ROW_LOOP
    for (size_t j = 0; j < dim; j++) {
        m[j] = beta1 * m[j] + rest1 * g[j];
        h[j] = beta2 * h[j] + rest2 * g[j] * g[j];
        const float curvature = rho * h[j] > eps ? rho * h[j] : eps;
        const float ratio = m[j] / curvature;
        w[j] -= rate * (ratio > 1.0f ? 1.0f : ratio < -1.0f ? -1.0f : ratio);
    }
}

PERSIA_EACH_CPU
static int step(const persia_block_t *rows)
{
#define ROW(w, state, g, dim) step_row(w, state, g, dim, rows->lr, rows->params)
    return PERSIA_STEP_ROWS(rows, ROW, 2 * dim);
}

static const persia_optimizer_t optimizer = {
    .size = sizeof(persia_optimizer_t), .num_params = 4, .param_names = names,
    .param_defaults = defaults, .state_width = state_width, .step = step, .guards = 1,
};
PERSIA_EXPORT_KERNELS(.optimizer = &optimizer)
