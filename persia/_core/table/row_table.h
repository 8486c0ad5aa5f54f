/* Rows by sign for any number of readers and one writer at a time; readers never wait.
 *
 *     sign --mix64--> bucket: 12 tags and row numbers --> chunk of 1024 rows: | sign | values |
 *
 * A row that a reader may see does not change. Its replacement is written aside and published by
 * one store of its number; what it replaced is retired, and used again once the readers of that
 * time have left (epochs: Fraser, Practical Lock-Freedom, 2004).
 *
 *   R1  A sign is in the first bucket from its home on that had a free place when it came; every
 *       bucket that it passed counts it in num_passed, before it can be found.
 *   R2  What was retired in epoch e is free when epoch e + 2 begins. An epoch begins when no
 *       reader of the last but one is left, and readers count themselves by its parity.
 *   R3  Only the writer stores, except to `active`. The index grows aside, too.
 *   R4  What may lack memory is done before a block of changes is begun.
 */
#ifndef PERSIA_ROW_TABLE_H
#define PERSIA_ROW_TABLE_H

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "half_kernels.h"
#include "portable.h"

#define PERSIA_ABSENT_ROW UINT32_MAX

enum {
    PERSIA_PLACES = 12,
    PERSIA_CHUNK_BITS = 10,
    PERSIA_CHUNK_ROWS = 1 << PERSIA_CHUNK_BITS,
    PERSIA_MOST_CHUNKS = 1 << 22,
    PERSIA_ARENA = 2 << 20,
    PERSIA_WRITE_BLOCK = 256, /* divides a chunk */
    PERSIA_READ_BLOCK = 32,
    PERSIA_INT8_HEAD = 4, /* scale and offset of a row */
};

typedef struct {
    uint64_t low; /* tags of places 0..7, a byte each; 0 is free */
    uint32_t high;
    uint32_t num_passed;
    uint32_t rows[PERSIA_PLACES];
} persia_bucket_t;

typedef struct persia_buckets {
    persia_bucket_t *buckets;
    uint64_t num_buckets;
    uint64_t retired_in; /* epoch */
    struct persia_buckets *next;
} persia_buckets_t;

typedef struct {
    char *rows;
    uint32_t stride;
    uint32_t table;
} persia_chunk_t;

typedef struct {
    uint32_t stride;
    uint32_t free_row; /* the next one's number is in the place of its sign */
    uint32_t num_free;
    uint32_t fresh_row;
    uint32_t num_fresh;
    int64_t num_rows;
} persia_group_t;

typedef struct {
    uint32_t *rows;
    size_t count, capacity;
} persia_retired_t;

typedef struct {
    char *start;
    size_t bytes;
} persia_arena_t;

/* The last group holds tombstones. */
typedef struct {
    persia_buckets_t *index;
    persia_chunk_t *chunks;
    uint32_t num_chunks;
    uint32_t num_groups;
    persia_group_t *groups;
    uint64_t num_entries;
    uint64_t num_bytes;
    uint64_t epoch;
    persia_retired_t retired[2]; /* in this epoch, and in the one before */
    persia_buckets_t *old_indexes;
    persia_chunk_t *old_chunks[32];
    uint32_t num_old_chunks;
    uint32_t chunk_capacity;
    persia_arena_t *arenas;
    size_t num_arenas, arena_used;
    pthread_mutex_t writer;
    char apart[64];
    int64_t active[2];
} persia_rows_t;

#define PERSIA_LOAD(place) __atomic_load_n(&(place), __ATOMIC_ACQUIRE)
#define PERSIA_STORE(place, value) __atomic_store_n(&(place), (value), __ATOMIC_RELEASE)

/* --- readers ------------------------------------------------------------------------------- */

static inline uint64_t persia_rows_enter(persia_rows_t *t)
{
    for (;;) {
        const uint64_t epoch = __atomic_load_n(&t->epoch, __ATOMIC_SEQ_CST);
        __atomic_fetch_add(&t->active[epoch & 1], 1, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&t->epoch, __ATOMIC_SEQ_CST) == epoch)
            return epoch;
        __atomic_fetch_sub(&t->active[epoch & 1], 1, __ATOMIC_SEQ_CST);
    }
}

static inline void persia_rows_leave(persia_rows_t *t, uint64_t epoch)
{
    __atomic_fetch_sub(&t->active[epoch & 1], 1, __ATOMIC_SEQ_CST);
}

