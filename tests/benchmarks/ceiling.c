/* The ceiling: how fast a sparse step could be on this machine if it had to do nothing else.
 *
 *   lines  [2^n]   4 slots {sign u64, row u32, mark u32}: open addressing, linear by lines, at
 *                  most half full
 *   rows   [max]   {16 weights, 16 Adagrad accumulators}: 128 bytes, two lines
 *
 * It takes any u64 id of any feature and its Adagrad is exact: gradients of equal ids are
 * summed first. It has no order of use, no eviction, no locks, no admission, no error messages,
 * no other dim and no other optimizer, all memory is made beforehand and in huge pages, and its
 * output goes to the same buffer each time. What the product does beside this is the difference.
 *
 * Equal ids are found for free. A slot's mark is the place of its row among the distinct rows of
 * the batch, and it is true if that place holds that row (a sparse set: marks of other batches
 * need not be wiped; they are counted on, so that few old ones even look true). Positions of one row are a linked list, so that its gradients are summed in
 * registers. Three passes, each behind its prefetches: slots, rows, rows again for the update.
 *
 * Threads take (feature, range of samples) from a counter. A feature with more than its share of
 * the ids is cut: then equal ids may meet in two threads, so they are found in the update
 * instead, where a thread takes the rows of its part.
 */
#define _GNU_SOURCE
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define DIM 16
#define MAX_THREADS 64
#define LINE 4          /* slots in 64 bytes */
#define AHEAD 32        /* ids whose lines of slots are on their way */
#define ROWS_AHEAD 12   /* rows on their way in an update */
#define BLOCK 1024      /* ids found before their rows are read */
#define NONE UINT32_MAX /* the end of a list */
#define HUGE_PAGE (2u << 20)
#define INLINE static inline __attribute__((always_inline))

typedef struct {
    uint64_t sign; /* 0: free; the feature in the top byte is never 0 */
    uint32_t row;
    uint32_t mark;
} slot_t;

typedef struct {
    slot_t slots[LINE]; /* used from the first on */
} line_t;

/* A row of weights: one register where there is AVX-512. Gradients and outputs are numpy's. */
typedef float vector_t __attribute__((vector_size(DIM * sizeof(float)), aligned(4), may_alias));

typedef struct {
    vector_t weight, state;
} row_t;

typedef struct {
    uint32_t row;
    uint32_t last; /* the last position of the row; next[] leads to the others */
} distinct_t;

/* One feature of a batch; the layout is ceiling.py's as well. */
typedef struct {
    const uint64_t *ids;
    const int64_t *offsets; /* [num_samples + 1], or NULL for one id a sample */
    int64_t num_ids;
} feature_t;

typedef struct {
    int feature, part;
    int64_t begin, end; /* samples of a lookup */
} task_t;

typedef struct table table_t;
typedef void (*work_t)(table_t *, int thread, const task_t *);

/* Room for as many positions as the largest batch had. */
typedef struct {
    uint32_t *rows, *next, *homes, *samples;
    distinct_t *distinct;
} scratch_t;

struct table {
    line_t *lines;
    row_t *rows; /* row 0 is zero: it stands for ids that are not held */
    uint64_t mask, num_rows, max_rows, line_bytes, row_bytes;
    float lr, eps, initial_accumulator;
    /* The batch between its lookup and its update. */
    feature_t *features;
    int64_t *firsts, *num_distinct; /* [num_features]: the feature's first position; -1: cut */
    int num_features, room_features, is_training;
    int64_t num_samples, num_ids, room;
    uint32_t base; /* marks of this batch begin here; it may wrap, because a mark is checked */
    scratch_t batch, own[MAX_THREADS];
    vector_t *out;
    const vector_t *gradient;
    /* Threads beside the caller's. */
    int num_threads;
    pthread_t threads[MAX_THREADS];
    pthread_mutex_t mutex;
    pthread_cond_t wake;
    task_t *tasks;
    work_t work;
    int num_tasks;
    atomic_int taken, finished, round, stop;
};

/* --- slots ------------------------------------------------------------------------------ */

INLINE uint64_t sign_of(uint64_t id, int feature)
{
    return (id & (UINT64_MAX >> 8)) | (uint64_t)(feature + 1) << 56;
}

