/* Adagrad as the built-in one does it, by the header for users; with PLAIN servers guard it. */
#include <math.h>

#include "persia_kernels.h"

/* Names are in the order of param_defaults. */
static const char *const names[] = {"initial_accumulator_value", "weight_decay", "eps"};
static const double defaults[] = {0.0, 0.0, 1e-10};

static uint32_t width(uint32_t dim, const double *params)
{
    (void)params;
    return dim;
}

static void init(float *state, uint32_t dim, const double *params)
{
    for (uint32_t j = 0; j < dim; j++)
        state[j] = (float)params[0];
}

PERSIA_ROW_INLINE void step_row(float *restrict w, float *restrict s, const float *restrict g,
                                size_t dim, float lr, float decay, float eps)
{
    PERSIA_ROW_LOOP
    for (size_t j = 0; j < dim; j++) {
        const float d = decay != 0.0f ? g[j] + decay * w[j] : g[j];
        const float sum = s[j] + d * d;
        s[j] = sum;
        w[j] = w[j] - lr * d / (sqrtf(sum) + eps);
    }
}

PERSIA_EACH_CPU
static int step(const persia_block_t *rows)
{
    const float lr = (float)rows->lr, decay = (float)rows->params[1], eps = (float)rows->params[2];
#ifdef PLAIN
#define GUARDS 0
#define ROW(i, dim) \
    step_row(rows->values[i], rows->states[i], rows->grads[i], dim, lr, decay, eps)
    PERSIA_FOR_EACH_ROW(rows, ROW)
    return 0;
#else
#define GUARDS 1
#define ROW(w, s, g, dim) step_row(w, s, g, dim, lr, 0.0f, eps)
#define DECAYED(w, s, g, dim) step_row(w, s, g, dim, lr, decay, eps)
    /* Here, so that no row has a branch. */
    return decay == 0.0f ? PERSIA_STEP_ROWS(rows, ROW, dim) : PERSIA_STEP_ROWS(rows, DECAYED, dim);
#endif
}

static const persia_optimizer_t optimizer = {
    .size = sizeof(persia_optimizer_t), .num_params = 3, .param_names = names,
    .param_defaults = defaults, .state_width = width, .init = init, .step = step,
    .guards = GUARDS,
};
PERSIA_EXPORT_KERNELS(.optimizer = &optimizer)
