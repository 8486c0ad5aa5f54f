/* Rows to pooled outputs and back, one feature at a time.
 *
 *     sample b -> positions offsets[b] .. offsets[b + 1] -> inverse[p] = d, a distinct id
 *     distinct id d -> places[d * rounds .. + rounds] -> rows, whose sum is d's vector
 *
 * offsets NULL: sample b has exactly position b. places NULL: rounds is 1 and d is its own row.
 * Every number is in range: the callers check with the scans at the end of this file, which
 * run over each array once. Outputs overlap neither inputs nor each other.
 *
 * The order of additions is part of the result: rounds, then positions, then samples, each
 * ascending. Elements of a row never meet, so the width of a vector changes nothing.
 */
#ifndef PERSIA_POOLING_KERNELS_H
#define PERSIA_POOLING_KERNELS_H

#include <math.h>

#include "kernels.h"

enum { PERSIA_SUM, PERSIA_MEAN, PERSIA_SQRT, PERSIA_MAX };

typedef struct {
    const uint32_t *places;  /* [num_distinct * rounds] or NULL */
    size_t rounds;           /* at least 1 */
    const uint32_t *inverse; /* [num_ids] */
    size_t num_ids;
    const uint32_t *offsets; /* [num_samples + 1] or NULL */
    size_t num_samples;
    const float *weights;    /* [num_ids] or NULL; for sums only */
    size_t dim;
    size_t stride;           /* floats from the gradient of a sample to that of the next */
    float *scratch;          /* [dim], for a sum of rounds or a scaled gradient */
} persia_bags_t;

/* How many ids ahead rows are fetched: an id takes 2 to 5 ns, memory about 100. */
#define PERSIA_POOL_AHEAD 24

/* --- one row ------------------------------------------------------------------------------- */

PERSIA_INLINE void persia_copy(size_t dim, float *restrict to, const float *restrict from)
{
    PERSIA_ROW_LOOP
    for (size_t j = 0; j < dim; j++)
        to[j] = from[j];
}

PERSIA_INLINE void persia_add(size_t dim, float *restrict to, const float *restrict from)
{
    PERSIA_ROW_LOOP
    for (size_t j = 0; j < dim; j++)
        to[j] += from[j];
}

PERSIA_INLINE void persia_divide(
    size_t dim, float *restrict to, const float *restrict from, float divisor)
{
    PERSIA_ROW_LOOP
    for (size_t j = 0; j < dim; j++)
        to[j] = from[j] / divisor;
}

PERSIA_INLINE void persia_scale(
    size_t dim, float *restrict to, const float *restrict from, float factor)
{
    PERSIA_ROW_LOOP
    for (size_t j = 0; j < dim; j++)
        to[j] = from[j] * factor;
}

/* Two roundings: the build forbids to fuse them. */
PERSIA_INLINE void persia_add_scaled(
    size_t dim, float *restrict to, const float *restrict from, float factor)
{
    PERSIA_ROW_LOOP
    for (size_t j = 0; j < dim; j++)
        to[j] += from[j] * factor;
}

PERSIA_INLINE size_t persia_row_of(const uint32_t *places, size_t rounds, size_t d, size_t r)
{
    return places ? places[d * rounds + r] : d;
}

/* The vector of distinct id d: its row itself, or the sum of its rounds in `scratch`. */
PERSIA_INLINE const float *persia_vector(
    size_t dim, const float *rows, const uint32_t *places, size_t rounds, size_t d,
    float *restrict scratch)
{
    const float *first = rows + persia_row_of(places, rounds, d, 0) * dim;
    if (rounds == 1)
        return first;
    persia_copy(dim, scratch, first);
    for (size_t r = 1; r < rounds; r++)
        persia_add(dim, scratch, rows + persia_row_of(places, rounds, d, r) * dim);
    return scratch;
}

