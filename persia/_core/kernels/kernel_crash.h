/* Says which kernel of a user a process crashed in.
 *
 * While a thread is in a kernel, its name is in persia_running_kernel, and the handler of the
 * signal says it before the process ends as it would have. Each module that calls kernels has a
 * handler of its own: one whose thread is in no kernel leaves the signal to the one before.
 */
#ifndef PERSIA_KERNEL_CRASH_H
#define PERSIA_KERNEL_CRASH_H

#include <signal.h>
#include <string.h>
#include <unistd.h>

/* initial-exec: the handler of a signal must not allocate. */
#if defined(__linux__)
#define PERSIA_THREAD_LOCAL static __thread __attribute__((tls_model("initial-exec")))
#else
#define PERSIA_THREAD_LOCAL static __thread
#endif
PERSIA_THREAD_LOCAL const char *volatile persia_running_kernel;

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

#endif
