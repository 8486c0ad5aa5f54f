"""Batches of many features with one id a sample, made in one call.

    names        a            b      c
    arrays       [7, 9, 7]    [5]    [[1], [2], [3]]
    batch size   3
    samples      7  9  7      5 5 5  1  2  3

A request to a served model brings dozens of such arrays, each of a few ids: checked and wrapped
one by one in Python they cost more than the lookup of their rows.
"""

from libc.string cimport memcpy, memset
from numpy cimport (
    NPY_ARRAY_C_CONTIGUOUS, PyArray_CHKFLAGS, PyArray_CheckExact, PyArray_DATA, PyArray_DESCR,
    PyArray_DIM, PyArray_ISNOTSWAPPED, PyArray_ITEMSIZE, PyArray_NDIM, dtype, import_array,
    ndarray,
)

from persia._core.base.arrays cimport MAX_IDS, new_u32, new_u64
from persia._core.base.types cimport uint32_t, uint64_t
from persia._core.ids.feature_batch cimport FeatureBatch

from persia.errors import DataError

import_array()


cdef bint is_single(object value, Py_ssize_t batch_size) noexcept:
    """Whether ``value`` has an i64 or u64 for each sample, or one for all of them.

    Any alignment will do; the ids are copied.
    """
    if not PyArray_CheckExact(value):
        return False
    cdef ndarray array = <ndarray>value
    cdef int rank = PyArray_NDIM(array)
    cdef char kind = (<dtype>PyArray_DESCR(array)).kind
    if rank < 1 or rank > 2 or (rank == 2 and PyArray_DIM(array, 1) != 1):
        return False
    return (
        (kind == c"i" or kind == c"u")
        and PyArray_ITEMSIZE(array) == sizeof(uint64_t)
        and PyArray_ISNOTSWAPPED(array)
        and PyArray_CHKFLAGS(array, NPY_ARRAY_C_CONTIGUOUS)
        and (PyArray_DIM(array, 0) == batch_size or PyArray_DIM(array, 0) == 1)
    )


def single_ids(tuple names, dict arrays, Py_ssize_t batch_size):
    """Return by name a batch of ``batch_size`` samples, or None for an array of another form.

    An array of one id [1] or [1, 1] is that id for each of the samples; all others have the
    shape [B] or [B, 1]. Negative ids stand for their bits. The arrays are not kept.
    """
    cdef list batches = []
    cdef str name
    cdef object found
    cdef FeatureBatch batch
    cdef ndarray ids
    cdef ndarray zeros = None   # read-only from its first use on, so that batches may share it
    cdef size_t size = batch_size
    if batch_size < 1 or size > MAX_IDS:
        raise DataError(f"batch_size: expected 1 to {MAX_IDS} samples, got {batch_size}")
    for name in names:
        found = arrays.get(name)
        if not is_single(found, batch_size):
            batches.append(None)
            continue
        batch = FeatureBatch.__new__(FeatureBatch)
        batch.name = name
        batch.batch_size = batch.num_ids = batch_size
        size = PyArray_DIM(<ndarray>found, 0)
        ids = new_u64(size)
        memcpy(PyArray_DATA(ids), PyArray_DATA(<ndarray>found), size * sizeof(uint64_t))
        if <Py_ssize_t>size == batch_size:
            batch.pending = ids
        else:
            if zeros is None:
                zeros = new_u32(batch_size)
                memset(PyArray_DATA(zeros), 0, batch_size * sizeof(uint32_t))
            batch.take_numbers(ids, zeros)
        batches.append(batch)
    return batches
