/* Dead entries out of a segment of the order of use: what is left moves together.
 *
 *     held    1 1 0 1 1     offsets that have an entry in rows
 *     live    1 0 0 1 1     those that stay; a subset
 *     rows    a b c d  ->  a c d
 *
 * The one kernel with intrinsics: compressing a register is an instruction that no plain loop
 * becomes, and five entries are looked at for each that dies.
 */
#ifndef PERSIA_RECENCY_KERNELS_H
#define PERSIA_RECENCY_KERNELS_H

#include "kernels.h"

#if PERSIA_NUM_LEVELS > 1
#include <immintrin.h>
#endif

enum { PERSIA_MOST_ENTRIES = 2048 }; /* of a segment */

/* Returns how many entries are left. */
PERSIA_INLINE uint32_t persia_squeeze_loop(
    uint32_t *rows, const uint64_t *held, const uint64_t *live, uint32_t num_words)
{
    uint32_t taken = 0, kept = 0;
    for (uint32_t word = 0; word < num_words; word++) {
        uint64_t left = held[word];
        while (left) {
            /* Written whether it lives or not: which entries died, no branch predictor knows. */
            rows[kept] = rows[taken];
            kept += (live[word] & left & (0 - left)) != 0;
            taken++;
            left &= left - 1;
        }
    }
    return kept;
}

static uint32_t persia_squeeze_baseline(
    uint32_t *rows, const uint64_t *held, const uint64_t *live, uint32_t num_words)
{
    return persia_squeeze_loop(rows, held, live, num_words);
}

#if PERSIA_NUM_LEVELS > 1
PERSIA_AVX2 static uint32_t persia_squeeze_avx2(
    uint32_t *rows, const uint64_t *held, const uint64_t *live, uint32_t num_words)
{
    return persia_squeeze_loop(rows, held, live, num_words);
}

/* Sixteen offsets at a time: their entries go to the lanes of their offsets, and those that live
 * from there to the first lanes. They are collected apart: a load after a store of some lanes of
 * the same lines waits for it. */
PERSIA_AVX512 static uint32_t persia_squeeze_avx512(
    uint32_t *rows, const uint64_t *held, const uint64_t *live, uint32_t num_words)
{
    uint32_t together[PERSIA_MOST_ENTRIES + 16];
    uint32_t taken = 0, kept = 0;
    for (uint32_t word = 0; word < num_words; word++)
        for (int first = 0; first < 64; first += 16) {
            const __mmask16 all = (__mmask16)(held[word] >> first);
            const __mmask16 some = (__mmask16)(live[word] >> first);
            const uint32_t num_all = (uint32_t)__builtin_popcount(all);
            __m512i entries =
                _mm512_maskz_loadu_epi32((__mmask16)((1u << num_all) - 1), rows + taken);
            entries = _mm512_maskz_expand_epi32(all, entries);
            entries = _mm512_maskz_compress_epi32(some, entries);
            _mm512_storeu_si512(together + kept, entries);
            taken += num_all;
            kept += (uint32_t)__builtin_popcount(some);
        }
    memcpy(rows, together, kept * sizeof *rows);
    return kept;
}
#endif

typedef uint32_t (*persia_squeeze_t)(
    uint32_t *rows, const uint64_t *held, const uint64_t *live, uint32_t num_words);

static const persia_squeeze_t persia_squeeze[PERSIA_NUM_LEVELS] = PERSIA_LEVELS(persia_squeeze);

#endif
