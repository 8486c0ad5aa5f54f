/* SGD that fails where a row's first gradient says so: NaN, error, crash. */
#include <math.h>
#include <stdlib.h>

#include "persia_kernels.h"

#ifndef EXTRA
#define EXTRA 0
#endif
#ifndef SIZE
#define SIZE sizeof(persia_optimizer_t)
#endif
#ifndef GUARDS
#define GUARDS 0
#endif
#ifndef VERSION
#define VERSION PERSIA_KERNELS_VERSION
#endif

#ifdef TAG /* another library that does the same */
__attribute__((used)) static const int tag = TAG;
#endif

static uint32_t width(uint32_t dim, const double *params)
{
    (void)params;
    return dim + 1;
}

static int step(const persia_block_t *rows)
{
#ifdef SPIN
    for (;;) {}
#endif
    for (size_t i = 0; i < rows->num_rows; i++) {
        const float first = rows->grads[i][0];
        for (size_t j = 0; j < rows->dim + 1 + EXTRA; j++) {
            rows->states[i][j] += 1.0f;
            if (j < rows->dim)
                rows->values[i][j] -= (float)rows->lr * rows->grads[i][j];
        }
        if (first == 100.0f)
            rows->values[i][rows->dim - 1] = NAN;
        if (first == 200.0f)
            return 7;
        if (first == 300.0f)
            *(volatile int *)8 = 1;
    }
    return 0;
}

#ifdef CRASH
__attribute__((constructor)) static void crash(void) { abort(); }
#endif

static const persia_optimizer_t optimizer = {
    .size = SIZE, .state_width = width, .step = step, .guards = GUARDS,
};

const persia_kernels_t *persia_kernels(void)
{
#ifdef OF_VERSION_1 /* which ended behind the optimizer: what is there is another's */
    static const persia_kernels_t kernels = {
        .version = 1, .size = offsetof(persia_kernels_t, initializer), .optimizer = &optimizer,
        .initializer = (const persia_initializer_t *)8};
#elif defined(EMPTY)
    static const persia_kernels_t kernels = {
        .version = VERSION, .size = sizeof(persia_kernels_t)};
#else
    static const persia_kernels_t kernels = {
        .version = VERSION, .size = sizeof(persia_kernels_t), .optimizer = &optimizer};
#endif
    return &kernels;
}