static inline uint64_t persia_rows_tag(uint64_t hash)
{
    const uint64_t tag = hash >> 32 & 0xFF;
    return tag ? tag : 1;
}

static inline uint64_t persia_rows_home(const persia_buckets_t *index, uint64_t hash)
{
    return (hash & 0xFFFFFFFF) * index->num_buckets >> 32;
}

/* The top bit of each byte that is 0. */
static inline uint64_t persia_zero_bytes(uint64_t word)
{
    const uint64_t rest = 0x7F7F7F7F7F7F7F7Fu;
    return ~(((word & rest) + rest) | word | rest);
}

/* Places with this tag as bits 0..11. */
static inline uint32_t persia_places(const persia_bucket_t *bucket, uint64_t tag)
{
    const uint64_t gather = 0x0102040810204080u;
    const uint64_t low = persia_zero_bytes(PERSIA_LOAD(bucket->low) ^ 0x0101010101010101u * tag);
    const uint64_t high = persia_zero_bytes(
        (PERSIA_LOAD(bucket->high) ^ 0x01010101u * tag) | 0xFFFFFFFF00000000u);
    return (uint32_t)((low >> 7) * gather >> 56 & 0xFF)
           | (uint32_t)((high >> 7) * gather >> 56 & 0x0F) << 8;
}

static inline char *persia_row(const persia_chunk_t *chunks, uint32_t row)
{
    const persia_chunk_t *chunk = &chunks[row >> PERSIA_CHUNK_BITS];
    return chunk->rows + (size_t)(row & (PERSIA_CHUNK_ROWS - 1)) * chunk->stride;
}

static inline uint64_t persia_row_sign(const char *row)
{
    return __atomic_load_n((const uint64_t *)row, __ATOMIC_RELAXED);
}

static inline void persia_set_sign(char *row, uint64_t sign)
{
    __atomic_store_n((uint64_t *)row, sign, __ATOMIC_RELAXED);
}

/* The place in *bucket, and the row; PERSIA_ABSENT_ROW: there is none. */
static inline uint32_t persia_find(const persia_rows_t *t, const persia_buckets_t *index,
                                   uint64_t hash, uint64_t sign, persia_bucket_t **found,
                                   uint32_t *place)
{
    const uint64_t home = persia_rows_home(index, hash), tag = persia_rows_tag(hash);
    uint64_t at = home;
    do {
        persia_bucket_t *bucket = &index->buckets[at];
        for (uint32_t places = persia_places(bucket, tag); places; places &= places - 1) {
            *place = persia_lowest_bit(places);
            const uint32_t row = PERSIA_LOAD(bucket->rows[*place]);
            /* After the row's number: it may lie in a chunk that was just added. */
            if (persia_row_sign(persia_row(PERSIA_LOAD(t->chunks), row)) == sign) {
                *found = bucket;
                return row;
            }
        }
        if (PERSIA_LOAD(bucket->num_passed) == 0)
            break;
        at = at + 1 == index->num_buckets ? 0 : at + 1;
    } while (at != home);
    return PERSIA_ABSENT_ROW;
}

/* The first row that has the tag: nearly always the right one, and found without reading it. */
static inline uint32_t persia_guess(const persia_buckets_t *index, uint64_t hash)
{
    const persia_bucket_t *bucket = &index->buckets[persia_rows_home(index, hash)];
    const uint32_t places = persia_places(bucket, persia_rows_tag(hash));
    return places ? PERSIA_LOAD(bucket->rows[persia_lowest_bit(places)]) : PERSIA_ABSENT_ROW;
}

/* --- memory, by the writer ------------------------------------------------------------------ */

static inline void persia_count_bytes(persia_rows_t *t, int64_t bytes)
{
    PERSIA_STORE(t->num_bytes, t->num_bytes + (uint64_t)bytes);
}

static inline persia_buckets_t *persia_new_index(persia_rows_t *t, uint64_t num_buckets)
{
    persia_buckets_t *index = (persia_buckets_t *)calloc(1, sizeof *index);
    void *buckets = NULL;
    const size_t bytes = num_buckets * sizeof(persia_bucket_t);
    const int is_large = bytes >= PERSIA_ARENA;
    if (index == NULL || num_buckets > UINT32_MAX
        || posix_memalign(&buckets, is_large ? PERSIA_ARENA : 64, bytes) != 0) {
        free(index);
        return NULL;
    }
    if (is_large)
        persia_advise_huge(buckets, bytes);
    memset(buckets, 0, bytes);
    index->buckets = (persia_bucket_t *)buckets;
    index->num_buckets = num_buckets;
    persia_count_bytes(t, (int64_t)bytes);
    return index;
}

