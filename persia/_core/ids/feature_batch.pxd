from numpy cimport ndarray


cdef class FeatureBatch:
    # All arrays are owned, contiguous and read-only; invariants in the .pyx.
    cdef readonly str name
    cdef object pending                     # u64 [N], the ids until they are numbered
    cdef object numbered_distinct           # u64 [D], first-seen order
    cdef object numbered_inverse            # u32 [N], number of each id among the distinct
    cdef readonly object offsets            # u32 [B + 1]; None: each sample has exactly one id
    cdef readonly object weights            # f32 [N]; None: each id counts once
    cdef readonly Py_ssize_t batch_size     # B
    cdef readonly Py_ssize_t num_ids        # N

    cdef int number(self) except -1
    cdef void take_numbers(self, ndarray distinct, ndarray inverse) noexcept
