"""Which of the threads that wait for answers on one channel receives from its socket.

One thread has the turn at a time. No method here waits or runs Python code, so under the GIL
each is atomic for all threads; an exception raised by a signal handler, which reaches the main
thread between any two lines of Python, finds the turn either passed on or not.
"""


cdef class ReceiveTurn:
    """The turn of one channel: held by a caller, by the channel's own thread, or free.

    A caller is an object with a lock ``done``, which is released when it gets the turn.
    """

    cdef object _holder
    cdef list _waiting  # callers in the order they came
    cdef object _free_lock  # released when the turn becomes free
    cdef bint _is_closed
    cdef readonly bint was_asked
    """A caller came since the own thread last tried to take the turn."""

    def __cinit__(self):
        self._holder = None
        self._waiting = []
        self._free_lock = None

    def enter(self, caller not None):
        """Take the turn and return True, or queue for it and return False."""
        # Set even if the turn is given now: the own thread leaves the socket to callers.
        self.was_asked = True
        if self._holder is None and not self._is_closed:
            self._holder = caller
            return True
        self._waiting.append(caller)
        return False

    def has(self, caller not None):
        """Return whether this caller has the turn."""
        return self._holder is caller

    def leave(self, caller not None):
        """Pass the turn to the caller that has waited longest, or stop waiting for it.

        Idempotent: an exception of a signal handler may make a caller leave twice.
        """
        cdef Py_ssize_t place
        if self._holder is not caller:
            for place in range(len(self._waiting)):
                if self._waiting[place] is caller:
                    del self._waiting[place]
                    return
            return
        self._holder = None
        if self._waiting and not self._is_closed:
            # Handed over directly: no other thread can take the turn in between.
            self._holder = self._waiting.pop(0)
            try:
                self._holder.done.release()
            except RuntimeError:
                pass  # released already: its answer came first
        elif self._free_lock is not None:
            lock, self._free_lock = self._free_lock, None
            try:
                lock.release()
            except RuntimeError:
                pass  # it was released already

    def release_when_free(self, lock not None):
        """Have ``lock`` released once the turn is free; return False if it is free now."""
        if self._holder is None:
            return False
        self._free_lock = lock
        return True

    def take_if_unused(self, own not None):
        """Take the turn for the own thread unless a caller has it, or came since."""
        is_unused = self._holder is None and not self.was_asked and not self._is_closed
        self.was_asked = False
        if is_unused:
            self._holder = own
        return is_unused

    def close(self):
        """Let no thread take the turn from now on; return whether it is free."""
        self._is_closed = True
        return self._holder is None