static inline void persia_free_index(persia_rows_t *t, persia_buckets_t *index)
{
    persia_count_bytes(t, -(int64_t)(index->num_buckets * sizeof(persia_bucket_t)));
    free(index->buckets);
    free(index);
}

/* Begins an epoch if no reader of the last one is left; see R2. */
static inline void persia_advance(persia_rows_t *t)
{
    if (__atomic_load_n(&t->active[(t->epoch + 1) & 1], __ATOMIC_SEQ_CST) != 0)
        return;
    persia_retired_t past = t->retired[1];
    for (size_t i = 0; i < past.count; i++) {
        const uint32_t row = past.rows[i];
        persia_group_t *group = &t->groups[t->chunks[row >> PERSIA_CHUNK_BITS].table];
        persia_set_sign(persia_row(t->chunks, row), group->free_row);
        group->free_row = row;
        group->num_free++;
    }
    past.count = 0;
    t->retired[1] = t->retired[0];
    t->retired[0] = past;
    __atomic_store_n(&t->epoch, t->epoch + 1, __ATOMIC_SEQ_CST);
    for (persia_buckets_t **at = &t->old_indexes; *at != NULL;) {
        persia_buckets_t *index = *at;
        if (index->retired_in + 2 > t->epoch) {
            at = &index->next;
            continue;
        }
        *at = index->next;
        persia_free_index(t, index);
    }
}

static inline void persia_reclaim(persia_rows_t *t)
{
    for (int i = 0; i < 2; i++)
        if (t->retired[0].count || t->retired[1].count || t->old_indexes != NULL)
            persia_advance(t);
}

static inline void persia_place_row(persia_buckets_t *index, uint64_t hash, uint32_t row)
{
    uint64_t at = persia_rows_home(index, hash);
    const uint64_t tag = persia_rows_tag(hash);
    uint32_t places;
    persia_bucket_t *bucket = &index->buckets[at];
    while ((places = persia_places(bucket, 0)) == 0) {
        PERSIA_STORE(bucket->num_passed, bucket->num_passed + 1);
        at = at + 1 == index->num_buckets ? 0 : at + 1;
        bucket = &index->buckets[at];
    }
    const uint32_t place = persia_lowest_bit(places);
    PERSIA_STORE(bucket->rows[place], row);
    if (place < 8)
        PERSIA_STORE(bucket->low, bucket->low | tag << 8 * place);
    else
        PERSIA_STORE(bucket->high, bucket->high | (uint32_t)tag << 8 * (place - 8));
}

/* Makes room for this many entries, at most 10.5 a bucket; -1: no memory, nothing changed. */
static inline int persia_fit_index(persia_rows_t *t, uint64_t num_entries)
{
    persia_buckets_t *old = t->index;
    if (old != NULL && 2 * num_entries <= 21 * old->num_buckets)
        return 0;
    uint64_t num_buckets = (2 * num_entries + 20) / 21;
    if (old != NULL && num_buckets < old->num_buckets + old->num_buckets / 2)
        num_buckets = old->num_buckets + old->num_buckets / 2;
    persia_buckets_t *index = persia_new_index(t, num_buckets < 4 ? 4 : num_buckets);
    if (index == NULL)
        return -1;
    for (uint64_t i = 0; old != NULL && i < old->num_buckets; i++) {
        if (i + 2 < old->num_buckets)
            for (uint32_t used = ~persia_places(&old->buckets[i + 2], 0) & 0xFFF; used;
                 used &= used - 1)
                persia_prefetch(
                    persia_row(t->chunks, old->buckets[i + 2].rows[persia_lowest_bit(used)]));
        for (uint32_t used = ~persia_places(&old->buckets[i], 0) & 0xFFF; used; used &= used - 1) {
            const uint32_t row = old->buckets[i].rows[persia_lowest_bit(used)];
            persia_place_row(index, persia_mix64(persia_row_sign(persia_row(t->chunks, row))),
                             row);
        }
    }
    PERSIA_STORE(t->index, index);
    if (old != NULL) {
        old->retired_in = t->epoch;
        old->next = t->old_indexes;
        t->old_indexes = old;
    }
    return 0;
}

