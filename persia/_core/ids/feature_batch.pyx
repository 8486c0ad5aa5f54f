"""The ids of one feature in one batch, deduplicated.

    samples    [7, 9]  []  [9, 7, 9]

    distinct   [7, 9]               D = 2, in first-seen order
    inverse    [0, 1, 1, 0, 1]      N = 5, the number of each id
    offsets    [0, 2, 2, 5]         B + 1 = 4
    weights    [1., .5, 2., 1., 0.] N, or None: each id counts once

Everything behind this class works on distinct ids: a row is looked up once and stepped once per
batch, however often its id occurs. The ids are copied when the object is built, and numbered
at the first use of ``distinct`` or ``inverse``; ``number_all`` does so for all features of a
batch, on several threads. Then the values are dropped.

Invariants, true from construction on:

    I1  The values of ``distinct`` differ, and their first positions in ``inverse`` ascend.
    I2  Every number of ``inverse`` is below D, and each of 0..D - 1 occurs.
    I3  ``offsets`` starts at 0, never decreases and ends at N; it is None if and only if each
        sample has exactly one id.
    I4  ``weights`` are finite, one for each entry of ``inverse``, or None.
    I5  The arrays belong to the object: no other code holds the memory or may write it.
    I6  Either ``pending`` is None or the two numbered arrays are. Two threads may number at a
        time; both come to the same arrays, and each reads what it holds itself.

Not taken: sorting, which loses the first-seen order that the reproducible mode needs; and one
table for all features, which would leave the cache and allow no threads.
"""

from cython cimport final, internal
from libc.math cimport isfinite
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcpy, memset
from numpy cimport PyArray_DATA, PyArray_DIM, PyArray_SIZE, PyArray_STRIDE, ndarray, npy_intp

from persia._core.base.arrays cimport (
    MAX_IDS, as_ids, as_vector, describe, frozen, is_vector, new_i64, new_u32, new_u64, to_ids,
    to_list,
)
from persia._core.base.threads cimport ThreadPool, persia_work_t
from persia._core.base.types cimport int32_t, int64_t, uint32_t, uint64_t, uint8_t
from persia._core.ids.signs cimport (
    Numbering, begin, distinct_of, finish, give_back, restart, take,
)

import numpy as np

from persia.errors import DataError, DataTypeError

ctypedef fused offset_t:
    int32_t
    int64_t
    uint32_t


cdef size_t copy_offsets(
    const offset_t *source, size_t n, uint64_t total, uint32_t *edges
) noexcept nogil:
    """Copy ``n`` >= 1 offsets; return n, or the first place that breaks I3 for ``total`` ids.

    Each offset is read once, so that what was checked is what is kept.
    """
    cdef size_t i
    cdef uint64_t here
    cdef uint64_t last = 0
    for i in range(n):
        # A negative offset becomes one beyond any total.
        here = <uint64_t><int64_t>source[i]
        if here < last or here > total or (i == 0 and here != 0):
            return i
        edges[i] = <uint32_t>here
        last = here
    return n if last == total else n - 1


cdef bint one_each(const uint32_t *edges, size_t num_samples) noexcept nogil:
    """Whether the edges are 0, 1, 2, ..."""
    cdef size_t i
    for i in range(num_samples + 1):
        if edges[i] != i:
            return False
    return True


