/* Calls of kernels that have the interface of persia_kernels.h, as steps of a row optimizer.
 *
 *     rows -> kept -> kernel -> bound, looked at -> put back, where it failed
 *
 * A kernel of a user can fail in three ways:
 *
 *   - it returns an error. All rows of the call are put back and each is tried alone, so that the
 *     rows that fail are known by their signs and all others take their step;
 *   - it leaves a NaN in a row that had none, by a gradient that had none: this row is put back.
 *     Without a guard, which is a copy of each row and costs as much as a cheap step, failed rows
 *     are known as well, but are as the kernel left them;
 *   - it crashes. While a thread is in a kernel its name is in persia_running_kernel, and the
 *     handler of the signal says it before the process ends as it would have.
 */
#ifndef PERSIA_NATIVE_KERNELS_H
#define PERSIA_NATIVE_KERNELS_H

#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include "optim_kernels.h"

enum {
    PERSIA_NATIVE_ROWS = 32,    /* the most in one call, as the header promises */
    /* Of old rows, on the stack: so few that the rows themselves stay in the first cache. */
    PERSIA_KEPT_WORDS = 2048,
};

/* initial-exec: the handler of a signal must not allocate. */
#if defined(__linux__)
#define PERSIA_THREAD_LOCAL static __thread __attribute__((tls_model("initial-exec")))
#else
#define PERSIA_THREAD_LOCAL static __thread
#endif
PERSIA_THREAD_LOCAL const char *volatile persia_running_kernel;

/* --- crashes --------------------------------------------------------------------------------- */

static const int persia_crash_signals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
enum { PERSIA_NUM_CRASH_SIGNALS = sizeof persia_crash_signals / sizeof(int) };
static struct sigaction persia_old_actions[PERSIA_NUM_CRASH_SIGNALS];
static const char *const persia_crash_names[] = {"SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT"};

static void persia_write(const char *text)
{
    if (write(STDERR_FILENO, text, strlen(text)) < 0)
        return; /* there is nothing else to say it with */
}

/* Says which kernel it was, and leaves the signal to the handler before: what crashed runs again
 * and crashes again. */
static void persia_on_crash(int number)
{
    for (int i = 0; i < PERSIA_NUM_CRASH_SIGNALS; i++) {
        if (persia_crash_signals[i] != number)
            continue;
        const char *name = persia_running_kernel;
        if (name != NULL) {
            persia_write("persia: kernel ");
            persia_write(name);
            persia_write(" crashed with ");
            persia_write(persia_crash_names[i]);
            persia_write("; this process ends\n");
        }
        sigaction(number, &persia_old_actions[i], NULL);
    }
    if (number == SIGABRT)
        raise(number);
}

static void persia_watch_crashes(void)
{
    static int is_watching;
    if (is_watching)
        return;
    is_watching = 1;
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = persia_on_crash;
    action.sa_flags = SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    for (int i = 0; i < PERSIA_NUM_CRASH_SIGNALS; i++)
        sigaction(persia_crash_signals[i], &action, &persia_old_actions[i]);
}

/* --- steps ----------------------------------------------------------------------------------- */

/* These two are all that a kernel of a user costs beside its own arithmetic. Where dim is a
 * literal they have no loop over a row left. */
typedef int32_t persia_int_lanes_t __attribute__((vector_size(32)));
typedef int32_t persia_int_line_t __attribute__((vector_size(64)));
typedef float persia_line_t __attribute__((vector_size(64)));

/* Whether a value of these rows is beyond the bound, or a NaN. Without signs, floats are in the
 * order of their bits, and NaNs are the largest: a difference from the bound below 0 says both. */
PERSIA_INLINE int persia_are_beyond(float *const *values, size_t n, size_t dim, float bound)
{
    int32_t most, one, rest = 0;
    memcpy(&most, &bound, sizeof most);
    persia_int_lanes_t lanes = {0}, eight;
    persia_int_line_t line = {0}, sixteen;
    for (size_t i = 0; i < n; i++) {
        const float *restrict const w = values[i];
        size_t j = 0;
        for (; j + 16 <= dim; j += 16) {
            memcpy(&sixteen, w + j, sizeof sixteen);
            line |= most - (sixteen & INT32_MAX);
        }
        if (dim & 8) {
            memcpy(&eight, w + j, sizeof eight);
            lanes |= most - (eight & INT32_MAX);
            j += 8;
        }
        for (; j < dim; j++) {
            memcpy(&one, w + j, sizeof one);
            rest |= most - (one & INT32_MAX);
        }
    }
    for (int k = 0; k < 16; k++)
        rest |= line[k] | lanes[k & 7];
    return rest < 0;
}

