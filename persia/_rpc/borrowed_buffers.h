/* Python buffers that libzmq reads from, and how they are released.
 *
 * libzmq reports from a thread of its own that it has read a buffer. Releasing the buffer takes
 * the GIL, for which that thread must not wait: all sockets of the context would wait with it.
 * It pushes the buffer onto a stack, which the next thread that sends or receives empties.
 */

#ifndef PERSIA_BORROWED_BUFFERS_H
#define PERSIA_BORROWED_BUFFERS_H

#include <Python.h>
#include <stdatomic.h>

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
    /* Release, so that `next` is visible to the thread that takes the stack. Elements are only
     * pushed one by one and taken all at once, so there is no ABA problem. */
    while (!atomic_compare_exchange_weak_explicit(&persia_returned, &borrowed->next, borrowed,
                                                  memory_order_release, memory_order_relaxed))
        ;
}

/* Call with the GIL held. */
static inline void persia_release_returned(void)
{
    persia_borrowed *borrowed;
    /* The plain load keeps the usual case, an empty stack, from writing to a shared line. */
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

#endif
