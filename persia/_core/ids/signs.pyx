"""Packing of ids into signs, the rows of a hash stack, and one numbering for many slots.

             63          64-b  63-b                              0
            +-----------------+-----------------------------------+
    sign =  |    group + 1    |        id & (2**(64-b) - 1)       |
            +-----------------+-----------------------------------+
"""

from libc.stdlib cimport free, malloc
from numpy cimport PyArray_DATA, PyArray_SIZE, ndarray

from persia._core.base.arrays cimport MAX_IDS, as_ids, new_u32, new_u64
from persia._core.base.hashing cimport mix64
from persia._core.base.threads cimport ThreadPool
from persia._core.base.types cimport uint32_t, uint64_t
from persia._core.ids.numbering cimport (
    Numbering, begin, distinct_values, finish, give_back, take,
)

from persia.errors import ConfigError, DataError

cdef ThreadPool ALONE = ThreadPool(1)


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


def prefix_of(group, prefix_bits):
    """Return the prefix of a feature group, shifted to the top of the word.

    Args:
        group: Number of the group, from 0.
        prefix_bits: Width of the prefix field, 1..63.

    Raises:
        ConfigError: If the field is too narrow for the group, or ``prefix_bits`` is outside
            1..63.
    """
    _check_prefix_bits(prefix_bits)
    most = (1 << prefix_bits) - 1
    if not 0 <= group < most:
        raise ConfigError(
            f"{prefix_bits} prefix bits hold {most} feature groups, 0..{most - 1}, "
            f"got group {group}"
        )
    return (group + 1) << (64 - prefix_bits)


def pack(ids, prefix, prefix_bits):
    """Return the signs of one feature's ids.

    Args:
        ids: u64 [n], any value.
        prefix: The feature's prefix, as ``prefix_of`` returns it.
        prefix_bits: Width of the prefix field, 1..63.

    Returns:
        The signs, u64 [n], and how many ids did not fit below the prefix and were masked.

    Raises:
        DataTypeError: If ``ids`` is not a 1-D array of uint64.
        ConfigError: If ``prefix_bits`` is outside 1..63, or ``prefix`` is zero or has a bit
            outside its field.
    """
    signs, (num_masked,) = pack_all((ids,), (prefix,), prefix_bits)
    return signs, num_masked


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


def pack_all(arrays, prefixes, prefix_bits, ThreadPool threads=None):
    """Return the signs of several features in one array, feature after feature.

    Args:
        arrays: The ids of each feature, u64 [n], any value.
        prefixes: The prefix of each, as ``prefix_of`` returns it.
        prefix_bits: Width of the prefix field, 1..63.
        threads: Threads; None for the caller's alone.

    Returns:
        The signs, u64 [sum of n], and how many ids of each feature were masked.

    Raises:
        DataTypeError: If one of ``arrays`` is not a 1-D array of uint64.
        DataError: If they hold more ids than a u32 can number.
        ConfigError: If ``prefix_bits`` is outside 1..63, or a prefix is zero or has a bit
            outside its field.
    """
    _check_prefix_bits(prefix_bits)
    cdef int bits = prefix_bits
    cdef ThreadPool chosen = ALONE if threads is None else threads
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
            if not 0 < prefix < 1 << 64 or prefix & id_mask(bits):
                raise ConfigError(
                    f"prefix must be a positive number in the top {bits} of 64 bits, "
                    f"got {prefix:#018x}"
                )
            one.ids = <const uint64_t *>PyArray_DATA(source)
            one.n = PyArray_SIZE(source)
            one.prefix = prefix
            one.prefix_bits = bits
            one.signs = signs_data
            signs_data += one.n
            one += 1
        # Each feature has its own part of ``signs``, so the parts need no order.
        chosen.work(pack_part, features, <uint32_t>count)
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
        embedding_size: Rows for each round, at least 1.

    Returns:
        u64 [n * rounds], id by id: row r of id i is at ``i * rounds + r``.

    Raises:
        DataTypeError: If ``ids`` is not a 1-D array of uint64.
        ConfigError: If ``rounds`` or ``embedding_size`` is below 1, or if together they need
            more rows than 64 bits can name.
        DataError: If the rows are more than a u32 can number.
    """
    if rounds < 1:
        raise ConfigError(f"hash_stack_rounds must be at least 1, got {rounds}")
    if embedding_size < 1 or rounds * embedding_size >= 1 << 64:
        raise ConfigError(
            f"embedding_size of a hash stack must be in 1..{((1 << 64) - 1) // rounds}, "
            f"got {embedding_size}"
        )
    cdef ndarray source = as_ids(ids, "ids")
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

    Args:
        arrays: A sequence of u64 arrays.

    Returns:
        The distinct values, u64 [U], in first-seen order over the arrays one after the other;
        and for each array, u32, the number of each of its values. They share one block.

    Raises:
        DataTypeError: If one of them is not a 1-D array of uint64.
        DataError: If they hold more values than a u32 can number.
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


def _check_prefix_bits(prefix_bits):
    if not 1 <= prefix_bits <= 63:
        raise ConfigError(f"prefix_bits must be in 1..63, got {prefix_bits}")
