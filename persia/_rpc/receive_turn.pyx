"""Who of those that wait for answers receives them.

One has the turn at a time. Nothing in here waits or runs Python code, so that under the
interpreter's lock each method is one step for all threads; and a signal's exception, which
comes to the main thread between any two lines of Python, finds a turn passed or not passed.
"""


cdef class Turns:
    """The turn of one channel: of a caller, of the channel's own thread, or of nobody.

    A caller is an object with a lock ``still``, which is freed when it gets the turn.
    """

    cdef object _holder
    cdef list _waiting
    cdef object _rest
    cdef bint _is_closed
    cdef readonly bint was_asked
    """A caller came since the own thread asked last whether it is needed."""

    def __cinit__(self):
        self._holder = None
        self._waiting = []
        self._rest = None

    def enter(self, caller not None):
        """Come to wait; returns whether the caller has the turn, else it gets it later."""
        self.was_asked = True
        if self._holder is None and not self._is_closed:
            self._holder = caller
            return True
        self._waiting.append(caller)
        return False

    def has(self, caller not None):
        """Return whether it is this caller's turn."""
        return self._holder is caller

    def leave(self, caller not None):
        """Wait no longer; the turn goes to who has waited longest. Again changes nothing."""
        cdef Py_ssize_t place
        if self._holder is not caller:
            for place in range(len(self._waiting)):
                if self._waiting[place] is caller:
                    del self._waiting[place]
                    return
            return
        self._holder = None
        if self._waiting and not self._is_closed:
            self._holder = self._waiting.pop(0)
            try:
                self._holder.still.release()
            except RuntimeError:
                pass  # an answer has freed it
        elif self._rest is not None:
            rest, self._rest = self._rest, None
            try:
                rest.release()
            except RuntimeError:
                pass  # it was free

    def rest(self, lock not None):
        """Have a lock freed when the turn is nobody's; returns whether anybody has it now."""
        if self._holder is None:
            return False
        self._rest = lock
        return True

    def is_needed(self, own not None):
        """Take the turn for the own thread, unless a caller has it or came since."""
        is_needed = self._holder is None and not self.was_asked and not self._is_closed
        self.was_asked = False
        if is_needed:
            self._holder = own
        return is_needed

    def close(self):
        """Give no turn to anybody; returns whether nobody has it any more."""
        self._is_closed = True
        return self._holder is None