INLINE uint32_t home(const table_t *t, uint64_t sign)
{
    sign = (sign ^ sign >> 32) * 0x9E3779B97F4A7C15u;
    sign = (sign ^ sign >> 29) * 0xBF58476D1CE4E5B9u;
    return (uint32_t)(sign >> 20 & t->mask);
}

/* The slot of a sign, or the free one where it would be. The slots of a line are compared
 * without a branch: which of them it is cannot be predicted. */
INLINE slot_t *probe(const table_t *t, uint64_t sign, uint32_t line)
{
    for (;; line = (line + 1) & t->mask) {
        slot_t *slots = t->lines[line].slots;
        slot_t *slot = slots;
        for (int i = 1; i < LINE; i++)
            slot = slots[i].sign == sign ? &slots[i] : slot;
        if (slot->sign == sign)
            return slot;
        for (int i = 0; i < LINE; i++)
            if (slots[i].sign == 0)
                return &slots[i];
    }
}

static void insert(table_t *t, uint64_t sign, slot_t *slot)
{
    if (t->num_rows == t->max_rows)
        abort(); /* the benchmark asked for too few rows */
    const uint32_t number = (uint32_t)t->num_rows++;
    row_t *row = &t->rows[number];
    for (int i = 0; i < DIM; i++) {
        const uint32_t draw = ((uint32_t)(sign >> 8 ^ sign) + (uint32_t)i) * 0x9E3779B1u;
        row->weight[i] = (float)(int32_t)(draw ^ draw << 15) * (0.01f / 2147483648.0f);
        row->state[i] = t->initial_accumulator;
    }
    *slot = (slot_t){sign, number, NONE};
}

/* --- lookup ----------------------------------------------------------------------------- */

/* Adds position `at` to its row's list; returns the number of distinct rows then. Without a
 * branch as well: whether an id is new is as good as random. */
INLINE uint32_t join(slot_t *slot, uint32_t at, distinct_t *distinct, uint32_t count,
                     uint32_t base, uint32_t room, uint32_t *next)
{
    const uint32_t row = slot->row, place = slot->mark - base;
    const distinct_t held = distinct[place < room ? place : 0];
    const int is_new = (place >= count) | (held.row != row);
    const uint32_t own = is_new ? count : place;
    next[at] = is_new ? NONE : held.last;
    distinct[own] = (distinct_t){row, at};
    slot->mark = base + own;
    return count + (uint32_t)is_new;
}

INLINE void pool(const table_t *t, const uint32_t *rows, int64_t count, vector_t *out)
{
    vector_t sum = t->rows[count > 0 ? rows[0] : 0].weight;
    for (int64_t i = 1; i < count; i++)
        sum += t->rows[rows[i]].weight;
    *out = sum;
}

INLINE int64_t offset(const int64_t *offsets, int64_t sample)
{
    return offsets == NULL ? sample : offsets[sample];
}

/* `offsets` is the feature's; the caller says literally where they are NULL. */
INLINE void look_up(table_t *t, const task_t *task, const int64_t *offsets, int is_training,
                    int is_cut)
{
    const feature_t *f = &t->features[task->feature];
    const int64_t first = t->firsts[task->feature];
    uint32_t *rows = t->batch.rows + first, *next = t->batch.next + first;
    uint32_t *homes = t->batch.homes + first, *samples = t->batch.samples + first;
    distinct_t *distinct = t->batch.distinct + first;
    vector_t *out = t->out + task->feature * t->num_samples;
    const uint32_t base = t->base + (uint32_t)first, room = (uint32_t)f->num_ids;
    uint32_t count = 0;
    int64_t at = offset(offsets, task->begin);
    for (int64_t i = at, stop = offset(offsets, task->end); i < stop; i++)
        homes[i] = home(t, sign_of(f->ids[i], task->feature));
    for (int i = 0; i < AHEAD; i++)
        __builtin_prefetch(&t->lines[homes[at + i]]);
    for (int64_t sample = task->begin, end = sample; sample < task->end; sample = end) {
        for (; end < task->end && offset(offsets, end) < offset(offsets, sample) + BLOCK; end++)
            for (int64_t stop = offset(offsets, end + 1); at < stop; at++) {
                __builtin_prefetch(&t->lines[homes[at + AHEAD]]);
                slot_t *slot = probe(t, sign_of(f->ids[at], task->feature), homes[at]);
                rows[at] = slot->row;
                __builtin_prefetch(&t->rows[slot->row].weight);
                if (is_training && offsets != NULL)
                    samples[at] = (uint32_t)end;
                if (is_training && !is_cut && slot->sign != 0)
                    count = join(slot, (uint32_t)at, distinct, count, base, room, next);
            }
        for (; sample < end; sample++)
            pool(t, rows + offset(offsets, sample),
                 offset(offsets, sample + 1) - offset(offsets, sample), out + sample);
    }
    if (is_training && !is_cut)
        t->num_distinct[task->feature] = count;
}