/* Fetches the rows of the id `PERSIA_POOL_AHEAD` positions behind p. */
PERSIA_INLINE void persia_fetch_ahead(
    size_t dim, const float *rows, const persia_bags_t *bags, size_t p, const int for_write)
{
    if (p + PERSIA_POOL_AHEAD >= bags->num_ids)
        return;
    const size_t d = bags->inverse[p + PERSIA_POOL_AHEAD];
    for (size_t r = 0; r < bags->rounds; r++) {
        const float *row = rows + persia_row_of(bags->places, bags->rounds, d, r) * dim;
        if (for_write)
            PERSIA_FETCH_LINES(row, 4 * dim, 1);
        else
            PERSIA_FETCH_LINES(row, 4 * dim, 0);
    }
}

/* Where the ids of sample b are. */
#define PERSIA_SAMPLE(bags, b)                                  \
    const size_t begin = bags.offsets ? bags.offsets[b] : b;    \
    const size_t end = bags.offsets ? bags.offsets[b + 1] : b + 1;

PERSIA_INLINE float persia_divisor(int mode, size_t num_ids)
{
    if (mode == PERSIA_MEAN)
        return (float)num_ids;
    return mode == PERSIA_SQRT ? sqrtf((float)num_ids) : 1.0f;
}

/* --- pooling --------------------------------------------------------------------------------- */

/* A sample adds up here and goes to the output once. Rows of a large array straddle cache lines,
 * and what was just written across two lines is read back at a third of the speed. */
#define PERSIA_LOCAL_DIM 256

/* `weighted` is a literal wherever these are inlined, so that sums without weights pay nothing. */
PERSIA_INLINE void persia_pool_sum_loop(
    size_t dim, int mode, int weighted, const persia_bags_t *settings, const float *rows,
    float *restrict out)
{
    const persia_bags_t bags = *settings;
    float local[PERSIA_LOCAL_DIM] __attribute__((aligned(64)));
    for (size_t b = 0; b < bags.num_samples; b++) {
        PERSIA_SAMPLE(bags, b)
        float *restrict to = out + b * dim;
        float *total = dim <= PERSIA_LOCAL_DIM ? local : to;
        if (begin == end) {
            memset(to, 0, dim * sizeof(float));
            continue;
        }
        /* Starts from the first vector, not from zero: a single id keeps its bits. */
        persia_fetch_ahead(dim, rows, &bags, begin, 0);
        const float *first = persia_vector(
            dim, rows, bags.places, bags.rounds, bags.inverse[begin], bags.scratch);
        if (weighted) {
            persia_scale(dim, total, first, bags.weights[begin]);
        } else if (end - begin == 1) {
            persia_copy(dim, to, first);
            continue;
        } else {
            persia_copy(dim, total, first);
        }
        for (size_t p = begin + 1; p < end; p++) {
            persia_fetch_ahead(dim, rows, &bags, p, 0);
            const float *from = persia_vector(
                dim, rows, bags.places, bags.rounds, bags.inverse[p], bags.scratch);
            if (weighted)
                persia_add_scaled(dim, total, from, bags.weights[p]);
            else
                persia_add(dim, total, from);
        }
        if (total != to)
            persia_copy(dim, to, total);
        if (mode != PERSIA_SUM) {
            const float divisor = persia_divisor(mode, end - begin);
            PERSIA_ROW_LOOP
            for (size_t j = 0; j < dim; j++)
                to[j] /= divisor;
        }
    }
}

/* The first of equal values wins; a NaN never beats a value, and stays if it came first: both
 * as in torch's embedding_bag. */
PERSIA_INLINE void persia_pool_max_loop(
    size_t dim, const persia_bags_t *settings, const float *rows, float *restrict out,
    int32_t *restrict argmax)
{
    const persia_bags_t bags = *settings;
    for (size_t b = 0; b < bags.num_samples; b++) {
        PERSIA_SAMPLE(bags, b)
        float *restrict to = out + b * dim;
        int32_t *restrict winner = argmax + b * dim;
        if (begin == end) {
            memset(to, 0, dim * sizeof(float));
            PERSIA_ROW_LOOP
            for (size_t j = 0; j < dim; j++)
                winner[j] = -1;
            continue;
        }
        for (size_t p = begin; p < end; p++) {
            persia_fetch_ahead(dim, rows, &bags, p, 0);
            const int32_t d = (int32_t)bags.inverse[p];
            const float *from = persia_vector(
                dim, rows, bags.places, bags.rounds, bags.inverse[p], bags.scratch);
            if (p == begin) {
                persia_copy(dim, to, from);
                PERSIA_ROW_LOOP
                for (size_t j = 0; j < dim; j++)
                    winner[j] = d;
                continue;
            }
            PERSIA_ROW_LOOP
            for (size_t j = 0; j < dim; j++) {
                const float old = to[j], new = from[j];
                /* A mask: two selects on one condition would become a branch per element. */
                const int32_t wins = -(int32_t)(new > old);
                winner[j] = (d & wins) | (winner[j] & ~wins);
                to[j] = new > old ? new : old;
            }
        }
    }
}

