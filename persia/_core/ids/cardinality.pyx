"""How many distinct ids there were, in 4 KiB whatever their number: HyperLogLog.

    mix64(id)      63      52 51                                            0
                  +----------+-----------------------------------------------+
                  | register | xxxxx10...000   rank = 1 + its trailing zeros |
                  +----------+-----------------------------------------------+

Not taken: the k least hashes, which give a sample of ids as well, but need 8 bytes for each,
and a search for every id among them, over and over for those that come often.
"""

from libc.stdlib cimport free, malloc
from numpy cimport PyArray_DATA, PyArray_ISWRITEABLE, PyArray_SIZE, ndarray

from persia._core.base.arrays cimport as_ids, as_vector
from persia._core.base.cpu cimport isa_level
from persia._core.base.threads cimport ThreadPool
from persia._core.base.types cimport uint32_t, uint64_t, uint8_t

import math

import numpy as np

from persia.errors import DataError

cdef extern from "portable.h" nogil:
    uint32_t persia_lowest_bit(uint64_t bits) noexcept

cdef extern from * nogil:
    """
    #include "kernels.h"

    PERSIA_INLINE void persia_mix_loop(const uint64_t *restrict values, size_t n,
                                       uint64_t *restrict hashes)
    {
        for (size_t i = 0; i < n; i++)
            hashes[i] = persia_mix64(values[i]);
    }

    PERSIA_VARIANTS(void, persia_mix, (const uint64_t *values, size_t n, uint64_t *hashes),
                    { persia_mix_loop(values, n, hashes); })

    typedef void (*persia_mix_t)(const uint64_t *, size_t, uint64_t *);

    static const persia_mix_t persia_mix_all[PERSIA_NUM_LEVELS] = PERSIA_LEVELS(persia_mix);
    """
    ctypedef void (*persia_mix_t)(const uint64_t *values, size_t n, uint64_t *hashes) noexcept
    const persia_mix_t *persia_mix_all

cdef enum:
    REGISTER_BITS = 12
    BLOCK = 512             # hashes at a time: vectors make them

cdef struct Sketch:
    uint8_t *registers
    const uint64_t *ids
    size_t n

NUM_REGISTERS = 1 << REGISTER_BITS
# Of hashes; a register holds at most one more.
_MAX_RANK = 64 - REGISTER_BITS


# A register keeps the highest rank of the ids that fell to it (Flajolet, Fusy, Gandouet,
# Meunier 2007). The same id again changes nothing, so it is enough to add each batch's distinct
# ids; the sketch of two streams together is the greater of each two registers.
cdef void add_part(void *context, uint32_t part, uint32_t worker) noexcept nogil:
    cdef Sketch *one = <Sketch *> context + part
    cdef uint8_t *registers = one.registers
    cdef uint64_t[BLOCK] hashes
    cdef uint64_t hash
    cdef uint8_t rank
    cdef size_t first = 0, count, i
    while first < one.n:
        count = min(<size_t> BLOCK, one.n - first)
        persia_mix_all[isa_level()](one.ids + first, count, hashes)
        for i in range(count):
            hash = hashes[i]
            # A bit in place of the register's ends the zeros.
            rank = <uint8_t> (
                1 + persia_lowest_bit(hash | <uint64_t> 1 << (64 - REGISTER_BITS)))
            if rank > registers[hash >> (64 - REGISTER_BITS)]:
                registers[hash >> (64 - REGISTER_BITS)] = rank
        first += count


def add(sketches, arrays, ThreadPool threads not None):
    """Add the ids of each array, u64 [n], to its sketch: registers u8 [4096], zeros at first.

    All sketches differ, and one thread at a time adds to any of them.
    """
    cdef size_t count = len(arrays), i
    cdef ndarray kept, values
    cdef list held = []
    cdef Sketch *all_ = <Sketch *> malloc((count + 1) * sizeof(Sketch))
    if all_ == NULL:
        raise MemoryError(f"no memory for {count} sketches")
    try:
        for i, (registers, ids) in enumerate(zip(sketches, arrays, strict=True)):
            kept, values = as_vector(registers, c"u", 1, "registers"), as_ids(ids, "ids")
            if PyArray_SIZE(kept) != NUM_REGISTERS or not PyArray_ISWRITEABLE(kept):
                raise DataError(
                    f"expected {NUM_REGISTERS} writeable registers, got {PyArray_SIZE(kept)}")
            all_[i].registers = <uint8_t *> PyArray_DATA(kept)
            all_[i].ids = <const uint64_t *> PyArray_DATA(values)
            all_[i].n = PyArray_SIZE(values)
            held.append((kept, values))
        threads.work(add_part, all_, <uint32_t> count)
    finally:
        free(all_)


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
