"""Numbering of distinct u64 values in first-seen order.

    position     0  1  2  3  4
    value        a  b  a  c  b
    slot         2  5  2  2  5      the top bits of the hash
    table        [2] = 0  [5] = 1   the first position of each slot
    first        0  1  0  3  1      that position, if it holds this very value; c's does not,
                                    and is asked again with another hash, among those left over
    number       0  1  0  2  1      how many first positions stand before the first one

Invariants, true after each round, whatever the values are, even if they are written meanwhile:

    I1  first[i] <= i, and first[first[i]] == first[i].
    I2  Of the values left over, the first one of each slot is not left over again: rounds end.
"""

from libc.stdlib cimport free, malloc
from libc.string cimport memcpy
from numpy cimport PyArray_DATA, ndarray

from persia._core.base.arrays cimport new_u64
from persia._core.base.cpu cimport isa_level
from persia._core.base.hashing cimport mix64
from persia._core.base.types cimport uint32_t, uint64_t


cdef extern from * nogil:
    """
    #include "kernels.h"

    /* Copies n values, and writes the top 64 - shift (at most 32) bits of each one's hash. */
    PERSIA_INLINE void persia_take_body(const uint64_t *restrict values, size_t n, int shift,
                                        uint64_t *restrict own, uint32_t *restrict slots)
    {
        for (size_t i = 0; i < n; i++) {
            const uint64_t value = values[i];
            own[i] = value;
            slots[i] = (uint32_t)(persia_mix64(value) >> shift);
        }
    }

    PERSIA_VARIANTS(void, persia_take,
                    (const uint64_t *values, size_t n, int shift, uint64_t *own,
                     uint32_t *slots),
                    (values, n, shift, own, slots))

    typedef void (*persia_take_t)(const uint64_t *, size_t, int, uint64_t *, uint32_t *);

    static const persia_take_t persia_take[PERSIA_NUM_LEVELS] = PERSIA_LEVELS(persia_take);
    """
    ctypedef void (*persia_take_t)(
        const uint64_t *values, size_t n, int shift, uint64_t *own, uint32_t *slots) noexcept
    const persia_take_t *persia_take


cdef enum:
    LEAST_BITS = 6          # of a slot
    MOST_BITS = 32          # a slot is a u32
    KEPT_ROOM = 1 << 20     # values; a block of up to 20 MiB is kept
    KEPT_BLOCKS = 16

# Of 20 to 40 bytes a value. Blocks are kept from call to call, because fresh pages cost more
# than the passes: one for each thread that numbers while others do. Taken and given back under
# the GIL, the last one first.
cdef Numbering[KEPT_BLOCKS] spares
cdef int num_spares = 0


cdef int bits_of(size_t n) noexcept nogil:
    """Bits of a slot for ``n`` values: two slots or more for each."""
    cdef int bits = LEAST_BITS
    while bits < MOST_BITS and (<size_t>1 << bits) < 2 * n:
        bits += 1
    return bits


cdef int begin(Numbering *self, size_t most) except -1:
    """Take a spare block, or make one; see the .pxd."""
    global num_spares
    cdef int bits = bits_of(most)
    cdef size_t room
    cdef char *block
    if num_spares > 0 and spares[num_spares - 1].room >= most:
        num_spares -= 1
        self[0] = spares[num_spares]
    else:
        room = max(most, <size_t>1 << (bits - 1))
        block = <char *>malloc(
            room * (sizeof(uint64_t) + sizeof(uint32_t)) + (sizeof(uint32_t) << bits)
        )
        if block == NULL:
            self.room = 0
            raise MemoryError(f"no memory to number {most} ids")
        self.values = <uint64_t *>block
        self.slots = <uint32_t *>(block + room * sizeof(uint64_t))
        self.table = self.slots + room
        self.room = room
    restart(self, most)
    return 0


