"""Rows to pooled outputs, and output gradients to row gradients.

    rows f32 [U, dim]         the rows of a table that the batch uses
    ids                       a FeatureBatch: B samples of D distinct ids, and their weights
    places u32 [D * R]        for each distinct id of the feature its R rows (R rounds of the
                              hash stack); None: R = 1 and distinct id d is row d

The vector of a distinct id is the sum of its rounds, in every mode. Then a sample is

    sum                       the sum over its ids, each times its weight, duplicates counted
                              again; the other modes take no weights
    mean                      sum / n
    sqrt                      sum / sqrt(n)
    max                       elementwise; of equal values the first id's

and zeros without ids. Sums run in f32 in the order (sample, position, round), which is part of
the result. All features of a batch are pooled by threads at once:

    call    one feature's rows to its outputs, or its gradient to the sums of its rows
    part    calls that one thread makes, in their order
"""

import numpy as np

from persia.errors import ConfigError, DataError, DataTypeError

from cython cimport final
from libc.math cimport sqrt
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memset
from numpy cimport (
    NPY_ARRAY_ALIGNED, NPY_ARRAY_C_CONTIGUOUS, NPY_ARRAY_WRITEABLE, NPY_FLOAT32,
    PyArray_CHKFLAGS, PyArray_Check, PyArray_DATA, PyArray_DIM, PyArray_FROM_OF,
    PyArray_ISNOTSWAPPED, PyArray_NDIM, PyArray_SIZE, PyArray_STRIDE, PyArray_TYPE,
    import_array, ndarray,
)

from persia._core.base.arrays cimport as_vector, describe
from persia._core.base.cpu cimport isa_level
from persia._core.base.threads cimport ThreadPool, persia_work_t
from persia._core.base.types cimport int32_t, int64_t, uint32_t, uint64_t, uint8_t
from persia._core.ids.feature_batch cimport FeatureBatch

import_array()

cdef extern from "pooling_kernels.h" nogil:
    enum:
        PERSIA_SUM
        PERSIA_MEAN
        PERSIA_SQRT
        PERSIA_MAX
        PERSIA_NUM_LEVELS

    ctypedef struct persia_bags_t:
        const uint32_t *places       # [num_distinct * rounds] or NULL
        size_t rounds
        const uint32_t *inverse     # [num_ids]
        size_t num_ids
        const uint32_t *offsets     # [num_samples + 1] or NULL
        size_t num_samples
        const float *weights        # [num_ids] or NULL
        size_t dim
        size_t stride               # floats from a gradient's sample to the next
        float *scratch              # [dim]; [2 * dim], the second half zeros, for grad_fresh

    ctypedef struct persia_pooling_t:
        void (*pool)(
            int mode, const persia_bags_t *bags, const float *rows, float *out,
            int32_t *argmax) noexcept nogil
        void (*pool_grad)(
            int mode, const persia_bags_t *bags, const float *grad, const int32_t *argmax,
            const uint8_t *skip, float *out) noexcept nogil
        size_t (*grad_fresh)(
            int mode, const persia_bags_t *bags, const float *grad, float *out) noexcept nogil
        void (*gather)(
            const float *rows, const uint32_t *places, size_t rounds, size_t num_distinct,
            size_t dim, float *out) noexcept nogil
        void (*scatter_add)(
            const float *grad, const uint32_t *places, size_t rounds, size_t num_distinct,
            size_t dim, float *out) noexcept nogil
        void (*index_add)(
            const float *grad, const int64_t *index, size_t n, size_t dim,
            float *out) noexcept nogil
        int (*any_nonfinite)(const float *values, size_t n) noexcept nogil
        double (*squares)(const float *values, size_t n) noexcept nogil
        uint32_t (*max_u32)(const uint32_t *values, size_t n) noexcept nogil
        uint64_t (*max_u64)(const int64_t *values, size_t n) noexcept nogil

    const persia_pooling_t[PERSIA_NUM_LEVELS] persia_pooling

cdef enum:
    PIECE_IDS = 16384       # of a call that is split

cdef enum Kind:
    POOL
    POOL_GRAD
    SCATTER_ADD

