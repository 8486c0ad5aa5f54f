# 0 baseline, 1 avx2, 2 avx512. Read once per call into a kernel table, never per row.
cdef int isa_level() noexcept nogil
