"""Packing of ids into signs, the rows of a hash stack, and one numbering for many slots.

             63          64-b  63-b                              0
            +-----------------+-----------------------------------+
    sign =  |    group + 1    |        id & (2**(64-b) - 1)       |
            +-----------------+-----------------------------------+
"""

from libc.stdlib cimport free, malloc
from libc.string cimport memcpy
from numpy cimport PyArray_DATA, PyArray_SIZE, ndarray

from persia._core.base.arrays cimport MAX_IDS, as_ids, new_u32, new_u64
from persia._core.base.cpu cimport isa_level
from persia._core.base.hashing cimport mix64
from persia._core.base.threads cimport ThreadPool
from persia._core.base.types cimport uint32_t, uint64_t

from persia.errors import ConfigError, DataError

cdef extern from * nogil:
    """
    #include "kernels.h"

    /* Copies n values, and writes the top 64 - shift (at most 32) bits of each one's hash. */
    PERSIA_INLINE void persia_take_loop(const uint64_t *restrict values, size_t n, int shift,
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
                    { persia_take_loop(values, n, shift, own, slots); })

    typedef void (*persia_take_t)(const uint64_t *, size_t, int, uint64_t *, uint32_t *);

    static const persia_take_t persia_take[PERSIA_NUM_LEVELS] = PERSIA_LEVELS(persia_take);
    """
    ctypedef void (*persia_take_t)(
        const uint64_t *values, size_t n, int shift, uint64_t *own, uint32_t *slots) noexcept
    const persia_take_t *persia_take


cdef inline uint64_t id_mask(int prefix_bits) noexcept nogil:
    """The ids of one feature are 0..2^(64 - prefix_bits) - 1. Needs 1 <= prefix_bits <= 63."""
    return (<uint64_t>1 << (64 - prefix_bits)) - 1


# A mask, not the original's modulus by 2**(64-b) - 1: no division, and the last id is not
# folded onto 0. Ids that lose bits to the mask are counted, because two ids of the user may now
# share a row. Groups count from 1 in a sign, so a prefix of zero is no group's and marks a
# number that did not fit.
cdef size_t pack_signs(
    const uint64_t *ids, size_t n, uint64_t prefix, int prefix_bits, uint64_t *signs
) noexcept nogil:
    """Fill ``signs``, which may be ``ids``; return how many ids lost bits to the mask."""
    cdef uint64_t mask = id_mask(prefix_bits)
    cdef size_t num_masked = 0
    cdef size_t i
    cdef uint64_t one
    for i in range(n):
        one = ids[i]
        num_masked += one > mask
        signs[i] = (one & mask) | prefix
    return num_masked


cdef void stack_rows(
    const uint64_t *ids, size_t n, size_t rounds, uint64_t embedding_size, uint64_t *rows
) noexcept nogil:
    """Fill ``rows`` [n * rounds]. Needs rounds * embedding_size < 2**64."""
    cdef size_t i, turn
    cdef uint64_t hashed
    for i in range(n):
        hashed = ids[i]
        for turn in range(rounds):
            hashed = mix64(hashed)
            # Unsigned division; a mask would need sizes that are powers of two.
            rows[i * rounds + turn] = hashed % embedding_size + turn * embedding_size


cdef struct Packing:        # of one feature
    const uint64_t *ids
    size_t n
    uint64_t prefix
    int prefix_bits
    uint64_t *signs
    size_t num_masked


cdef void pack_part(void *context, uint32_t part, uint32_t worker) noexcept nogil:
    cdef Packing *one = <Packing *>context + part
    one.num_masked = pack_signs(one.ids, one.n, one.prefix, one.prefix_bits, one.signs)