static void look_up_task(table_t *t, int thread, const task_t *task)
{
    (void)thread;
    const int64_t *offsets = t->features[task->feature].offsets;
    if (t->is_training && t->num_distinct[task->feature] < 0)
        look_up(t, task, offsets, 1, 1);
    else if (t->is_training && offsets == NULL)
        look_up(t, task, NULL, 1, 0);
    else if (t->is_training)
        look_up(t, task, offsets, 1, 0);
    else if (offsets == NULL)
        look_up(t, task, NULL, 0, 0);
    else
        look_up(t, task, offsets, 0, 0);
}

/* --- update ----------------------------------------------------------------------------- */

/* torch's formula: the accumulator first, eps outside the root. */
INLINE void adagrad(const table_t *t, row_t *row, vector_t gradient)
{
    const vector_t state = row->state + gradient * gradient;
    vector_t root;
    for (int i = 0; i < DIM; i++)
        root[i] = sqrtf(state[i]);
    row->state = state;
    row->weight -= t->lr * gradient / (root + t->eps);
}

/* Steps all distinct rows. `samples` is NULL where a position is its sample. */
INLINE void step(table_t *t, const vector_t *gradient, const distinct_t *distinct, int64_t count,
                 const uint32_t *next, const uint32_t *samples)
{
    for (int64_t u = -ROWS_AHEAD; u < count; u++) {
        if (u + ROWS_AHEAD < count) {
            const distinct_t *ahead = &distinct[u + ROWS_AHEAD];
            __builtin_prefetch(&t->rows[ahead->row].weight, 1);
            __builtin_prefetch(&t->rows[ahead->row].state, 1);
            __builtin_prefetch(&gradient[samples ? samples[ahead->last] : ahead->last]);
        }
        if (u < 0)
            continue;
        uint32_t at = distinct[u].last;
        vector_t sum = gradient[samples ? samples[at] : at];
        while ((at = next[at]) != NONE)
            sum += gradient[samples ? samples[at] : at];
        adagrad(t, &t->rows[distinct[u].row], sum);
    }
}

/* Equal ids of a cut feature, among the rows of one part; returns how many rows. */
static int64_t join_part(table_t *t, const task_t *task, scratch_t *own)
{
    const feature_t *f = &t->features[task->feature];
    const uint32_t *homes = t->batch.homes + t->firsts[task->feature];
    const uint32_t base = t->base + (uint32_t)t->firsts[task->feature];
    int64_t mine = 0;
    uint32_t count = 0;
    for (int64_t at = 0; at < f->num_ids; at++) {
        own->rows[mine] = (uint32_t)at;
        mine += (int)(homes[at] % (uint32_t)t->num_threads) == task->part;
    }
    for (int64_t i = 0; i < mine; i++) {
        if (i + AHEAD < mine)
            __builtin_prefetch(&t->lines[homes[own->rows[i + AHEAD]]]);
        const uint32_t at = own->rows[i];
        slot_t *slot = probe(t, sign_of(f->ids[at], task->feature), homes[at]);
        if (slot->sign != 0)
            count = join(slot, at, own->distinct, count, base, (uint32_t)mine, own->next);
    }
    return count;
}

static void update_task(table_t *t, int thread, const task_t *task)
{
    const feature_t *f = &t->features[task->feature];
    const int64_t first = t->firsts[task->feature];
    const vector_t *gradient = t->gradient + task->feature * t->num_samples;
    const uint32_t *samples = t->batch.samples + first, *next = t->batch.next + first;
    const distinct_t *distinct = t->batch.distinct + first;
    int64_t count = t->num_distinct[task->feature];
    if (count < 0) {
        scratch_t *own = &t->own[thread];
        count = join_part(t, task, own);
        distinct = own->distinct;
        next = own->next;
    }
    if (f->offsets == NULL)
        step(t, gradient, distinct, count, next, NULL);
    else
        step(t, gradient, distinct, count, next, samples);
}

