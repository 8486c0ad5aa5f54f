"""Rows on their way into the parts of a checkpoint, and their signs on the way back.

A part takes few rows of each block that comes out of a store, array by array, so copying them
is a matter of fetching early what lies far apart.
"""

from numpy cimport PyArray_DATA, PyArray_SIZE, ndarray

from persia._core.base.arrays cimport as_ids, as_vector
from persia._core.base.cpu cimport isa_level
from persia._core.base.hashing cimport NUM_BUCKETS, bucket_of, mix64
from persia._core.base.types cimport uint32_t, uint64_t, uint8_t

from persia.errors import DataError

cdef extern from * nogil:
    """
    #include <stdlib.h>

    #include "kernels.h"

    /* Rows are fetched early: those of a part lie too far apart for the hardware to see it. */
    #define PERSIA_COPY_AHEAD 12

    PERSIA_INLINE void persia_copy_loop(size_t width, char *restrict out,
                                        const char *restrict rows,
                                        const uint32_t *restrict places, size_t n)
    {
        for (size_t i = 0; i < n; i++) {
            if (i + PERSIA_COPY_AHEAD < n)
                PERSIA_FETCH_LINES(rows + (size_t)places[i + PERSIA_COPY_AHEAD] * width,
                                   width, 0);
            memcpy(out + i * width, rows + (size_t)places[i] * width, width);
        }
    }

    PERSIA_VARIANTS(
        void, persia_copy_rows,
        (char *out, const char *rows, size_t width, const uint32_t *places, size_t n), {
            switch (width) {
            case 4: persia_copy_loop(4, out, rows, places, n); break;
            case 128: persia_copy_loop(128, out, rows, places, n); break;
            default: PERSIA_BY_DIM(persia_copy_loop, width, out, rows, places, n)
            }
        })

    /* How many signs are not of `count` buckets from `first` on. */
    PERSIA_INLINE size_t persia_strangers_of(const uint64_t *signs, size_t n, uint64_t first,
                                             uint64_t count)
    {
        size_t found = 0;
        for (size_t i = 0; i < n; i++)
            found += (persia_mix64(signs[i]) >> 50) - first >= count;
        return found;
    }

    PERSIA_VARIANTS(size_t, persia_strangers,
                    (const uint64_t *signs, size_t n, uint64_t first, uint64_t count),
                    { return persia_strangers_of(signs, n, first, count); })

    enum {
        PERSIA_HEAP_SIGNS = 4096, /* about: their table stays in the cache */
        PERSIA_MOST_HEAP_BITS = 20,
        PERSIA_MOST_PROBES = 64,
    };

    /* Enters hashes, none of which is 0, into an empty table; 0 where one may be there. */
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

    /* Whether each of n signs certainly comes once. Their hashes, no two of which are alike,
     * are put on heaps by bits below those of the bucket, and each heap into a table. 0 if one
     * comes twice, if they crowd as those of chance do not, or if there is no memory. */
    static int persia_all_once(const uint64_t *signs, size_t n)
    {
        int heap_bits = 0;
        while (heap_bits < PERSIA_MOST_HEAP_BITS && n >> heap_bits > PERSIA_HEAP_SIGNS)
            heap_bits++;
        const size_t heaps = (size_t)1 << heap_bits;
        const size_t most = (n >> heap_bits) + (n >> heap_bits) / 2 + 256; // on one heap
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
            ends[(persia_mix64(signs[i]) >> 14 & (heaps - 1)) + 1]++;
        for (size_t heap = 0; heap < heaps; heap++)
            ends[heap + 1] += ends[heap];
        for (size_t i = 0; i < n; i++) {
            const uint64_t hash = persia_mix64(signs[i]);
            hashes[ends[hash >> 14 & (heaps - 1)]++] = hash;
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

    typedef void (*persia_copy_rows_t)(char *, const char *, size_t, const uint32_t *, size_t);
    typedef size_t (*persia_strangers_t)(const uint64_t *, size_t, uint64_t, uint64_t);

    static const persia_copy_rows_t persia_copy_rows[PERSIA_NUM_LEVELS] =
        PERSIA_LEVELS(persia_copy_rows);
    static const persia_strangers_t persia_strangers[PERSIA_NUM_LEVELS] =
        PERSIA_LEVELS(persia_strangers);
    """
    enum:
        PERSIA_NUM_LEVELS

    ctypedef void (*persia_copy_rows_t)(
        char *out, const char *rows, size_t width, const uint32_t *places, size_t n
    ) noexcept nogil
    ctypedef size_t (*persia_strangers_t)(
        const uint64_t *signs, size_t n, uint64_t first, uint64_t count) noexcept nogil

    int persia_all_once(const uint64_t *signs, size_t n) noexcept nogil
    const persia_copy_rows_t[PERSIA_NUM_LEVELS] persia_copy_rows
    const persia_strangers_t[PERSIA_NUM_LEVELS] persia_strangers


def copy_rows(const uint8_t[:, ::1] rows not None, places, uint8_t[::1] out not None):
    cdef ndarray chosen = as_vector(places, c"u", 4, "places")
    cdef const uint32_t *of_places = <const uint32_t *> PyArray_DATA(chosen)
    cdef size_t n = PyArray_SIZE(chosen)
    cdef size_t width = rows.shape[1]
    cdef size_t i
    cdef uint32_t last = 0
    if <size_t> out.shape[0] != n * width:
        raise DataError(
            f"expected room for {n} rows of {width} bytes, got {out.shape[0]} bytes")
    if n == 0 or width == 0:
        return
    with nogil:
        for i in range(n):
            last = max(last, of_places[i])
    if last >= <size_t> rows.shape[0]:
        raise DataError(f"places: expected those of {rows.shape[0]} rows, got {last}")
    with nogil:
        persia_copy_rows[isa_level()](
            <char *> &out[0], <const char *> &rows[0, 0], width, of_places, n)


def find_stranger(signs, uint64_t first, uint64_t end):
    cdef ndarray values = as_ids(signs, "signs")
    cdef const uint64_t *of_signs = <const uint64_t *> PyArray_DATA(values)
    cdef size_t n = PyArray_SIZE(values)
    cdef size_t i
    cdef size_t found
    if not first <= end <= NUM_BUCKETS:
        raise DataError(f"expected buckets in 0..{NUM_BUCKETS}, got {first}..{end}")
    with nogil:
        found = persia_strangers[isa_level()](of_signs, n, first, end - first)
    if found:
        for i in range(n):
            if not first <= bucket_of(mix64(of_signs[i])) < end:
                return i
    return -1


def all_once(signs):
    cdef ndarray values = as_ids(signs, "signs")
    cdef const uint64_t *of_signs = <const uint64_t *> PyArray_DATA(values)
    cdef size_t n = PyArray_SIZE(values)
    cdef bint is_once
    with nogil:
        is_once = persia_all_once(of_signs, n)
    return is_once
