"""How many distinct ids there were, in 4 KiB whatever their number: HyperLogLog.

    mix64(id)      63      52 51                                            0
                  +----------+-----------------------------------------------+
                  | register | xxxxx10...000   rank = 1 + its trailing zeros |
                  +----------+-----------------------------------------------+

Not taken: the k least hashes, which give a sample of ids as well, but need 8 bytes for each,
and a search for every id among them, over and over for those that come often.
"""

from numpy cimport PyArray_DATA, PyArray_SIZE, ndarray

from persia._core.base.arrays cimport as_ids, as_vector
from persia._core.base.hashing cimport mix64
from persia._core.base.types cimport uint32_t, uint64_t, uint8_t

import math

import numpy as np

from persia.errors import DataError

cdef extern from "portable.h" nogil:
    uint32_t persia_lowest_bit(uint64_t bits) noexcept

cdef enum:
    REGISTER_BITS = 12

NUM_REGISTERS = 1 << REGISTER_BITS
# Of hashes; a register holds at most one more.
_MAX_RANK = 64 - REGISTER_BITS


# A register keeps the highest rank of the ids that fell to it (Flajolet, Fusy, Gandouet,
# Meunier 2007). The same id again changes nothing, so it is enough to add each batch's distinct
# ids; the sketch of two streams together is the greater of each two registers.
cdef void add_ids(const uint64_t *ids, size_t n, uint8_t *registers) noexcept nogil:
    cdef size_t i
    cdef uint64_t hash
    cdef uint8_t rank
    cdef uint8_t *register
    for i in range(n):
        hash = mix64(ids[i])
        register = &registers[hash >> (64 - REGISTER_BITS)]
        # A bit in place of the register's ends the zeros.
        rank = <uint8_t> (1 + persia_lowest_bit(hash | <uint64_t> 1 << (64 - REGISTER_BITS)))
        if rank > register[0]:
            register[0] = rank


def add(registers, ids):
    """Add ids u64 [n] to the registers u8 [4096], zeros at first. One thread at a time."""
    cdef ndarray kept = as_vector(registers, c"u", 1, "registers")
    cdef ndarray values = as_ids(ids, "ids")
    if PyArray_SIZE(kept) != NUM_REGISTERS or not kept.flags.writeable:
        raise DataError(
            f"expected {NUM_REGISTERS} writeable registers, got {PyArray_SIZE(kept)}")
    cdef const uint64_t *of_ids = <const uint64_t *> PyArray_DATA(values)
    cdef size_t n = PyArray_SIZE(values)
    cdef uint8_t *data = <uint8_t *> PyArray_DATA(kept)
    with nogil:
        add_ids(of_ids, n, data)


# From how many registers have each rank (Ertl 2017, the corrected raw estimator): no bias, no
# tables, and below some thousands as good as exact. The standard error is 1.04 / sqrt(4096).
def estimate(registers):
    """Return about how many distinct ids a sketch has seen."""
    size = float(NUM_REGISTERS)
    counts = np.bincount(registers, minlength=_MAX_RANK + 2).tolist()
    z = size * _tau(1 - counts[_MAX_RANK + 1] / size)
    for rank in range(_MAX_RANK, 0, -1):
        z = (z + counts[rank]) / 2
    z += size * _sigma(counts[0] / size)
    return size * size / (2 * math.log(2)) / z


def _sigma(x):
    if x == 1:
        return math.inf
    power, z, last = 1.0, x, -1.0
    while z != last:
        last, x = z, x * x
        z += x * power
        power *= 2
    return z


def _tau(x):
    if x in (0, 1):
        return 0.0
    power, z, last = 1.0, 1 - x, -1.0
    while z != last:
        last, x = z, math.sqrt(x)
        power /= 2
        z -= (1 - x) ** 2 * power
    return z / 3