static inline char *persia_carve(persia_rows_t *t, size_t bytes)
{
    persia_arena_t *last = t->num_arenas ? &t->arenas[t->num_arenas - 1] : NULL;
    if (last == NULL || last->bytes - t->arena_used < bytes) {
        const size_t whole = (bytes + PERSIA_ARENA - 1) / PERSIA_ARENA * PERSIA_ARENA;
        persia_arena_t *arenas =
            (persia_arena_t *)realloc(t->arenas, (t->num_arenas + 1) * sizeof *arenas);
        if (arenas == NULL)
            return NULL;
        t->arenas = arenas;
        last = &arenas[t->num_arenas];
        last->bytes = whole;
        last->start = (char *)persia_map(whole, PERSIA_ARENA);
        if (last->start == NULL)
            return NULL;
        /* Little tables stay on little pages. */
        if (t->num_arenas > 0)
            persia_advise_huge(last->start, whole);
        t->num_arenas++;
        t->arena_used = 0;
    }
    t->arena_used += bytes;
    return last->start + t->arena_used - bytes;
}

static inline int persia_add_chunk(persia_rows_t *t, uint32_t table)
{
    persia_group_t *group = &t->groups[table];
    if (t->num_chunks == PERSIA_MOST_CHUNKS - 1)
        return -1;
    if (t->num_chunks == t->chunk_capacity) {
        const uint32_t capacity = t->chunk_capacity ? 2 * t->chunk_capacity : 8;
        persia_chunk_t *chunks = (persia_chunk_t *)malloc(capacity * sizeof *chunks);
        if (chunks == NULL)
            return -1;
        if (t->chunks != NULL) {
            memcpy(chunks, t->chunks, t->num_chunks * sizeof *chunks);
            t->old_chunks[t->num_old_chunks++] = t->chunks;
        }
        PERSIA_STORE(t->chunks, chunks);
        t->chunk_capacity = capacity;
        persia_count_bytes(t, (int64_t)(capacity * sizeof *chunks));
    }
    persia_chunk_t *chunk = &t->chunks[t->num_chunks];
    chunk->stride = group->stride;
    chunk->table = table;
    chunk->rows = persia_carve(t, (size_t)PERSIA_CHUNK_ROWS * group->stride);
    if (chunk->rows == NULL)
        return -1;
    for (; group->num_fresh > 0; group->num_fresh--, group->fresh_row++, group->num_free++) {
        persia_set_sign(persia_row(t->chunks, group->fresh_row), group->free_row);
        group->free_row = group->fresh_row;
        persia_count_bytes(t, group->stride);
    }
    group->fresh_row = t->num_chunks << PERSIA_CHUNK_BITS;
    group->num_fresh = PERSIA_CHUNK_ROWS;
    PERSIA_STORE(t->num_chunks, t->num_chunks + 1);
    return 0;
}

/* Sees that a block of n changes can be retired, and with `rows` that n rows of the table can be
 * added; -1: no memory, no row changed. */
static inline int persia_prepare(persia_rows_t *t, uint32_t table, uint32_t n, int rows)
{
    persia_reclaim(t);
    persia_retired_t *retired = &t->retired[0];
    if (retired->capacity - retired->count < n) {
        const size_t capacity = 2 * (retired->count + n);
        uint32_t *more = (uint32_t *)realloc(retired->rows, capacity * sizeof *more);
        if (more == NULL)
            return -1;
        persia_count_bytes(t, (int64_t)((capacity - retired->capacity) * sizeof *more));
        retired->rows = more;
        retired->capacity = capacity;
    }
    if (!rows)
        return 0;
    if (persia_fit_index(t, t->num_entries + n) < 0)
        return -1;
    const persia_group_t *group = &t->groups[table];
    return group->num_free + group->num_fresh < n ? persia_add_chunk(t, table) : 0;
}

/* --- changes, which cannot fail ------------------------------------------------------------- */

static inline uint32_t persia_take_row(persia_rows_t *t, uint32_t table)
{
    persia_group_t *group = &t->groups[table];
    uint32_t row = group->free_row;
    if (group->num_free > 0) {
        group->free_row = (uint32_t)persia_row_sign(persia_row(t->chunks, row));
        group->num_free--;
        return row;
    }
    row = group->fresh_row++;
    group->num_fresh--;
    persia_count_bytes(t, group->stride);
    return row;
}

