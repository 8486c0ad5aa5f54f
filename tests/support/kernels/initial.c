/* The built-in uniform values, by the header for users; it fails for signs whose low 16 bits are
 * those of a parameter. Flags make it what is refused when it is loaded. */
#include <math.h>
#include <stddef.h>

#include "persia_kernels.h"

#ifdef TAG /* another library that does the same */
__attribute__((used)) static const int tag = TAG;
#endif

#ifndef FILL
#define FILL fill
#endif
#ifndef DEFAULTS
#define DEFAULTS defaults
#endif

static const char *const names[] = {"lower", "upper", "error_at", "nan_at", "crash_at"};
static const double defaults[] = {-0.01, 0.01, -1.0, -1.0, -1.0};

static int fill(float *values, uint32_t dim, uint64_t seed, uint64_t sign, const double *params)
{
    const double lower = (float)params[0], width = (float)params[1] - lower;
    const float last = nextafterf((float)params[1], -INFINITY);
    const uint64_t key = persia_mix64(sign ^ persia_mix64(seed));
    const double low_bits = (double)(sign & 0xFFFF);
    for (uint32_t j = 0; j < dim; j++) {
        const double unit = (double)(persia_mix64(key + j) >> 12) * 0x1p-52;
        const float value = (float)(lower + width * unit);
        values[j] = value < last ? value : last;
    }
    if (low_bits == params[3])
        values[dim - 1] = NAN;
    if (low_bits == params[4])
        *(volatile int *)8 = 1;
#ifdef BESIDE
    values[dim] = 0.0f;
#endif
#ifdef COUNTS
    static int count;
    values[0] = (float)count++;
#endif
    return low_bits == params[2] ? 7 : 0;
}

static const persia_initializer_t initializer = {
    .size = sizeof(persia_initializer_t), .num_params = 5, .param_names = names,
    .param_defaults = DEFAULTS, .fill = FILL,
};
PERSIA_EXPORT_KERNELS(.initializer = &initializer)
