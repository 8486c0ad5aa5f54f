"""Rows to pooled outputs, and output gradients to row gradients, one feature at a time.

    rows f32 [U, dim]         the rows of a table that the batch uses
    slots u32 [D * R]         for each distinct id of the feature its R rows (R rounds of the
                              hash stack); None: R = 1 and distinct id d is row d
    inverse u32 [N]           for each id of the batch the number of its distinct id
    offsets u32 [B + 1]       where each sample's ids begin; None: one id a sample
    weights f32 [N]           a factor for each id; None: 1

The vector of a distinct id is the sum of its rounds, in every mode. Then a sample is

    sum                       the sum over its ids, each times its weight, duplicates counted
                              again; the other modes take no weights
    mean                      sum / n
    sqrt                      sum / sqrt(n)
    max                       elementwise; of equal values the first id's

and zeros without ids. Sums run in f32 in the order (sample, position, round), which is part of
the result.
"""

import numpy as np

from persia.errors import ConfigError, DataError

from libc.stdlib cimport free, malloc
from libc.string cimport memset

from persia._core.base.cpu cimport isa_level

MODES = {"sum": PERSIA_SUM, "mean": PERSIA_MEAN, "sqrt": PERSIA_SQRT, "max": PERSIA_MAX}


cdef int mode_number(object mode) except -1:
    number = MODES.get(mode)
    if number is None:
        raise ConfigError(f"pooling: expected one of {', '.join(MODES)}, got {mode!r}")
    return number


cdef const persia_pooling_t *kernels() noexcept nogil:
    return &persia_pooling[isa_level()]


cdef const uint32_t *first_u32(const uint32_t[::1] values) noexcept:
    """Address of the first element; NULL for None and for an empty array."""
    if values is None or values.shape[0] == 0:
        return NULL
    return &values[0]


cdef const float *first_f32(const float[:, ::1] matrix) noexcept:
    return &matrix[0, 0] if matrix.shape[0] and matrix.shape[1] else NULL


cdef float *first_out(float[:, ::1] matrix) noexcept:
    return &matrix[0, 0] if matrix.shape[0] and matrix.shape[1] else NULL


# The checks are made once per call, before anything is written: the numbers come over the wire,
# and one out of range would write into foreign memory.
cdef Py_ssize_t check_slots(
    const uint32_t[::1] slots, Py_ssize_t rounds, Py_ssize_t num_rows
) except -1:
    """The number of distinct ids that ``slots`` describes, all of whose rows exist."""
    cdef uint32_t largest
    if rounds < 1:
        raise DataError(f"rounds must be at least 1, got {rounds}")
    if slots is None:
        if rounds != 1:
            raise DataError(f"slots must be given for {rounds} rounds, got None")
        return num_rows
    if slots.shape[0] % rounds:
        raise DataError(f"slots must hold {rounds} per distinct id, got {slots.shape[0]}")
    if slots.shape[0]:
        with nogil:
            largest = kernels().max_u32(&slots[0], slots.shape[0])
        if largest >= num_rows:
            raise DataError(f"slots must be below {num_rows} (the rows), got {largest}")
    return slots.shape[0] // rounds


cdef int fill_bags(
    persia_bags_t *bags, const uint32_t[::1] slots, Py_ssize_t rounds,
    const uint32_t[::1] inverse, const uint32_t[::1] offsets, Py_ssize_t num_rows,
    Py_ssize_t dim
) except -1:
    """Check the numbers of one feature and describe it in ``bags``."""
    cdef Py_ssize_t num_distinct = check_slots(slots, rounds, num_rows)
    cdef Py_ssize_t num_ids = inverse.shape[0]
    cdef uint32_t largest = 0
    cdef size_t descents
    if dim < 1:
        raise DataError(f"dim must be at least 1, got {dim}")
    bags.slots = first_u32(slots)
    bags.rounds = rounds
    bags.inverse = first_u32(inverse)
    bags.num_ids = num_ids
    bags.offsets = NULL
    bags.num_samples = num_ids
    bags.weights = NULL
    bags.dim = dim
    bags.scratch = NULL
    if num_ids:
        with nogil:
            largest = kernels().max_u32(bags.inverse, num_ids)
        if largest >= num_distinct:
            raise DataError(
                f"inverse must be below {num_distinct} (the distinct ids), got {largest}"
            )
    if offsets is None:
        return 0
    if offsets.shape[0] < 1:
        raise DataError("offsets must hold one more than the samples, got an empty array")
    bags.offsets = &offsets[0]
    bags.num_samples = offsets.shape[0] - 1
    with nogil:
        descents = kernels().descents(bags.offsets, bags.num_samples + 1)
    if offsets[0] != 0 or offsets[bags.num_samples] != num_ids or descents:
        raise DataError(
            f"offsets must rise from 0 to {num_ids} (the ids), got {offsets[0]} to "
            f"{offsets[bags.num_samples]} with {descents} descents"
        )
    return 0


