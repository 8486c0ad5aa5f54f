"""NumPy arrays at the door of a kernel: checked on the way in, owned on the way out.

A kernel reads a bare pointer, so the array behind it must be one-dimensional, contiguous,
aligned and in the byte order of the machine. The dtype has to be right, because reading an
i64 or an f64 as ids would train other rows; the layout need not be, and what
is strided, reversed or unaligned is copied.
"""

from numpy cimport (
    NPY_ARRAY_ALIGNED, NPY_ARRAY_C_CONTIGUOUS, NPY_ARRAY_NOTSWAPPED, NPY_ARRAY_WRITEABLE,
    NPY_FLOAT32, NPY_INT64, NPY_UINT8, NPY_UINT32, NPY_UINT64, PyArray_CHKFLAGS, PyArray_Check,
    PyArray_CheckExact, PyArray_CLEARFLAGS, PyArray_DATA, PyArray_DESCR, PyArray_DIM,
    PyArray_FROM_OF, PyArray_ISNOTSWAPPED, PyArray_ITEMSIZE, PyArray_NDIM, PyArray_SIZE,
    PyArray_SimpleNew, PyArray_SimpleNewFromData, PyArray_TYPE, dtype, import_array, ndarray,
    npy_intp, set_array_base,
)

from persia._core.base.types cimport MAX_DIM

import numpy as np
from numpy.ma import MaskedArray

from persia.errors import DataError, DataTypeError

import_array()

cdef enum:
    LINE = 64               # bytes of a cache line
    MOST_DIMENSIONS = 4

_NAMES = {"f": "float", "i": "int", "u": "uint"}

_TEXTS = "; ids are numbers: persia.readers.hash_text(texts) makes them of texts"


cdef str describe(object value):
    """Say in words what came instead of the array that was expected."""
    if not PyArray_Check(value):
        return f"an object of type {type(value).__name__}"
    if isinstance(value, MaskedArray):
        return "a masked array; .compressed() has the values without the masked ones"
    plural = "" if value.ndim == 1 else "s"
    return f"{value.dtype} of {value.ndim} dimension{plural}"


cdef str to_ids(object value):
    """Say what to type where ids came as something else: nothing of floats, which are cut."""
    if isinstance(value, MaskedArray):
        return ""
    if is_of(value, "torch"):
        is_cut = getattr(getattr(value, "dtype", None), "is_floating_point", True)
        return "" if is_cut else "; .cpu().numpy().astype(np.uint64) makes one of it"
    try:
        found = np.asarray(value)
    except (RuntimeError, TypeError, ValueError):  # lists of different lengths, for instance
        return ""
    if found.dtype.kind in "OSU" and found.size and isinstance(found.flat[0], (str, bytes)):
        return _TEXTS
    if found.ndim == 1 and found.dtype.kind in "iub":
        return "; np.asarray(ids).astype(np.uint64) makes one of it"
    return ""


cdef str to_list(object value):
    """Say what to type for a list with one array for each sample."""
    if is_of(value, "torch"):
        return "; IDTypeFeature.from_jagged takes tensors"
    if is_of(value, "pyarrow"):
        return "; IDTypeFeature.from_arrow takes list arrays"
    if is_of(value, "pandas"):
        return (
            "; .tolist() makes one of a column of arrays, and a column of single ids is for "
            "IDTypeFeatureWithSingleID"
        )
    return ""


cdef bint is_of(object value, str package):
    """Whether its class is of a package that need not be there."""
    return type(value).__module__.partition(".")[0] == package


cdef bint is_vector(object value, char kind, int itemsize) noexcept:
    """Whether ``value`` is an array of one dimension and native ``kind``; any layout.

    A masked array is none: the kernels would read what the mask hides.
    """
    if not PyArray_CheckExact(value):
        if not PyArray_Check(value) or isinstance(value, MaskedArray):
            return False
    cdef ndarray array = <ndarray>value
    # By kind and size, not by type number: int64 has two numbers (long and long long).
    return (
        PyArray_NDIM(array) == 1
        and (<dtype>PyArray_DESCR(array)).kind == kind
        and PyArray_ITEMSIZE(array) == itemsize
        and PyArray_ISNOTSWAPPED(array)
    )


# NumPy's C interface rather than typed memoryviews: a memoryview costs some 0.4 us to take,
# a batch of single ids arrives as thousands of arrays, and the error of a memoryview cannot
# name the feature.
cdef ndarray as_vector(object value, char kind, int itemsize, str what):
    """Return ``value``, or a copy that is contiguous and aligned.

    Raises:
        DataTypeError: If it is not a 1-D array of that kind and size; names ``what``.
        DataError: If it has more items than a u32 can number.
    """
    if not is_vector(value, kind, itemsize):
        expected = f"{_NAMES[chr(kind)]}{8 * itemsize}"
        hint = to_ids(value) if expected == "uint64" else ""
        raise DataTypeError(
            f"{what}: expected a 1-D numpy array of {expected}, got {describe(value)}{hint}"
        )
    cdef ndarray array = <ndarray>value
    # Before the copy: a broadcast array may be far larger than its memory.
    if PyArray_SIZE(array) > <npy_intp>MAX_IDS:
        raise DataError(f"{what}: expected at most {MAX_IDS} items, got {array.size}")
    if PyArray_CHKFLAGS(array, NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_ALIGNED):
        return array
    return PyArray_FROM_OF(
        array, NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_ALIGNED | NPY_ARRAY_NOTSWAPPED
    )