cdef size_t renumber(
    const uint32_t *inverse, const uint32_t *edges, size_t num_samples, size_t limit, bint last,
    uint32_t *kept_inverse, uint32_t *kept_edges, uint32_t *new_numbers, uint32_t *old_numbers
) noexcept nogil:
    """Copy the first or last ``limit`` ids of each sample, numbered again.

    Returns how many differ. Needs every entry of ``new_numbers`` [D] to be the maximum.
    ``old_numbers`` [D] receives the old number of each new one. Numbers are given by first
    position again, which moves when an id's first position is cut and a later one stays.
    """
    cdef size_t sample, i, start, stop
    cdef size_t kept = 0
    cdef uint32_t count = 0
    cdef uint32_t old
    kept_edges[0] = 0
    for sample in range(num_samples):
        start, stop = edges[sample], edges[sample + 1]
        if stop - start > limit:
            if last:
                start = stop - limit
            else:
                stop = start + limit
        for i in range(start, stop):
            old = inverse[i]
            if new_numbers[old] == <uint32_t>0xFFFFFFFF:
                new_numbers[old] = count
                old_numbers[count] = old
                count += 1
            kept_inverse[kept] = new_numbers[old]
            kept += 1
        kept_edges[sample + 1] = <uint32_t>kept
    return count


cdef size_t misnumbered(const uint32_t *inverse, size_t n, size_t num_distinct) noexcept nogil:
    """Return the first position that breaks I1 or I2, n if they are true but for a number that
    never occurs, n + 1 if they are true."""
    cdef size_t i
    cdef uint32_t count = 0
    for i in range(n):
        if inverse[i] > count or inverse[i] >= num_distinct:
            return i
        count += inverse[i] == count
    return n + 1 if count == num_distinct else n


