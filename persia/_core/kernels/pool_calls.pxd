"""Pooling of all features of a batch: each call is checked, then all are made on a crew."""

from persia._core.kernels.pooling cimport Call
from persia._core.base.types cimport uint32_t

cdef struct Part:
    uint32_t first
    uint32_t end
    float *sums             # NULL: none to set and look at
    size_t num_sums         # floats
    bint is_finite


cdef class PoolCalls:
    cdef Call *calls
    cdef Part *parts
    cdef float *scratch         # two rows of each call, as long as the longest
    cdef size_t num_calls
    cdef size_t num_parts
    cdef size_t room            # of calls, and of parts
    cdef size_t most_dim
    cdef list held              # the arrays that the pointers point into, not their views

    cdef int make_room(self) except -1
    cdef int begin_part(self, float *sums, size_t num_sums) except -1
    cdef int append(self, const Call *call) except -1
    cdef int append_pieces(self, const Call *whole) except -1
    cdef int check_begun(self) except -1
