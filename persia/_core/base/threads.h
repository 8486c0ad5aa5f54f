/* Threads that share the parts of a job, without the interpreter and its lock.
 *
 *     job     work(context, part, worker) for part = 0 .. num_parts - 1
 *     taken   the next part: a free thread takes it, so that a late thread delays no other
 *
 * A caller puts its job on the pool's list, takes parts like any helper, and leaves when the
 * last helper has left the job. Several callers may have jobs on the list; helpers take parts
 * of the first that has any. A job needs no helper: a caller alone does all of it.
 *
 *   C1  Who works on a job holds a worker's number of its own: the caller 0, helper i i + 1.
 *   C2  A job is on the list only while its caller is in persia_threads_run, and num_helping > 0
 *       only while a helper may touch it. So it may live on the caller's stack.
 *   C3  All that the parts wrote is seen by the caller when persia_threads_run returns.
 *
 * A thread in the kernel's sleep takes 50 us or more to come back, on a virtual machine; one
 * that looks takes 1. So who waits looks for SPIN_NS, then sleeps: stages of a batch follow
 * each other within that time, batches do not have to, and an idle pool takes no processor.
 * While it looks it yields, so that a thread with work to do gets the core.
 *
 * After a fork the child has none of the helpers: its callers do their jobs alone.
 */
#ifndef PERSIA_THREADS_H
#define PERSIA_THREADS_H

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { PERSIA_SPIN_NS = 100000, PERSIA_LOOKS = 32 };

typedef void (*persia_work_t)(void *context, uint32_t part, uint32_t worker);

typedef struct persia_job {
    persia_work_t work;
    void *context;
    uint32_t num_parts;
    atomic_uint taken;       /* above num_parts: as many came too late */
    atomic_uint num_helping; /* written under the pool's mutex */
    struct persia_job *next;
} persia_job_t;

typedef struct {
    pthread_mutex_t mutex; /* guards jobs, num_asleep, num_started */
    pthread_cond_t wake;   /* helpers: a job was published, or stop */
    pthread_cond_t left;   /* callers: a helper has left a job */
    persia_job_t *jobs;
    atomic_uint published; /* counts jobs, so that who looks sees a new one without the mutex */
    atomic_int stop;
    uint32_t num_asleep;
    uint32_t num_started;
    uint32_t num_helpers;
    char name[16]; /* of the threads, for those who watch them; ends with 0 */
    pid_t owner; /* the process that has the helpers */
    pthread_t *threads;
} persia_threads_t;

static inline void persia_relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static inline int64_t persia_nanoseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Looks at `value` until it is no longer `old`, or for SPIN_NS. */
static inline void persia_look(atomic_uint *value, unsigned old)
{
    const int64_t end = persia_nanoseconds() + PERSIA_SPIN_NS;
    do {
        for (int i = 0; i < PERSIA_LOOKS; i++) {
            if (atomic_load_explicit(value, memory_order_acquire) != old)
                return;
            persia_relax();
        }
        sched_yield();
    } while (persia_nanoseconds() < end);
}

static inline void persia_take_parts(persia_job_t *job, uint32_t worker)
{
    uint32_t part;
    while ((part = atomic_fetch_add(&job->taken, 1)) < job->num_parts)
        job->work(job->context, part, worker);
}

/* The first job with parts left; the mutex is held. */
static inline persia_job_t *persia_open_job(const persia_threads_t *pool)
{
    persia_job_t *job = pool->jobs;
    while (job != NULL && atomic_load(&job->taken) >= job->num_parts)
        job = job->next;
    return job;
}

static inline void persia_help_with(persia_threads_t *pool, persia_job_t *job, uint32_t worker)
{
    atomic_fetch_add(&job->num_helping, 1);
    pthread_mutex_unlock(&pool->mutex);
    persia_take_parts(job, worker);
    pthread_mutex_lock(&pool->mutex);
    /* The caller may see it without the mutex and be gone: the job is not touched again. */
    atomic_fetch_sub(&job->num_helping, 1);
    pthread_cond_broadcast(&pool->left);
}

