/* Memory of Python's that libzmq reads from, and how it comes back.
 *
 * libzmq tells in a thread of its own that it has read it all. To let go of the buffer takes
 * the interpreter's lock, for which that thread must not wait: it leaves the buffer on a
 * stack, and whoever sends or receives next empties that.
 */

#ifndef PERSIA_LENT_H
#define PERSIA_LENT_H

#include <Python.h>
#include <stdatomic.h>

typedef struct persia_lent {
    Py_buffer buffer;
    struct persia_lent *next;
} persia_lent;

static _Atomic(persia_lent *) persia_returned = NULL;

/* zmq_free_fn. Nothing but the push, so that the stack has no ABA problem. */
static inline void persia_give_back(void *data, void *hint)
{
    persia_lent *lent = hint;
    (void)data;
    lent->next = atomic_load_explicit(&persia_returned, memory_order_relaxed);
    while (!atomic_compare_exchange_weak_explicit(&persia_returned, &lent->next, lent,
                                                  memory_order_release, memory_order_relaxed))
        ;
}

/* With the interpreter's lock. The look before spares others the exchange. */
static inline void persia_release_returned(void)
{
    persia_lent *lent;
    if (atomic_load_explicit(&persia_returned, memory_order_relaxed) == NULL)
        return;
    lent = atomic_exchange_explicit(&persia_returned, NULL, memory_order_acquire);
    while (lent != NULL) {
        persia_lent *next = lent->next;
        PyBuffer_Release(&lent->buffer);
        PyMem_RawFree(lent);
        lent = next;
    }
}

#endif
