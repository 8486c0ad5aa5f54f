"""Threads that share the work of one call.

A crew is a handle. All crews of a process with the same name and as many threads share the
helpers, because a stage of a batch follows the one before: were there helpers for each, those
that look for their next job would stand in the way of those that have one. The helpers end with
the last handle.
"""

import contextvars
import os
import threading
import weakref

from cython cimport auto_pickle, final

from persia.errors import ConfigError

cdef extern from "threads.h" nogil:
    persia_crew_t *persia_crew_new(uint32_t num_helpers, const char *name)
    void persia_crew_free(persia_crew_t *crew)
    void persia_crew_run(
        persia_crew_t *crew, persia_work_t work, void *context, uint32_t num_parts)

cdef enum:
    MOST_THREADS = 1024

# By process (a child has no helpers of its parent's), name and number.
_shared = weakref.WeakValueDictionary()
_shared_lock = threading.Lock()


@final
cdef class Helpers:
    """The threads of crews beside their callers."""

    def __cinit__(self, uint32_t count, bytes name):
        self.crew = persia_crew_new(count, name)
        if self.crew == NULL:
            raise MemoryError(f"{count} helpers")

    def __dealloc__(self):
        if self.crew != NULL:
            # A helper on its way out needs nothing of the interpreter's.
            with nogil:
                persia_crew_free(self.crew)


cdef Helpers shared_helpers(uint32_t count, str name):
    key = os.getpid(), name, count
    with _shared_lock:
        helpers = _shared.get(key)
        if helpers is None:
            helpers = _shared[key] = Helpers(count, name.encode())
    return helpers


@final
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
    def __cinit__(self, num_threads, str name="persia-crew"):
        if not 1 <= num_threads <= MOST_THREADS:
            raise ConfigError(f"num_threads must be in 1..{MOST_THREADS}, got {num_threads}")
        self.num_threads = num_threads
        self.helpers = shared_helpers(num_threads - 1, name) if num_threads > 1 else None

    cdef int work(self, persia_work_t work, void *context, uint32_t num_parts) except -1:
        cdef Helpers helpers = self.helpers     # kept, should another thread close the crew
        cdef persia_crew_t *crew = NULL if helpers is None else helpers.crew
        with nogil:
            persia_crew_run(crew, work, context, num_parts)
        return 0

    def run(self, call, parts):
        cdef Calls calls = Calls.__new__(Calls)
        cdef uint32_t count = len(parts)
        calls.call = call
        calls.parts = list(parts)
        # In copies of this context, for the deadline of the call served here.
        calls.contexts = [contextvars.copy_context() for _ in range(count)]
        calls.failures = [None] * count
        self.work(make_call, <void *> calls, count)
        for failure in calls.failures:
            if failure is not None:
                raise failure

    def close(self):
        self.helpers = None