cdef int check_shape(
    object name, Py_ssize_t rows, Py_ssize_t dim, Py_ssize_t want_rows, Py_ssize_t want_dim
) except -1:
    if rows != want_rows or dim != want_dim:
        raise DataError(
            f"{name} must have shape ({want_rows}, {want_dim}), got ({rows}, {dim})"
        )
    return 0


cdef int check_skip(const uint8_t[::1] skip, Py_ssize_t num_samples) except -1:
    if skip is not None and skip.shape[0] != num_samples:
        raise DataError(f"skip must have {num_samples} entries, got {skip.shape[0]}")
    return 0


cdef int fill_weights(
    persia_bags_t *bags, const float[::1] weights, int mode, object mode_name
) except -1:
    """Check the weights of ``bags`` and put them in."""
    if weights is None:
        return 0
    if mode != PERSIA_SUM:
        raise DataError(f"weights are for pooling sum, got them for {mode_name}")
    if <size_t>weights.shape[0] != bags.num_ids:
        raise DataError(f"weights must have {bags.num_ids} entries, got {weights.shape[0]}")
    if bags.num_ids:
        bags.weights = &weights[0]
    return 0


cdef int check_argmax(
    const int32_t[:, ::1] argmax, const persia_bags_t *bags, Py_ssize_t num_distinct
) except -1:
    """An entry is -1 or a distinct id; a row of them belongs to every sample."""
    cdef Py_ssize_t i, j
    cdef int32_t value, worst = -1
    if argmax is None:
        raise DataError("argmax must be given for max, got None")
    check_shape("argmax", argmax.shape[0], argmax.shape[1], bags.num_samples, bags.dim)
    with nogil:
        for i in range(argmax.shape[0]):
            for j in range(argmax.shape[1]):
                value = argmax[i, j]
                if value < -1 or value >= num_distinct:
                    worst = value
    if worst != -1:
        raise DataError(f"argmax must be in -1..{num_distinct - 1}, got {worst}")
    return 0


cdef float *new_scratch(size_t dim) except NULL:
    cdef float *scratch = <float *>malloc(dim * sizeof(float))
    if scratch == NULL:
        raise MemoryError(f"no memory for {dim} floats")
    return scratch


cdef object fill_pool(
    Call *call, object mode, const float[:, ::1] rows, const uint32_t[::1] slots,
    Py_ssize_t rounds, const uint32_t[::1] inverse, const uint32_t[::1] offsets,
    float[:, ::1] out, const float[::1] weights
):
    """Check a call of ``pool`` and describe it in ``call``; return where its maxima will be."""
    cdef int32_t[:, ::1] winners
    call.kind = POOL
    call.mode = mode_number(mode)
    fill_bags(&call.bags, slots, rounds, inverse, offsets, rows.shape[0], rows.shape[1])
    fill_weights(&call.bags, weights, call.mode, mode)
    check_shape("out", out.shape[0], out.shape[1], call.bags.num_samples, call.bags.dim)
    call.source = first_f32(rows)
    call.out = first_out(out)
    call.argmax = NULL
    call.skip = NULL
    if call.mode != PERSIA_MAX:
        return None
    # Distinct ids, not rows: with a hash stack one id has several rows.
    argmax = np.empty((out.shape[0], out.shape[1]), dtype=np.int32)
    winners = argmax
    call.argmax = &winners[0, 0] if winners.shape[0] else NULL
    return argmax


cdef int fill_pool_grad(
    Call *call, object mode, const float[:, ::1] grad, const uint32_t[::1] slots,
    Py_ssize_t rounds, const uint32_t[::1] inverse, const uint32_t[::1] offsets,
    const int32_t[:, ::1] argmax, const uint8_t[::1] skip, float[:, ::1] out,
    const float[::1] weights
) except -1:
    """Check a call of ``pool_grad`` and describe it in ``call``."""
    call.kind = POOL_GRAD
    call.mode = mode_number(mode)
    fill_bags(&call.bags, slots, rounds, inverse, offsets, out.shape[0], out.shape[1])
    fill_weights(&call.bags, weights, call.mode, mode)
    check_shape("grad", grad.shape[0], grad.shape[1], call.bags.num_samples, call.bags.dim)
    check_skip(skip, call.bags.num_samples)
    call.source = first_f32(grad)
    call.out = first_out(out)
    call.argmax = NULL
    call.skip = NULL
    if call.mode == PERSIA_MAX:
        check_argmax(
            argmax, &call.bags, out.shape[0] if slots is None else slots.shape[0] // rounds
        )
        if argmax.shape[0]:
            call.argmax = <int32_t *>&argmax[0, 0]
    if skip is not None and skip.shape[0]:
        call.skip = &skip[0]
    return 0