cdef struct Call:
    Kind kind
    int mode
    persia_bags_t bags          # of SCATTER_ADD places, rounds, dim; num_ids: rows of source
    const float *source         # rows, or a gradient
    float *out
    int32_t *argmax             # written by POOL, read by POOL_GRAD; NULL but for max
    const uint8_t *skip

cdef struct Part:
    uint32_t first
    uint32_t end
    float *sums             # NULL: none to set and look at
    size_t num_sums         # floats
    double squares          # their sum, if it is asked for
    bint is_finite

cdef dict MODES = {
    "sum": PERSIA_SUM, "mean": PERSIA_MEAN, "sqrt": PERSIA_SQRT, "max": PERSIA_MAX,
}


cdef const persia_pooling_t *kernels() noexcept nogil:
    return &persia_pooling[isa_level()]


# The checks are made once per call, before anything is written: a number out of range would
# write into foreign memory. Memoryviews would cost as much as a small feature's sums.


cdef bint is_matrix(object array, int flags) noexcept:
    return (
        PyArray_Check(array) and PyArray_NDIM(<ndarray> array) == 2
        and PyArray_TYPE(<ndarray> array) == NPY_FLOAT32
        and PyArray_ISNOTSWAPPED(<ndarray> array)
        and PyArray_CHKFLAGS(<ndarray> array, flags))


cdef ndarray as_input(object array, str name):
    """Return the matrix, or a copy that a kernel may take a bare pointer to."""
    if not is_matrix(array, 0):
        raise DataTypeError(f"{name}: expected a matrix of float32, got {describe(array)}")
    return PyArray_FROM_OF(array, NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_ALIGNED)


cdef ndarray as_gradient(object array):
    """Return the matrix, or a copy; rows may lie apart, as those of a part of a larger one."""
    cdef ndarray matrix
    if is_matrix(array, NPY_ARRAY_ALIGNED):
        matrix = <ndarray> array
        if PyArray_STRIDE(matrix, 1) == sizeof(float) and (
            PyArray_STRIDE(matrix, 0) >= 0 and PyArray_STRIDE(matrix, 0) % sizeof(float) == 0
        ):
            return matrix
    return as_input(array, "grad")


cdef ndarray as_output(object array, str name):
    if not is_matrix(array, NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_ALIGNED | NPY_ARRAY_WRITEABLE):
        raise DataTypeError(
            f"{name}: expected a contiguous matrix of float32 to write, got {describe(array)}")
    return <ndarray> array


cdef int check_shape(str name, ndarray array, Py_ssize_t rows, Py_ssize_t dim) except -1:
    if PyArray_DIM(array, 0) != rows or PyArray_DIM(array, 1) != dim:
        raise DataError(
            f"{name} must have shape ({rows}, {dim}), got "
            f"({PyArray_DIM(array, 0)}, {PyArray_DIM(array, 1)})")
    return 0


cdef Py_ssize_t fill_places(
    persia_bags_t *bags, ndarray places, Py_ssize_t rounds, Py_ssize_t num_rows
) except -1:
    """Return the number of distinct ids that ``places`` describes, all of whose rows exist."""
    cdef size_t size
    cdef uint32_t largest
    if rounds < 1:
        raise DataError(f"rounds must be at least 1, got {rounds}")
    bags.rounds = rounds
    bags.places = NULL
    if places is None:
        if rounds != 1:
            raise DataError(f"places must be given for {rounds} rounds, got None")
        return num_rows
    size = PyArray_SIZE(places)
    if size % rounds:
        raise DataError(f"places must hold {rounds} per distinct id, got {size}")
    if size:
        bags.places = <const uint32_t *> PyArray_DATA(places)
        with nogil:
            largest = kernels().max_u32(bags.places, size)
        if largest >= num_rows:
            raise DataError(f"places must be below {num_rows} (the rows), got {largest}")
    return size // rounds


cdef ndarray places_of(object places):
    return None if places is None else as_vector(places, c"u", 4, "places")


