"""The words of the core as C types."""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

ctypedef uint64_t sign_t        # packed id: feature bits above, index bits below
ctypedef uint32_t row_t         # number of a row in one shard's slabs
ctypedef uint32_t position_t    # place of a row in its shard's order of use

cdef enum:
    # Also "not admitted" where a lookup returns hints.
    NO_ROW = 0xFFFFFFFF
    # Values of a row: with Adam's state, 768 KiB, it must fit its chunk of 2 MiB.
    MAX_DIM = 65536
