"""Pooling of all features of a batch: each call is checked, then all are made by threads.

    call    one feature's rows to its outputs, or its gradient to the sums of its rows
    part    calls that one thread makes, in their order
"""

from cython cimport final
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memset
from numpy cimport (
    NPY_ARRAY_ALIGNED, NPY_ARRAY_C_CONTIGUOUS, NPY_ARRAY_WRITEABLE, NPY_FLOAT32,
    PyArray_CHKFLAGS, PyArray_CheckExact, PyArray_DATA, PyArray_DIM, PyArray_ISNOTSWAPPED,
    PyArray_NDIM, PyArray_TYPE, import_array, ndarray,
)

from persia._core.base.threads cimport ThreadPool, persia_work_t
from persia._core.base.types cimport uint32_t
from persia._core.ids.feature_batch cimport FeatureBatch
from persia._core.kernels.pooling cimport (
    PERSIA_MAX, PERSIA_SUM, POOL, POOL_GRAD, Call, fill_pool, fill_pool_grad, fill_scatter_add,
    first_out, kernels, make, mode_number, persia_bags_t,
)

from persia.errors import DataError

import_array()

cdef enum:
    PIECE_IDS = 16384       # of a call that is split

cdef struct Part:
    uint32_t first
    uint32_t end
    float *sums             # NULL: none to set and look at
    size_t num_sums         # floats
    bint is_finite


# Most calls are of a FeatureBatch, whose numbers are right by its invariants and are not looked
# at again, without a hash stack; and memoryviews would cost as much as a small feature's sums.


cdef bint is_matrix(object array, int flags) noexcept:
    """Whether a kernel may take a bare pointer to it."""
    return (
        PyArray_CheckExact(array) and PyArray_NDIM(<ndarray> array) == 2
        and PyArray_TYPE(<ndarray> array) == NPY_FLOAT32
        and PyArray_ISNOTSWAPPED(<ndarray> array)
        and PyArray_CHKFLAGS(
            <ndarray> array, NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_ALIGNED | flags))


cdef bint fill_plain(
    Call *call, object mode, FeatureBatch ids, ndarray by_row, ndarray by_sample
) except -1:
    """Describe a call but for its kind and matrices; False: it is none of the usual ones."""
    cdef persia_bags_t *bags = &call.bags
    call.mode = mode_number(mode)
    ids.number()
    if call.mode == PERSIA_MAX or ids.weights is not None and call.mode != PERSIA_SUM or (
            ids.num_distinct > PyArray_DIM(by_row, 0)
            or ids.batch_size != PyArray_DIM(by_sample, 0)
            or PyArray_DIM(by_row, 1) != PyArray_DIM(by_sample, 1)
            or PyArray_DIM(by_row, 1) == 0):
        return False
    memset(bags, 0, sizeof(persia_bags_t))
    bags.rounds = 1
    bags.inverse = <const uint32_t *> PyArray_DATA(<ndarray> ids.numbered_inverse)
    bags.num_ids = ids.num_ids
    bags.num_samples = ids.batch_size
    if ids.offsets is not None:
        bags.offsets = <const uint32_t *> PyArray_DATA(<ndarray> ids.offsets)
    if ids.weights is not None:
        bags.weights = <const float *> PyArray_DATA(<ndarray> ids.weights)
    bags.dim = PyArray_DIM(by_row, 1)
    call.argmax = NULL
    call.skip = NULL
    return True


cdef bint begin_sums(const Part *part, const Call *call) noexcept nogil:
    """Write the sums of a part of one call without zeros; False: they hold anything."""
    cdef const persia_bags_t *bags = &call.bags
    cdef size_t num_rows = part.num_sums // bags.dim
    if call.kind != POOL_GRAD or call.mode == PERSIA_MAX or call.out != part.sums:
        return False
    if bags.slots != NULL or bags.weights != NULL or call.skip != NULL:
        return False
    # Zeros cost little beside the additions where ids come again.
    return 2 * num_rows >= bags.num_ids and (
        kernels().grad_fresh(call.mode, bags, call.source, call.out) == num_rows)


