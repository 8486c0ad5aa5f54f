# zmq_msg_t of zmq.h: 64 opaque bytes, aligned as a pointer.
ctypedef struct message_t:
    void *words[8]


cdef class Received:
    cdef message_t message