cdef int fill(
    Call *call, Kind kind, object mode, FeatureBatch ids, ndarray places, Py_ssize_t rounds,
    ndarray by_row, ndarray by_sample, str name
) except -1:
    """Describe a call but for what it reads and writes; ``name`` is that of ``by_sample``."""
    cdef persia_bags_t *bags = &call.bags
    cdef Py_ssize_t dim = PyArray_DIM(by_row, 1), num_distinct
    memset(call, 0, sizeof(Call))
    call.kind = kind
    if mode not in MODES:
        raise ConfigError(f"pooling: expected one of {', '.join(MODES)}, got {mode!r}")
    call.mode = MODES[mode]
    num_distinct = fill_places(bags, places, rounds, PyArray_DIM(by_row, 0))
    if dim < 1:
        raise DataError(f"dim must be at least 1, got {dim}")
    # Numbers and offsets are right by the invariants of a FeatureBatch.
    ids.number()
    if PyArray_SIZE(<ndarray> ids.numbered_distinct) > num_distinct:
        raise DataError(
            f"expected rows of {ids.num_distinct} distinct ids, got those of {num_distinct}")
    check_shape(name, by_sample, ids.batch_size, dim)
    bags.dim = dim
    bags.inverse = <const uint32_t *> PyArray_DATA(<ndarray> ids.numbered_inverse)
    bags.num_ids = ids.num_ids
    bags.num_samples = ids.batch_size
    if ids.offsets is not None:
        bags.offsets = <const uint32_t *> PyArray_DATA(<ndarray> ids.offsets)
    if ids.weights is not None:
        if call.mode != PERSIA_SUM:
            raise DataError(f"weights are for pooling sum, got them for {mode}")
        bags.weights = <const float *> PyArray_DATA(<ndarray> ids.weights)
    return 0


cdef int32_t *checked_argmax(
    const int32_t[:, ::1] argmax, const persia_bags_t *bags, Py_ssize_t num_distinct
) except? NULL:
    """An entry is -1 or a distinct id; a row of them belongs to every sample."""
    cdef Py_ssize_t i, j
    cdef int32_t value, worst = -1
    if argmax is None:
        raise DataError("argmax must be given for max, got None")
    check_shape("argmax", argmax.base, bags.num_samples, bags.dim)
    with nogil:
        for i in range(argmax.shape[0]):
            for j in range(argmax.shape[1]):
                value = argmax[i, j]
                if value < -1 or value >= num_distinct:
                    worst = value
    if worst != -1:
        raise DataError(f"argmax must be in -1..{num_distinct - 1}, got {worst}")
    return <int32_t *> &argmax[0, 0] if argmax.shape[0] else NULL


cdef void make(const Call *call) noexcept nogil:
    if call.kind == POOL:
        kernels().pool(call.mode, &call.bags, call.source, call.out, call.argmax)
    elif call.kind == POOL_GRAD:
        kernels().pool_grad(
            call.mode, &call.bags, call.source, call.argmax, call.skip, call.out)
    elif call.bags.num_ids and call.bags.dim:
        kernels().scatter_add(
            call.source, call.bags.places, call.bags.rounds, call.bags.num_ids, call.bags.dim,
            call.out)


cdef bint begin_sums(const Part *part, const Call *call) noexcept nogil:
    """Write the sums of a part of one call without zeros; False: they hold anything."""
    cdef const persia_bags_t *bags = &call.bags
    cdef size_t num_rows
    if call.kind != POOL_GRAD or call.mode == PERSIA_MAX or call.out != part.sums:
        return False
    if bags.places != NULL or bags.weights != NULL or call.skip != NULL:
        return False
    num_rows = part.num_sums // bags.dim
    # Zeros cost little beside the additions where ids come again.
    return 2 * num_rows >= bags.num_ids and (
        kernels().grad_fresh(call.mode, bags, call.source, call.out) == num_rows)


# The gradients of a group add to the same sums: they are one part, which first sets its sums to
# zero, and at the end, while they are still in the cache, looks for what is not finite. So the
# order of additions, and with it the result, does not depend on the threads. Where a part is
# one feature in which most ids come once, its first gradients are written instead of added to
# zeros, with the same bits.
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
    if calls.adds_squares:
        part.squares = kernels().squares(part.sums, part.num_sums)


