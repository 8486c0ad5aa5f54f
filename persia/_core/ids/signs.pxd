"""Packing of ids into signs, and the rows of a hash stack."""

from persia._core.base.types cimport uint64_t


# The ids of one feature are 0..2^(64 - prefix_bits) - 1. Needs 1 <= prefix_bits <= 63.
cdef inline uint64_t id_mask(int prefix_bits) noexcept nogil:
    return (<uint64_t>1 << (64 - prefix_bits)) - 1


# Returns how many ids lost bits to the mask. ``ids`` and ``signs`` may be one buffer.
cdef size_t pack_signs(
    const uint64_t *ids, size_t n, uint64_t prefix, int prefix_bits, uint64_t *signs
) noexcept nogil
