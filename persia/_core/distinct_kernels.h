/* The one pass of a numbering that a vector unit helps with: see distinct.pyx. */
#ifndef PERSIA_DISTINCT_KERNELS_H
#define PERSIA_DISTINCT_KERNELS_H

#include "kernels.h"

/* mix64 of hashing.pxd. */
PERSIA_INLINE uint64_t persia_mix64(uint64_t x)
{
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

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
