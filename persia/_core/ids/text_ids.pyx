"""Ids of texts: a stable hash, or the number that a text spells.

    data       r e d b l u e        u8
    offsets    0     3 3       7    i64 [n + 1]: "red", "", "blue"

This is how Arrow holds texts, so whole columns are taken without a copy.

The hash reads a text as words of eight bytes, little-endian, the last one filled with zeros:

    h = mix64(length);   for each word: h = mix64(h ^ word)
"""

from numpy cimport PyArray_DATA, PyArray_SIZE, ndarray

from persia._core.base.arrays cimport as_vector, new_u64
from persia._core.base.hashing cimport mix64
from persia._core.base.types cimport int64_t, uint64_t, uint8_t

from persia.errors import DataError


cdef struct Texts:
    const uint8_t *data
    const int64_t *offsets
    size_t n
    uint64_t *ids           # to be filled


cdef bint are_in_order(const int64_t *offsets, size_t n, size_t num_bytes) noexcept nogil:
    """Whether ``n`` texts lie one after the other in ``num_bytes`` bytes."""
    cdef size_t i
    if offsets[0] < 0 or <uint64_t>offsets[n] > num_bytes:
        return False
    for i in range(n):
        if offsets[i] > offsets[i + 1]:
            return False
    return True


cdef inline uint64_t word_of(const uint8_t *text, size_t length) noexcept nogil:
    """Up to eight bytes as a little-endian number, on any machine."""
    cdef uint64_t word = 0
    cdef size_t i
    for i in range(length):
        word |= <uint64_t>text[i] << (8 * i)
    return word


# It begins with the length, so that zeros at the end count. It is published (docs/readers.md)
# and does not change: an id that is a hash must be the same in every run, and in serving.
cdef inline uint64_t hash_text(const uint8_t *text, size_t length) noexcept nogil:
    cdef uint64_t h = mix64(length)
    while length >= 8:
        h = mix64(h ^ word_of(text, 8))
        text += 8
        length -= 8
    if length:
        h = mix64(h ^ word_of(text, length))
    return h


cdef void hash_all(const Texts *texts) noexcept nogil:
    cdef const int64_t *offsets = texts.offsets
    cdef size_t i
    for i in range(texts.n):
        texts.ids[i] = hash_text(
            texts.data + offsets[i], <size_t>(offsets[i + 1] - offsets[i])
        )


cdef inline int digit_of(uint8_t character) noexcept nogil:
    """Value of a hexadecimal digit, or -1."""
    if 48 <= character <= 57:
        return character - 48
    character |= 32  # lower case
    return character - 87 if 97 <= character <= 102 else -1


cdef size_t parse_all(const Texts *texts) noexcept nogil:
    """Parse all; returns the place of the first that is no number, or how many there are."""
    cdef const int64_t *offsets = texts.offsets
    cdef size_t i
    cdef int64_t j
    cdef int digit
    cdef uint64_t number
    for i in range(texts.n):
        if not 1 <= offsets[i + 1] - offsets[i] <= 16:
            return i
        number = 0
        for j in range(offsets[i], offsets[i + 1]):
            digit = digit_of(texts.data[j])
            if digit < 0:
                return i
            number = number << 4 | <uint64_t>digit
        texts.ids[i] = number
    return texts.n


cdef tuple checked(object data, object offsets, Texts *texts):
    """Fill ``texts``; return the ids, not yet filled, and what else it points into."""
    # Either may be a copy; the caller holds both while ``texts`` points into them.
    cdef ndarray bytes_ = as_vector(data, c"u", 1, "texts")
    cdef ndarray edges = as_vector(offsets, c"i", 8, "offsets")
    cdef Py_ssize_t n = PyArray_SIZE(edges) - 1
    if n < 0 or not are_in_order(
        <const int64_t *>PyArray_DATA(edges), n, PyArray_SIZE(bytes_)
    ):
        raise DataError(
            f"offsets: expected at least one, ascending within {PyArray_SIZE(bytes_)} bytes"
        )
    cdef ndarray ids = new_u64(n)
    texts.data = <const uint8_t *>PyArray_DATA(bytes_)
    texts.offsets = <const int64_t *>PyArray_DATA(edges)
    texts.n = n
    texts.ids = <uint64_t *>PyArray_DATA(ids)
    return ids, bytes_, edges


def hash_texts(data, offsets):
    """Return the hash of each text, u64 [n]."""
    cdef Texts texts
    held = checked(data, offsets, &texts)
    with nogil:
        hash_all(&texts)
    return held[0]


def parse_hex(data, offsets):
    """Return the number that each text spells in hexadecimal digits, u64 [n], and a place.

    The place is that of the first text that is no number of 1 to 16 such digits; n if all are.
    """
    cdef Texts texts
    cdef size_t place
    held = checked(data, offsets, &texts)
    with nogil:
        place = parse_all(&texts)
    return held[0], place
