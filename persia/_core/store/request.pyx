"""A request and its scratch, split by shard and served shard by shard."""

cimport cython

from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memset
from numpy cimport (
    NPY_UINT32, PyArray_CheckExact, PyArray_DATA, PyArray_SimpleNewFromData, get_array_base,
    import_array, ndarray, npy_intp, set_array_base,
)

from persia._core.base.arrays cimport new_u32
from persia._core.base.hashing cimport mix64, shard_of
from persia._core.base.threads cimport persia_work_t
from persia._core.shard.row_format cimport scratch_size
from persia._core.shard.shard cimport (
    PyThread_type_lock, persia_done, shard_acquire, shard_ahead,
)
from persia._core.shard.slabs cimport Ahead, back_ahead

import_array()

cdef extern from "pythread.h" nogil:
    void PyThread_release_lock(PyThread_type_lock lock) noexcept

cdef enum:
    SPLIT_SIGNS = 4096      # of a part of the split by shard


@cython.final
cdef class Split:
    def __dealloc__(self):
        self.release()

    cdef void release(self) noexcept:
        self.signs = None
        free(self.sorted)
        free(self.order)
        free(self.starts)
        self.sorted = NULL
        self.order = NULL
        self.starts = NULL
        self.room = 0
        self.shard_room = 0

    cdef int reserve(self, uint32_t num_signs, uint32_t num_shards) except -1:
        self.signs = None
        self.num_signs = num_signs
        self.num_shards = num_shards
        if num_signs <= self.room and num_shards <= self.shard_room:
            return 0
        self.release()
        self.sorted = <sign_t *> malloc(num_signs * sizeof(sign_t))
        self.order = <uint32_t *> malloc(num_signs * sizeof(uint32_t))
        self.starts = <uint32_t *> malloc((num_shards + 1) * sizeof(uint32_t))
        if self.sorted == NULL or self.order == NULL or self.starts == NULL:
            self.release()
            raise MemoryError(f"scratch for a request of {num_signs} signs")
        self.room = num_signs
        self.shard_room = num_shards
        return 0

    cdef bint is_of(self, const sign_t *signs, uint32_t count, uint32_t num_shards) noexcept:
        # The same memory: ``signs`` is held, so no other array can have taken its place.
        return (
            self.signs is not None and self.signs_at == signs
            and self.num_signs == count and self.num_shards == num_shards)


def kept_numbers(count):
    cdef Split split = Split()
    cdef npy_intp length
    cdef ndarray numbers
    split.numbers = new_u32(count)
    length = split.numbers.size
    # The array's base is the split, whose ``numbers`` own the memory: they end together.
    numbers = PyArray_SimpleNewFromData(
        1, &length, NPY_UINT32, PyArray_DATA(<ndarray> split.numbers))
    set_array_base(numbers, split)
    return numbers


cdef Split split_of(object numbers):
    # Of the array itself: the base of a part of it is an array.
    if not PyArray_CheckExact(numbers):
        return None
    base = get_array_base(<ndarray> numbers)
    return <Split> base if isinstance(base, Split) else None


@cython.final
cdef class Request:
    """One request: its arguments, and its signs in shard order. Reused."""

    def __cinit__(self):
        self.own = Split()

    def __dealloc__(self):
        free(self.places)
        free(self.results)

    cdef int reserve(self, uint32_t num_signs, uint32_t num_shards) except -1:
        self.num_signs = num_signs
        # A request object serves one call after another; its scratch only grows.
        if num_shards > self.num_shards:
            free(self.results)
            self.results = <RequestResult *> malloc(num_shards * sizeof(RequestResult))
            if self.results == NULL:
                self.num_shards = 0
                raise MemoryError(f"scratch for {num_shards} shards")
        self.num_shards = num_shards
        return 0

    cdef void use(self, Split split) noexcept:
        self.sorted = split.sorted
        self.order = split.order
        self.starts = split.starts

    cdef int split(self, Split into) except -1:
        """Order the request by shard, stable."""
        cdef Split split = self.own if into is None else into
        cdef size_t num_places
        cdef void *places
        self.num_parts = 1
        if self.threads.num_threads > 1:
            self.num_parts = self.num_signs // SPLIT_SIGNS + 1
        num_places = <size_t> self.num_parts * self.num_shards
        if num_places > self.num_places:
            places = realloc(self.places, num_places * sizeof(uint32_t))
            if places == NULL:
                raise MemoryError(f"scratch for a request of {self.num_signs} signs")
            self.places = <uint32_t *> places
            self.num_places = num_places
        split.reserve(self.num_signs, self.num_shards)
        self.use(split)
        self.threads.work(<persia_work_t> count_part, <void *> self, self.num_parts)
        begin_shards(self)
        self.threads.work(<persia_work_t> put_part, <void *> self, self.num_parts)
        return 0

    cdef RequestResult serve(self) except *:
        cdef RequestResult total
        cdef uint32_t i
        self.has_failed = False
        self.threads.work(<persia_work_t> handle_part, <void *> self, self.num_shards)
        memset(&total, 0, sizeof(RequestResult))
        for i in range(self.num_shards):
            add_result(&total, &self.results[i])
        return total