@final
cdef class FeatureBatch:
    """The ids of one feature in one batch: distinct ids, and where each occurs.

    Immutable: every array is read-only and owned, so it may be shared between threads.

    Args:
        name: Name of the feature.
        distinct: The distinct ids in first-seen order, u64 [D].
        inverse: Number of each id among the distinct ones, u32 [N].
        offsets: Where each sample's ids start in ``inverse``, u32 [B + 1]. ``None`` if each
            sample has exactly one id.
        weights: Weight of each id, f32 [N]. ``None`` if each counts once.

    Raises:
        DataTypeError: If an array has another dtype or more dimensions, or ``name`` is no str.
        DataError: If the arrays do not describe a batch.
    """

    def __init__(self, name, distinct, inverse, offsets=None, weights=None):
        if self.name is not None:
            raise TypeError(f"feature {self.name!r} is built; a FeatureBatch never changes")
        cdef str feature = checked_name(name)
        # Copied before they are checked: the sender's memory may change, ours may not.
        cdef ndarray values = as_ids(distinct, f"feature {feature!r}, distinct").copy()
        cdef ndarray numbers = as_vector(
            inverse, c"u", 4, f"feature {feature!r}, inverse"
        ).copy()
        cdef size_t num_distinct = PyArray_SIZE(values)
        cdef size_t n = PyArray_SIZE(numbers)
        cdef size_t place = misnumbered(
            <const uint32_t *>PyArray_DATA(numbers), n, num_distinct
        )
        if place < n:
            raise DataError(
                f"feature {feature!r}: inverse must number {num_distinct} distinct ids in "
                f"first-seen order, got {numbers[place]} at position {place}"
            )
        if place == n:
            raise DataError(
                f"feature {feature!r}: expected each distinct id in inverse, got "
                f"{num_distinct} distinct ids of which some never occur"
            )
        cdef size_t num_differing = count_distinct(values)
        if num_differing != num_distinct:
            raise DataError(
                f"feature {feature!r}: expected distinct ids that differ, got "
                f"{num_distinct} with {num_differing} values"
            )
        cdef object edges = None
        if offsets is not None:
            edges = own_offsets(
                feature, as_vector(offsets, c"u", 4, f"feature {feature!r}, offsets"), n
            )
        fill(self, feature, values, numbers, edges)
        self.weights = own_weights(self, weights)

    @property
    def distinct(self):
        """The distinct ids in first-seen order, u64 [D]."""
        self.number()
        return self.numbered_distinct

    @property
    def inverse(self):
        """Number of each id among the distinct ones, u32 [N]."""
        self.number()
        return self.numbered_inverse

    @property
    def num_distinct(self):
        self.number()
        return PyArray_SIZE(<ndarray>self.numbered_distinct)

    @property
    def num_empty(self):
        """The number of samples without ids."""
        cdef const uint32_t *edges = edges_of(self)
        cdef Py_ssize_t i, count = 0
        if edges != NULL:
            for i in range(self.batch_size):
                count += edges[i] == edges[i + 1]
        return count

    cdef int number(self) except -1:
        """Number the ids unless that is done."""
        cdef object ids = self.pending      # held: another thread may come first
        cdef ndarray inverse
        if ids is None:
            return 0
        inverse = new_u32(self.num_ids)
        self.take_numbers(
            distinct_of(
                <const uint64_t *>PyArray_DATA(<ndarray>ids), self.num_ids,
                <uint32_t *>PyArray_DATA(inverse)),
            inverse)
        return 0

    cdef void take_numbers(self, ndarray distinct, ndarray inverse) noexcept:
        """Take over arrays that satisfy the invariants."""
        self.numbered_distinct = frozen(distinct)
        self.numbered_inverse = frozen(inverse)
        self.pending = None

    @staticmethod
    def from_csr(name, values, offsets, weights=None):
        """Build from the ids of all samples, one after the other; neither array is kept.

        Sample i of ``offsets``, int32, int64 or uint32 [B + 1], has
        ``values[offsets[i]:offsets[i + 1]]``, u64 in any layout; ``weights`` are f32 [N].
        """
        cdef str feature = checked_name(name)
        cdef ndarray source = as_ids(values, f"feature {feature!r}, values")
        cdef ndarray edges
        what = f"feature {feature!r}, offsets"
        if is_vector(offsets, c"i", 8):
            edges = as_vector(offsets, c"i", 8, what)
        elif is_vector(offsets, c"i", 4):
            edges = as_vector(offsets, c"i", 4, what)
        elif is_vector(offsets, c"u", 4):
            edges = as_vector(offsets, c"u", 4, what)
        else:
            raise DataTypeError(
                f"{what}: expected a 1-D numpy array of int32, int64 or uint32, "
                f"got {describe(offsets)}"
            )
        owned = own_offsets(feature, edges, PyArray_SIZE(source))
        cdef FeatureBatch batch = build(
            feature, <const uint64_t *>PyArray_DATA(source), PyArray_SIZE(source), owned
        )
        batch.weights = own_weights(batch, weights)
        return batch

    @staticmethod
    def from_single(name, ids):
        """Build from exactly one id for each sample, u64 [B] in any layout."""
        cdef str feature = checked_name(name)
        cdef ndarray source = as_ids(ids, f"feature {feature!r}")
        return build(
            feature, <const uint64_t *>PyArray_DATA(source), PyArray_SIZE(source), None
        )

    @staticmethod
    def from_rows(name, ids, rows, Py_ssize_t batch_size):
        """Build a list of batches of ``batch_size`` rows, the last of what is left.

        ``ids``, u64 [N], has one of each row; ``rows``, i64, are those of the first batch, then
        those of the next one. The caller must not write to either meanwhile.
        """
        cdef str feature = checked_name(name)
        if batch_size < 1:
            raise DataError(f"batch_size: expected at least 1 sample, got {batch_size}")
        return build_batches(
            feature, as_ids(ids, f"feature {feature!r}"),
            as_vector(rows, c"i", 8, f"feature {feature!r}, rows"), batch_size)

    @staticmethod
    def from_list(name, data, weights=None):
        """Build from a list or tuple with one array for each sample, of any layout.

        ``from_csr`` costs less where the ids are in one piece already.
        """
        cdef str feature = checked_name(name)
        cdef FeatureBatch batch
        check_list(f"feature {feature!r}", data)
        cdef Gathered gathered
        gathered.ids = NULL
        gathered.count = 0
        gathered.room = 0
        try:
            edges = gather(feature, tuple(data), &gathered)
            batch = build(feature, gathered.ids, gathered.count, edges)
        finally:
            free(gathered.ids)
        if weights is not None:
            check_list(f"feature {feature!r}, weights", weights)
            batch.weights = own_weights(batch, joined_weights(batch, weights))
        return batch

    @staticmethod
    def from_parts(name, parts):
        """Build from what ``parts`` returned, on the other side of a wire."""
        if not 2 <= len(parts) <= 4:
            raise DataError(f"feature {name!r}: expected 2 to 4 parts, got {len(parts)}")
        return FeatureBatch(name, *parts)

    def parts(self):
        """Return the arrays to send: distinct, inverse, offsets if a sample has another number
        of ids than one, and weights if there are any, then always behind offsets."""
        if self.weights is not None:
            return self.distinct, self.inverse, offsets_of(self), self.weights
        if self.offsets is None:
            return self.distinct, self.inverse
        return self.distinct, self.inverse, self.offsets

    def lengths(self):
        """Return the number of ids of each sample, i64 [B]."""
        cdef ndarray lengths = new_i64(self.batch_size)
        cdef int64_t *lengths_data = <int64_t *>PyArray_DATA(lengths)
        cdef const uint32_t *edges = edges_of(self)
        cdef Py_ssize_t i
        for i in range(self.batch_size):
            lengths_data[i] = 1 if edges == NULL else <int64_t>edges[i + 1] - edges[i]
        return lengths

    def truncated(self, limit, bint last=False):
        """Return a batch with the first or last ``limit`` ids of each sample, in their order.

        Distinct ids without an occurrence left are left out, and first-seen order is that of
        what remains. Returns this object if there is nothing to cut.
        """
        if limit < 0:
            raise DataError(
                f"feature {self.name!r}: limit must be at least 0, got {limit}"
            )
        cdef size_t most = min(limit, MAX_IDS)
        cdef const uint32_t *edges = edges_of(self)
        cdef uint64_t num_kept = 0
        cdef Py_ssize_t i
        if edges == NULL:
            if most >= 1 or self.batch_size == 0:
                return self
            return without_ids(self)
        for i in range(self.batch_size):
            num_kept += min(<size_t>(edges[i + 1] - edges[i]), most)
        if num_kept == <uint64_t>self.num_ids:
            return self
        cdef size_t num_distinct = self.num_distinct
        cdef size_t num_samples = self.batch_size
        cdef ndarray inverse = new_u32(num_kept)
        cdef ndarray offsets = new_u32(num_samples + 1)
        cdef const uint32_t *old = <const uint32_t *>PyArray_DATA(<ndarray>self.inverse)
        cdef uint32_t *new_inverse = <uint32_t *>PyArray_DATA(inverse)
        cdef uint32_t *new_edges = <uint32_t *>PyArray_DATA(offsets)
        cdef const uint64_t *ids = <const uint64_t *>PyArray_DATA(<ndarray>self.distinct)
        cdef uint64_t *new_values
        cdef ndarray distinct
        cdef size_t count, number
        # One block for both directions of the numbering.
        cdef uint32_t *numbers = <uint32_t *>malloc(2 * num_distinct * sizeof(uint32_t))
        if numbers == NULL:
            raise MemoryError(f"feature {self.name!r}: cannot number {num_distinct} ids again")
        try:
            with nogil:
                memset(numbers, 0xFF, num_distinct * sizeof(uint32_t))
                count = renumber(
                    old, edges, num_samples, most, last,
                    new_inverse, new_edges, numbers, numbers + num_distinct
                )
            distinct = new_u64(count)
            new_values = <uint64_t *>PyArray_DATA(distinct)
            for number in range(count):
                new_values[number] = ids[numbers[num_distinct + number]]
        finally:
            free(numbers)
        cdef FeatureBatch batch = FeatureBatch.__new__(FeatureBatch)
        single = one_each(new_edges, num_samples)
        fill(batch, self.name, distinct, inverse, None if single else offsets)
        if self.weights is not None:
            batch.weights = kept_weights(
                self.weights, edges, new_edges, num_samples, last
            )
        return batch

    def __reduce__(self):
        """Pickle and copy through the checks: what Cython would generate gives writable arrays
        and takes any state, and numbers out of range would write into foreign memory."""
        return FeatureBatch, (
            self.name, self.distinct, self.inverse, self.offsets, self.weights
        )

    def __repr__(self):
        return (
            f"FeatureBatch({self.name!r}: {self.batch_size} samples, {self.num_ids} ids, "
            f"{self.num_distinct} distinct)"
        )


