"""How often ids without a row appeared, approximately, in a fixed number of bytes."""

from persia._core.base.types cimport uint32_t, uint64_t, uint8_t
from persia._core.shard.persistent_shard cimport ShardFile
from persia._core.shard.slabs cimport CACHE_LINE, persia_prefetch_write

cdef enum:
    SKETCH_ROWS = 4             # counters of a sign, all in one line
    ROW_COUNTERS = 16           # that each is one of
    MAX_COUNT = 255
    COUNTS_PER_LINE = 8         # counted appearances after which one line is halved

cdef struct Sketch:
    uint8_t *lines              # NULL: none; of CACHE_LINE counters each
    uint64_t num_lines          # 1..2**32
    uint64_t num_bytes          # mapped
    uint64_t num_counted
    uint64_t next_halved        # line


cdef inline uint8_t *sketch_line(const Sketch *sketch, uint64_t key) noexcept nogil:
    return sketch.lines + ((key >> 32) * sketch.num_lines >> 32) * CACHE_LINE


cdef inline void sketch_prefetch(const Sketch *sketch, uint64_t key) noexcept nogil:
    persia_prefetch_write(sketch_line(sketch, key))


# Zeroed, of at least one line; -1: no memory.
cdef int sketch_init(Sketch *sketch, uint64_t num_bytes) noexcept nogil
# The same in a shard's file.
cdef int sketch_map(Sketch *sketch, uint64_t num_bytes, ShardFile *file) noexcept nogil
cdef void sketch_free(Sketch *sketch) noexcept nogil
# The sign of that hash appears: whether this is at least its ``threshold``-th time. A repeated
# appearance was counted before.
cdef bint sketch_admits(
    Sketch *sketch, uint64_t key, uint32_t threshold, bint repeated) noexcept nogil
cdef uint64_t sketch_key(uint64_t hash) noexcept nogil
