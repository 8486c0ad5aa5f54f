/* Values of 2 bytes and f32, row by row.
 *
 *               sign   exponent       fraction
 *     float16     1    5, bias 15     10     to 65504; quantum 2^-24 below 2^-14
 *     bfloat16    1    8, bias 127     7     the upper half of an f32
 *
 *     widen    2 bytes -> f32, exact; f16 by the processor where it can
 *     narrow   f32 -> 2 bytes, to nearest, ties to even
 *     round    f32 -> 2 bytes, up or down by chance, so that the mean is the f32
 *
 * A finite f32 beyond the largest value becomes that value, so that no step loses a row; an
 * infinity stays one and a NaN stays a NaN, made quiet: they shall not look like values.
 * What was widened comes back as it was, whichever way it is rounded.
 *
 * round is stochastic rounding (Gupta et al., Deep Learning with Limited Numerical Precision,
 * ICML 2015): up with the chance of how far the value is on its way to the next one up. The
 * draw of element j is a pure function of (key, j): 16 bits for bf16, 13 for f16, as many as they
 * drop, so that the chance is exact (below 2^-14, where f16 drops more, to 2^-13 of a quantum).
 * Not taken: a generator with a state per thread, as FBGEMM has; its rows depend on the threads.
 *
 * gcc 12 turns a cast from _Float16 into one conversion an element, hence the one intrinsic.
 */
#ifndef PERSIA_HALF_KERNELS_H
#define PERSIA_HALF_KERNELS_H

#include "kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { PERSIA_FLOAT16, PERSIA_BFLOAT16, PERSIA_NUM_HALVES };

#define PERSIA_ROUNDED                                                                    \
    (void *const *rows, float *matrix, size_t n, size_t dim, uint64_t update_key,         \
     const uint64_t *hashes)

typedef struct {
    void (*widen)(const uint16_t *from, float *to, size_t n);
    void (*narrow)(const float *from, uint16_t *to, size_t n);
    /* Between n rows of dim values and a matrix of them, which rounding uses up; hashes[i] is
     * mix64 of row i's sign. */
    void (*widen_rows)(void *const *rows, float *matrix, size_t n, size_t dim);
    void (*round_rows) PERSIA_ROUNDED;
} persia_half_t;

#define PERSIA_F32_INFINITY 0x7F800000
#define PERSIA_F16_LARGEST 0x477FE000 /* 65504, as f32 */
#define PERSIA_F16_NORMAL 0x38800000  /* 2^-14 */
#define PERSIA_BF16_LARGEST 0x7F7F0000