# Any u64 is an id, 0 and 2**64 - 1 included. There is no limit of 65,535 on samples or ids;
# positions are u32, which ends at 2**32 - 2 ids of one feature in one batch.
cdef struct Gathered:
    uint64_t *ids           # from realloc; the caller frees it
    size_t count
    size_t room


cdef str checked_name(object name):
    if not isinstance(name, str):
        raise DataTypeError(f"name of a feature: expected a str, got {describe(name)}")
    return str(name)


cdef const uint32_t *edges_of(FeatureBatch batch) noexcept:
    """Return the offsets, or NULL if each sample has exactly one id."""
    if batch.offsets is None:
        return NULL
    return <const uint32_t *>PyArray_DATA(<ndarray>batch.offsets)


cdef ndarray offsets_of(FeatureBatch batch):
    """Return the offsets, made up if each sample has exactly one id."""
    if batch.offsets is None:
        return frozen(np.arange(batch.batch_size + 1, dtype=np.uint32))
    return batch.offsets


cdef FeatureBatch without_ids(FeatureBatch batch):
    cdef ndarray edges = new_u32(batch.batch_size + 1)
    edges.fill(0)
    cdef FeatureBatch empty = build(batch.name, NULL, 0, edges)
    if batch.weights is not None:
        empty.weights = frozen(batch.weights[:0].copy())
    return empty