cdef int fill_scatter_add(
    Call *call, const float[:, ::1] grad, const uint32_t[::1] slots, Py_ssize_t rounds,
    float[:, ::1] out
) except -1:
    """Check a call of ``scatter_add`` and describe it in ``call``."""
    cdef Py_ssize_t num_distinct = check_slots(slots, rounds, out.shape[0])
    check_shape("grad", grad.shape[0], grad.shape[1], num_distinct, out.shape[1])
    memset(call, 0, sizeof(Call))
    call.kind = SCATTER_ADD
    call.bags.slots = first_u32(slots)
    call.bags.rounds = rounds
    call.bags.num_ids = num_distinct
    call.bags.dim = out.shape[1]
    call.source = first_f32(grad)
    call.out = first_out(out)
    return 0


cdef void make(const Call *call) noexcept nogil:
    """Make a call; see the .pxd."""
    if call.kind == POOL:
        kernels().pool(call.mode, &call.bags, call.source, call.out, call.argmax)
    elif call.kind == POOL_GRAD:
        kernels().pool_grad(
            call.mode, &call.bags, call.source, call.argmax, call.skip, call.out)
    elif call.bags.num_ids and call.bags.dim:
        kernels().scatter_add(
            call.source, call.bags.slots, call.bags.rounds, call.bags.num_ids, call.bags.dim,
            call.out)


def pool(
    mode, const float[:, ::1] rows not None, const uint32_t[::1] slots, Py_ssize_t rounds,
    const uint32_t[::1] inverse not None, const uint32_t[::1] offsets,
    float[:, ::1] out not None, const float[::1] weights=None
):
    """Pool a feature's rows into one vector per sample.

    Args:
        mode: ``sum``, ``mean``, ``sqrt`` or ``max``.
        rows: f32 [U, dim].
        slots: u32 [D * rounds], or None for ``rounds`` 1 and D = U.
        rounds: Rows per distinct id.
        inverse: u32 [N], below D.
        offsets: u32 [B + 1] from 0 to N, or None for B = N.
        out: f32 [B, dim], overwritten.
        weights: f32 [N], or None for 1 each; only for ``sum``.

    Returns:
        For ``max`` the distinct id that gave each element, i32 [B, dim], -1 in empty samples;
        otherwise None.

    Raises:
        ConfigError: If ``mode`` is unknown.
        DataError: If shapes or numbers do not fit each other; nothing is written.
    """
    cdef Call call
    argmax = fill_pool(&call, mode, rows, slots, rounds, inverse, offsets, out, weights)
    call.bags.scratch = new_scratch(call.bags.dim)
    with nogil:
        make(&call)
        free(call.bags.scratch)
    return argmax


def pool_grad(
    mode, const float[:, ::1] grad not None, const uint32_t[::1] slots, Py_ssize_t rounds,
    const uint32_t[::1] inverse not None, const uint32_t[::1] offsets,
    const int32_t[:, ::1] argmax, const uint8_t[::1] skip, float[:, ::1] out not None,
    const float[::1] weights=None
):
    """Add the gradient of ``pool`` to the gradients of the rows.

    Args:
        mode: As given to ``pool``.
        grad: f32 [B, dim], gradient of the pooled output.
        slots: As given to ``pool``; D = U where it is None.
        rounds: As given to ``pool``.
        inverse: As given to ``pool``.
        offsets: As given to ``pool``.
        argmax: What ``pool`` returned.
        skip: u8 [B], samples that are left out where it is not 0; None for none.
        out: f32 [U, dim], added to.
        weights: As given to ``pool``.

    Raises:
        ConfigError: If ``mode`` is unknown.
        DataError: If shapes or numbers do not fit each other; nothing is written.
    """
    cdef Call call
    fill_pool_grad(
        &call, mode, grad, slots, rounds, inverse, offsets, argmax, skip, out, weights)
    call.bags.scratch = new_scratch(call.bags.dim)
    with nogil:
        make(&call)
        free(call.bags.scratch)