@final
cdef class PoolCalls:
    """Calls that wait to be made; their arrays must not be used meanwhile.

    Each method checks its arguments before anything is written.

    Raises:
        ConfigError: If ``mode`` is unknown.
        DataTypeError: If an array has another dtype or layout.
        DataError: If shapes or numbers do not fit each other.
    """

    cdef Call *calls
    cdef Part *parts
    cdef float *scratch         # two rows of each call, as long as the longest
    cdef size_t num_calls
    cdef size_t num_parts
    cdef size_t room            # of calls, and of parts
    cdef size_t most_dim
    cdef bint adds_squares
    cdef list held              # the arrays that the pointers point into

    def __cinit__(self):
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
        part.first = part.end = <uint32_t> self.num_calls
        part.sums = sums
        part.num_sums = num_sums
        part.squares = 0.0
        part.is_finite = True
        self.num_parts += 1
        return 0

    cdef int append(self, const Call *call) except -1:
        """Add a call to the last part."""
        if self.num_parts == 0:
            raise DataError("begin_sums must come before the gradients that add to them")
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

    def pool(self, mode, rows, places, Py_ssize_t rounds, FeatureBatch ids not None, out):
        """Add a call: ``rows`` to one vector a sample in ``out`` f32 [B, dim].

        Outputs of calls lie apart from each other.

        Returns:
            For ``max`` the distinct id that gives each element, i32 [B, dim], -1 in empty
            samples, filled by ``run``; otherwise None.
        """
        cdef Call call
        cdef ndarray source = as_input(rows, "rows"), target = as_output(out, "out")
        cdef ndarray numbers = places_of(places), argmax = None
        fill(&call, POOL, mode, ids, numbers, rounds, source, target, "out")
        call.source = <const float *> PyArray_DATA(source)
        call.out = <float *> PyArray_DATA(target)
        if call.mode == PERSIA_MAX:
            # Distinct ids, not rows: with a hash stack one id has several rows.
            argmax = np.empty((ids.batch_size, call.bags.dim), dtype=np.int32)
            call.argmax = <int32_t *> PyArray_DATA(argmax)
        self.held.append((source, numbers, ids, target, argmax))
        self.append_pieces(&call)
        return argmax

    def begin_sums(self, sums):
        """Begin a part: the gradients that follow are added in their order, by one thread.

        Sums are set to zero before, and looked at for what is not finite afterwards; None:
        neither is done. Those of parts lie apart, and so must all rows that they add to.
        """
        if sums is None:
            self.begin_part(NULL, 0)
            return
        cdef ndarray target = as_output(sums, "sums")
        self.held.append(target)
        self.begin_part(<float *> PyArray_DATA(target), PyArray_SIZE(target))

    def pool_grad(
        self, mode, grad, places, Py_ssize_t rounds, FeatureBatch ids not None, argmax, skip,
        out
    ):
        """Add a call to the part that was begun last: the gradient of ``pool``.

        Rows of ``grad`` f32 [B, dim] may lie apart. Samples are left out where ``skip`` u8 [B]
        is not 0. What the others give the rows is added to ``out`` f32 [U, dim]. ``argmax`` is
        what ``pool`` returned.
        """
        cdef Call call
        cdef ndarray source = as_gradient(grad), target = as_output(out, "out")
        cdef ndarray numbers = places_of(places), flags = None
        fill(&call, POOL_GRAD, mode, ids, numbers, rounds, target, source, "grad")
        call.bags.stride = PyArray_STRIDE(source, 0) // sizeof(float)
        call.source = <const float *> PyArray_DATA(source)
        call.out = <float *> PyArray_DATA(target)
        if call.mode == PERSIA_MAX:
            call.argmax = checked_argmax(argmax, &call.bags, ids.num_distinct)
        if skip is not None:
            flags = as_vector(skip, c"u", 1, "skip")
            if PyArray_SIZE(flags) != ids.batch_size:
                raise DataError(
                    f"skip must have {ids.batch_size} entries, got {PyArray_SIZE(flags)}")
            call.skip = <const uint8_t *> PyArray_DATA(flags)
        self.append(&call)
        self.held.append((source, numbers, ids, argmax, flags, target))

    def scatter_add(self, grad, places, Py_ssize_t rounds, out):
        """Add a call to the part that was begun last: the gradient of ``gather``, [D, dim]."""
        cdef Call call
        cdef ndarray source = as_input(grad, "grad"), target = as_output(out, "out")
        cdef ndarray numbers = places_of(places)
        memset(&call, 0, sizeof(Call))
        call.kind = SCATTER_ADD
        call.bags.num_ids = fill_places(&call.bags, numbers, rounds, PyArray_DIM(target, 0))
        call.bags.dim = PyArray_DIM(target, 1)
        check_shape("grad", source, call.bags.num_ids, call.bags.dim)
        call.source = <const float *> PyArray_DATA(source)
        call.out = <float *> PyArray_DATA(target)
        self.append(&call)
        self.held.append((source, numbers, target))

    def run_with_norms(self, ThreadPool threads not None):
        """Make all calls; return the norm of the sums of each part, f32 [parts]."""
        cdef size_t i
        self.adds_squares = True
        self.run(threads)
        norms = np.empty(self.num_parts, np.float32)
        cdef float[::1] found = norms
        for i in range(self.num_parts):
            found[i] = <float> sqrt(self.parts[i].squares)
        return norms

    def run(self, ThreadPool threads not None):
        """Make all calls; return whether all sums are finite."""
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