/* --- threads ---------------------------------------------------------------------------- */

static void take_tasks(table_t *t, int thread)
{
    for (int number; (number = atomic_fetch_add(&t->taken, 1)) < t->num_tasks;)
        t->work(t, thread, &t->tasks[number]);
}

static void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

typedef struct {
    table_t *table;
    int thread;
} start_t;

/* Waits for the next round: some microseconds awake, because a step has two, then asleep. */
static void *help(void *argument)
{
    start_t start = *(start_t *)argument;
    free(argument);
    table_t *t = start.table;
    for (int seen = 0;; seen++) {
        for (int spins = 0; spins < 4000 && atomic_load(&t->round) == seen; spins++)
            relax();
        pthread_mutex_lock(&t->mutex);
        while (atomic_load(&t->round) == seen)
            pthread_cond_wait(&t->wake, &t->mutex);
        pthread_mutex_unlock(&t->mutex);
        if (atomic_load(&t->stop))
            return NULL;
        take_tasks(t, start.thread);
        atomic_fetch_add(&t->finished, 1);
    }
}

static void begin_round(table_t *t)
{
    pthread_mutex_lock(&t->mutex);
    atomic_fetch_add(&t->round, 1);
    pthread_cond_broadcast(&t->wake);
    pthread_mutex_unlock(&t->mutex);
}

static void run(table_t *t, work_t work)
{
    t->work = work;
    atomic_store(&t->taken, 0);
    atomic_store(&t->finished, 0);
    if (t->num_threads > 1)
        begin_round(t);
    take_tasks(t, 0);
    while (atomic_load(&t->finished) < t->num_threads - 1)
        relax();
}

/* Whether a feature has more ids than its share, so that one thread would wait for another. */
static int is_cut(const table_t *t, int feature, int64_t num_ids)
{
    return t->num_threads > 1 && t->features[feature].num_ids * 2 * t->num_threads > num_ids;
}

static void add_lookups(table_t *t, int feature, int num_parts)
{
    for (int part = 0; part < num_parts; part++)
        t->tasks[t->num_tasks++] = (task_t){feature, part, t->num_samples * part / num_parts,
                                            t->num_samples * (part + 1) / num_parts};
}

/* --- what ceiling.py calls -------------------------------------------------------------- */

static void *reserve(uint64_t *bytes)
{
    *bytes = (*bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    void *memory = NULL;
    if (posix_memalign(&memory, HUGE_PAGE, *bytes) != 0)
        abort();
    madvise(memory, *bytes, MADV_HUGEPAGE);
    return memory;
}

table_t *ceiling_new(uint64_t max_rows, int num_threads, float lr, float eps,
                     float initial_accumulator)
{
    table_t *t = calloc(1, sizeof *t);
    uint64_t num_lines = 256;
    while (num_lines * LINE < 2 * max_rows)
        num_lines *= 2;
    t->mask = num_lines - 1;
    t->max_rows = max_rows + 1;
    t->line_bytes = num_lines * sizeof *t->lines;
    t->row_bytes = t->max_rows * sizeof *t->rows;
    t->lines = reserve(&t->line_bytes);
    t->rows = reserve(&t->row_bytes);
    memset(t->lines, 0, t->line_bytes);
    memset(t->rows, 0, sizeof *t->rows);
    t->num_rows = 1;
    t->lr = lr;
    t->eps = eps;
    t->initial_accumulator = initial_accumulator;
    t->num_threads = num_threads;
    pthread_mutex_init(&t->mutex, NULL);
    pthread_cond_init(&t->wake, NULL);
    for (int thread = 1; thread < num_threads; thread++) {
        start_t *start = malloc(sizeof *start);
        *start = (start_t){t, thread};
        pthread_create(&t->threads[thread], NULL, help, start);
    }
    return t;
}

static void free_scratch(scratch_t *s)
{
    free(s->rows);
    free(s->next);
    free(s->homes);
    free(s->samples);
    free(s->distinct);
}

void ceiling_free(table_t *t)
{
    atomic_store(&t->stop, 1);
    begin_round(t);
    for (int thread = 1; thread < t->num_threads; thread++)
        pthread_join(t->threads[thread], NULL);
    for (int thread = 0; thread < t->num_threads; thread++)
        free_scratch(&t->own[thread]);
    free_scratch(&t->batch);
    free(t->features);
    free(t->firsts);
    free(t->num_distinct);
    free(t->tasks);
    free(t->lines);
    free(t->rows);
    free(t);
}

/* Inserts ids of one feature that are not held yet. */
void ceiling_fill(table_t *t, int feature, const uint64_t *ids, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        if (i + AHEAD < count)
            __builtin_prefetch(&t->lines[home(t, sign_of(ids[i + AHEAD], feature))], 1);
        const uint64_t sign = sign_of(ids[i], feature);
        slot_t *slot = probe(t, sign, home(t, sign));
        if (slot->sign == 0)
            insert(t, sign, slot);
    }
}