/* A NaN stays one. */
static void persia_bound_rows(float *const *values, size_t n, size_t dim, float bound)
{
    for (size_t i = 0; i < n; i++)
        for (size_t j = 0; j < dim; j++)
            values[i][j] = persia_bounded(values[i][j], bound);
}

/* Copies rows with the state behind them; `width` is a literal, and a multiple of 8. */
PERSIA_INLINE void persia_copy_rows(float *to, float *const *values, size_t n, size_t width)
{
    for (size_t i = 0; i < n; i++, to += width) {
        const float *restrict const from = values[i];
        size_t j = 0;
        for (; j + 16 <= width; j += 16) {
            persia_line_t line;
            memcpy(&line, from + j, sizeof line);
            memcpy(to + j, &line, sizeof line);
        }
        if (j < width) {
            persia_lanes_t lanes;
            memcpy(&lanes, from + j, sizeof lanes);
            memcpy(to + j, &lanes, sizeof lanes);
        }
    }
}

static int persia_has_nan(const float *w, size_t dim)
{
    for (size_t j = 0; j < dim; j++)
        if (w[j] != w[j])
            return 1;
    return 0;
}

/* Whether row and gradient have only such values as a kernel must not make a NaN of. */
static int persia_are_finite(const float *w, const float *g, size_t dim)
{
    for (size_t j = 0; j < dim; j++)
        if (!isfinite(w[j]) || !isfinite(g[j]))
            return 0;
    return 1;
}

typedef struct {
    const persia_optim_t *settings;
    persia_call_t *call;
    size_t dim, words;      /* of a row, and of its state */
    float *kept;            /* old values and state of the rows of one call */
} persia_native_t;

__attribute__((noinline)) static void persia_keep_any(
    const persia_native_t *this, const persia_block_t *rows)
{
    float *to = this->kept;
    for (size_t i = 0; i < rows->num_rows; i++, to += this->dim + this->words) {
        memcpy(to, rows->values[i], this->dim * sizeof(float));
        memcpy(to + this->dim, rows->states[i], this->words * sizeof(float));
    }
}

/* `is_usual`: dim is a literal of PERSIA_BY_DIM, and the state stands behind the values. */
PERSIA_INLINE void persia_keep(
    const persia_native_t *this, const persia_block_t *rows, size_t dim, int is_usual)
{
    if (is_usual && this->words == dim)
        persia_copy_rows(this->kept, rows->values, rows->num_rows, 2 * dim);
    else if (is_usual && this->words == 2 * dim)
        persia_copy_rows(this->kept, rows->values, rows->num_rows, 3 * dim);
    else
        persia_keep_any(this, rows);
}

static void persia_put_back(const persia_native_t *this, size_t at, float *w, float *s)
{
    const float *from = this->kept + at * (this->dim + this->words);
    memcpy(w, from, this->dim * sizeof(float));
    memcpy(s, from + this->dim, this->words * sizeof(float));
}

static void persia_note_failure(persia_call_t *call, size_t place, int code)
{
    if (call->num_failed++ == 0) {
        call->first_failed = (uint32_t)place;
        call->code = code;
    }
}

static int persia_call_kernel(const persia_optim_t *o, const persia_block_t *rows)
{
    persia_running_kernel = o->native_name;
    const int code = o->native->step(rows);
    persia_running_kernel = NULL;
    return code;
}

/* Bounds rows, and looks for those that the kernel has made NaNs of without a reason: they are
 * put back. Without a guard nothing is known of a row before, and its gradient alone counts. */
__attribute__((noinline)) static void persia_settle(
    const persia_native_t *this, const persia_block_t *rows, size_t first)
{
    persia_bound_rows(rows->values, rows->num_rows, this->dim, this->settings->weight_bound);
    for (size_t i = 0; i < rows->num_rows; i++) {
        const float *old = this->kept + i * (this->dim + this->words);
        if (!persia_has_nan(rows->values[i], this->dim))
            continue;
        const int is_guarded = this->settings->is_guarded;
        if (!persia_are_finite(is_guarded ? old : rows->grads[i], rows->grads[i], this->dim))
            continue;
        if (is_guarded)
            persia_put_back(this, i, rows->values[i], rows->states[i]);
        persia_note_failure(this->call, first + i, PERSIA_WROTE_NAN);
    }
}

/* Puts all rows back after an error, and tries each alone; `first` is the first one's place. */
__attribute__((noinline)) static void persia_step_alone(
    const persia_native_t *this, const persia_block_t *rows, size_t first, int code)
{
    if (!this->settings->is_guarded) {
        for (size_t i = 0; i < rows->num_rows; i++)
            persia_note_failure(this->call, first + i, code);
        return;
    }
    for (size_t i = 0; i < rows->num_rows; i++)
        persia_put_back(this, i, rows->values[i], rows->states[i]);
    for (size_t i = 0; i < rows->num_rows; i++) {
        persia_block_t one = *rows;
        persia_native_t alone = *this;
        one.num_rows = 1;
        one.values += i;
        one.states += i;
        one.grads += i;
        alone.kept += i * (this->dim + this->words);
        if (rows->num_rows > 1)
            code = persia_call_kernel(this->settings, &one);
        if (code != 0) {
            persia_put_back(this, i, rows->values[i], rows->states[i]);
            persia_note_failure(this->call, first + i, code);
        } else {
            persia_settle(&alone, &one, first + i);
        }
    }
}

