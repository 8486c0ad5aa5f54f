"""Counts of appearances: a count-min sketch in which a sign has one cache line.

    key = mix64(mix64(sign) ^ SKETCH)
    bits 63..32   line, scaled to their number
    bits 15..0    four counters of it, one in each row of 16
                  +----------------+----------------+----------------+----------------+
    line 64 x u8  | row 0          | row 1          | row 2          | row 3          |
                  +----------------+----------------+----------------+----------------+

Not taken: 4-bit counters (half the bytes, but thresholds end at 15), counters of a sign all
over the sketch (four cache misses).
"""

from libc.string cimport memset

from persia._core.base.hashing cimport mix64
from persia._core.shard.persistent_shard cimport FILE_SKETCH, file_back, persia_map_file

cdef extern from "portable.h" nogil:
    void *persia_map(size_t num_bytes, size_t alignment) noexcept
    void persia_unmap(void *start, size_t num_bytes) noexcept
    void persia_advise_huge(void *start, size_t num_bytes) noexcept

cdef enum:
    LARGE_PAGE = 0x10000
    HUGE_PAGE = 0x200000

# Keeps the place in the sketch apart from shard, index and admission draws.
cdef uint64_t SKETCH = <uint64_t> 0x5CE7C4F0A11D0C75


cdef int sketch_init(Sketch *sketch, uint64_t num_bytes) noexcept nogil:
    set_size(sketch, num_bytes)
    sketch.lines = <uint8_t *> persia_map(sketch.num_bytes, HUGE_PAGE)
    if sketch.lines == NULL:
        memset(sketch, 0, sizeof(Sketch))
        return -1
    if sketch.num_bytes >= HUGE_PAGE:
        persia_advise_huge(sketch.lines, sketch.num_bytes)
    return 0


cdef int sketch_map(Sketch *sketch, uint64_t num_bytes, ShardFile *file) noexcept nogil:
    set_size(sketch, num_bytes)
    sketch.lines = <uint8_t *> persia_map_file(
        file.fd, file.offset + FILE_SKETCH, sketch.num_bytes, HUGE_PAGE)
    if sketch.lines == NULL:
        memset(sketch, 0, sizeof(Sketch))
        return -1
    if file_back(file, sketch.lines, FILE_SKETCH, sketch.num_bytes) < 0:
        sketch_free(sketch)
        return -1
    return 0


cdef void set_size(Sketch *sketch, uint64_t num_bytes) noexcept nogil:
    memset(sketch, 0, sizeof(Sketch))
    sketch.num_lines = min(max(num_bytes // CACHE_LINE, <uint64_t> 1), <uint64_t> 1 << 32)
    # Whole pages of any size a machine may have.
    sketch.num_bytes = (sketch.num_lines * CACHE_LINE + LARGE_PAGE - 1) & ~<uint64_t> (
        LARGE_PAGE - 1)


cdef void sketch_free(Sketch *sketch) noexcept nogil:
    if sketch.lines != NULL:
        persia_unmap(sketch.lines, sketch.num_bytes)
    memset(sketch, 0, sizeof(Sketch))


cdef uint64_t sketch_key(uint64_t hash) noexcept nogil:
    return mix64(hash ^ SKETCH)


cdef void halve(uint8_t *line) noexcept nogil:
    cdef uint32_t i
    for i in range(<uint32_t> CACHE_LINE):
        line[i] >>= 1


# A sign's count is the least of its four counters; an appearance adds one to those that are the
# least (conservative update, Estan and Varghese 2002). So it is never too low, and too high
# only if all four are shared with others (Cormode and Muthukrishnan 2005, kept to one line as
# in blocked Bloom filters, Putze, Sanders and Singler 2007).
#
# Old appearances are forgotten: every eighth one that is counted halves the next line in turn.
# An id that appears once in a round, eight appearances a line, is forgotten before the next; so
# are those that were admitted, evicted, and no longer come. Nothing is ever done to all lines
# at once.
cdef bint sketch_admits(
    Sketch *sketch, uint64_t key, uint32_t threshold, bint repeated
) noexcept nogil:
    cdef uint8_t *line = sketch_line(sketch, key)
    cdef uint8_t *counters[SKETCH_ROWS]
    cdef uint32_t i
    cdef uint32_t count = MAX_COUNT
    for i in range(<uint32_t> SKETCH_ROWS):
        counters[i] = line + ROW_COUNTERS * i + (key >> (4 * i) & (ROW_COUNTERS - 1))
        count = min(count, <uint32_t> counters[i][0])
    if repeated or count >= threshold:
        return count >= threshold
    for i in range(<uint32_t> SKETCH_ROWS):
        if counters[i][0] == count:
            counters[i][0] = <uint8_t> (count + 1)
    sketch.num_counted += 1
    if sketch.num_counted % COUNTS_PER_LINE == 0:
        halve(sketch.lines + sketch.next_halved * CACHE_LINE)
        sketch.next_halved = (
            sketch.next_halved + 1 if sketch.next_halved + 1 < sketch.num_lines else 0)
    return count + 1 >= threshold