cdef inline uint32_t part_begin(Request request, uint32_t part) noexcept nogil:
    """The first sign of a part of the split."""
    return <uint32_t> (<uint64_t> request.num_signs * part // request.num_parts)


# The split by shard. Each part counts its signs of each shard; then the counts become places,
#
#     shard 0, part 0 | shard 0, part 1 | ... | shard 1, part 0 | ...
#
# and each part puts its signs from there on: so the order within a shard is the request's.
# Hashing twice is cheaper than keeping the hashes.


cdef void count_part(Request request, uint32_t part, uint32_t worker) noexcept nogil:
    cdef uint32_t[MAX_SHARDS] counts    # its own lines
    cdef uint32_t i, shard
    memset(counts, 0, request.num_shards * sizeof(uint32_t))
    for i in range(part_begin(request, part), part_begin(request, part + 1)):
        counts[shard_of(mix64(request.signs[i]), request.num_shards)] += 1
    for shard in range(request.num_shards):
        request.places[shard * request.num_parts + part] = counts[shard]


cdef void put_part(Request request, uint32_t part, uint32_t worker) noexcept nogil:
    cdef uint32_t[MAX_SHARDS] places
    cdef uint32_t i, shard
    for shard in range(request.num_shards):
        places[shard] = request.places[shard * request.num_parts + part]
    for i in range(part_begin(request, part), part_begin(request, part + 1)):
        shard = shard_of(mix64(request.signs[i]), request.num_shards)
        request.sorted[places[shard]] = request.signs[i]
        request.order[places[shard]] = i
        places[shard] += 1


cdef void begin_shards(Request request) noexcept nogil:
    """Turn counts into places, and say where each shard begins."""
    cdef uint32_t shard, count
    cdef uint32_t at = 0
    cdef uint32_t *places = request.places
    for shard in range(request.num_shards):
        request.starts[shard] = at
        for _ in range(request.num_parts):
            count = places[0]
            places[0] = at
            places += 1
            at += count
    request.starts[request.num_shards] = at


cdef void handle_part(Request request, uint32_t number, uint32_t worker) noexcept nogil:
    """Serve one shard, under its lock."""
    cdef uint32_t begin = request.starts[number], end = request.starts[number + 1]
    cdef uint32_t floats = scratch_size(&request.format)
    cdef RequestResult *result = &request.results[number]
    cdef Shard *shard = &request.shards[number]
    cdef Ahead ahead
    memset(result, 0, sizeof(RequestResult))
    # ``has_failed`` is read without the lock: it only saves work, the results say what
    # happened.
    if begin == end or request.has_failed:
        return
    if floats:
        result.scratch = <float *> malloc(floats * sizeof(float))
        if result.scratch == NULL:
            result.status = STATUS_NO_MEMORY
            request.has_failed = True
            return
    shard_acquire(shard)
    request.handler(shard, request, begin, end, result)
    ahead.base = NULL
    if shard.slabs.is_room_wanted:
        ahead = shard_ahead(shard)
    PyThread_release_lock(shard.lock)
    if ahead.base != NULL:
        # Outside the lock; num_backing keeps the chunk mapped until it is done.
        back_ahead(&ahead)
        persia_done(&shard.num_backing)
    free(result.scratch)
    if result.status != STATUS_OK:
        request.has_failed = True


cdef inline void add_result(RequestResult *total, const RequestResult *part) noexcept nogil:
    total.num_missing += part.num_missing
    total.num_refused += part.num_refused
    if total.num_failed == 0 and part.num_failed:
        total.failed, total.code = part.failed, part.code
    total.num_failed += part.num_failed
    if total.status == STATUS_OK and part.status != STATUS_OK:
        total.status, total.code = part.status, part.code
        total.sign = part.sign
        total.dim = part.dim
        total.dtype = part.dtype
        total.state_words = part.state_words
