/* Adagrad that says it guards its rows, and by a flag does not: GUARDS lets NaNs pass. */
#include <math.h>

#include "persia_kernels.h"

static uint32_t width(uint32_t dim, const double *params)
{
    (void)params;
    return dim;
}

PERSIA_ROW_INLINE void step_row(float *w, float *s, const float *g, size_t dim, float lr)
{
    for (size_t j = 0; j < dim; j++) {
        s[j] += g[j] * g[j];
        w[j] -= lr * g[j] / (sqrtf(s[j]) + 1e-10f);
    }
}

static int step(const persia_block_t *rows)
{
#define ROW(w, s, g, dim) step_row(w, s, g, dim, (float)rows->lr)
#ifdef GUARDS
    for (size_t i = 0; i < rows->num_rows; i++)
        ROW(rows->values[i], rows->states[i], rows->grads[i], rows->dim);
    return 0;
#elif defined(BOUNDLESS)
    persia_block_t others = *rows;
    others.bound = INFINITY;
    return PERSIA_STEP_ROWS(&others, ROW, dim);
#else
    const int code = PERSIA_STEP_ROWS(rows, ROW, dim);
    for (size_t i = 0; i < rows->num_rows; i++)
        if (rows->codes[i] != 0)
#ifdef CODES
            rows->values[i][0] += 1.0f;
    return code;
#else
            return 0;
    return code;
#endif
#endif
}

static const persia_optimizer_t optimizer = {
    .size = sizeof(persia_optimizer_t), .state_width = width, .step = step, .guards = 1};
PERSIA_EXPORT_KERNELS(.optimizer = &optimizer)