def pack_all(arrays, prefixes, int prefix_bits, ThreadPool threads not None):
    """Return the signs of several features in one array, feature after feature.

    Args:
        arrays: The ids of each feature, u64 [n], any value.
        prefixes: The prefix of each, in the top bits.
        prefix_bits: Width of the prefix field, 1..63.
        threads: Threads.

    Returns:
        The signs, u64 [sum of n], and how many ids of each feature were masked.
    """
    cdef list sources = [as_ids(ids, "ids") for ids in arrays]
    total = sum([source.size for source in sources])
    if total > MAX_IDS:
        raise DataError(f"features must hold at most {MAX_IDS} distinct ids, got {total}")
    cdef ndarray signs = new_u64(total)
    cdef uint64_t *signs_data = <uint64_t *>PyArray_DATA(signs)
    cdef size_t count = len(sources)
    cdef Packing *features = <Packing *>malloc((count + 1) * sizeof(Packing))
    cdef Packing *one = features
    cdef size_t i
    cdef ndarray source
    if features == NULL:
        raise MemoryError(f"no memory to pack {count} features")
    try:
        for source, prefix in zip(sources, prefixes, strict=True):
            one.ids = <const uint64_t *>PyArray_DATA(source)
            one.n = PyArray_SIZE(source)
            one.prefix = prefix
            one.prefix_bits = prefix_bits
            one.signs = signs_data
            signs_data += one.n
            one += 1
        # Each feature has its own part of ``signs``, so the parts need no order.
        threads.work(pack_part, features, <uint32_t>count)
        return signs, [features[i].num_masked for i in range(count)]
    finally:
        free(features)


def hash_stack(ids, rounds, embedding_size):
    """Return the rows whose sum is the vector of each id.

    Round r draws from its own range, r * embedding_size up to (r + 1) * embedding_size, by
    hashing the hash of the round before it.

    Args:
        ids: u64 [n].
        rounds: Rows for each id, at least 1.
        embedding_size: Rows for each round, at least 1; together they are below 2**64.

    Returns:
        u64 [n * rounds], id by id: row r of id i is at ``i * rounds + r``.
    """
    cdef ndarray source = as_ids(ids, "ids")
    if rounds < 1 or embedding_size < 1:
        raise ConfigError(
            f"a hash stack needs at least one round and one row, "
            f"got {rounds} and {embedding_size}"
        )
    if source.size * rounds > MAX_IDS:
        raise DataError(
            f"a hash stack must give at most {MAX_IDS} rows, "
            f"got {source.size} ids in {rounds} rounds"
        )
    cdef size_t n = PyArray_SIZE(source)
    cdef size_t turns = rounds
    cdef uint64_t size = embedding_size
    cdef ndarray rows = new_u64(n * turns)
    cdef const uint64_t *source_data = <const uint64_t *>PyArray_DATA(source)
    cdef uint64_t *rows_data = <uint64_t *>PyArray_DATA(rows)
    with nogil:
        stack_rows(source_data, n, turns, size, rows_data)
    return rows


def merge(arrays):
    """Number the distinct values over several arrays at once.

    The slots of a group share rows, and so do the ids of a hash stack that collide: a row must
    be looked up once and step once, however many slots name it.

    Returns:
        The distinct values, u64 [U], in first-seen order over the arrays one after the other;
        and for each array, u32, the number of each of its values. They share one block.
    """
    cdef list sources = [as_ids(one, f"arrays[{i}]") for i, one in enumerate(arrays)]
    total = sum([source.size for source in sources])
    if total > MAX_IDS:
        raise DataError(f"arrays must hold at most {MAX_IDS} values, got {total}")
    cdef size_t most = total
    cdef ndarray numbers = new_u32(most)
    cdef uint32_t *numbers_data = <uint32_t *>PyArray_DATA(numbers)
    cdef ndarray source
    cdef Numbering numbering
    cdef size_t count
    begin(&numbering, most)
    try:
        for source in sources:
            take(&numbering, <const uint64_t *>PyArray_DATA(source), PyArray_SIZE(source))
        with nogil:
            count = finish(&numbering, numbers_data)
        distinct = distinct_values(&numbering, count)
    finally:
        give_back(&numbering)
    cdef Py_ssize_t start = 0
    pieces = []
    for source in sources:
        pieces.append(numbers[start : start + PyArray_SIZE(source)])
        start += PyArray_SIZE(source)
    return distinct, pieces


# --- numbering -----------------------------------------------------------------------------
#
#     position     0  1  2  3  4
#     value        a  b  a  c  b
#     slot         2  5  2  2  5      the top bits of the hash
#     table        [2] = 0  [5] = 1   the first position of each slot
#     first        0  1  0  3  1      that position, if it holds this very value; c's does not,
#                                     and is asked again with another hash, with others left
#     number       0  1  0  2  1      how many first positions stand before the first one
#
# Invariants, true after each round, even if the values are written meanwhile:
#
#     I1  first[i] <= i, and first[first[i]] == first[i].
#     I2  Of the values left over, the first of each slot is not left over again: rounds end.


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
    self.num_taken = 0
    self.shift = 64 - bits_of(most)


cdef void give_back(Numbering *self) noexcept:
    """The larger blocks are kept, and the largest is the next to be taken."""
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
