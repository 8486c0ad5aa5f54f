"""Embedding rows by sign for serving: many readers, one writer, no state of an optimizer.

The structure and its invariants are in ``row_table.h``; here are the checks of arguments.
"""

import numpy as np

cimport cython

from libc.stdint cimport int64_t
from libc.stdlib cimport free, malloc

from persia._core.base.arrays cimport MAX_IDS, as_ids, check_length, describe
from persia._core.base.cpu cimport isa_level
from persia._core.base.halves cimport half_kernels, persia_half_t
from persia._core.base.threads cimport ThreadPool
from persia._core.base.types cimport MAX_DIM, uint8_t, uint16_t, uint32_t, uint64_t

from persia._core.base import halves
from persia.errors import ConfigError, DataError, DataTypeError

cdef extern from "row_table.h" nogil:
    enum:
        PERSIA_CHUNK_ROWS

    ctypedef struct pthread_mutex_t:
        pass
    int pthread_mutex_lock(pthread_mutex_t *mutex) noexcept
    int pthread_mutex_unlock(pthread_mutex_t *mutex) noexcept

    ctypedef struct persia_rows_t:
        uint32_t num_groups
        uint64_t num_bytes
        pthread_mutex_t writer
    ctypedef struct persia_values_t:
        int dtype
        const persia_half_t *half
        int level

    persia_rows_t *persia_rows_new(const uint32_t *strides, uint32_t num_groups) noexcept
    void persia_rows_free(persia_rows_t *table) noexcept
    uint32_t persia_num_chunks(persia_rows_t *table) noexcept
    uint32_t persia_chunk_table(persia_rows_t *table, uint32_t chunk) noexcept
    int64_t persia_group_rows(persia_rows_t *table, uint32_t number) noexcept
    int persia_fit_index(persia_rows_t *table, uint64_t num_entries) noexcept
    int persia_rows_write(
        persia_rows_t *table, const persia_values_t *values, uint32_t number,
        const uint64_t *signs, const float *rows, size_t n, size_t dim) noexcept
    int64_t persia_rows_delete(persia_rows_t *table, const uint64_t *signs, size_t n) noexcept
    uint64_t persia_rows_lookup(
        persia_rows_t *table, const persia_values_t *values, uint32_t number,
        const uint64_t *signs, float *rows, uint8_t *states, size_t first, size_t end,
        size_t dim) noexcept
    uint32_t persia_rows_scan(
        persia_rows_t *table, const persia_values_t *values, uint32_t start, uint32_t end,
        uint64_t *signs, float *rows, size_t dim) noexcept
    int persia_rows_merge(
        persia_rows_t *table, persia_rows_t *other, uint32_t start, uint32_t end,
        int keep_deleted) noexcept
    void persia_pack_int8(
        const float *row, uint16_t *head, uint8_t *steps, size_t dim) noexcept

DTYPES = (*halves.DTYPES, "int8")

cdef enum:
    INT8 = 3
    MOST_TABLES = 65535
    # A hand-off to another thread is worth it from here on.
    PART_SIGNS = 2048

ctypedef struct Lookup:
    persia_rows_t *table
    const persia_values_t *values
    uint32_t number
    const uint64_t *signs
    float *rows
    uint8_t *states
    size_t count
    size_t dim
    uint64_t missing


cdef void lookup_part(void *context, uint32_t part, uint32_t worker) noexcept nogil:
    cdef Lookup *lookup = <Lookup *> context
    cdef size_t first = <size_t> part * PART_SIGNS
    cdef size_t end = min(first + PART_SIGNS, lookup.count)
    cdef uint64_t missing = persia_rows_lookup(
        lookup.table, lookup.values, lookup.number, lookup.signs, lookup.rows, lookup.states,
        first, end, lookup.dim)
    add_to(&lookup.missing, missing)


cdef extern from *:
    """
    static inline void persia_add_to(uint64_t *sum, uint64_t value)
    {
        __atomic_fetch_add(sum, value, __ATOMIC_RELAXED);
    }
    """
    void add_to "persia_add_to"(uint64_t *sum, uint64_t value) noexcept nogil


