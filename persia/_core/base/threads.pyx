"""Threads that share the work of one call, and those that answer requests.

The C side of pools is threads.h.
"""

import contextvars
import os
import threading
import weakref

from cython cimport auto_pickle, final, internal

from persia.errors import ConfigError

cdef extern from "threads.h" nogil:
    persia_threads_t *persia_threads_new(uint32_t num_helpers, const char *name)
    void persia_threads_free(persia_threads_t *pool)
    void persia_threads_run(
        persia_threads_t *pool, persia_work_t work, void *context, uint32_t num_parts)

cdef extern from *:
    """
    #include <sched.h>
    #include <stdint.h>
    #include <unistd.h>
    #ifdef __linux__
    #include <sys/resource.h>
    #include <sys/syscall.h>
    #endif

    /* A thread that wakes where another one computes waits for the end of that one's slice, up
     * to a tick of 4 ms: longer than many requests take. From Linux 6.12 on one with a shorter
     * slice runs at once, if it has not had more than its share, which stays the same. */
    #if defined(__linux__) && defined(SYS_sched_setattr)
    static void persia_prefer_thread(void)
    {
        struct { /* sched_attr, in its first version */
            uint32_t size, policy;
            uint64_t flags;
            int32_t nice;
            uint32_t priority;
            uint64_t slice_ns, deadline, period;
        } wanted = {.size = sizeof(wanted), .policy = SCHED_OTHER, .slice_ns = 100000};
        if (sched_getscheduler(0) != SCHED_OTHER)
            return;
        wanted.nice = getpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid));
        /* Refused by a filter of system calls, the thread is as it was. */
        (void)syscall(SYS_sched_setattr, 0, &wanted, 0);
    }
    #else
    static void persia_prefer_thread(void) {}
    #endif
    """
    void persia_prefer_thread()

cdef enum:
    MOST_THREADS = 1024

# By process (a child has no helpers of its parent's), name and number.
_shared = weakref.WeakValueDictionary()
_shared_lock = threading.Lock()


@final
cdef class Helpers:
    """The threads of pools beside their callers."""

    def __cinit__(self, uint32_t count, bytes name):
        self.pool = persia_threads_new(count, name)
        if self.pool == NULL:
            raise MemoryError(f"{count} helpers")

    def __dealloc__(self):
        if self.pool != NULL:
            # A helper on its way out needs nothing of the interpreter's.
            with nogil:
                persia_threads_free(self.pool)


# A pool is a handle. All pools of a process with the same name and as many threads share the
# helpers, because a stage of a batch follows the one before: were there helpers for each, those
# that look for their next job would stand in the way of those that have one. The helpers end
# with the last handle.
cdef Helpers shared_helpers(uint32_t count, str name):
    key = os.getpid(), name, count
    with _shared_lock:
        helpers = _shared.get(key)
        if helpers is None:
            helpers = _shared[key] = Helpers(count, name.encode())
    return helpers


@final
@internal
@auto_pickle(False)
cdef class Calls:
    """The parts of a call to a Python function."""
    cdef object call
    cdef list parts
    cdef list contexts
    cdef list failures

    cdef void make(self, uint32_t part) noexcept:
        try:
            self.contexts[part].run(self.call, self.parts[part])
        except BaseException as error:
            self.failures[part] = error


cdef void make_call(void *context, uint32_t part, uint32_t worker) noexcept nogil:
    with gil:
        (<Calls> context).make(part)


@final
cdef class ThreadPool:
    def __cinit__(self, num_threads, str name="persia-threads"):
        if not 1 <= num_threads <= MOST_THREADS:
            raise ConfigError(f"num_threads must be in 1..{MOST_THREADS}, got {num_threads}")
        self.num_threads = num_threads
        self.helpers = shared_helpers(num_threads - 1, name) if num_threads > 1 else None

    cdef int work(self, persia_work_t work, void *context, uint32_t num_parts) except -1:
        cdef Helpers helpers = self.helpers     # kept, should another thread close the pool
        cdef persia_threads_t *pool = NULL if helpers is None else helpers.pool
        with nogil:
            persia_threads_run(pool, work, context, num_parts)
        return 0

    def run(self, call, parts):
        cdef Calls calls = Calls.__new__(Calls)
        cdef uint32_t count = len(parts)
        calls.call = call
        calls.parts = list(parts)
        # In copies of this context, for the deadline of the call served here.
        calls.contexts = [contextvars.copy_context() for _ in range(count)]
        calls.failures = [None] * count
        # ``calls`` lives until every part has ended, which ``work`` waits for.
        self.work(make_call, <void *> calls, count)
        for failure in calls.failures:
            if failure is not None:
                raise failure

    def close(self):
        self.helpers = None


def prefer_thread():
    persia_prefer_thread()