/* --- its gradient ---------------------------------------------------------------------------- */

PERSIA_INLINE void persia_grad_sum_loop(
    size_t dim, int mode, int weighted, const persia_bags_t *settings, const float *grad,
    const uint8_t *skip, float *restrict out)
{
    const persia_bags_t bags = *settings;
    for (size_t b = 0; b < bags.num_samples; b++) {
        PERSIA_SAMPLE(bags, b)
        const float *from = grad + b * bags.stride;
        if (skip && skip[b])
            continue;
        if (mode != PERSIA_SUM && end - begin > 1) {
            persia_divide(dim, bags.scratch, from, persia_divisor(mode, end - begin));
            from = bags.scratch;
        }
        for (size_t p = begin; p < end; p++) {
            persia_fetch_ahead(dim, out, &bags, p, 1);
            for (size_t r = 0; r < bags.rounds; r++) {
                const size_t row = persia_row_of(bags.places, bags.rounds, bags.inverse[p], r);
                if (weighted)
                    persia_add_scaled(dim, out + row * dim, from, bags.weights[p]);
                else
                    persia_add(dim, out + row * dim, from);
            }
        }
    }
}

/* The same into rows that hold nothing yet, without hash stack, skips and weights. Ids are
 * numbered as they are first seen, so a number that has not come yet is a row's first gradient: it
 * is added to zeros (a copy would keep the sign of -0), and whether it is one costs no branch.
 * Returns how many rows were begun; where numbers do not come in that order, these are fewer
 * than there are, and the others hold anything. */
PERSIA_INLINE size_t persia_grad_fresh_loop(
    size_t dim, int mode, const persia_bags_t *settings, const float *grad, float *restrict out)
{
    const persia_bags_t bags = *settings;
    float *divided = bags.scratch;
    const float *zeros = bags.scratch + dim;
    size_t begun = 0;
    for (size_t b = 0; b < bags.num_samples; b++) {
        PERSIA_SAMPLE(bags, b)
        const float *from = grad + b * bags.stride;
        if (mode != PERSIA_SUM && end - begin > 1) {
            persia_divide(dim, divided, from, persia_divisor(mode, end - begin));
            from = divided;
        }
        for (size_t p = begin; p < end; p++) {
            persia_fetch_ahead(dim, out, &bags, p, 1);
            const size_t d = bags.inverse[p];
            const float *base = d == begun ? zeros : out + d * dim;
            float *to = out + d * dim;
            begun += d == begun;
            PERSIA_SAME_OR_APART
            for (size_t j = 0; j < dim; j++)
                to[j] = base[j] + from[j];
        }
    }
    return begun;
}

/* Each element goes to the id that won it; an empty sample (-1) has none. */
PERSIA_INLINE void persia_grad_max_loop(
    size_t dim, const persia_bags_t *bags, const float *grad, const int32_t *argmax,
    const uint8_t *skip, float *restrict out)
{
    for (size_t b = 0; b < bags->num_samples; b++) {
        if (skip && skip[b])
            continue;
        PERSIA_ROW_LOOP
        for (size_t j = 0; j < dim; j++) {
            const int32_t d = argmax[b * dim + j];
            if (d < 0)
                continue;
            for (size_t r = 0; r < bags->rounds; r++) {
                const size_t row = persia_row_of(bags->places, bags->rounds, (size_t)d, r);
                out[row * dim + j] += grad[b * bags->stride + j];
            }
        }
    }
}

/* --- raw slots --------------------------------------------------------------------------------- */

