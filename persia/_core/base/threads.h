/* Threads that share the parts of a job, without the interpreter and its lock.
 *
 *     job     work(context, part, worker) for part = 0 .. num_parts - 1
 *     taken   the next part: whoever is free takes it, so that a late thread holds nobody up
 *
 * A caller puts its job on the crew's list, takes parts like any helper, and leaves when the
 * last helper has left the job. Several callers may have jobs on the list; helpers take parts
 * of the first that has any. A job needs no helper: a caller alone does all of it.
 *
 *   C1  Who works on a job holds a worker's number of its own: the caller 0, helper i i + 1.
 *   C2  A job is on the list only while its caller is in persia_crew_run, and num_helping > 0
 *       only while a helper may touch it. So it may live on the caller's stack.
 *   C3  All that the parts wrote is seen by the caller when persia_crew_run returns.
 *
 * A thread in the kernel's sleep takes 50 us or more to come back, on a virtual machine; one
 * that looks takes 1. So who waits looks for SPIN_NS, then sleeps: stages of a batch follow
 * each other within that time, batches do not have to, and an idle crew takes no processor.
 * While it looks it yields, so that a thread with work to do gets the core.
 *
 * After a fork the child has none of the helpers: its callers do their jobs alone.
 */
#ifndef PERSIA_CREW_H
#define PERSIA_CREW_H

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
    atomic_uint num_helping; /* written under the crew's mutex */
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
} persia_crew_t;

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
static inline persia_job_t *persia_open_job(const persia_crew_t *crew)
{
    persia_job_t *job = crew->jobs;
    while (job != NULL && atomic_load(&job->taken) >= job->num_parts)
        job = job->next;
    return job;
}

static inline void persia_help_with(persia_crew_t *crew, persia_job_t *job, uint32_t worker)
{
    atomic_fetch_add(&job->num_helping, 1);
    pthread_mutex_unlock(&crew->mutex);
    persia_take_parts(job, worker);
    pthread_mutex_lock(&crew->mutex);
    /* The caller may see it without the mutex and be gone: the job is not touched again. */
    atomic_fetch_sub(&job->num_helping, 1);
    pthread_cond_broadcast(&crew->left);
}

static inline void *persia_help(void *argument)
{
    persia_crew_t *crew = (persia_crew_t *)argument;
#if defined(__linux__)
    pthread_setname_np(pthread_self(), crew->name);
#endif
    pthread_mutex_lock(&crew->mutex);
    const uint32_t worker = ++crew->num_started;
    while (!atomic_load(&crew->stop)) {
        persia_job_t *job = persia_open_job(crew);
        if (job != NULL) {
            persia_help_with(crew, job, worker);
            continue;
        }
        const unsigned seen = atomic_load(&crew->published);
        pthread_mutex_unlock(&crew->mutex);
        persia_look(&crew->published, seen);
        pthread_mutex_lock(&crew->mutex);
        while (atomic_load(&crew->published) == seen && !atomic_load(&crew->stop)) {
            crew->num_asleep++;
            pthread_cond_wait(&crew->wake, &crew->mutex);
            crew->num_asleep--;
        }
    }
    pthread_mutex_unlock(&crew->mutex);
    return NULL;
}

/* Ends the helpers and frees all. No caller may be in persia_crew_run. */
static inline void persia_crew_free(persia_crew_t *crew)
{
    if (crew->owner == getpid()) { /* else the helpers never were, and the mutex may be held */
        pthread_mutex_lock(&crew->mutex);
        atomic_store(&crew->stop, 1);
        atomic_fetch_add(&crew->published, 1);
        pthread_cond_broadcast(&crew->wake);
        pthread_mutex_unlock(&crew->mutex);
        for (uint32_t i = 0; i < crew->num_helpers; i++)
            pthread_join(crew->threads[i], NULL);
        pthread_cond_destroy(&crew->left);
        pthread_cond_destroy(&crew->wake);
        pthread_mutex_destroy(&crew->mutex);
    }
    free(crew->threads);
    free(crew);
}

/* A crew with this many helpers, or as many as could be started; NULL: no memory. */
static inline persia_crew_t *persia_crew_new(uint32_t num_helpers, const char *name)
{
    persia_crew_t *crew = (persia_crew_t *)calloc(1, sizeof *crew);
    if (crew == NULL)
        return NULL;
    crew->threads = (pthread_t *)calloc(num_helpers ? num_helpers : 1, sizeof *crew->threads);
    if (crew->threads == NULL) {
        free(crew);
        return NULL;
    }
    strncpy(crew->name, name, sizeof crew->name - 1);
    pthread_mutex_init(&crew->mutex, NULL);
    pthread_cond_init(&crew->wake, NULL);
    pthread_cond_init(&crew->left, NULL);
    crew->owner = getpid();
    while (crew->num_helpers < num_helpers &&
           pthread_create(&crew->threads[crew->num_helpers], NULL, persia_help, crew) == 0)
        crew->num_helpers++;
    return crew;
}

/* Takes a job off the list and waits until nobody helps with it. */
static inline void persia_end_job(persia_crew_t *crew, persia_job_t *job)
{
    pthread_mutex_lock(&crew->mutex);
    persia_job_t **at = &crew->jobs;
    while (*at != job)
        at = &(*at)->next;
    *at = job->next;
    pthread_mutex_unlock(&crew->mutex);
    unsigned helping;
    const int64_t end = persia_nanoseconds() + PERSIA_SPIN_NS;
    while ((helping = atomic_load(&job->num_helping)) > 0) {
        if (persia_nanoseconds() < end) {
            persia_look(&job->num_helping, helping);
            continue;
        }
        pthread_mutex_lock(&crew->mutex);
        while (atomic_load(&job->num_helping) > 0)
            pthread_cond_wait(&crew->left, &crew->mutex);
        pthread_mutex_unlock(&crew->mutex);
    }
}

/* Does all parts, each once, and returns when the last has ended. */
static inline void persia_crew_run(persia_crew_t *crew, persia_work_t work, void *context,
                            uint32_t num_parts)
{
    persia_job_t job = {.work = work, .context = context, .num_parts = num_parts};
    if (crew == NULL || num_parts < 2 || crew->owner != getpid()) {
        persia_take_parts(&job, 0);
        return;
    }
    pthread_mutex_lock(&crew->mutex);
    persia_job_t **last = &crew->jobs;
    while (*last != NULL)
        last = &(*last)->next;
    *last = &job;
    atomic_fetch_add(&crew->published, 1);
    if (crew->num_asleep > 0)
        pthread_cond_broadcast(&crew->wake);
    pthread_mutex_unlock(&crew->mutex);
    persia_take_parts(&job, 0);
    persia_end_job(crew, &job);
}

#endif
