/* Calls of kernels that have the interface of persia_kernels.h, as steps of a row optimizer.
 *
 *     rows -> kept -> kernel -> bound, looked at -> put back, where it failed
 *
 * A kernel that guards its rows does all of that row by row: here its codes are read.
 *
 * A kernel of a user can fail in three ways:
 *
 *   - it returns an error. All rows of the call are put back and each is tried alone, so that the
 *     rows that fail are known by their signs and all others take their step;
 *   - it leaves a NaN in a row that had none, by a gradient that had none: this row is put back.
 *     Without a guard, which is a copy of each row and costs as much as a cheap step, failed rows
 *     are known as well, but are as the kernel left them. A server with a state file has such
 *     copies in any case;
 *   - it crashes: see kernel_crash.h.
 */
#ifndef PERSIA_NATIVE_KERNELS_H
#define PERSIA_NATIVE_KERNELS_H

#include <stdlib.h>

#include "kernel_crash.h"
#include "optim_kernels.h"

enum {
    /* The most in one call, as the header promises; and of a kernel that guards them. */
    PERSIA_NATIVE_ROWS = 32,
    PERSIA_SELF_GUARDED_ROWS = 256,
    /* Of old rows, on the stack: so few that the rows themselves stay in the first cache. */
    PERSIA_KEPT_WORDS = 2048,
};

/* --- steps ----------------------------------------------------------------------------------- */

