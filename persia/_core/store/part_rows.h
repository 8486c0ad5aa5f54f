/* The two passes over the rows of a part: see part_rows.pyx. */
#ifndef PERSIA_PART_ROWS_H
#define PERSIA_PART_ROWS_H

#include <stdlib.h>

#include "kernels.h"

/* Rows that are fetched early: those of a part lie too far apart for the hardware to see it. */
#define PERSIA_COPY_AHEAD 12

#define PERSIA_COPY_LOOP(bytes, out, rows, places, n)                                           \
    for (size_t i = 0; i < (n); i++) {                                                          \
        if (i + PERSIA_COPY_AHEAD < (n))                                                        \
            PERSIA_FETCH_LINES((rows) + (size_t)(places)[i + PERSIA_COPY_AHEAD] * (bytes),      \
                               (bytes), 0);                                                     \
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

enum {
    PERSIA_HEAP_SIGNS = 4096, /* about: their table stays in the cache */
    PERSIA_MOST_HEAP_BITS = 20,
    PERSIA_MOST_PROBES = 64,
};

#define PERSIA_HEAP_OF(hash) ((hash) >> 14 & (heaps - 1))

/* Enters hashes, none of which is 0, into an empty table; 0 where one may be there already. */
static int persia_enter(const uint64_t *hashes, size_t n, uint64_t *table, size_t mask)
{
    for (size_t i = 0; i < n; i++) {
        const uint64_t hash = hashes[i];
        size_t place = hash >> 34 & mask;
        for (int probes = 0; table[place] != 0; place = (place + 1) & mask)
            if (table[place] == hash || ++probes > PERSIA_MOST_PROBES)
                return 0;
        table[place] = hash;
    }
    return 1;
}

/* Whether each of n signs certainly comes once. Their hashes, no two of which are alike, are put
 * on heaps by bits below those of the bucket, and each heap into a table. 0 if one comes twice,
 * if they crowd as those of chance do not, or if there is no memory. */
static int persia_all_once(const uint64_t *signs, size_t n)
{
    int heap_bits = 0;
    while (heap_bits < PERSIA_MOST_HEAP_BITS && n >> heap_bits > PERSIA_HEAP_SIGNS)
        heap_bits++;
    const size_t heaps = (size_t)1 << heap_bits;
    const size_t most = (n >> heap_bits) + (n >> heap_bits) / 2 + 256; /* on one heap */
    size_t room = 1024;
    while (room < 2 * most)
        room *= 2;
    uint64_t *hashes = (uint64_t *)malloc((n + heaps + 1 + room) * sizeof *hashes);
    if (hashes == NULL)
        return 0;
    uint64_t *ends = hashes + n, *table = ends + heaps + 1;
    size_t zeros = 0; /* 0 is an empty place of the table; one sign has that hash */
    memset(ends, 0, (heaps + 1) * sizeof *ends);
    for (size_t i = 0; i < n; i++)
        ends[PERSIA_HEAP_OF(persia_mix64(signs[i])) + 1]++;
    for (size_t heap = 0; heap < heaps; heap++)
        ends[heap + 1] += ends[heap];
    for (size_t i = 0; i < n; i++) {
        const uint64_t hash = persia_mix64(signs[i]);
        hashes[ends[PERSIA_HEAP_OF(hash)]++] = hash;
    }
    /* Where a heap began, the next one begins now: each is written to its end. */
    int is_once = 1;
    for (size_t heap = 0, begin = 0; heap < heaps && is_once; begin = ends[heap++]) {
        size_t count = ends[heap] - begin;
        for (size_t i = begin; heap == 0 && i < begin + count; i++)
            if (hashes[i] == 0) {
                zeros++;
                hashes[i--] = hashes[begin + --count];
            }
        memset(table, 0, room * sizeof *table);
        is_once = zeros < 2 && count <= most
                  && persia_enter(hashes + begin, count, table, room - 1);
    }
    free(hashes);
    return is_once;
}

#undef PERSIA_HEAP_OF

typedef void (*persia_copy_rows_t)(char *, const char *, size_t, const uint32_t *, size_t);
typedef size_t (*persia_strangers_t)(const uint64_t *, size_t, uint64_t, uint64_t);

static const persia_copy_rows_t persia_copy_rows[PERSIA_NUM_LEVELS] =
    PERSIA_LEVELS(persia_copy_rows);
static const persia_strangers_t persia_strangers[PERSIA_NUM_LEVELS] =
    PERSIA_LEVELS(persia_strangers);

#endif