def begin_grad(
    mode, const float[:, ::1] grad not None, const uint32_t[::1] inverse not None,
    const uint32_t[::1] offsets, float[:, ::1] out not None
):
    """Write what ``pool_grad`` adds, for ids in the order in which they were numbered.

    Without a hash stack, weights or samples left out; and not for ``max``.

    Args:
        mode: ``sum``, ``mean`` or ``sqrt``.
        grad: f32 [B, dim], gradient of the pooled output.
        inverse: u32 [N], below D.
        offsets: u32 [B + 1] from 0 to N, or None for B = N.
        out: f32 [D, dim], overwritten: to the bit what zeros are after ``pool_grad``.

    Returns:
        Whether each of the D ids is there, and the first of each comes in the order of their
        numbers; if not, ``out`` holds anything.

    Raises:
        ConfigError: If ``mode`` is unknown, or max.
        DataError: If shapes or numbers do not fit each other; nothing is written.
    """
    cdef int number = mode_number(mode)
    cdef persia_bags_t bags
    cdef size_t begun, i
    if number == PERSIA_MAX:
        raise ConfigError("pooling: expected one of sum, mean, sqrt, got 'max'")
    fill_bags(&bags, None, 1, inverse, offsets, out.shape[0], out.shape[1])
    check_shape("grad", grad.shape[0], grad.shape[1], bags.num_samples, bags.dim)
    cdef const float *grad_at = first_f32(grad)
    cdef float *out_at = first_out(out)
    # The kernel sums in the first row; the second is the zeros that a first gradient is added
    # to.
    bags.scratch = new_scratch(2 * bags.dim)
    with nogil:
        for i in range(bags.dim, 2 * bags.dim):
            bags.scratch[i] = 0.0
        begun = kernels().grad_fresh(number, &bags, grad_at, out_at)
        free(bags.scratch)
    return begun == <size_t>out.shape[0]


def gather(
    const float[:, ::1] rows not None, const uint32_t[::1] slots, Py_ssize_t rounds,
    float[:, ::1] out not None
):
    """Write the vector of each distinct id: f32 [U, dim] to ``out`` f32 [D, dim].

    Raises:
        DataError: If shapes or numbers do not fit each other; nothing is written.
    """
    cdef Py_ssize_t num_distinct = check_slots(slots, rounds, rows.shape[0])
    check_shape("out", out.shape[0], out.shape[1], num_distinct, rows.shape[1])
    if num_distinct == 0 or rows.shape[1] == 0:
        return
    cdef const uint32_t *slots_at = first_u32(slots)
    with nogil:
        kernels().gather(
            &rows[0, 0], slots_at, rounds, num_distinct, rows.shape[1], &out[0, 0])


def scatter_add(
    const float[:, ::1] grad not None, const uint32_t[::1] slots, Py_ssize_t rounds,
    float[:, ::1] out not None
):
    """Add the gradient of ``gather``, f32 [D, dim], to the rows' gradients f32 [U, dim].

    Raises:
        DataError: If shapes or numbers do not fit each other; nothing is written.
    """
    cdef Call call
    fill_scatter_add(&call, grad, slots, rounds, out)
    with nogil:
        make(&call)


def index_add(
    const float[:, ::1] grad not None, const int64_t[::1] index not None,
    float[:, ::1] out not None
):
    """Add row i of ``grad`` f32 [M, dim] to row ``index[i]`` of ``out`` f32 [K, dim].

    Raises:
        DataError: If shapes or numbers do not fit each other; nothing is written.
    """
    cdef Py_ssize_t n = index.shape[0]
    cdef uint64_t largest
    check_shape("grad", grad.shape[0], grad.shape[1], n, out.shape[1])
    # A negative index is a large number as u64, so one comparison finds both kinds.
    if n == 0 or out.shape[1] == 0:
        return
    with nogil:
        largest = kernels().max_u64(&index[0], n)
    if largest >= <uint64_t>out.shape[0]:
        raise DataError(f"index must be in 0..{out.shape[0] - 1}, got {<int64_t>largest}")
    with nogil:
        kernels().index_add(&grad[0, 0], &index[0], n, out.shape[1], &out[0, 0])


def nonfinite(const float[:, ::1] matrix not None):
    """u8 [n]: 1 where a row of f32 [n, dim] holds a NaN or an infinity."""
    cdef Py_ssize_t n = matrix.shape[0]
    cdef Py_ssize_t dim = matrix.shape[1]
    cdef Py_ssize_t i
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