# The gradients of a group add to the same sums: they are one part, which first sets its sums to
# zero, and at the end, while they are still in the cache, looks for what is not finite. So the
# order of additions, and with it the result, does not depend on the threads. Where a part is
# one feature in which most ids come once, its first gradients are written instead of added to
# zeros; see ``pooling.begin_grad``.
cdef void make_part(PoolCalls calls, uint32_t number, uint32_t worker) noexcept nogil:
    cdef Part *part = &calls.parts[number]
    cdef uint32_t i
    if part.sums == NULL:
        for i in range(part.first, part.end):
            make(&calls.calls[i])
        return
    if part.end - part.first != 1 or not begin_sums(part, &calls.calls[part.first]):
        memset(part.sums, 0, part.num_sums * sizeof(float))
        for i in range(part.first, part.end):
            make(&calls.calls[i])
    part.is_finite = not kernels().any_nonfinite(part.sums, part.num_sums)


@final
cdef class PoolCalls:
    """See the stub for the contract of each method."""

    cdef Call *calls
    cdef Part *parts
    cdef float *scratch         # two rows of each call, as long as the longest
    cdef size_t num_calls
    cdef size_t num_parts
    cdef size_t room            # of calls, and of parts
    cdef size_t most_dim
    cdef list held              # the arrays that the pointers point into, not their views

    def __cinit__(self):
        self.calls = NULL
        self.parts = NULL
        self.scratch = NULL
        self.num_calls = 0
        self.num_parts = 0
        self.room = 0
        self.most_dim = 0
        self.held = []

    def __dealloc__(self):
        free(self.calls)
        free(self.parts)
        free(self.scratch)

    cdef int make_room(self) except -1:
        """Make room for one call and one part more."""
        cdef size_t room = 2 * self.room + 32
        cdef void *calls
        cdef void *parts
        if max(self.num_calls, self.num_parts) < self.room:
            return 0
        calls = realloc(self.calls, room * sizeof(Call))
        if calls != NULL:
            self.calls = <Call *> calls
        parts = realloc(self.parts, room * sizeof(Part))
        if parts != NULL:
            self.parts = <Part *> parts
        if calls == NULL or parts == NULL:
            raise MemoryError(f"no memory for {room} calls")
        self.room = room
        return 0

    cdef int begin_part(self, float *sums, size_t num_sums) except -1:
        cdef Part *part
        self.make_room()
        part = &self.parts[self.num_parts]
        part.first = <uint32_t> self.num_calls
        part.end = part.first
        part.sums = sums
        part.num_sums = num_sums
        part.is_finite = True
        self.num_parts += 1
        return 0

    cdef int append(self, const Call *call) except -1:
        """Add a call to the last part."""
        self.make_room()
        self.calls[self.num_calls] = call[0]
        self.num_calls += 1
        self.parts[self.num_parts - 1].end = <uint32_t> self.num_calls
        self.most_dim = max(self.most_dim, call.bags.dim)
        return 0

    # Outputs of different calls lie apart, and so may calls be parts of their own.
    cdef int append_pieces(self, const Call *whole) except -1:
        """Add a call of POOL, cut by samples into parts of about PIECE_IDS ids."""
        cdef size_t num_pieces = whole.bags.num_ids // PIECE_IDS + 1
        cdef size_t piece, first, end
        cdef Call call
        for piece in range(num_pieces):
            first = whole.bags.num_samples * piece // num_pieces
            end = whole.bags.num_samples * (piece + 1) // num_pieces
            # A struct copy: the pieces share the arrays and differ in where they begin.
            call = whole[0]
            call.bags.num_samples = end - first
            if call.bags.offsets != NULL:
                call.bags.offsets += first      # which stay places in all of ``inverse``
            else:
                call.bags.inverse += first
                call.bags.num_ids = end - first
                if call.bags.weights != NULL:
                    call.bags.weights += first
            call.out += first * call.bags.dim
            if call.argmax != NULL:
                call.argmax += first * call.bags.dim
            self.begin_part(NULL, 0)
            self.append(&call)
        return 0

    def pool(
        self, mode, rows not None, slots, Py_ssize_t rounds, inverse not None, offsets,
        out not None, weights=None
    ):
        cdef Call call
        if isinstance(inverse, FeatureBatch):
            if slots is None and rounds == 1 and is_matrix(rows, 0) and (
                    is_matrix(out, NPY_ARRAY_WRITEABLE)) and (
                    fill_plain(&call, mode, <FeatureBatch> inverse, rows, out)):
                call.kind = POOL
                call.source = <const float *> PyArray_DATA(<ndarray> rows)
                call.out = <float *> PyArray_DATA(<ndarray> out)
                self.held.append((rows, inverse, out))
                self.append_pieces(&call)
                return None
            inverse, offsets, weights = inverse.inverse, inverse.offsets, inverse.weights
        argmax = fill_pool(&call, mode, rows, slots, rounds, inverse, offsets, out, weights)
        self.held.append((rows, slots, inverse, offsets, out, weights, argmax))
        self.append_pieces(&call)
        return argmax

    def begin_sums(self, sums):
        cdef float[:, ::1] view
        if sums is None:
            self.begin_part(NULL, 0)
            return
        view = sums
        self.held.append(sums)
        self.begin_part(first_out(view), <size_t> (view.shape[0] * view.shape[1]))

    def pool_grad(
        self, mode, grad not None, slots, Py_ssize_t rounds, inverse not None, offsets, argmax,
        skip, out not None, weights=None
    ):
        cdef Call call
        self.check_begun()
        if isinstance(inverse, FeatureBatch):
            if slots is None and rounds == 1 and skip is None and is_matrix(grad, 0) and (
                    is_matrix(out, NPY_ARRAY_WRITEABLE)) and (
                    fill_plain(&call, mode, <FeatureBatch> inverse, out, grad)):
                call.kind = POOL_GRAD
                call.source = <const float *> PyArray_DATA(<ndarray> grad)
                call.out = <float *> PyArray_DATA(<ndarray> out)
                self.held.append((grad, inverse, out))
                self.append(&call)
                return
            inverse, offsets, weights = inverse.inverse, inverse.offsets, inverse.weights
        fill_pool_grad(
            &call, mode, grad, slots, rounds, inverse, offsets, argmax, skip, out, weights)
        self.held.append((grad, slots, inverse, offsets, argmax, skip, out, weights))
        self.append(&call)

    def scatter_add(
        self, grad not None, slots, Py_ssize_t rounds, out not None
    ):
        cdef Call call
        self.check_begun()
        fill_scatter_add(&call, grad, slots, rounds, out)
        self.held.append((grad, slots, out))
        self.append(&call)

    cdef int check_begun(self) except -1:
        if self.num_parts == 0:
            raise DataError("begin_sums must come before the gradients that add to them")
        return 0

    def run(self, ThreadPool threads not None):
        cdef size_t i
        if self.num_parts == 0:
            return True
        free(self.scratch)
        # Of each call two rows, of which the second stays zeros.
        self.scratch = <float *> calloc(2 * self.num_calls * self.most_dim + 1, sizeof(float))
        if self.scratch == NULL:
            raise MemoryError(f"no memory for {self.num_calls} rows of {self.most_dim} floats")
        for i in range(self.num_calls):
            self.calls[i].bags.scratch = self.scratch + 2 * i * self.most_dim
        threads.work(<persia_work_t> make_part, <void *> self, <uint32_t> self.num_parts)
        for i in range(self.num_parts):
            if not self.parts[i].is_finite:
                return False
        return True
