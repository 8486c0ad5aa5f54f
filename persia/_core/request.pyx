"""A request and its scratch, split by shard and served shard by shard."""

cimport cython

from libc.stdlib cimport free, malloc
from libc.string cimport memset

from persia._core.hashing cimport mix64, shard_of
from persia._core.row_format cimport scratch_size
from persia._core.shard cimport PyThread_type_lock

cdef extern from "pythread.h" nogil:
    int PyThread_acquire_lock(PyThread_type_lock lock, int wait) noexcept
    void PyThread_release_lock(PyThread_type_lock lock) noexcept


@cython.final
cdef class Batch:
    """One request: its arguments, and its signs in shard order. Reused."""

    def __cinit__(self):
        self.num_signs = 0
        self.capacity = 0
        self.sorted = NULL
        self.order = NULL
        self.starts = NULL

    def __dealloc__(self):
        free(self.sorted)
        free(self.order)
        free(self.starts)

    def serve(self, uint32_t first, uint32_t end):
        """Serve shards first..end, each under its lock."""
        cdef Tally mine
        cdef uint32_t i, floats = scratch_size(&self.format)
        cdef Shard *shard
        memset(&mine, 0, sizeof(Tally))
        if floats:
            mine.scratch = <float *> malloc(floats * sizeof(float))
            if mine.scratch == NULL:
                raise MemoryError(f"scratch of {floats} floats for rows of 2-byte values")
        with nogil:
            for i in range(first, end):
                if self.starts[i] == self.starts[i + 1]:
                    continue
                shard = &self.shards[i]
                PyThread_acquire_lock(shard.lock, 1)
                self.serve_shard(shard, self, self.starts[i], self.starts[i + 1], &mine)
                PyThread_release_lock(shard.lock)
                if mine.status != STATUS_OK:
                    break
        free(mine.scratch)
        add_tally(&self.tally, &mine)

    cdef int reserve(self, uint32_t num_signs, uint32_t num_shards) except -1:
        if self.starts == NULL:
            self.starts = <uint32_t *> malloc((num_shards + 1) * sizeof(uint32_t))
        if num_signs > self.capacity:
            free(self.sorted)
            free(self.order)
            self.capacity = 0
            self.sorted = <sign_t *> malloc(num_signs * sizeof(sign_t))
            self.order = <uint32_t *> malloc(num_signs * sizeof(uint32_t))
            if self.sorted == NULL or self.order == NULL:
                raise MemoryError(f"scratch for a request of {num_signs} signs")
            self.capacity = num_signs
        if self.starts == NULL:
            raise MemoryError(f"scratch for {num_shards} shards")
        self.num_signs = num_signs
        return 0

    cdef void split(self, uint32_t num_shards) noexcept nogil:
        """Order the request by shard, stable.

        Hashing twice is cheaper than keeping the hashes.
        """
        cdef const sign_t *signs = self.signs
        cdef uint32_t *starts = self.starts
        cdef uint32_t i, shard, start, count
        memset(starts, 0, (num_shards + 1) * sizeof(uint32_t))
        if num_shards == 1:
            for i in range(self.num_signs):
                self.sorted[i] = signs[i]
                self.order[i] = i
            starts[1] = self.num_signs
            return
        for i in range(self.num_signs):
            starts[shard_of(mix64(signs[i]), num_shards)] += 1
        start = 0
        for shard in range(num_shards):
            count = starts[shard]
            starts[shard] = start
            start += count
        for i in range(self.num_signs):
            shard = shard_of(mix64(signs[i]), num_shards)
            self.sorted[starts[shard]] = signs[i]
            self.order[starts[shard]] = i
            starts[shard] += 1
        # Each start now is the next shard's; shift them back by one.
        shard = num_shards
        while shard > 0:
            starts[shard] = starts[shard - 1]
            shard -= 1
        starts[0] = 0


cdef inline void add_tally(Tally *total, const Tally *part) noexcept nogil:
    total.num_missing += part.num_missing
    total.num_refused += part.num_refused
    if total.status == STATUS_OK and part.status != STATUS_OK:
        total.status = part.status
        total.sign = part.sign
        total.dim = part.dim
        total.dtype = part.dtype
        total.state_words = part.state_words