static inline uint32_t persia_retire(persia_rows_t *t, uint32_t row)
{
    const uint32_t table = t->chunks[row >> PERSIA_CHUNK_BITS].table;
    t->retired[0].rows[t->retired[0].count++] = row;
    PERSIA_STORE(t->groups[table].num_rows, t->groups[table].num_rows - 1);
    return table;
}

static inline void persia_publish(persia_rows_t *t, uint64_t hash, uint64_t sign, uint32_t row)
{
    persia_group_t *group = &t->groups[t->chunks[row >> PERSIA_CHUNK_BITS].table];
    persia_bucket_t *bucket;
    uint32_t place;
    const uint32_t old = persia_find(t, t->index, hash, sign, &bucket, &place);
    PERSIA_STORE(group->num_rows, group->num_rows + 1);
    if (old != PERSIA_ABSENT_ROW) {
        PERSIA_STORE(bucket->rows[place], row);
        persia_retire(t, old);
        return;
    }
    persia_place_row(t->index, hash, row);
    t->num_entries++;
}

/* Its table, or num_groups where there was none. */
static inline uint32_t persia_remove(persia_rows_t *t, uint64_t hash, uint64_t sign)
{
    persia_bucket_t *bucket;
    uint32_t place;
    const uint32_t row = persia_find(t, t->index, hash, sign, &bucket, &place);
    if (row == PERSIA_ABSENT_ROW)
        return t->num_groups;
    if (place < 8)
        PERSIA_STORE(bucket->low, bucket->low & ~((uint64_t)0xFF << 8 * place));
    else
        PERSIA_STORE(bucket->high, bucket->high & ~((uint32_t)0xFF << 8 * (place - 8)));
    const persia_buckets_t *index = t->index;
    for (uint64_t at = persia_rows_home(index, hash); &index->buckets[at] != bucket;
         at = at + 1 == index->num_buckets ? 0 : at + 1)
        PERSIA_STORE(index->buckets[at].num_passed, index->buckets[at].num_passed - 1);
    t->num_entries--;
    return persia_retire(t, row);
}

static inline void persia_fetch_block(const persia_rows_t *t, const uint64_t *hashes, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        persia_prefetch_write(&t->index->buckets[persia_rows_home(t->index, hashes[i])]);
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t row = persia_guess(t->index, hashes[i]);
        if (row != PERSIA_ABSENT_ROW)
            persia_prefetch(persia_row(t->chunks, row));
    }
}

/* --- values --------------------------------------------------------------------------------- */

typedef struct {
    int dtype; /* 0 float32, 1 float16, 2 bfloat16, 3 int8 */
    const persia_half_t *half;
    int level;
} persia_values_t;

PERSIA_INLINE void persia_unpack_int8_loop(size_t dim, const uint8_t *restrict from,
                                           float *restrict to, float scale, float offset)
{
    PERSIA_ROW_LOOP
    for (size_t j = 0; j < dim; j++)
        to[j] = offset + scale * (float)from[j];
}

PERSIA_VARIANTS(void, persia_unpack_int8,
                (const uint8_t *from, float *to, size_t dim, float scale, float offset),
                { PERSIA_BY_DIM(persia_unpack_int8_loop, dim, from, to, scale, offset) })

PERSIA_INLINE void persia_copy_floats(size_t dim, const void *from, float *to)
{
    memcpy(to, from, dim * sizeof *to);
}

static inline void persia_unpack(const persia_values_t *values, const char *row, float *to,
                                 size_t dim)
{
    static void (*const unpack[])(const uint8_t *, float *, size_t, float, float) =
        PERSIA_LEVELS(persia_unpack_int8);
    const char *from = row + sizeof(uint64_t);
    if (values->dtype == 0) {
        PERSIA_BY_DIM(persia_copy_floats, dim, from, to)
    } else if (values->dtype == 3) {
        const uint16_t *head = (const uint16_t *)from;
        unpack[values->level]((const uint8_t *)from + PERSIA_INT8_HEAD, to, dim,
                              persia_widened_f16(head[0]), persia_widened_f16(head[1]));
    } else {
        values->half->widen((const uint16_t *)from, to, dim);
    }
}

/* Steps above an offset: the largest f16 not above the lowest value. The scale is the smallest
 * f16 by which 255 steps reach the highest. */
