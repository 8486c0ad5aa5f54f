# zmq.h: 64 bytes, aligned as a pointer.
ctypedef struct message_t:
    void *words[8]


cdef class Received:
    cdef message_t message