def gather(rows, places, Py_ssize_t rounds, out):
    """Write the vector of each distinct id: f32 [U, dim] to ``out`` f32 [D, dim].

    Errors are those of ``PoolCalls``; nothing is written then.
    """
    cdef persia_bags_t bags
    cdef ndarray source = as_input(rows, "rows"), target = as_output(out, "out")
    cdef ndarray numbers = places_of(places)
    cdef const float *rows_at = <const float *> PyArray_DATA(source)
    cdef float *out_at = <float *> PyArray_DATA(target)
    bags.num_ids = fill_places(&bags, numbers, rounds, PyArray_DIM(source, 0))
    bags.dim = PyArray_DIM(source, 1)
    check_shape("out", target, bags.num_ids, bags.dim)
    if bags.num_ids and bags.dim:
        with nogil:
            kernels().gather(rows_at, bags.places, rounds, bags.num_ids, bags.dim, out_at)


def index_add(grad, const int64_t[::1] index not None, out):
    """Add row i of ``grad`` f32 [M, dim] to row ``index[i]`` of ``out`` f32 [K, dim].

    Errors are those of ``PoolCalls``; nothing is written then.
    """
    cdef ndarray source = as_input(grad, "grad"), target = as_output(out, "out")
    cdef const float *grad_at = <const float *> PyArray_DATA(source)
    cdef float *out_at = <float *> PyArray_DATA(target)
    cdef size_t n = index.shape[0], dim = PyArray_DIM(target, 1)
    cdef uint64_t largest
    check_shape("grad", source, n, dim)
    if n == 0 or dim == 0:
        return
    # A negative index is a large number as u64, so one comparison finds both kinds.
    with nogil:
        largest = kernels().max_u64(&index[0], n)
    if largest >= <uint64_t> PyArray_DIM(target, 0):
        raise DataError(
            f"index must be in 0..{PyArray_DIM(target, 0) - 1}, got {<int64_t> largest}")
    with nogil:
        kernels().index_add(grad_at, &index[0], n, dim, out_at)


def nonfinite(const float[:, ::1] matrix not None):
    """u8 [n]: 1 where a row of f32 [n, dim] holds a NaN or an infinity."""
    cdef Py_ssize_t n = matrix.shape[0], dim = matrix.shape[1], i
    flags = np.zeros(n, dtype=np.uint8)
    cdef uint8_t[::1] view = flags
    cdef const persia_pooling_t *table = kernels()
    if n == 0 or dim == 0:
        return flags
    with nogil:
        # Nearly always none: one scan without a decision per row.
        if table.any_nonfinite(&matrix[0, 0], n * dim):
            for i in range(n):
                view[i] = table.any_nonfinite(&matrix[i, 0], dim)
    return flags
