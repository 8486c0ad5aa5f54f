"""Messages onto and off a ZeroMQ socket, and the turn to receive, without releasing the GIL.

pyzmq releases the GIL around every part, and wakes a thread of its own for every array that was
sent without a copy. With several busy threads each release loses the GIL to another, and
getting it back takes longer than the part. Nothing here waits, so nothing needs a release; and
as no signal is handled in between, a message is put on the socket whole or not at all, and an
exception of a signal handler finds the turn either passed on or not.

libzmq is the one that pyzmq has loaded; its functions are found by name. They and ``zmq_msg_t``
have been part of its stable interface since version 3.
"""

import ctypes

import zmq
from zmq.backend.cython import _zmq

from cpython.buffer cimport (
    PyBUF_SIMPLE,
    PyBuffer_FillInfo,
    PyBuffer_Release,
    PyObject_GetBuffer,
)
from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc
from libc.errno cimport EAGAIN, EINTR
from libc.string cimport memcpy

cdef extern from *:
    """
    #include <stdatomic.h>

    /* Python buffers that libzmq reads from, and how they are released. libzmq reports from a
     * thread of its own that it has read a buffer. Releasing it takes the GIL, for which that
     * thread must not wait: all sockets of the context would wait with it. It pushes the buffer
     * onto a stack, which the next thread that sends or receives empties. */

    /* Owned by libzmq from zmq_msg_init_data on, until persia_return_buffer gets it. */
    typedef struct persia_borrowed {
        Py_buffer buffer;
        struct persia_borrowed *next;
    } persia_borrowed;

    static _Atomic(persia_borrowed *) persia_returned = NULL;

    /* zmq_free_fn: called without the GIL, by any thread of libzmq. */
    static inline void persia_return_buffer(void *data, void *hint)
    {
        persia_borrowed *borrowed = hint;
        (void)data;
        borrowed->next = atomic_load_explicit(&persia_returned, memory_order_relaxed);
        /* Release, so that `next` is visible to the thread that takes the stack. Elements are
         * only pushed one by one and taken all at once, so there is no ABA problem. */
        while (!atomic_compare_exchange_weak_explicit(
            &persia_returned, &borrowed->next, borrowed,
            memory_order_release, memory_order_relaxed))
            ;
    }

    /* Call with the GIL held. */
    static inline void persia_release_returned(void)
    {
        persia_borrowed *borrowed;
        /* The plain load keeps the usual case, an empty stack, from a write. */
        if (atomic_load_explicit(&persia_returned, memory_order_relaxed) == NULL)
            return;
        /* Acquire pairs with the push above. */
        borrowed = atomic_exchange_explicit(&persia_returned, NULL, memory_order_acquire);
        while (borrowed != NULL) {
            persia_borrowed *next = borrowed->next;
            PyBuffer_Release(&borrowed->buffer);
            PyMem_RawFree(borrowed);
            borrowed = next;
        }
    }
    """
    ctypedef struct persia_borrowed:
        Py_buffer buffer
    void persia_return_buffer(void *data, void *hint) noexcept nogil
    void persia_release_returned() noexcept

# zmq_msg_t of zmq.h: 64 opaque bytes, aligned as a pointer.
ctypedef struct message_t:
    void *words[8]

ctypedef int (*message_f)(message_t *) noexcept nogil
ctypedef int (*move_f)(message_t *, void *, int) noexcept nogil
ctypedef int (*init_size_f)(message_t *, size_t) noexcept nogil
ctypedef void (*free_f)(void *, void *) noexcept nogil
ctypedef int (*init_data_f)(message_t *, void *, size_t, free_f, void *) noexcept nogil
ctypedef void *(*data_f)(message_t *) noexcept nogil
ctypedef size_t (*size_f)(message_t *) noexcept nogil
ctypedef int (*get_f)(void *, int, void *, size_t *) noexcept nogil
ctypedef int (*errno_f)() noexcept nogil
ctypedef const char *(*gets_f)(message_t *, const char *) noexcept nogil

# pyzmq's wheels link libzmq into this extension; a second copy of libzmq would know none of
# pyzmq's sockets.
_libzmq = ctypes.CDLL(_zmq.__file__)


cdef size_t _address(str name) except 0:
    return ctypes.cast(getattr(_libzmq, name), ctypes.c_void_p).value


cdef message_f zmq_msg_init = <message_f> _address("zmq_msg_init")
cdef message_f zmq_msg_close = <message_f> _address("zmq_msg_close")
cdef message_f zmq_msg_more = <message_f> _address("zmq_msg_more")
cdef init_size_f zmq_msg_init_size = <init_size_f> _address("zmq_msg_init_size")
cdef init_data_f zmq_msg_init_data = <init_data_f> _address("zmq_msg_init_data")
cdef move_f zmq_msg_send = <move_f> _address("zmq_msg_send")
cdef move_f zmq_msg_recv = <move_f> _address("zmq_msg_recv")
cdef data_f zmq_msg_data = <data_f> _address("zmq_msg_data")
cdef size_f zmq_msg_size = <size_f> _address("zmq_msg_size")
cdef get_f zmq_getsockopt = <get_f> _address("zmq_getsockopt")
cdef errno_f zmq_errno = <errno_f> _address("zmq_errno")
cdef gets_f zmq_msg_gets = <gets_f> _address("zmq_msg_gets")

cdef int NOW = zmq.NOBLOCK
cdef int MORE = zmq.SNDMORE
cdef int EVENTS = zmq.EVENTS