static inline void persia_pack_int8(const float *from, uint16_t *head, uint8_t *to, size_t dim)
{
    float low = from[0], high = from[0];
    int is_finite = 1;
    for (size_t j = 0; j < dim; j++) {
        is_finite &= (persia_bits_of(from[j]) & 0x7FFFFFFF) < PERSIA_F32_INFINITY;
        low = from[j] < low ? from[j] : low;
        high = from[j] > high ? from[j] : high;
    }
    memset(to, 0, dim);
    head[0] = 0;
    head[1] = 0x7E00; /* NaN, and so all that is added to it */
    if (!is_finite)
        return;
    low = (low < -65504.0f ? -65504.0f : low) + 0.0f; /* no -0 */
    uint16_t offset = persia_to_f16(low, 0);
    if (persia_widened_f16(offset) > low)
        offset += offset & 0x8000 ? 1 : -1;
    const float base = persia_widened_f16(offset);
    const float exact = (high > base ? high - base : 0.0f) / 255.0f;
    uint16_t scale = persia_to_f16(exact, 0);
    if (persia_widened_f16(scale) < exact && scale < 0x7BFF)
        scale++;
    head[0] = scale;
    head[1] = offset;
    const float step = persia_widened_f16(scale);
    for (size_t j = 0; j < dim && scale; j++) {
        const float above = (from[j] - base) / step;
        const float most = above < 255.0f ? above : 255.0f;
        /* At 2^23 an f32 has no fraction left: the addition rounds. */
        to[j] = (uint8_t)persia_bits_of((most > 0.0f ? most : 0.0f) + 0x1p23f);
    }
}

static inline void persia_pack(const persia_values_t *values, const float *from, char *row,
                               size_t dim)
{
    char *to = row + sizeof(uint64_t);
    if (values->dtype == 0)
        memcpy(to, from, dim * sizeof *from);
    else if (values->dtype == 3)
        persia_pack_int8(from, (uint16_t *)to, (uint8_t *)to + PERSIA_INT8_HEAD, dim);
    else
        values->half->narrow(from, (uint16_t *)to, dim);
}

/* --- whole requests ------------------------------------------------------------------------- */

/* The writer's mutex is held by those that write. */

static inline int persia_rows_write(persia_rows_t *t, const persia_values_t *values,
                                    uint32_t table, const uint64_t *signs, const float *rows,
                                    size_t n, size_t dim)
{
    uint64_t hashes[PERSIA_WRITE_BLOCK];
    for (size_t first = 0; first < n; first += PERSIA_WRITE_BLOCK) {
        const size_t left = n - first;
        const uint32_t count = left < PERSIA_WRITE_BLOCK ? (uint32_t)left : PERSIA_WRITE_BLOCK;
        if (persia_prepare(t, table, count, 1) < 0)
            return -1;
        for (uint32_t i = 0; i < count; i++)
            hashes[i] = persia_mix64(signs[first + i]);
        persia_fetch_block(t, hashes, count);
        for (uint32_t i = 0; i < count; i++) {
            const uint64_t sign = signs[first + i];
            const uint32_t number = persia_take_row(t, table);
            char *row = persia_row(t->chunks, number);
            persia_set_sign(row, sign);
            if (rows != NULL)
                persia_pack(values, rows + (first + i) * dim, row, dim);
            persia_publish(t, hashes[i], sign, number);
        }
    }
    return 0;
}

/* How many rows there were, or -1: no memory. */
static inline int64_t persia_rows_delete(persia_rows_t *t, const uint64_t *signs, size_t n)
{
    uint64_t hashes[PERSIA_WRITE_BLOCK];
    int64_t deleted = 0;
    for (size_t first = 0; first < n; first += PERSIA_WRITE_BLOCK) {
        const size_t left = n - first;
        const uint32_t count = left < PERSIA_WRITE_BLOCK ? (uint32_t)left : PERSIA_WRITE_BLOCK;
        if (persia_prepare(t, 0, count, 0) < 0)
            return -1;
        for (uint32_t i = 0; i < count; i++)
            hashes[i] = persia_mix64(signs[first + i]);
        persia_fetch_block(t, hashes, count);
        for (uint32_t i = 0; i < count; i++)
            deleted += persia_remove(t, hashes[i], signs[first + i]) + 1 < t->num_groups;
    }
    return deleted;
}