PERSIA_INLINE void persia_gather_loop(
    size_t dim, const float *rows, const uint32_t *places, size_t rounds, size_t num_distinct,
    float *restrict out)
{
    for (size_t d = 0; d < num_distinct; d++) {
        if (d + PERSIA_POOL_AHEAD < num_distinct)
            for (size_t r = 0; r < rounds; r++)
                PERSIA_FETCH_LINES(
                    rows + persia_row_of(places, rounds, d + PERSIA_POOL_AHEAD, r) * dim,
                    4 * dim, 0);
        float *restrict to = out + d * dim;
        persia_copy(dim, to, rows + persia_row_of(places, rounds, d, 0) * dim);
        for (size_t r = 1; r < rounds; r++)
            persia_add(dim, to, rows + persia_row_of(places, rounds, d, r) * dim);
    }
}

PERSIA_INLINE void persia_scatter_add_loop(
    size_t dim, const float *grad, const uint32_t *places, size_t rounds, size_t num_distinct,
    float *restrict out)
{
    for (size_t d = 0; d < num_distinct; d++)
        for (size_t r = 0; r < rounds; r++) {
            if (d + PERSIA_POOL_AHEAD < num_distinct)
                PERSIA_FETCH_LINES(
                    out + persia_row_of(places, rounds, d + PERSIA_POOL_AHEAD, r) * dim,
                    4 * dim, 1);
            persia_add(dim, out + persia_row_of(places, rounds, d, r) * dim, grad + d * dim);
        }
}

PERSIA_INLINE void persia_index_add_loop(
    size_t dim, const float *grad, const int64_t *index, size_t n, float *restrict out)
{
    for (size_t i = 0; i < n; i++) {
        if (i + PERSIA_POOL_AHEAD < n)
            PERSIA_FETCH_LINES(out + (size_t)index[i + PERSIA_POOL_AHEAD] * dim, 4 * dim, 1);
        persia_add(dim, out + (size_t)index[i] * dim, grad + i * dim);
    }
}

/* --- scans ------------------------------------------------------------------------------------- */

/* Whether any of n floats is NaN or infinite: all exponent bits set. */
PERSIA_INLINE int persia_any_nonfinite_of(const float *values, size_t n)
{
    uint32_t found = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, values + i, sizeof bits);
        found |= (bits & 0x7F800000u) == 0x7F800000u;
    }
    return (int)found;
}

typedef float persia_sixteen_t __attribute__((vector_size(64)));

/* The sum of n squares, in 16 lanes by blocks of 2048, whose sums are added in double: so it is
 * exact to f32 however many there are. A square that overflows makes it infinite. */
PERSIA_INLINE double persia_squares_of(const float *values, size_t n)
{
    double total = 0.0;
    size_t i = 0;
    while (i + 16 <= n) {
        const size_t end = n - i < 2048 ? n : i + 2048;
        persia_sixteen_t lanes = {0}, here;
        for (; i + 16 <= end; i += 16) {
            memcpy(&here, values + i, sizeof here);
            lanes += here * here;
        }
        for (size_t j = 0; j < 16; j++)
            total += (double)lanes[j];
    }
    for (; i < n; i++)
        total += (double)(values[i] * values[i]);
    return total;
}

PERSIA_INLINE uint32_t persia_max_u32_of(const uint32_t *values, size_t n)
{
    uint32_t largest = 0;
    for (size_t i = 0; i < n; i++)
        largest = values[i] > largest ? values[i] : largest;
    return largest;
}

/* As unsigned, so that a negative number is the largest of all. */
PERSIA_INLINE uint64_t persia_max_u64_of(const int64_t *values, size_t n)
{
    uint64_t largest = 0;
    for (size_t i = 0; i < n; i++)
        largest = (uint64_t)values[i] > largest ? (uint64_t)values[i] : largest;
    return largest;
}

/* --- the tables -------------------------------------------------------------------------------- */

PERSIA_VARIANTS(
    void, persia_pool,
    (int mode, const persia_bags_t *bags, const float *rows, float *out, int32_t *argmax), {
        if (mode == PERSIA_MAX) {
            PERSIA_BY_DIM(persia_pool_max_loop, bags->dim, bags, rows, out, argmax)
        } else if (bags->weights) {
            PERSIA_BY_DIM(persia_pool_sum_loop, bags->dim, PERSIA_SUM, 1, bags, rows, out)
        } else {
            PERSIA_BY_DIM(persia_pool_sum_loop, bags->dim, mode, 0, bags, rows, out)
        }
    })