cdef ndarray kept_weights(
    ndarray weights, const uint32_t *edges, const uint32_t *kept_edges, size_t num_samples,
    bint last
):
    """Return the first or last weights of each sample, as many as ``kept_edges`` says."""
    cdef ndarray kept = np.empty(kept_edges[num_samples], np.float32)
    cdef const float *source = <const float *>PyArray_DATA(weights)
    cdef float *target = <float *>PyArray_DATA(kept)
    cdef size_t sample, count
    for sample in range(num_samples):
        count = kept_edges[sample + 1] - kept_edges[sample]
        memcpy(
            target + kept_edges[sample],
            source + (edges[sample + 1] - count if last else edges[sample]),
            count * sizeof(float),
        )
    return frozen(kept)


cdef object own_weights(FeatureBatch batch, object weights):
    """Return a checked copy of one weight for each id, None for None."""
    if weights is None:
        return None
    what = f"feature {batch.name!r}, weights"
    # Copied before they are checked, like all else.
    cdef ndarray owned = as_vector(weights, c"f", 4, what).copy()
    if PyArray_SIZE(owned) != batch.num_ids:
        raise DataError(
            f"{what}: expected {batch.num_ids}, one for each id, got {PyArray_SIZE(owned)}"
        )
    cdef const float *values = <const float *>PyArray_DATA(owned)
    cdef Py_ssize_t i
    for i in range(batch.num_ids):
        if not isfinite(values[i]):
            sample = int(np.searchsorted(offsets_of(batch), i, side="right")) - 1
            raise DataError(
                f"{what}: expected finite values, got {values[i]} in sample {sample}"
            )
    return frozen(owned)


cdef int check_list(str what, object data) except -1:
    if not isinstance(data, (list, tuple)):
        raise DataTypeError(
            f"{what}: expected a list with one array for each sample, "
            f"got {describe(data)}{to_list(data)}"
        )
    return 0


