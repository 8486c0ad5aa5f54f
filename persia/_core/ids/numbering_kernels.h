/* The one pass of a numbering that a vector unit helps with: see distinct.pyx. */
#ifndef PERSIA_DISTINCT_KERNELS_H
#define PERSIA_DISTINCT_KERNELS_H

#include "kernels.h"

/* Copies n values, and writes the top 64 - shift (at most 32) bits of each one's hash. */
PERSIA_INLINE void persia_take_body(const uint64_t *restrict values, size_t n, int shift,
                                    uint64_t *restrict own, uint32_t *restrict slots)
{
    for (size_t i = 0; i < n; i++) {
        const uint64_t value = values[i];
        own[i] = value;
        slots[i] = (uint32_t)(persia_mix64(value) >> shift);
    }
}

PERSIA_VARIANTS(void, persia_take,
                (const uint64_t *values, size_t n, int shift, uint64_t *own, uint32_t *slots),
                (values, n, shift, own, slots))

typedef void (*persia_take_t)(const uint64_t *, size_t, int, uint64_t *, uint32_t *);

static const persia_take_t persia_take[PERSIA_NUM_LEVELS] = PERSIA_LEVELS(persia_take);

#endif