uint64_t ceiling_num_rows(const table_t *t)
{
    return t->num_rows - 1;
}

/* The 32 numbers of an id's row, or NULL. */
float *ceiling_row(table_t *t, int feature, uint64_t id)
{
    const uint64_t sign = sign_of(id, feature);
    const slot_t *slot = probe(t, sign, home(t, sign));
    return slot->sign == sign ? (float *)&t->rows[slot->row] : NULL;
}

static void make_room(scratch_t *s, int64_t room)
{
    free_scratch(s);
    s->rows = calloc((size_t)room, sizeof *s->rows);
    s->next = calloc((size_t)room, sizeof *s->next);
    s->homes = calloc((size_t)room + AHEAD, sizeof *s->homes); /* fetched ahead of the end */
    s->samples = calloc((size_t)room, sizeof *s->samples);
    s->distinct = calloc((size_t)room, sizeof *s->distinct);
}

/* Writes the sums of each feature's samples to out[num_features][num_samples][DIM]. */
void ceiling_lookup(table_t *t, const feature_t *features, int num_features, int64_t num_samples,
                    int is_training, float *out)
{
    int64_t num_ids = 0;
    if (num_features > t->room_features) {
        t->features = realloc(t->features, (size_t)num_features * sizeof *t->features);
        t->firsts = realloc(t->firsts, (size_t)num_features * sizeof *t->firsts);
        t->num_distinct = realloc(t->num_distinct, (size_t)num_features * sizeof *t->firsts);
        t->tasks = realloc(t->tasks,
                           (size_t)(num_features * 2 * t->num_threads) * sizeof *t->tasks);
        t->room_features = num_features;
    }
    memcpy(t->features, features, (size_t)num_features * sizeof *features);
    for (int feature = 0; feature < num_features; feature++) {
        t->firsts[feature] = num_ids;
        num_ids += features[feature].num_ids;
    }
    if (num_ids > t->room) {
        make_room(&t->batch, num_ids);
        for (int thread = 0; thread < t->num_threads; thread++)
            make_room(&t->own[thread], num_ids);
        t->room = num_ids;
    }
    t->base += (uint32_t)t->num_ids;
    t->num_ids = num_ids;
    t->num_features = num_features;
    t->num_samples = num_samples;
    t->is_training = is_training;
    t->out = (vector_t *)out;
    t->num_tasks = 0;
    for (int feature = 0; feature < num_features; feature++) {
        const int cut = is_cut(t, feature, num_ids);
        t->num_distinct[feature] = cut ? -1 : 0;
        add_lookups(t, feature, cut ? 2 * t->num_threads : 1);
    }
    run(t, look_up_task);
}

/* Steps the rows of the last training lookup; gradient is shaped as its output was. */
void ceiling_update(table_t *t, const float *gradient)
{
    t->gradient = (const vector_t *)gradient;
    t->num_tasks = 0;
    for (int feature = 0; feature < t->num_features; feature++)
        for (int part = 0; part < (t->num_distinct[feature] < 0 ? t->num_threads : 1); part++)
            t->tasks[t->num_tasks++] = (task_t){feature, part, 0, 0};
    run(t, update_task);
}
