from numpy cimport ndarray

from persia._core.base.types cimport uint64_t

cdef extern from *:
    """
    #define PERSIA_MAX_IDS ((uint64_t)0xFFFFFFFE)
    """
    # Positions travel as u32, and the last value stays free to say "none". A macro: as a
    # ``cdef enum`` it becomes an int, which is -2, wherever Cython makes a Python number of it.
    const uint64_t MAX_IDS "PERSIA_MAX_IDS"


cdef str describe(object value)
cdef str to_ids(object value)
cdef str to_list(object value)
cdef bint is_vector(object value, char kind, int itemsize) noexcept
cdef ndarray as_vector(object value, char kind, int itemsize, str what)
cdef ndarray as_ids(object value, str what)
# Not initialised.
cdef ndarray new_u64(Py_ssize_t size)
cdef ndarray new_u32(Py_ssize_t size)
cdef ndarray new_i64(Py_ssize_t size)
cdef ndarray frozen(ndarray array)

# DataError names the array that does not fit the number of signs.
cdef int check_length(str name, Py_ssize_t expected, Py_ssize_t got) except -1
cdef int check_rows(
    str name, Py_ssize_t num_signs, Py_ssize_t num_rows, Py_ssize_t dim) except -1