cdef object wrong_rows(str name, object value, str what):
    return DataTypeError(f"{name}: expected {what}, got {describe(value)}")


cdef const float[:, ::1] as_rows(object value):
    """The rows of a caller, of any layout. DataTypeError: not 2-D of f32."""
    if (
        not isinstance(value, np.ndarray) or isinstance(value, np.ma.MaskedArray)
        or value.ndim != 2 or value.dtype != np.float32
    ):
        raise wrong_rows("rows", value, "a 2-D numpy array of float32")
    return np.ascontiguousarray(value)


@cython.final
cdef class RowTable:
    """See the stub for the contract of each method."""

    cdef persia_rows_t *rows
    cdef readonly tuple dims
    cdef readonly str dtype
    cdef int dtype_number
    cdef ThreadPool threads

    def __cinit__(self, dims, dtype="float32", *, num_threads=1):
        cdef uint32_t *strides
        self.dims = tuple(int(dim) for dim in dims)
        if dtype not in DTYPES:
            raise ConfigError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
        if not 1 <= len(self.dims) <= MOST_TABLES:
            raise ConfigError(f"dims: expected 1..{MOST_TABLES} tables, got {len(self.dims)}")
        for dim in self.dims:
            if not 1 <= dim <= MAX_DIM:
                raise ConfigError(f"dims: expected each in 1..{MAX_DIM}, got {dim}")
        self.dtype = dtype
        self.dtype_number = DTYPES.index(dtype)
        self.threads = ThreadPool(num_threads)
        strides = <uint32_t *> malloc((len(self.dims) + 1) * sizeof(uint32_t))
        if strides == NULL:
            raise MemoryError(f"{len(self.dims)} tables")
        for i, dim in enumerate(self.dims):
            strides[i] = self.stride_of(dim)
        strides[len(self.dims)] = sizeof(uint64_t)      # tombstones
        self.rows = persia_rows_new(strides, <uint32_t> len(self.dims) + 1)
        free(strides)
        if self.rows == NULL:
            raise MemoryError(f"{len(self.dims)} tables")

    def __dealloc__(self):
        if self.rows != NULL:
            persia_rows_free(self.rows)

    cdef uint32_t stride_of(self, uint32_t dim):
        """Bytes of a row, its sign first; a multiple of 8."""
        cdef uint32_t num_bytes = 4 * dim
        if self.dtype_number == INT8:
            num_bytes = 4 + dim
        elif self.dtype_number:
            num_bytes = 2 * dim
        return 8 + (num_bytes + 7) // 8 * 8

    cdef persia_values_t values(self):
        cdef persia_values_t values
        values.dtype = self.dtype_number
        values.half = NULL
        if 0 < self.dtype_number < INT8:
            values.half = half_kernels(self.dtype_number)
        values.level = isa_level()
        return values

    cdef uint32_t number_of(self, object table) except? 0xFFFFFFFF:
        if not 0 <= table < len(self.dims):
            raise DataError(f"table: expected one of 0..{len(self.dims) - 1}, got {table}")
        return table

    cdef int check_dim(self, str name, uint32_t table, Py_ssize_t dim) except -1:
        if dim != self.dims[table]:
            raise DataError(
                f"{name}: expected dim {self.dims[table]} of table {table}, got {dim}")
        return 0

    @property
    def num_threads(self):
        return self.threads.num_threads

    def __len__(self):
        cdef int64_t total = 0
        cdef uint32_t i
        for i in range(self.rows.num_groups - 1):
            total += persia_group_rows(self.rows, i)
        return total

    @property
    def num_deleted(self):
        return persia_group_rows(self.rows, self.rows.num_groups - 1)

    @property
    def num_bytes(self):
        return self.rows.num_bytes

    def reserve(self, num_rows):
        cdef uint64_t count
        cdef int status
        if not 0 <= num_rows <= MAX_IDS:
            raise DataError(f"num_rows: expected 0..{MAX_IDS}, got {num_rows}")
        count = num_rows
        with nogil:
            pthread_mutex_lock(&self.rows.writer)
            status = persia_fit_index(self.rows, count)
            pthread_mutex_unlock(&self.rows.writer)
        if status < 0:
            raise MemoryError(f"an index for {num_rows} rows")

    def write(self, table, signs, rows):
        cdef uint32_t number = self.number_of(table)
        cdef const uint64_t[::1] ids = as_ids(signs, "signs")
        cdef const float[:, ::1] matrix = as_rows(rows)
        self.check_dim("rows", number, matrix.shape[1])
        check_length("rows", ids.shape[0], matrix.shape[0])
        if ids.shape[0]:
            self.put(number, &ids[0], &matrix[0, 0], ids.shape[0], matrix.shape[1])

    cdef int put(
        self, uint32_t table, const uint64_t *signs, const float *rows, size_t count, size_t dim
    ) except -1:
        cdef persia_values_t values = self.values()
        cdef int status
        with nogil:
            pthread_mutex_lock(&self.rows.writer)
            status = persia_rows_write(self.rows, &values, table, signs, rows, count, dim)
            pthread_mutex_unlock(&self.rows.writer)
        if status < 0:
            raise MemoryError(f"{count} rows beside the {len(self)} that are held")
        return 0

    def delete(self, signs):
        cdef const uint64_t[::1] ids = as_ids(signs, "signs")
        cdef int64_t deleted = 0
        if ids.shape[0]:
            with nogil:
                pthread_mutex_lock(&self.rows.writer)
                deleted = persia_rows_delete(self.rows, &ids[0], ids.shape[0])
                pthread_mutex_unlock(&self.rows.writer)
        if deleted < 0:
            raise MemoryError(f"notes on {ids.shape[0]} deleted rows")
        return deleted

    def mark_deleted(self, signs):
        cdef const uint64_t[::1] ids = as_ids(signs, "signs")
        if ids.shape[0]:
            self.put(self.rows.num_groups - 1, &ids[0], NULL, ids.shape[0], 0)

    def lookup(self, table, signs, rows_out, state_out=None):
        cdef Lookup lookup
        cdef persia_values_t values = self.values()
        cdef const uint64_t[::1] ids = as_ids(signs, "signs")
        cdef float[:, ::1] matrix
        cdef uint8_t[::1] states
        lookup.number = self.number_of(table)
        try:
            matrix = rows_out
            states = state_out
        except (TypeError, ValueError, BufferError):
            raise DataTypeError(
                "rows_out and state_out: expected writable C-contiguous numpy arrays of "
                "float32 [n, dim] and uint8 [n], got "
                f"{describe(rows_out)} and {describe(state_out)}"
            ) from None
        if matrix is None:
            raise wrong_rows("rows_out", rows_out, "a 2-D numpy array of float32")
        self.check_dim("rows_out", lookup.number, matrix.shape[1])
        check_length("rows_out", ids.shape[0], matrix.shape[0])
        if states is not None:
            check_length("state_out", ids.shape[0], states.shape[0])
        if ids.shape[0] == 0:
            return 0
        lookup.table = self.rows
        lookup.values = &values
        lookup.signs = &ids[0]
        lookup.rows = &matrix[0, 0]
        lookup.states = NULL if states is None else &states[0]
        lookup.count = ids.shape[0]
        lookup.dim = matrix.shape[1]
        lookup.missing = 0
        self.threads.work(
            lookup_part, &lookup, <uint32_t> ((lookup.count + PART_SIGNS - 1) // PART_SIGNS))
        return lookup.missing

    cdef tuple scan(self, uint32_t table, uint32_t chunk, bint with_rows):
        """The signs of a chunk, and their values or None; None: it is not the table's."""
        cdef persia_values_t values = self.values()
        cdef uint32_t start = chunk * PERSIA_CHUNK_ROWS
        cdef uint32_t count
        cdef uint64_t[::1] ids
        cdef float[:, ::1] matrix
        cdef float *out = NULL
        cdef size_t dim = 0
        if persia_chunk_table(self.rows, chunk) != table:
            return None
        signs = np.empty(PERSIA_CHUNK_ROWS, np.uint64)
        ids = signs
        rows = None
        if with_rows:
            dim = self.dims[table]
            rows = np.empty((PERSIA_CHUNK_ROWS, dim), np.float32)
            matrix = rows
            out = &matrix[0, 0]
        with nogil:
            count = persia_rows_scan(
                self.rows, &values, start, start + PERSIA_CHUNK_ROWS, &ids[0], out, dim)
        return signs[:count], rows[:count] if with_rows else None

    cdef object signs_of(self, uint32_t table):
        parts = [np.empty(0, np.uint64)]
        for chunk in range(persia_num_chunks(self.rows)):
            found = self.scan(table, chunk, False)
            if found is not None:
                parts.append(found[0].copy())
        return np.concatenate(parts)

    def signs(self, table):
        return self.signs_of(self.number_of(table))

    def deleted_signs(self):
        return self.signs_of(self.rows.num_groups - 1)

    def blocks(self, table, max_rows=1 << 16):
        cdef uint32_t number = self.number_of(table)
        if max_rows < 1:
            raise DataError(f"max_rows: expected at least 1, got {max_rows}")
        return self._blocks(number, max_rows)

    def _blocks(self, number, max_rows):
        signs, rows, count = [], [], 0
        for chunk in range(persia_num_chunks(self.rows)):
            found = self.scan(number, chunk, True)
            if found is None:
                continue
            for first in range(0, len(found[0]), max_rows):
                some = found[0][first:first + max_rows]
                if count + len(some) > max_rows:
                    yield np.concatenate(signs), np.concatenate(rows)
                    signs, rows, count = [], [], 0
                signs.append(some)
                rows.append(found[1][first:first + max_rows])
                count += len(some)
        if count:
            yield np.concatenate(signs), np.concatenate(rows)

    def merge(self, RowTable other not None, start=0, max_rows=1 << 16, *, keep_deleted=False):
        cdef uint64_t most = <uint64_t> persia_num_chunks(other.rows) * PERSIA_CHUNK_ROWS
        cdef uint64_t place, end, to
        cdef int keep = bool(keep_deleted)
        cdef int status = 0
        if other is self or (other.dims, other.dtype) != (self.dims, self.dtype):
            raise DataError(
                f"merge: expected another table of dims {self.dims} and {self.dtype}, got dims "
                f"{other.dims} and {other.dtype}")
        if start < 0 or max_rows < 1:
            raise DataError(
                f"merge: expected start from 0 and max_rows from 1, got {start} and {max_rows}")
        place = min(start, most)
        end = min(place + <uint64_t> max_rows, most)
        while place < end and status == 0:
            to = min(end, (place // PERSIA_CHUNK_ROWS + 1) * PERSIA_CHUNK_ROWS)
            with nogil:
                pthread_mutex_lock(&self.rows.writer)
                status = persia_rows_merge(
                    self.rows, other.rows, <uint32_t> place, <uint32_t> to, keep)
                pthread_mutex_unlock(&self.rows.writer)
            place = to
        if status < 0:
            raise MemoryError(f"rows to merge beside the {len(self)} that are held")
        return 0 if place == most else place


def pack_int8(rows):
    cdef const float[:, ::1] matrix = as_rows(rows)
    cdef Py_ssize_t i
    heads = np.empty((matrix.shape[0], 2), np.uint16)
    steps = np.empty((matrix.shape[0], matrix.shape[1]), np.uint8)
    cdef uint16_t[:, ::1] head_view = heads
    cdef uint8_t[:, ::1] step_view = steps
    if matrix.shape[1]:
        with nogil:
            for i in range(matrix.shape[0]):
                persia_pack_int8(
                    &matrix[i, 0], &head_view[i, 0], &step_view[i, 0], matrix.shape[1])
    return heads[:, 0], heads[:, 1], steps