/* Lookups of places first..end - 1; how many are not there. */
static inline uint64_t persia_rows_lookup(persia_rows_t *t, const persia_values_t *values,
                                          uint32_t table, const uint64_t *signs, float *rows,
                                          uint8_t *states, size_t first, size_t end, size_t dim)
{
    enum { RING = 4 * PERSIA_READ_BLOCK };
    const persia_buckets_t *index;
    const persia_chunk_t *chunks;
    uint64_t hashes[RING], missing = 0;
    uint32_t guesses[RING];
    const size_t stride = t->groups[table].stride;
    const uint64_t epoch = persia_rows_enter(t);
    index = PERSIA_LOAD(t->index);
    for (size_t step = first; step < end + 2 * PERSIA_READ_BLOCK; step += PERSIA_READ_BLOCK) {
        for (size_t i = step; i < step + PERSIA_READ_BLOCK && i < end; i++) {
            hashes[i % RING] = persia_mix64(signs[i]);
            persia_prefetch(&index->buckets[persia_rows_home(index, hashes[i % RING])]);
        }
        if (step < first + PERSIA_READ_BLOCK)
            continue;
        for (size_t i = step - PERSIA_READ_BLOCK; i < step && i < end; i++) {
            const uint32_t row = guesses[i % RING] = persia_guess(index, hashes[i % RING]);
            /* After the row's number, because it may lie in a chunk that was just added. */
            chunks = PERSIA_LOAD(t->chunks);
            if (row != PERSIA_ABSENT_ROW)
                PERSIA_FETCH_LINES(persia_row(chunks, row), stride, 0);
        }
        if (step < first + 2 * PERSIA_READ_BLOCK)
            continue;
        for (size_t i = step - 2 * PERSIA_READ_BLOCK; i < step - PERSIA_READ_BLOCK && i < end;
             i++) {
            persia_bucket_t *bucket;
            uint32_t place, row = guesses[i % RING], found = t->num_groups;
            chunks = PERSIA_LOAD(t->chunks);
            if (row == PERSIA_ABSENT_ROW || persia_row_sign(persia_row(chunks, row)) != signs[i])
                row = persia_find(t, index, hashes[i % RING], signs[i], &bucket, &place);
            chunks = PERSIA_LOAD(t->chunks); /* again, for what was found */
            if (row != PERSIA_ABSENT_ROW)
                found = chunks[row >> PERSIA_CHUNK_BITS].table;
            if (found == table)
                persia_unpack(values, persia_row(chunks, row), rows + i * dim, dim);
            else
                memset(rows + i * dim, 0, dim * sizeof *rows);
            missing += found != table;
            if (states != NULL)
                states[i] = found == table ? 1 : found + 1 == t->num_groups ? 2 : 0;
        }
    }
    persia_rows_leave(t, epoch);
    return missing;
}

/* Signs and numbers of the rows among start..end - 1 that are held; no more than one chunk. */
static inline uint32_t persia_rows_held(persia_rows_t *t, uint32_t start, uint32_t end,
                                        uint64_t *signs, uint32_t *rows)
{
    const persia_buckets_t *index = PERSIA_LOAD(t->index);
    const persia_chunk_t *chunks = PERSIA_LOAD(t->chunks);
    uint64_t hashes[PERSIA_WRITE_BLOCK];
    uint32_t count = 0;
    for (uint32_t from = start; from < end; from += PERSIA_WRITE_BLOCK) {
        const uint32_t to = end - from < PERSIA_WRITE_BLOCK ? end : from + PERSIA_WRITE_BLOCK;
        for (uint32_t row = from; row < to; row++) {
            hashes[row - from] = persia_mix64(persia_row_sign(persia_row(chunks, row)));
            persia_prefetch(&index->buckets[persia_rows_home(index, hashes[row - from])]);
        }
        for (uint32_t row = from; row < to; row++) {
            persia_bucket_t *bucket;
            uint32_t place;
            const uint64_t sign = persia_row_sign(persia_row(chunks, row));
            if (persia_find(t, index, hashes[row - from], sign, &bucket, &place) != row)
                continue;
            signs[count] = sign;
            rows[count++] = row;
        }
    }
    return count;
}

static inline uint32_t persia_num_chunks(persia_rows_t *t) { return PERSIA_LOAD(t->num_chunks); }

static inline uint32_t persia_chunk_table(persia_rows_t *t, uint32_t chunk)
{
    return PERSIA_LOAD(t->chunks)[chunk].table;
}