cdef ndarray joined_weights(FeatureBatch batch, object weights):
    """Return the weights of all samples behind each other; each has as many as ids."""
    what = f"feature {batch.name!r}, weights"
    if len(weights) != batch.batch_size:
        raise DataError(f"{what}: expected {batch.batch_size} samples, got {len(weights)}")
    cdef const uint32_t *edges = edges_of(batch)
    cdef Py_ssize_t sample, num_ids
    for sample, item in enumerate(weights):
        if not is_vector(item, c"f", 4):
            is_wide = type(item) is np.ndarray and item.ndim == 1
            hint = "; .astype(np.float32) makes one of it" if is_wide else ""
            raise DataTypeError(
                f"{what}, sample {sample}: expected a 1-D numpy array of float32, "
                f"got {describe(item)}{hint}"
            )
        num_ids = 1 if edges == NULL else <Py_ssize_t>edges[sample + 1] - edges[sample]
        if PyArray_DIM(<ndarray>item, 0) != num_ids:
            raise DataError(
                f"{what}, sample {sample}: expected {num_ids}, one for each id, got {item.size}"
            )
    return np.concatenate(weights) if weights else np.empty(0, np.float32)


cdef size_t count_distinct(ndarray values) except? 0:
    cdef size_t n = PyArray_SIZE(values)
    cdef const uint64_t *values_data = <const uint64_t *>PyArray_DATA(values)
    cdef ndarray numbers = new_u32(n)
    cdef uint32_t *numbers_data = <uint32_t *>PyArray_DATA(numbers)
    return PyArray_SIZE(distinct_of(values_data, n, numbers_data))


cdef object own_offsets(str feature, ndarray offsets, size_t num_ids):
    """Return checked offsets as u32, or None if each sample has exactly one id.

    ``offsets`` comes from ``as_vector`` with one of the three dtypes of ``offset_t``.
    """
    cdef size_t n = PyArray_SIZE(offsets)
    cdef ndarray edges = new_u32(n)
    cdef uint32_t *edges_data = <uint32_t *>PyArray_DATA(edges)
    cdef const void *source = PyArray_DATA(offsets)
    cdef bint is_wide = offsets.itemsize == 8
    cdef bint is_signed = is_wide or is_vector(offsets, c"i", 4)
    cdef size_t place
    cdef bint single = False
    if n == 0:
        raise DataError(f"feature {feature!r}: offsets must have at least one item, got none")
    with nogil:
        if is_wide:
            place = copy_offsets[int64_t](<const int64_t *>source, n, num_ids, edges_data)
        elif is_signed:
            place = copy_offsets[int32_t](<const int32_t *>source, n, num_ids, edges_data)
        else:
            place = copy_offsets[uint32_t](<const uint32_t *>source, n, num_ids, edges_data)
        if place == n:
            single = one_each(edges_data, n - 1)
    if place < n:
        raise DataError(
            f"feature {feature!r}: expected offsets from 0 that never decrease, up to "
            f"{num_ids}, the ids given, got {offsets[place]} at position {place}"
        )
    return None if single else edges


cdef object gather(str feature, tuple data, Gathered *gathered):
    """Copy the ids of all samples behind each other; return offsets as ``own_offsets`` does.

    The copy is what makes it safe to release the GIL afterwards: the arrays are the user's.
    """
    cdef Py_ssize_t num_samples = len(data)
    cdef ndarray edges = new_u32(num_samples + 1)
    cdef uint32_t *edges_data = <uint32_t *>PyArray_DATA(edges)
    cdef Py_ssize_t sample
    cdef object item
    cdef ndarray ids
    cdef size_t length, i
    cdef npy_intp stride
    cdef const uint8_t *source
    cdef uint64_t *target
    grow(feature, gathered, 4 * num_samples + 16)
    edges_data[0] = 0
    for sample in range(num_samples):
        item = data[sample]
        if not is_vector(item, c"u", 8):
            raise DataTypeError(
                f"feature {feature!r}, sample {sample}: expected a 1-D numpy array of uint64, "
                f"got {describe(item)}{to_ids(item)}"
            )
        ids = <ndarray>item
        length = PyArray_DIM(ids, 0)
        if length > gathered.room - gathered.count:
            grow(feature, gathered, gathered.count + length)
        stride = PyArray_STRIDE(ids, 0)
        source = <const uint8_t *>PyArray_DATA(ids)
        target = gathered.ids + gathered.count
        if stride == sizeof(uint64_t) and length > 16:
            memcpy(target, source, length * sizeof(uint64_t))
        else:
            # By memcpy of one id, since a strided array may be unaligned.
            for i in range(length):
                memcpy(target + i, source + <npy_intp>i * stride, sizeof(uint64_t))
        gathered.count += length
        edges_data[sample + 1] = <uint32_t>gathered.count
    if one_each(edges_data, num_samples):
        return None
    return edges