cdef class Received:
    """One received part. libzmq owns its memory, which lives as long as this object.

    A memoryview of it, and any array made of that, keeps the object alive.
    """

    cdef message_t message

    def __cinit__(self):
        # Valid to close from here on, even if nothing is received into it.
        zmq_msg_init(&self.message)

    def __dealloc__(self):
        zmq_msg_close(&self.message)

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(
            buffer, self, zmq_msg_data(&self.message), zmq_msg_size(&self.message), 0, flags
        )


cdef int _fill(message_t *message, object part, size_t copied_bytes) except -1:
    """Initialize a message with a copy of a small part or a view of a large one."""
    cdef persia_borrowed *borrowed
    cdef size_t num_bytes
    cdef int rc
    # Freed by persia_return_buffer in a thread of libzmq, so not from Python's own pools.
    borrowed = <persia_borrowed *> PyMem_RawMalloc(sizeof(persia_borrowed))
    if borrowed == NULL:
        raise MemoryError()
    try:
        PyObject_GetBuffer(part, &borrowed.buffer, PyBUF_SIMPLE)
    except BaseException:
        PyMem_RawFree(borrowed)
        raise
    num_bytes = borrowed.buffer.len
    if num_bytes >= copied_bytes:
        rc = zmq_msg_init_data(
            message, borrowed.buffer.buf, num_bytes, persia_return_buffer, borrowed)
        if rc == 0:
            # libzmq owns `borrowed` now, and calls persia_return_buffer when it has read it.
            return 0
    else:
        rc = zmq_msg_init_size(message, num_bytes)
        if rc == 0:
            memcpy(zmq_msg_data(message), borrowed.buffer.buf, num_bytes)
    # Copied, or failed: the buffer is not needed any more.
    PyBuffer_Release(&borrowed.buffer)
    PyMem_RawFree(borrowed)
    if rc != 0:
        raise MemoryError(f"a part of {num_bytes} bytes")
    return 0


def release():
    """Release the buffers of parts that have left."""
    persia_release_returned()


def events(socket):
    """Return the socket's state as zmq.POLLIN and zmq.POLLOUT; resets the edge of ZMQ_FD."""
    cdef int found = 0
    cdef size_t num_bytes = sizeof(found)
    while True:
        if zmq_getsockopt(<void *> <size_t> socket.underlying, EVENTS, &found, &num_bytes) == 0:
            return found
        if zmq_errno() != EINTR:
            raise zmq.ZMQError(zmq_errno())


def user_of(part):
    """Return the name of the key that the sender of a part has proven; None without keys."""
    cdef Received received = part.obj
    cdef const char *name = zmq_msg_gets(&received.message, b"User-Id")
    # Without keys a peer may send a User-Id of its own choice: any bytes.
    return None if name == NULL else (<bytes> name).decode("utf-8", "replace")


def send(socket, parts, size_t copied_bytes):
    """Put one message on a socket, copying parts of fewer than ``copied_bytes``.

    False if there is no room now, or the connection broke meanwhile: nothing of it was sent.
    zmq.ZMQError if the socket cannot be used, or a ROUTER does not know the peer.
    """
    cdef void *handle = <void *> <size_t> socket.underlying
    cdef Py_ssize_t left = len(parts)
    cdef bint is_first = True
    cdef bint is_cut = False
    cdef message_t message
    cdef int rc, number
    persia_release_returned()
    for part in parts:
        left -= 1
        _fill(&message, part, copied_bytes)
        while True:
            # On success libzmq owns the message's content, and `message` is empty again.
            rc = zmq_msg_send(&message, handle, NOW | MORE if left else NOW)
            number = zmq_errno()
            if rc >= 0 or number != EINTR:
                break
        if rc < 0:
            zmq_msg_close(&message)
            if number != EAGAIN:
                raise zmq.ZMQError(number)
            if is_first:
                return False
            # The connection broke within the message. libzmq takes back the parts before this
            # one, and drops the rest only if it is given them: otherwise it would take the
            # next message for the rest of this one.
            is_cut = True
        is_first = False
    return not is_cut


def receive(socket, Py_ssize_t max_parts, size_t max_bytes, list received not None):
    """Move one message from a socket to a list; False if there is none (ZMQ_FD says when).

    It is added as its parts and "", or, dropped whole, as no parts and the reason. No signal is
    handled between the socket and the list, so no message is lost to an exception of a signal
    handler. zmq.ZMQError if the socket cannot be used.
    """
    cdef void *handle = <void *> <size_t> socket.underlying
    cdef size_t num_bytes = 0
    cdef Received part
    cdef list parts = []
    cdef str reason = ""
    cdef int rc, number
    persia_release_returned()
    # libzmq delivers whole messages: once the first part is there, all of them are.
    while True:
        part = Received.__new__(Received)
        while True:
            rc = zmq_msg_recv(&part.message, handle, NOW)
            number = zmq_errno()
            if rc >= 0 or number != EINTR:
                break
        if rc < 0:
            if number == EAGAIN:
                return False
            raise zmq.ZMQError(number)
        num_bytes += zmq_msg_size(&part.message)
        if len(parts) >= max_parts:
            reason = "num_arrays"
        elif num_bytes > max_bytes:
            reason = "message_bytes"
        # Only the number and bytes of what Python keeps are bounded here; libzmq has had the
        # whole message already.
        if reason:
            parts.clear()
        else:
            parts.append(memoryview(part))
        if not zmq_msg_more(&part.message):
            received.append((parts, reason))
            return True


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
        self._waiting = []  # the objects are None

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
            lock = self._holder.done
        else:
            lock, self._free_lock = self._free_lock, None
        if lock is not None:
            try:
                lock.release()
            except RuntimeError:
                pass  # released already: a caller's answer came first

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
