"""Threads that share the work of one call; see threads.h."""

from persia._core.base.types cimport uint32_t

cdef extern from "threads.h" nogil:
    ctypedef void (*persia_work_t)(void *context, uint32_t part, uint32_t worker) noexcept
    ctypedef struct persia_threads_t:
        pass


cdef class Helpers:
    cdef persia_threads_t *pool
    cdef object __weakref__


cdef class ThreadPool:
    cdef readonly uint32_t num_threads
    cdef Helpers helpers        # None: the caller is alone

    # Does ``work`` for each part, on whichever threads are free, without the GIL. No two
    # threads have the same ``worker`` at a time, and each is below num_threads.
    cdef int work(self, persia_work_t work, void *context, uint32_t num_parts) except -1