static inline void *persia_help(void *argument)
{
    persia_threads_t *pool = (persia_threads_t *)argument;
#if defined(__linux__)
    pthread_setname_np(pthread_self(), pool->name);
#endif
    pthread_mutex_lock(&pool->mutex);
    const uint32_t worker = ++pool->num_started;
    while (!atomic_load(&pool->stop)) {
        persia_job_t *job = persia_open_job(pool);
        if (job != NULL) {
            persia_help_with(pool, job, worker);
            continue;
        }
        const unsigned seen = atomic_load(&pool->published);
        pthread_mutex_unlock(&pool->mutex);
        persia_look(&pool->published, seen);
        pthread_mutex_lock(&pool->mutex);
        while (atomic_load(&pool->published) == seen && !atomic_load(&pool->stop)) {
            pool->num_asleep++;
            pthread_cond_wait(&pool->wake, &pool->mutex);
            pool->num_asleep--;
        }
    }
    pthread_mutex_unlock(&pool->mutex);
    return NULL;
}

/* Ends the helpers and frees all. No caller may be in persia_threads_run. */
static inline void persia_threads_free(persia_threads_t *pool)
{
    if (pool->owner == getpid()) { /* else the helpers never were, and the mutex may be held */
        pthread_mutex_lock(&pool->mutex);
        atomic_store(&pool->stop, 1);
        atomic_fetch_add(&pool->published, 1);
        pthread_cond_broadcast(&pool->wake);
        pthread_mutex_unlock(&pool->mutex);
        for (uint32_t i = 0; i < pool->num_helpers; i++)
            pthread_join(pool->threads[i], NULL);
        pthread_cond_destroy(&pool->left);
        pthread_cond_destroy(&pool->wake);
        pthread_mutex_destroy(&pool->mutex);
    }
    free(pool->threads);
    free(pool);
}

/* A pool with this many helpers, or as many as could be started; NULL: no memory. */
static inline persia_threads_t *persia_threads_new(uint32_t num_helpers, const char *name)
{
    persia_threads_t *pool = (persia_threads_t *)calloc(1, sizeof *pool);
    if (pool == NULL)
        return NULL;
    pool->threads = (pthread_t *)calloc(num_helpers ? num_helpers : 1, sizeof *pool->threads);
    if (pool->threads == NULL) {
        free(pool);
        return NULL;
    }
    strncpy(pool->name, name, sizeof pool->name - 1);
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->wake, NULL);
    pthread_cond_init(&pool->left, NULL);
    pool->owner = getpid();
    while (pool->num_helpers < num_helpers &&
           pthread_create(&pool->threads[pool->num_helpers], NULL, persia_help, pool) == 0)
        pool->num_helpers++;
    return pool;
}

/* Takes a job off the list and waits until no helper is left in it. */
static inline void persia_end_job(persia_threads_t *pool, persia_job_t *job)
{
    pthread_mutex_lock(&pool->mutex);
    persia_job_t **at = &pool->jobs;
    while (*at != job)
        at = &(*at)->next;
    *at = job->next;
    pthread_mutex_unlock(&pool->mutex);
    unsigned helping;
    const int64_t end = persia_nanoseconds() + PERSIA_SPIN_NS;
    while ((helping = atomic_load(&job->num_helping)) > 0) {
        if (persia_nanoseconds() < end) {
            persia_look(&job->num_helping, helping);
            continue;
        }
        pthread_mutex_lock(&pool->mutex);
        while (atomic_load(&job->num_helping) > 0)
            pthread_cond_wait(&pool->left, &pool->mutex);
        pthread_mutex_unlock(&pool->mutex);
    }
}

/* Does all parts, each once, and returns when the last has ended. */
static inline void persia_threads_run(persia_threads_t *pool, persia_work_t work, void *context,
                            uint32_t num_parts)
{
    persia_job_t job = {.work = work, .context = context, .num_parts = num_parts};
    if (pool == NULL || num_parts < 2 || pool->owner != getpid()) {
        persia_take_parts(&job, 0);
        return;
    }
    pthread_mutex_lock(&pool->mutex);
    persia_job_t **last = &pool->jobs;
    while (*last != NULL)
        last = &(*last)->next;
    *last = &job;
    atomic_fetch_add(&pool->published, 1);
    if (pool->num_asleep > 0)
        pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->mutex);
    persia_take_parts(&job, 0);
    persia_end_job(pool, &job);
}

#endif
