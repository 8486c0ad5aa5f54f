"""How many distinct ids there were, in 4 KiB whatever their number: HyperLogLog."""

from persia._core.base.types cimport uint8_t, uint64_t

cdef enum:
    REGISTER_BITS = 12

cdef void add_ids(const uint64_t *ids, size_t n, uint8_t *registers) noexcept nogil