cdef ndarray as_ids(object value, str what):
    return as_vector(value, c"u", 8, what)


cdef int check_length(str name, Py_ssize_t expected, Py_ssize_t got) except -1:
    if expected != got:
        raise DataError(f"{name} must have one element a sign, {expected}, got {got}")
    return 0


cdef int check_rows(
    str name, Py_ssize_t num_signs, Py_ssize_t num_rows, Py_ssize_t dim
) except -1:
    if num_rows != num_signs:
        raise DataError(f"{name} must have one row a sign, {num_signs}, got {num_rows}")
    if not 1 <= dim <= MAX_DIM:
        raise DataError(f"{name} must have 1..{MAX_DIM} columns (the dim), got {dim}")
    return 0


cdef ndarray new_vector(Py_ssize_t size, int number):
    cdef npy_intp length = size
    return PyArray_SimpleNew(1, &length, number)


cdef ndarray new_u64(Py_ssize_t size):
    return new_vector(size, NPY_UINT64)


cdef ndarray new_u32(Py_ssize_t size):
    return new_vector(size, NPY_UINT32)


cdef ndarray new_i64(Py_ssize_t size):
    return new_vector(size, NPY_INT64)


cdef ndarray frozen(ndarray array):
    """Return ``array`` itself, read-only from now on."""
    PyArray_CLEARFLAGS(array, NPY_ARRAY_WRITEABLE)
    return array


def is_matrix(object value, Py_ssize_t num_rows, Py_ssize_t dim):
    """Whether it is a NumPy array f32 [num_rows, dim] that kernels can read as it is."""
    if not PyArray_CheckExact(value):
        return False
    cdef ndarray array = <ndarray>value
    return (
        PyArray_NDIM(array) == 2
        and PyArray_DIM(array, 0) == num_rows
        and PyArray_DIM(array, 1) == dim
        and PyArray_TYPE(array) == NPY_FLOAT32
        and PyArray_ISNOTSWAPPED(array)
        and PyArray_CHKFLAGS(array, NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_ALIGNED)
    )


def empty_floats(*shape):
    """Return an uninitialised f32 array of at most 4 dimensions that begins with a line."""
    cdef npy_intp[MOST_DIMENSIONS] lengths
    cdef npy_intp num_bytes = sizeof(float)
    cdef int count = 0
    cdef ndarray block, array
    if len(shape) > MOST_DIMENSIONS:
        raise DataError(f"expected at most {MOST_DIMENSIONS} dimensions, got {len(shape)}")
    for length in shape:
        lengths[count] = length
        num_bytes *= lengths[count]
        count += 1
    num_bytes += LINE
    block = PyArray_SimpleNew(1, &num_bytes, NPY_UINT8)
    array = PyArray_SimpleNewFromData(
        count, lengths, NPY_FLOAT32,
        <void *>((<size_t>PyArray_DATA(block) + LINE - 1) & ~<size_t>(LINE - 1)))
    set_array_base(array, block)
    return array


def joined(arrays):
    """Return matrices f32 [n, dim] as one, to read, if each lies right behind the one before.

    Nothing is copied. None if they do not, or none of them has a row.
    """
    cdef npy_intp[2] shape
    cdef char *begin = NULL
    cdef char *end = NULL
    cdef ndarray one
    shape[0] = 0
    for item in arrays:
        if not PyArray_CheckExact(item) or PyArray_NDIM(<ndarray>item) != 2:
            return None
        one = <ndarray>item
        if not is_matrix(one, PyArray_DIM(one, 0), PyArray_DIM(one, 1)):
            return None
        if PyArray_DIM(one, 0) == 0:    # it may lie anywhere
            continue
        if begin == NULL:
            begin = end = <char *>PyArray_DATA(one)
            shape[1] = PyArray_DIM(one, 1)
        if <char *>PyArray_DATA(one) != end or PyArray_DIM(one, 1) != shape[1]:
            return None
        end += PyArray_SIZE(one) * sizeof(float)
        shape[0] += PyArray_DIM(one, 0)
    if begin == NULL:
        return None
    one = PyArray_SimpleNewFromData(2, shape, NPY_FLOAT32, begin)
    set_array_base(one, tuple(arrays))
    return frozen(one)