static inline int64_t persia_group_rows(persia_rows_t *t, uint32_t table)
{
    return PERSIA_LOAD(t->groups[table].num_rows);
}

/* Of one table's rows start..end - 1 in one chunk, with their values where `out` is given. */
static inline uint32_t persia_rows_scan(persia_rows_t *t, const persia_values_t *values,
                                        uint32_t start, uint32_t end, uint64_t *signs, float *out,
                                        size_t dim)
{
    uint32_t rows[PERSIA_CHUNK_ROWS];
    const uint64_t epoch = persia_rows_enter(t);
    const uint32_t count = persia_rows_held(t, start, end, signs, rows);
    for (uint32_t i = 0; out != NULL && i < count; i++)
        persia_unpack(values, persia_row(PERSIA_LOAD(t->chunks), rows[i]), out + i * dim, dim);
    persia_rows_leave(t, epoch);
    return count;
}

/* Rows start..end - 1 of one chunk of the other; -1: no memory. */
static inline int persia_rows_merge(persia_rows_t *t, persia_rows_t *other, uint32_t start,
                                    uint32_t end, int keep_deleted)
{
    uint64_t signs[PERSIA_CHUNK_ROWS], hashes[PERSIA_WRITE_BLOCK];
    uint32_t rows[PERSIA_CHUNK_ROWS];
    const uint32_t table = other->chunks[start >> PERSIA_CHUNK_BITS].table;
    const int deletes = table + 1 == other->num_groups && !keep_deleted;
    const size_t bytes = t->groups[table].stride - sizeof(uint64_t);
    int result = 0;
    const uint64_t epoch = persia_rows_enter(other);
    const uint32_t held = persia_rows_held(other, start, end, signs, rows);
    for (uint32_t first = 0; first < held; first += PERSIA_WRITE_BLOCK) {
        const uint32_t left = held - first;
        const uint32_t count = left < PERSIA_WRITE_BLOCK ? left : PERSIA_WRITE_BLOCK;
        if ((result = persia_prepare(t, table, count, !deletes)) < 0)
            break;
        for (uint32_t i = 0; i < count; i++)
            hashes[i] = persia_mix64(signs[first + i]);
        persia_fetch_block(t, hashes, count);
        for (uint32_t i = 0; i < count; i++) {
            if (deletes) {
                persia_remove(t, hashes[i], signs[first + i]);
                continue;
            }
            const uint32_t number = persia_take_row(t, table);
            char *row = persia_row(t->chunks, number);
            persia_set_sign(row, signs[first + i]);
            memcpy(row + sizeof(uint64_t),
                   persia_row(other->chunks, rows[first + i]) + sizeof(uint64_t), bytes);
            persia_publish(t, hashes[i], signs[first + i], number);
        }
    }
    persia_rows_leave(other, epoch);
    return result;
}

static inline void persia_rows_free(persia_rows_t *t)
{
    persia_buckets_t *next;
    for (persia_buckets_t *index = t->old_indexes; index != NULL; index = next) {
        next = index->next;
        persia_free_index(t, index);
    }
    if (t->index != NULL)
        persia_free_index(t, t->index);
    for (uint32_t i = 0; i < t->num_old_chunks; i++)
        free(t->old_chunks[i]);
    for (size_t i = 0; i < t->num_arenas; i++)
        persia_unmap(t->arenas[i].start, t->arenas[i].bytes);
    free(t->arenas);
    free(t->chunks);
    free(t->retired[0].rows);
    free(t->retired[1].rows);
    free(t->groups);
    pthread_mutex_destroy(&t->writer);
    free(t);
}

/* Without rows; strides[num_groups] in bytes, multiples of 8. NULL: no memory. */
static inline persia_rows_t *persia_rows_new(const uint32_t *strides, uint32_t num_groups)
{
    persia_rows_t *t = (persia_rows_t *)calloc(1, sizeof *t);
    if (t == NULL)
        return NULL;
    pthread_mutex_init(&t->writer, NULL);
    t->num_groups = num_groups;
    t->groups = (persia_group_t *)calloc(num_groups, sizeof *t->groups);
    if (t->groups == NULL || persia_fit_index(t, 1) < 0) {
        persia_rows_free(t);
        return NULL;
    }
    for (uint32_t i = 0; i < num_groups; i++)
        t->groups[i].stride = strides[i];
    persia_count_bytes(t, (int64_t)(sizeof *t + num_groups * sizeof *t->groups));
    return t;
}

#endif
