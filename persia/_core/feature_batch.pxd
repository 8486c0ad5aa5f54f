"""The ids of one feature in one batch, deduplicated."""

cdef class FeatureBatch:
    # All arrays are owned, contiguous and read-only; invariants in the .pyx.
    cdef readonly str name
    cdef readonly object distinct           # u64 [D], first-seen order
    cdef readonly object inverse            # u32 [N], number of each id among the distinct
    cdef readonly object offsets            # u32 [B + 1]; None: each sample has exactly one id
    cdef readonly object weights            # f32 [N]; None: each id counts once
    cdef readonly Py_ssize_t batch_size     # B
    cdef readonly Py_ssize_t num_ids        # N
    cdef readonly Py_ssize_t num_distinct   # D