PERSIA_INLINE int32_t persia_bits_of(float value)
{
    int32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

PERSIA_INLINE float persia_float_of(int32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* 16 bits. The key is new in each update, so each element's draws are independent and uniform;
 * the elements of one row lie evenly apart (a Weyl sequence), for which no multiplication is
 * needed. */
PERSIA_INLINE int32_t persia_draw(uint32_t key, size_t j)
{
    return (int32_t)((key + (uint32_t)j * 0x9E3779B9u) >> 16);
}

/* --- one value ----------------------------------------------------------------------------- */

/* Signed words throughout: the older instruction sets compare no others. And a choice between
 * two words is made by their bits: as a ternary it would become a branch around arithmetic in
 * f32, which no compiler turns back into a choice, because the arithmetic may set a flag. */
PERSIA_INLINE int32_t persia_choose(int condition, int32_t yes, int32_t no)
{
    return no ^ ((yes ^ no) & -(int32_t)condition);
}

PERSIA_INLINE float persia_widened_f16(uint16_t half)
{
    const int32_t sign = (int32_t)((uint32_t)(half & 0x8000) << 16);
    const int32_t rest = half & 0x7FFF;
    /* Below 2^-14 a multiple of 2^-24; an f32 that is no normal number never arises. */
    const int32_t small = persia_bits_of((float)rest * 0x1p-24f);
    const int32_t normal = (rest << 13) + ((127 - 15) << 23);
    const int32_t special = rest << 13 | PERSIA_F32_INFINITY | (rest > 0x7C00 ? 1 << 22 : 0);
    const int32_t large = persia_choose(rest < 0x7C00, normal, special);
    return persia_float_of(sign | persia_choose(rest < 0x0400, small, large));
}

PERSIA_INLINE float persia_widened_bf16(uint16_t half)
{
    return persia_float_of((int32_t)((uint32_t)half << 16));
}

/* Up to 8191/8192 of a quantum more, so that truncation becomes rounding by chance. The sum is
 * exact, unless a value below 2^-24 has bits that f32 drops there. */
PERSIA_INLINE float persia_dithered_f16(float value, int32_t draw)
{
    const int32_t bits = persia_bits_of(value);
    const int32_t given = bits & 0x7FFFFFFF;
    const int32_t finite = given < PERSIA_F16_LARGEST ? given : PERSIA_F16_LARGEST;
    const int32_t power = (finite > PERSIA_F16_NORMAL ? finite : PERSIA_F16_NORMAL) & 0x7F800000;
    const float part = (float)(draw >> 3) * 0x1p-23f * persia_float_of(power);
    return persia_float_of(persia_bits_of(persia_float_of(given) + part) | (bits ^ given));
}

/* |value| is cut to a multiple of its quantum: scaled by a power of two, so exactly, to
 * 1024..2047 quanta, or fewer below 2^-14. As a sum with the exponent, 2048 carries over. */
PERSIA_INLINE uint16_t persia_to_f16(float value, int truncate)
{
    const int32_t bits = persia_bits_of(value);
    const int32_t given = bits & 0x7FFFFFFF;
    const int32_t finite = given < PERSIA_F16_LARGEST ? given : PERSIA_F16_LARGEST;
    const int32_t exponent = finite >> 23 > 113 ? finite >> 23 : 113;
    const float scaled = persia_float_of(finite) * persia_float_of((264 - exponent) << 23);
    /* At 2^23 an f32 has no fraction left: the addition rounds. */
    const int32_t quanta = truncate ? (int32_t)scaled
                                    : persia_bits_of(scaled + 0x1p23f) - 0x4B000000;
    const int32_t normal = ((exponent - 113) << 10) + quanta;
    const int32_t payload = given > PERSIA_F32_INFINITY ? 0x0200 | (given >> 13 & 0x03FF) : 0;
    const int32_t half = persia_choose(given < PERSIA_F32_INFINITY, normal, 0x7C00 | payload);
    return (uint16_t)(half | (bits >> 16 & 0x8000));
}

PERSIA_INLINE uint16_t persia_to_bf16(float value, int by_chance, int32_t draw)
{
    const int32_t bits = persia_bits_of(value);
    const int32_t given = bits & 0x7FFFFFFF;
    const int32_t more = by_chance ? draw : 0x7FFF + (given >> 16 & 1);
    const int32_t quiet = given > PERSIA_F32_INFINITY ? 0x0040 : 0;
    /* Beyond the largest, the upper half is the largest's, an infinity's or a NaN's. */
    const int32_t half = persia_choose(
        given > PERSIA_BF16_LARGEST, given >> 16 | quiet, (given + more) >> 16);
    return (uint16_t)(half | (bits >> 16 & 0x8000));
}

/* --- rows ---------------------------------------------------------------------------------- */

/* `kind` is a literal wherever these are inlined. */

PERSIA_INLINE void persia_widen_loop(
    size_t n, int kind, const uint16_t *restrict from, float *restrict to)
{
    PERSIA_ROW_LOOP
    for (size_t j = 0; j < n; j++)
        to[j] = kind == PERSIA_FLOAT16 ? persia_widened_f16(from[j])
                                       : persia_widened_bf16(from[j]);
}

PERSIA_INLINE void persia_narrow_loop(
    size_t n, int kind, const float *restrict from, uint16_t *restrict to)
{
    PERSIA_ROW_LOOP
    for (size_t j = 0; j < n; j++)
        to[j] = kind == PERSIA_FLOAT16 ? persia_to_f16(from[j], 0)
                                       : persia_to_bf16(from[j], 0, 0);
}

PERSIA_INLINE void persia_dither_f16_loop(size_t n, float *row, uint32_t key)
{
    PERSIA_ROW_LOOP
    for (size_t j = 0; j < n; j++)
        row[j] = persia_dithered_f16(row[j], persia_draw(key, j));
}

PERSIA_INLINE void persia_round_bf16_loop(
    size_t n, const float *restrict from, uint16_t *restrict to, uint32_t key)
{
    PERSIA_ROW_LOOP
    for (size_t j = 0; j < n; j++)
        to[j] = persia_to_bf16(from[j], 1, persia_draw(key, j));
}

PERSIA_INLINE void persia_widen_rows_loop(
    size_t dim, int kind, void *const *rows, float *matrix, size_t n)
{
    for (size_t i = 0; i < n; i++)
        persia_widen_loop(dim, kind, rows[i], matrix + i * dim);
}

PERSIA_INLINE void persia_round_rows_bf16_loop(
    size_t dim, void *const *rows, float *matrix, size_t n, uint64_t update_key,
    const uint64_t *hashes)
{
    for (size_t i = 0; i < n; i++)
        persia_round_bf16_loop(dim, matrix + i * dim, rows[i],
                               (uint32_t)persia_mix64(update_key ^ hashes[i]));
}

PERSIA_INLINE void persia_dither_rows_f16_loop(
    size_t dim, float *matrix, size_t n, uint64_t update_key, const uint64_t *hashes)
{
    for (size_t i = 0; i < n; i++)
        persia_dither_f16_loop(dim, matrix + i * dim,
                               (uint32_t)persia_mix64(update_key ^ hashes[i]));
}

/* --- every level -------------------------------------------------------------------------- */

PERSIA_VARIANTS(void, persia_narrow_f16, (const float *from, uint16_t *to, size_t n),
                { PERSIA_BY_DIM(persia_narrow_loop, n, PERSIA_FLOAT16, from, to) })
PERSIA_VARIANTS(void, persia_narrow_bf16, (const float *from, uint16_t *to, size_t n),
                { PERSIA_BY_DIM(persia_narrow_loop, n, PERSIA_BFLOAT16, from, to) })
PERSIA_VARIANTS(void, persia_widen_bf16, (const uint16_t *from, float *to, size_t n),
                { PERSIA_BY_DIM(persia_widen_loop, n, PERSIA_BFLOAT16, from, to) })
PERSIA_VARIANTS(void, persia_widen_rows_bf16,
                (void *const *rows, float *matrix, size_t n, size_t dim),
                { PERSIA_BY_DIM(persia_widen_rows_loop, dim, PERSIA_BFLOAT16, rows, matrix, n) })
PERSIA_VARIANTS(void, persia_round_rows_bf16, PERSIA_ROUNDED,
                { PERSIA_BY_DIM(persia_round_rows_bf16_loop, dim, rows, matrix, n, update_key,
                                hashes) })
PERSIA_VARIANTS(void, persia_dither_rows_f16,
                (float *matrix, size_t n, size_t dim, uint64_t update_key,
                 const uint64_t *hashes),
                { PERSIA_BY_DIM(persia_dither_rows_f16_loop, dim, matrix, n, update_key, hashes) })

/* --- f16 where the processor does not convert ---------------------------------------------- */

static void persia_widen_f16_baseline(const uint16_t *from, float *to, size_t n)
{
    PERSIA_BY_DIM(persia_widen_loop, n, PERSIA_FLOAT16, from, to)
}

static void persia_widen_rows_f16_baseline(
    void *const *rows, float *matrix, size_t n, size_t dim)
{
    PERSIA_BY_DIM(persia_widen_rows_loop, dim, PERSIA_FLOAT16, rows, matrix, n)
}

static void persia_round_rows_f16_baseline PERSIA_ROUNDED
{
    persia_dither_rows_f16_baseline(matrix, n, dim, update_key, hashes);
    for (size_t i = 0; i < n; i++) {
        const float *from = matrix + i * dim;
        uint16_t *restrict to = rows[i];
        for (size_t j = 0; j < dim; j++)
            to[j] = persia_to_f16(from[j], 1);
    }
}

/* --- and where it does: eight at a time, in both directions --------------------------------- */

#if PERSIA_NUM_LEVELS > 1
PERSIA_AVX2 PERSIA_INLINE void persia_convert_f16(size_t n, const uint16_t *from, float *to)
{
    const size_t whole = n & ~(size_t)7;
    for (size_t j = 0; j < whole; j += 8)
        _mm256_storeu_ps(to + j, _mm256_cvtph_ps(_mm_loadu_si128((const void *)(from + j))));
    for (size_t j = whole; j < n; j++)
        to[j] = persia_widened_f16(from[j]);
}

/* The processor's truncation, too, goes to the largest and never to infinity. */
PERSIA_AVX2 PERSIA_INLINE void persia_truncate_f16(size_t n, const float *from, uint16_t *to)
{
    const size_t whole = n & ~(size_t)7;
    for (size_t j = 0; j < whole; j += 8)
        _mm_storeu_si128((void *)(to + j),
                         _mm256_cvtps_ph(_mm256_loadu_ps(from + j), _MM_FROUND_TO_ZERO));
    for (size_t j = whole; j < n; j++)
        to[j] = persia_to_f16(from[j], 1);
}

PERSIA_AVX2 PERSIA_INLINE void persia_convert_rows_f16(
    size_t dim, void *const *rows, float *matrix, size_t n)
{
    for (size_t i = 0; i < n; i++)
        persia_convert_f16(dim, rows[i], matrix + i * dim);
}

PERSIA_AVX2 PERSIA_INLINE void persia_truncate_rows_f16(
    size_t dim, void *const *rows, const float *matrix, size_t n)
{
    for (size_t i = 0; i < n; i++)
        persia_truncate_f16(dim, matrix + i * dim, rows[i]);
}

PERSIA_AVX2 static void persia_widen_f16_avx2(const uint16_t *from, float *to, size_t n)
{
    PERSIA_BY_DIM(persia_convert_f16, n, from, to)
}

PERSIA_AVX2 static void persia_widen_rows_f16_avx2(
    void *const *rows, float *matrix, size_t n, size_t dim)
{
    PERSIA_BY_DIM(persia_convert_rows_f16, dim, rows, matrix, n)
}

#define PERSIA_ROUND_ROWS_F16(level)                                                      \
    PERSIA_AVX2 static void persia_round_rows_f16_##level PERSIA_ROUNDED                  \
    {                                                                                     \
        persia_dither_rows_f16_##level(matrix, n, dim, update_key, hashes);               \
        PERSIA_BY_DIM(persia_truncate_rows_f16, dim, rows, matrix, n)                     \
    }
PERSIA_ROUND_ROWS_F16(avx2)
PERSIA_ROUND_ROWS_F16(avx512)

/* Wider registers convert no faster than memory gives. */
#define persia_widen_f16_avx512 persia_widen_f16_avx2
#define persia_widen_rows_f16_avx512 persia_widen_rows_f16_avx2
#endif

#define PERSIA_HALF(name, level)                                                              \
    {                                                                                         \
        persia_widen_##name##_##level, persia_narrow_##name##_##level,                        \
        persia_widen_rows_##name##_##level, persia_round_rows_##name##_##level                \
    }
#if PERSIA_NUM_LEVELS > 1
#define PERSIA_HALF_LEVELS(name) \
    { PERSIA_HALF(name, baseline), PERSIA_HALF(name, avx2), PERSIA_HALF(name, avx512) }
#else
#define PERSIA_HALF_LEVELS(name) { PERSIA_HALF(name, baseline) }
#endif

static const persia_half_t persia_halves[PERSIA_NUM_HALVES][PERSIA_NUM_LEVELS] = {
    [PERSIA_FLOAT16] = PERSIA_HALF_LEVELS(f16),
    [PERSIA_BFLOAT16] = PERSIA_HALF_LEVELS(bf16),
};

#endif