#define PERSIA_NATIVE_STEPPED                                                               \
    float *const *values, float *const *states, const float *const *grads, size_t n,        \
        const persia_optim_t *o, persia_call_t *call

/* Kernels of users: what a call may spoil is kept. */
PERSIA_INLINE void persia_native_loop(size_t dim, PERSIA_NATIVE_STEPPED)
{
    float stack[PERSIA_KEPT_WORDS] __attribute__((aligned(64)));
    float *behind[PERSIA_NATIVE_ROWS];
    const size_t words = o->native_widths[dim], width = dim + words;
    size_t at_once = PERSIA_KEPT_WORDS / width;
    at_once = at_once == 0 ? 1 : at_once > PERSIA_NATIVE_ROWS ? PERSIA_NATIVE_ROWS : at_once;
    persia_native_t this = {o, call, dim, words, stack};
    if (width > PERSIA_KEPT_WORDS && (this.kept = malloc(width * sizeof(float))) == NULL) {
        for (size_t i = 0; i < n; i++)
            persia_note_failure(call, i, PERSIA_NO_MEMORY);
        return;
    }
    for (size_t begin = 0; begin < n; begin += at_once) {
        const size_t count = n - begin < at_once ? n - begin : at_once;
        for (size_t i = 0; states == NULL && i < count; i++)
            behind[i] = values[begin + i] + dim;
        const persia_block_t rows = {
            .num_rows = count, .dim = dim, .values = values + begin,
            .states = states == NULL ? behind : states + begin, .grads = grads + begin,
            .lr = o->lr_exact, .step = call->number, .params = o->native_params,
        };
        if (o->is_guarded)
            persia_keep(&this, &rows, dim, states == NULL && __builtin_constant_p(dim));
        const int code = persia_call_kernel(o, &rows);
        if (code != 0)
            persia_step_alone(&this, &rows, begin, code);
        else if (persia_are_beyond(rows.values, count, dim, o->weight_bound))
            persia_settle(&this, &rows, begin);
    }
    if (this.kept != stack)
        free(this.kept);
}

PERSIA_VARIANTS(
    void, persia_native_step,
    (float *const *values, float *const *states, const float *const *grads, size_t n, size_t dim,
     const persia_optim_t *o, persia_call_t *call),
    { PERSIA_BY_DIM(persia_native_loop, dim, values, states, grads, n, o, call) })

static const persia_step_t persia_native_steps[] = PERSIA_LEVELS(persia_native_step);

/* Kernels of PERSIA's own, which do not fail. */
PERSIA_INLINE void persia_trusted_loop(size_t dim, int level, PERSIA_NATIVE_STEPPED)
{
    float *behind[PERSIA_NATIVE_ROWS];
    for (size_t begin = 0; begin < n; begin += PERSIA_NATIVE_ROWS) {
        const size_t count = n - begin < PERSIA_NATIVE_ROWS ? n - begin : PERSIA_NATIVE_ROWS;
        for (size_t i = 0; states == NULL && i < count; i++)
            behind[i] = values[begin + i] + dim;
        const persia_block_t rows = {
            .num_rows = count, .dim = dim, .values = values + begin,
            .states = states == NULL ? behind : states + begin, .grads = grads + begin,
            .lr = o->lr_exact, .step = call->number, .params = o->native_params,
        };
        o->native_steps[level](&rows);
        if (persia_are_beyond(rows.values, count, dim, o->weight_bound))
            persia_bound_rows(rows.values, count, dim, o->weight_bound);
    }
}

#define PERSIA_TRUSTED(suffix, target, level)                                                \
    target static void persia_trusted_step_##suffix(                                         \
        float *const *values, float *const *states, const float *const *grads, size_t n,     \
        size_t dim, const persia_optim_t *o, persia_call_t *call)                            \
    {                                                                                        \
        PERSIA_BY_DIM(persia_trusted_loop, dim, level, values, states, grads, n, o, call)    \
    }

PERSIA_TRUSTED(baseline, , 0)
#if PERSIA_NUM_LEVELS > 1
PERSIA_TRUSTED(avx2, PERSIA_AVX2, 1)
PERSIA_TRUSTED(avx512, PERSIA_AVX512, 2)
#endif
static const persia_step_t persia_trusted_steps[] = PERSIA_LEVELS(persia_trusted_step);

#endif