cdef int grow(str feature, Gathered *gathered, size_t needed) except -1:
    """Make room for ``needed`` ids, and half as many again."""
    if needed > MAX_IDS:
        raise DataError(f"feature {feature!r}: expected at most {MAX_IDS} ids, got {needed}")
    cdef size_t room = min(needed + needed // 2, <size_t>MAX_IDS)
    cdef void *ids = realloc(gathered.ids, room * sizeof(uint64_t))
    if ids == NULL:
        raise MemoryError(f"feature {feature!r}: no memory for {room} ids")
    gathered.ids = <uint64_t *>ids
    gathered.room = room
    return 0


cdef FeatureBatch build(str feature, const uint64_t *ids, size_t n, object offsets):
    """Copy ``n`` ids; ``offsets`` as ``own_offsets`` returns them, not used again."""
    cdef FeatureBatch batch = FeatureBatch.__new__(FeatureBatch)
    cdef ndarray pending = new_u64(n)
    if n:  # no ids may have no address, which memcpy must not be given
        memcpy(PyArray_DATA(pending), ids, n * sizeof(uint64_t))
    batch.pending = pending
    set_sizes(batch, feature, n, offsets)
    return batch


cdef size_t pick(
    const uint64_t *ids, size_t num_ids, const int64_t *rows, size_t n,
    size_t batch_size, uint64_t **batches
) noexcept nogil:
    """Copy the ids of ``n`` rows to their batches; return n, or the place of the first row
    that does not exist."""
    cdef size_t place, end, row
    cdef size_t first = 0
    cdef uint64_t *batch
    while first < n:
        batch = batches[first // batch_size]
        end = min(first + batch_size, n)
        for place in range(first, end):
            row = <size_t>rows[place]       # a negative one lies beyond the end
            if row >= num_ids:
                return place
            batch[place - first] = ids[row]
        first = end
    return n


cdef list build_batches(str feature, ndarray ids, ndarray rows, size_t batch_size):
    """Copy the ids of the rows of all batches, in one go without the GIL."""
    cdef size_t n = PyArray_SIZE(rows)
    cdef size_t num_batches = (n + batch_size - 1) // batch_size
    cdef size_t number, place
    cdef FeatureBatch batch
    cdef list batches = []
    cdef uint64_t **pending = <uint64_t **>malloc((num_batches + 1) * sizeof(uint64_t *))
    if pending == NULL:
        raise MemoryError(f"feature {feature!r}: no memory for {num_batches} batches")
    try:
        for number in range(num_batches):
            batch = FeatureBatch.__new__(FeatureBatch)
            set_sizes(batch, feature, min(batch_size, n - number * batch_size), None)
            batch.pending = new_u64(batch.num_ids)
            pending[number] = <uint64_t *>PyArray_DATA(<ndarray>batch.pending)
            batches.append(batch)
        with nogil:
            place = pick(
                <const uint64_t *>PyArray_DATA(ids), PyArray_SIZE(ids),
                <const int64_t *>PyArray_DATA(rows), n, batch_size, pending)
    finally:
        free(pending)
    if place < n:
        raise DataError(
            f"feature {feature!r}: expected rows of {ids.size} ids, got {rows[place]} at "
            f"position {place}"
        )
    return batches


cdef void fill(
    FeatureBatch batch, str feature, ndarray distinct, ndarray inverse, object offsets
) noexcept:
    """Take over arrays that satisfy the invariants."""
    batch.take_numbers(distinct, inverse)
    set_sizes(batch, feature, PyArray_SIZE(inverse), offsets)


cdef void set_sizes(FeatureBatch batch, str feature, size_t n, object offsets) noexcept:
    batch.name = feature
    batch.offsets = None if offsets is None else frozen(<ndarray>offsets)
    batch.num_ids = n
    batch.batch_size = n if offsets is None else PyArray_SIZE(<ndarray>offsets) - 1


# --- all features of a batch ------------------------------------------------------------------

cdef struct Feature:
    const uint64_t *ids
    size_t num_ids
    uint32_t *inverse
    uint64_t *distinct      # room for all ids
    size_t num_distinct


@internal
@final
cdef class Features:
    """Features that are numbered together."""

    cdef Feature *all
    cdef Numbering *blocks      # by worker
    cdef uint32_t num_blocks

    def __cinit__(self, size_t num_features, uint32_t num_workers):
        self.num_blocks = num_workers
        self.all = <Feature *>malloc(num_features * sizeof(Feature))
        self.blocks = <Numbering *>calloc(num_workers, sizeof(Numbering))
        if self.all == NULL or self.blocks == NULL:
            raise MemoryError(f"no memory to number {num_features} features")

    def __dealloc__(self):
        cdef uint32_t i
        if self.blocks != NULL:
            for i in range(self.num_blocks):
                give_back(&self.blocks[i])
        free(self.blocks)
        free(self.all)


cdef void number_part(Features features, uint32_t part, uint32_t worker) noexcept nogil:
    cdef Feature *one = &features.all[part]
    cdef Numbering *block = &features.blocks[worker]
    restart(block, one.num_ids)
    take(block, one.ids, one.num_ids)
    one.num_distinct = finish(block, one.inverse)
    memcpy(one.distinct, block.values, one.num_distinct * sizeof(uint64_t))


def number_all(batches, ThreadPool threads not None):
    """Number the ids of those that are not numbered yet, some by each thread."""
    cdef FeatureBatch batch
    cdef Features features
    cdef Feature *one
    cdef ndarray ids, inverse, distinct
    cdef uint32_t worker
    cdef list pending = []
    for batch in batches:
        if batch.pending is not None:
            pending.append((batch, batch.pending))  # held: another thread may come first
    if not pending:
        return
    # Threads take parts in this order: the longest must not be begun last.
    pending.sort(key=_num_ids_of, reverse=True)      # the last parts are small ones
    features = Features(len(pending), threads.num_threads)
    for worker in range(threads.num_threads):
        begin(&features.blocks[worker], _num_ids_of(pending[0]))
    arrays = []
    for place, (batch, ids) in enumerate(pending):
        inverse, distinct = new_u32(batch.num_ids), new_u64(batch.num_ids)
        arrays.append((batch, distinct, inverse))
        one = &features.all[<size_t>place]
        one.ids = <const uint64_t *>PyArray_DATA(ids)
        one.num_ids = batch.num_ids
        one.inverse = <uint32_t *>PyArray_DATA(inverse)
        one.distinct = <uint64_t *>PyArray_DATA(distinct)
    threads.work(<persia_work_t>number_part, <void *>features, <uint32_t>len(pending))
    for place, (batch, distinct, inverse) in enumerate(arrays):
        # In place, so that the memory beyond the distinct ids goes back.
        distinct.resize(<object>features.all[<size_t>place].num_distinct, refcheck=False)
        batch.take_numbers(distinct, inverse)


def _num_ids_of(tuple item):
    return (<FeatureBatch>item[0]).num_ids
