/* The two passes over the rows of a part: see part_rows.pyx. */
#ifndef PERSIA_PART_ROWS_H
#define PERSIA_PART_ROWS_H

#include "kernels.h"

#define PERSIA_COPY_AHEAD 24 /* rows fetched early: those of a part lie too far apart for the hardware */

#define PERSIA_COPY_LOOP(bytes, out, rows, places, n)                                           \
    for (size_t i = 0; i < (n); i++) {                                                          \
        if (i + PERSIA_COPY_AHEAD < (n))                                                        \
            PERSIA_FETCH_LINES((rows) + (size_t)(places)[i + PERSIA_COPY_AHEAD] * (bytes), (bytes), 0); \
        memcpy((out) + i * (bytes), (rows) + (size_t)(places)[i] * (bytes), (bytes));           \
    }

/* Copies n rows of `width` bytes, in the order of their places. */
PERSIA_INLINE void persia_copy_rows_body(char *restrict out, const char *restrict rows,
                                         size_t width, const uint32_t *restrict places, size_t n)
{
    switch (width) {
    case 4: PERSIA_COPY_LOOP(4, out, rows, places, n); break;
    case 8: PERSIA_COPY_LOOP(8, out, rows, places, n); break;
    case 16: PERSIA_COPY_LOOP(16, out, rows, places, n); break;
    case 32: PERSIA_COPY_LOOP(32, out, rows, places, n); break;
    case 64: PERSIA_COPY_LOOP(64, out, rows, places, n); break;
    case 128: PERSIA_COPY_LOOP(128, out, rows, places, n); break;
    default: PERSIA_COPY_LOOP(width, out, rows, places, n);
    }
}

PERSIA_VARIANTS(void, persia_copy_rows,
                (char *out, const char *rows, size_t width, const uint32_t *places, size_t n),
                (out, rows, width, places, n))

/* How many signs are not of `count` buckets from `first` on. */
PERSIA_INLINE size_t persia_strangers_body(const uint64_t *signs, size_t n, uint64_t first,
                                           uint64_t count)
{
    size_t found = 0;
    for (size_t i = 0; i < n; i++)
        found += (persia_mix64(signs[i]) >> 50) - first >= count;
    return found;
}

PERSIA_VARIANTS(size_t, persia_strangers,
                (const uint64_t *signs, size_t n, uint64_t first, uint64_t count),
                (signs, n, first, count))

typedef void (*persia_copy_rows_t)(char *, const char *, size_t, const uint32_t *, size_t);
typedef size_t (*persia_strangers_t)(const uint64_t *, size_t, uint64_t, uint64_t);

static const persia_copy_rows_t persia_copy_rows[PERSIA_NUM_LEVELS] =
    PERSIA_LEVELS(persia_copy_rows);
static const persia_strangers_t persia_strangers[PERSIA_NUM_LEVELS] =
    PERSIA_LEVELS(persia_strangers);

#endif
