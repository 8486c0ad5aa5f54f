"""Numbering of distinct u64 values in first-seen order.

                  hash >> shift
    value  ---------------------->  table  [ . 3 . . 1 . 2 . ]     u32, 0 is empty
                                             |
                                             v  number + 1
                                    values [ a  b  c ]             u64, in first-seen order

A small open-addressing table with linear probing points at the values themselves, which are
the result. Occupancy is in the table, never in the value: 0 and 2**64 - 1 are ids like others.

Invariants, true between calls:

    I1  Entries are 0 or 1..count; each number stands in exactly one entry.
    I2  At most half the entries are used, so that a probe always ends.
    I3  Between a value's first slot and its entry no entry is 0.

Cost: 4 bytes an entry, at most 16 for each value announced. Where the table is larger than the
cache, a value costs two dependent misses, so a block of them is hashed and fetched ahead before
the first is probed. The table never grows: it is sized for values that are all distinct, and
a batch's table lives for one call only.

A thread may number while others do; each has its own ``Distinct``.
"""

from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy
from numpy cimport PyArray_DATA, PyArray_SIZE, ndarray

from persia._core.arrays cimport as_ids, new_u32, new_u64
from persia._core.hashing cimport mix64
from persia._core.types cimport uint32_t, uint64_t


cdef extern from "portable.h" nogil:
    void prefetch "persia_prefetch"(const void *address) noexcept


cdef enum:
    BLOCK = 32              # values in flight: about as many misses as a core keeps open
    CACHED = 1 << 17        # entries; a table up to 512 KiB stays in the second-level cache


cdef int distinct_init(Distinct *self, size_t most) noexcept nogil:
    """Make room for ``most`` distinct values; see the .pxd."""
    cdef int bits = 3
    while (<size_t>1 << bits) < 2 * most:
        bits += 1
    self.mask = (<size_t>1 << bits) - 1
    self.shift = 64 - bits
    self.count = 0
    self.table = <uint32_t *>calloc(<size_t>1 << bits, sizeof(uint32_t))
    self.values = <uint64_t *>malloc((most + 1) * sizeof(uint64_t))
    return 0 if self.table != NULL and self.values != NULL else -1


cdef void distinct_free(Distinct *self) noexcept nogil:
    """Give the memory back; harmless on one that was freed."""
    free(self.table)
    free(self.values)
    self.table = NULL
    self.values = NULL


cdef void distinct_number(
    Distinct *self, const uint64_t *values, size_t n, uint32_t *numbers
) noexcept nogil:
    """Write the number of each value. Needs room for those that are new."""
    cdef size_t[BLOCK] home
    cdef uint32_t *table = self.table
    cdef uint64_t *known = self.values
    cdef size_t mask = self.mask
    cdef int shift = self.shift
    cdef uint32_t count = self.count
    cdef bint is_large = mask >= CACHED
    cdef size_t start = 0
    cdef size_t length, i, slot
    cdef uint64_t value
    cdef uint32_t entry
    while start < n:
        length = min(<size_t>BLOCK, n - start)
        for i in range(length):
            home[i] = <size_t>(mix64(values[start + i]) >> shift)
        if is_large:
            for i in range(length):
                prefetch(&table[home[i]])
            for i in range(length):
                entry = table[home[i]]
                if entry:
                    prefetch(&known[entry - 1])
        for i in range(length):
            value = values[start + i]
            slot = home[i]
            while True:
                entry = table[slot]
                if entry == 0:
                    known[count] = value
                    count += 1
                    table[slot] = count
                    numbers[start + i] = count - 1
                    break
                if known[entry - 1] == value:
                    numbers[start + i] = entry - 1
                    break
                slot = (slot + 1) & mask
        start += length
    self.count = count


def number(values):
    """Number the distinct values of an array in first-seen order.

    Args:
        values: u64 [n], any layout.

    Returns:
        The distinct values, u64 [U], and the number of each value among them, u32 [n].

    Raises:
        DataTypeError: If ``values`` is not a 1-D array of uint64.
    """
    cdef ndarray source = as_ids(values, "values")
    cdef size_t n = PyArray_SIZE(source)
    cdef ndarray numbers = new_u32(n)
    cdef const uint64_t *source_data = <const uint64_t *>PyArray_DATA(source)
    cdef uint32_t *numbers_data = <uint32_t *>PyArray_DATA(numbers)
    return distinct_of("values", source_data, n, numbers_data), numbers


cdef ndarray distinct_of(str what, const uint64_t *values, size_t n, uint32_t *numbers):
    cdef ndarray distinct
    cdef Distinct found
    try:
        with nogil:
            status = distinct_init(&found, n)
            if status == 0:
                distinct_number(&found, values, n, numbers)
        if status != 0:
            raise MemoryError(f"{what}: no memory to number {n} of them")
        distinct = new_u64(found.count)
        memcpy(PyArray_DATA(distinct), found.values, found.count * sizeof(uint64_t))
    finally:
        distinct_free(&found)
    return distinct