/* This and persia_keep are all that a kernel of a user costs beside its own arithmetic. */
PERSIA_INLINE int persia_are_beyond(const persia_block_t *rows, size_t dim)
{
    persia_seen_t seen = {{0}, {0}, 0};
    const float bound = rows->bound;
    for (size_t i = 0; i < rows->num_rows; i++)
        persia_see_row(&seen, rows->values[i], dim, bound);
    return persia_is_beyond(&seen);
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

/* Of states of `vectors` times dim words and some more; both are literals. */
PERSIA_INLINE void persia_keep_vectors(
    const persia_native_t *this, const persia_block_t *rows, size_t dim, size_t vectors)
{
    const size_t width = dim + this->words;
    float *to = this->kept;
    for (size_t i = 0; i < rows->num_rows; i++, to += width) {
        persia_copy_words(to, rows->values[i], dim);
        persia_copy_words(to + dim, rows->states[i], vectors * dim);
        for (size_t k = vectors * dim; k < this->words; k++)
            to[dim + k] = rows->states[i][k];
    }
}

PERSIA_INLINE void persia_keep(
    const persia_native_t *this, const persia_block_t *rows, size_t dim)
{
    const size_t words = this->words;
    if (!__builtin_constant_p(dim))
        persia_keep_any(this, rows);
    else if (words <= 2)
        persia_keep_vectors(this, rows, dim, 0);
    else if (words >= dim && words <= dim + 2)
        persia_keep_vectors(this, rows, dim, 1);
    else if (words >= 2 * dim && words <= 2 * dim + 2)
        persia_keep_vectors(this, rows, dim, 2);
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

/* Reports the rows that have a code; without any, all rows of a call that returned one. */
__attribute__((noinline)) static void persia_note_codes(
    persia_call_t *call, const persia_block_t *rows, size_t first, int code)
{
    for (size_t i = 0; i < rows->num_rows; i++)
        if (rows->codes[i] != 0)
            code = 0;
    for (size_t i = 0; i < rows->num_rows; i++) {
        const int own = rows->codes[i] != 0 ? rows->codes[i] : code;
        rows->codes[i] = 0;
        if (own != 0)
            persia_note_failure(call, first + i, own);
    }
}

/* Bounds rows, and looks for those that the kernel has made NaNs of without a cause: they are
 * put back. Without a guard nothing is known of a row before, and its gradient alone counts. */
__attribute__((noinline)) static void persia_bound_rows(
    const persia_native_t *this, const persia_block_t *rows, size_t first)
{
    const float *kept = this->settings->is_guarded ? this->kept : NULL;
    if (persia_settle(rows, 0, rows->num_rows, kept, this->words) != 0)
        persia_note_codes(this->call, rows, first, 0);
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
        one.codes += i;
        alone.kept += i * (this->dim + this->words);
        if (rows->num_rows > 1)
            code = persia_call_kernel(this->settings, &one);
        if (code != 0) {
            persia_put_back(this, i, rows->values[i], rows->states[i]);
            persia_note_failure(this->call, first + i, code);
        } else {
            persia_bound_rows(&alone, &one, first + i);
        }
    }
}

#define PERSIA_NATIVE_STEPPED                                                               \
    float *const *values, float *const *states, const float *const *grads, size_t n,        \
        const persia_optim_t *o, persia_call_t *call

/* The rows from `begin` on as a kernel takes them; `behind` has room for where their states are. */
PERSIA_INLINE persia_block_t persia_block(
    size_t dim, size_t begin, size_t count, float **behind, int *codes, PERSIA_NATIVE_STEPPED)
{
    (void)n;
    for (size_t i = 0; states == NULL && i < count; i++)
        behind[i] = values[begin + i] + dim;
    const persia_block_t rows = {
        .num_rows = count, .dim = dim, .values = values + begin,
        .states = states == NULL ? behind : states + begin, .grads = grads + begin,
        .lr = o->lr_exact, .step = call->number, .params = o->native_params,
        .bound = o->weight_bound, .codes = codes,
    };
    return rows;
}

/* Calls a kernel of a user, or a trusted one of PERSIA's own: that one does not fail, and is of a
 * level of instructions. */
PERSIA_INLINE void persia_native_loop(
    size_t dim, int is_trusted, int level, PERSIA_NATIVE_STEPPED)
{
    float stack[PERSIA_KEPT_WORDS] __attribute__((aligned(64)));
    float *behind[PERSIA_NATIVE_ROWS];
    int codes[PERSIA_NATIVE_ROWS] = {0};
    const size_t words = o->native_widths[dim], width = dim + words;
    const int is_copied = !is_trusted && o->is_guarded && call->kept == NULL;
    persia_native_t this = {o, call, dim, words, stack};
    /* Fewer rows a call are slower, by what a call costs. */
    size_t at_once = PERSIA_NATIVE_ROWS;
    if (is_copied && at_once * width > PERSIA_KEPT_WORDS)
        at_once = width < PERSIA_KEPT_WORDS ? PERSIA_KEPT_WORDS / width : 1;
    if (is_copied && width > PERSIA_KEPT_WORDS
        && (this.kept = malloc(width * sizeof(float))) == NULL) {
        for (size_t i = 0; i < n; i++)
            persia_note_failure(call, i, PERSIA_NO_MEMORY);
        return;
    }
    for (size_t begin = 0; begin < n; begin += at_once) {
        const size_t count = n - begin < at_once ? n - begin : at_once;
        const persia_block_t rows =
            persia_block(dim, begin, count, behind, codes, values, states, grads, n, o, call);
        if (is_trusted) {
            o->native_steps[level](&rows);
            if (persia_are_beyond(&rows, dim))
                persia_settle(&rows, 0, count, NULL, words);
            continue;
        }
        if (is_copied)
            persia_keep(&this, &rows, dim);
        else if (call->kept != NULL)
            this.kept = call->kept + begin * width;
        const int code = persia_call_kernel(o, &rows);
        if (code != 0)
            persia_step_alone(&this, &rows, begin, code);
        else if (persia_are_beyond(&rows, dim))
            persia_bound_rows(&this, &rows, begin);
    }
    if (is_copied && this.kept != stack)
        free(this.kept);
}

/* Calls a kernel that guards its rows. */
static void persia_self_guarded_loop(size_t dim, PERSIA_NATIVE_STEPPED)
{
    float *behind[PERSIA_SELF_GUARDED_ROWS];
    int codes[PERSIA_SELF_GUARDED_ROWS];
    const size_t most = n < PERSIA_SELF_GUARDED_ROWS ? n : PERSIA_SELF_GUARDED_ROWS;
    memset(codes, 0, most * sizeof(int));
    for (size_t begin = 0; begin < n; begin += most) {
        const size_t count = n - begin < most ? n - begin : most;
        const persia_block_t rows =
            persia_block(dim, begin, count, behind, codes, values, states, grads, n, o, call);
        const int code = persia_call_kernel(o, &rows);
        if (code != 0)
            persia_note_codes(call, &rows, begin, code);
    }
}

#define PERSIA_NATIVE_STEP(name, suffix, target, is_trusted, level)                         \
    target static void name##_##suffix(                                                     \
        float *const *values, float *const *states, const float *const *grads, size_t n,     \
        size_t dim, const persia_optim_t *o, persia_call_t *call)                            \
    {                                                                                       \
        if (o->guards_rows && dim + o->native_widths[dim] <= PERSIA_GUARDED_WORDS) {         \
            persia_self_guarded_loop(dim, values, states, grads, n, o, call);               \
            return;                                                                         \
        }                                                                                   \
        PERSIA_BY_DIM(                                                                      \
            persia_native_loop, dim, is_trusted, level, values, states, grads, n, o, call)   \
    }
#define PERSIA_NATIVE_STEPS(name, is_trusted)                                               \
    PERSIA_NATIVE_STEP(name, baseline, , is_trusted, 0)                                     \
    PERSIA_NATIVE_STEPS_X86(name, is_trusted)                                               \
    static const persia_step_t name##s[] = PERSIA_LEVELS(name);
#if PERSIA_NUM_LEVELS > 1
#define PERSIA_NATIVE_STEPS_X86(name, is_trusted)                 \
    PERSIA_NATIVE_STEP(name, avx2, PERSIA_AVX2, is_trusted, 1)    \
    PERSIA_NATIVE_STEP(name, avx512, PERSIA_AVX512, is_trusted, 2)
#else
#define PERSIA_NATIVE_STEPS_X86(name, is_trusted)
#endif

PERSIA_NATIVE_STEPS(persia_native_step, 0)
PERSIA_NATIVE_STEPS(persia_trusted_step, 1)

#endif