PERSIA_VARIANTS(
    void, persia_pool_grad,
    (int mode, const persia_bags_t *bags, const float *grad, const int32_t *argmax,
     const uint8_t *skip, float *out), {
        if (mode == PERSIA_MAX) {
            persia_grad_max_loop(bags->dim, bags, grad, argmax, skip, out);
        } else if (bags->weights) {
            PERSIA_BY_DIM(persia_grad_sum_loop, bags->dim, PERSIA_SUM, 1, bags, grad, skip, out)
        } else {
            PERSIA_BY_DIM(persia_grad_sum_loop, bags->dim, mode, 0, bags, grad, skip, out)
        }
    })
PERSIA_VARIANTS(
    size_t, persia_grad_fresh,
    (int mode, const persia_bags_t *bags, const float *grad, float *out), {
        size_t begun;
        PERSIA_BY_DIM(begun = persia_grad_fresh_loop, bags->dim, mode, bags, grad, out)
        return begun;
    })
PERSIA_VARIANTS(
    void, persia_gather,
    (const float *rows, const uint32_t *places, size_t rounds, size_t num_distinct, size_t dim,
     float *out),
    { PERSIA_BY_DIM(persia_gather_loop, dim, rows, places, rounds, num_distinct, out) })
PERSIA_VARIANTS(
    void, persia_scatter_add,
    (const float *grad, const uint32_t *places, size_t rounds, size_t num_distinct, size_t dim,
     float *out),
    { PERSIA_BY_DIM(persia_scatter_add_loop, dim, grad, places, rounds, num_distinct, out) })
PERSIA_VARIANTS(
    void, persia_index_add,
    (const float *grad, const int64_t *index, size_t n, size_t dim, float *out),
    { PERSIA_BY_DIM(persia_index_add_loop, dim, grad, index, n, out) })
PERSIA_VARIANTS(int, persia_any_nonfinite, (const float *values, size_t n),
                { return persia_any_nonfinite_of(values, n); })
PERSIA_VARIANTS(double, persia_squares, (const float *values, size_t n),
                { return persia_squares_of(values, n); })
PERSIA_VARIANTS(uint32_t, persia_max_u32, (const uint32_t *values, size_t n),
                { return persia_max_u32_of(values, n); })
PERSIA_VARIANTS(uint64_t, persia_max_u64, (const int64_t *values, size_t n),
                { return persia_max_u64_of(values, n); })

typedef struct {
    void (*pool)(int, const persia_bags_t *, const float *, float *, int32_t *);
    void (*pool_grad)(
        int, const persia_bags_t *, const float *, const int32_t *, const uint8_t *, float *);
    size_t (*grad_fresh)(int, const persia_bags_t *, const float *, float *);
    void (*gather)(const float *, const uint32_t *, size_t, size_t, size_t, float *);
    void (*scatter_add)(const float *, const uint32_t *, size_t, size_t, size_t, float *);
    void (*index_add)(const float *, const int64_t *, size_t, size_t, float *);
    int (*any_nonfinite)(const float *, size_t);
    double (*squares)(const float *, size_t);
    uint32_t (*max_u32)(const uint32_t *, size_t);
    uint64_t (*max_u64)(const int64_t *, size_t);
} persia_pooling_t;

#define PERSIA_POOLING(level)                                                     \
    {                                                                             \
        persia_pool_##level, persia_pool_grad_##level, persia_grad_fresh_##level, \
        persia_gather_##level, persia_scatter_add_##level, persia_index_add_##level, \
        persia_any_nonfinite_##level, persia_squares_##level, persia_max_u32_##level, \
        persia_max_u64_##level                                                    \
    }

static const persia_pooling_t persia_pooling[PERSIA_NUM_LEVELS] = {
    PERSIA_POOLING(baseline),
#if PERSIA_NUM_LEVELS > 1
    PERSIA_POOLING(avx2),
    PERSIA_POOLING(avx512),
#endif
};

#endif