cdef void restart(Numbering *self, size_t most) noexcept nogil:
    """Begin again in the same block; see the .pxd."""
    self.num_taken = 0
    self.shift = 64 - bits_of(most)


cdef void give_back(Numbering *self) noexcept:
    """Keep the block, or free it; harmless on one that was given back.

    The larger ones are kept, and the largest is the next to be taken.
    """
    global num_spares
    cdef Numbering one = self[0]
    cdef int i
    self.room = 0
    if one.room == 0:
        return
    if one.room > KEPT_ROOM:
        free(one.values)
        return
    for i in range(num_spares - 1, -1, -1):
        if spares[i].room < one.room:
            spares[i], one = one, spares[i]
    if num_spares < KEPT_BLOCKS:
        # The smallest of all is the first.
        for i in range(num_spares, 0, -1):
            spares[i] = spares[i - 1]
        spares[0] = one
        num_spares += 1
    else:
        free(one.values)


cdef void take(Numbering *self, const uint64_t *values, size_t n) noexcept nogil:
    """Copy and hash ``n`` values; see the .pxd."""
    persia_take[isa_level()](
        values, n, self.shift, self.values + self.num_taken, self.slots + self.num_taken
    )
    self.num_taken += n


cdef void find_first(
    const uint64_t *values, uint32_t *table, uint32_t *left, size_t num_left, uint32_t *first
) noexcept nogil:
    """Ask the positions in ``left`` again, until each has found its first."""
    cdef size_t i, kept
    cdef uint32_t place, found
    cdef uint64_t seed = 0
    cdef int shift
    while num_left > 0:
        seed = mix64(seed)
        shift = 64 - bits_of(num_left)
        for i in range(num_left, 0, -1):
            place = left[i - 1]
            table[mix64(values[place] ^ seed) >> shift] = place
        kept = 0
        for i in range(num_left):
            place = left[i]
            found = table[mix64(values[place] ^ seed) >> shift]
            first[place] = found
            left[kept] = place
            kept += values[found] != values[place]
        num_left = kept


# Each pass is over all values, and none has a branch that depends on one: a probe that ends at
# an id's own luck costs a misprediction for every third id, more than all of its work. The
# table is written backwards, so that the first position of a slot stays. It is written before
# it is read and therefore never cleared, and correct at any size; at twice the values, 5 of 100
# ids are left over for a second round, and one in a thousand for a third.
cdef size_t finish(Numbering *self, uint32_t *numbers) noexcept nogil:
    """Number what was taken; see the .pxd."""
    cdef uint64_t *values = self.values
    cdef uint32_t *slots = self.slots
    cdef uint32_t *table = self.table
    cdef size_t n = self.num_taken
    cdef size_t num_left = 0
    cdef size_t i
    cdef uint32_t found
    cdef uint32_t count = 0
    for i in range(n, 0, -1):
        table[slots[i - 1]] = <uint32_t>(i - 1)
    # ``left`` and ``ranks`` overwrite slots that were read.
    cdef uint32_t *left = slots
    cdef uint32_t *ranks = slots
    for i in range(n):
        found = table[slots[i]]
        numbers[i] = found
        left[num_left] = <uint32_t>i
        num_left += values[found] != values[i]
    find_first(values, table, left, num_left, numbers)
    for i in range(n):
        found = numbers[i]
        ranks[i] = count
        values[count] = values[i]
        count += found == i
        numbers[i] = ranks[found]
    return count


cdef ndarray distinct_values(const Numbering *self, size_t count):
    cdef ndarray distinct = new_u64(count)
    memcpy(PyArray_DATA(distinct), self.values, count * sizeof(uint64_t))
    return distinct


cdef ndarray distinct_of(const uint64_t *values, size_t n, uint32_t *numbers):
    cdef Numbering numbering
    cdef size_t count
    begin(&numbering, n)
    try:
        with nogil:
            take(&numbering, values, n)
            count = finish(&numbering, numbers)
        return distinct_values(&numbering, count)
    finally:
        give_back(&numbering)
