# Nothing of this module is seen from Python; its C interface is in the .pxd.
"""A shard's part of the state file: what a new process needs that the rows do not say.

    KeptShard    formats, chunks, clocks, policies; the journal; how far each update came
    old images   of the rows in hand, at most 32, so that they stay in the cache
    segments     of the orders of use: which order, and where in it
    sketch       the sketch itself
    rows         the chunks themselves, number after number

Everything else (index, free places, the lists of segments, counts) follows from these.

What is kept is right at every instruction, because each change comes into being by one store
of 8 bytes or less, the last of its kind:

    a row that is new     its position, after sign, values and state
    a row that goes       its position, before anything else
    a chunk's places      their number, after the place is marked free
    rows that are stepped how far the update came; before that, a new process puts their old
                          images back

Memory is set aside before it is touched: a store to a page that a full tmpfs cannot give would
be a SIGBUS. Where none is left, the process's own memory takes the place of the mapping and the
file is void from then on: training goes on, and a kill would lose the rows, as it would without
a file. Whoever owns the file has to look and say so.
"""

from libc.string cimport memcpy, memset

cdef extern from "portable.h" nogil:
    void persia_unmap(void *start, size_t num_bytes) noexcept


cdef int kept_init(
    Kept *kept, int file, uint32_t number, uint64_t *is_void, uint64_t *crash_in
) noexcept nogil:
    cdef char *start
    memset(kept, 0, sizeof(Kept))
    kept.file = file
    kept.offset = KEPT_HEADER + number * KEPT_SHARD
    kept.newest_key = KEY_BEGIN
    kept.is_void = is_void
    kept.crash_in = crash_in
    start = <char *> persia_map_file(file, kept.offset, KEPT_CONTROL, KEPT_PAGE)
    if start == NULL:
        return -1
    kept.shard = <KeptShard *> start
    kept.images = start + KEPT_IMAGES
    kept.segments = <KeptSegment *> (start + KEPT_SEGMENTS)
    # The table of chunks is backed as it grows.
    return kept_back(kept, start, 0, sizeof(KeptShard) - KEPT_CHUNKS * sizeof(uint64_t))


cdef void kept_free(Kept *kept) noexcept nogil:
    if kept.shard != NULL:
        persia_unmap(kept.shard, KEPT_CONTROL)
    kept.shard = NULL


cdef int kept_back(Kept *kept, void *start, uint64_t offset, size_t num_bytes) noexcept nogil:
    # Of whole pages: those at the ends may have been backed before, which costs nothing.
    cdef uint64_t first = offset & ~<uint64_t> (KEPT_PAGE - 1)
    cdef uint64_t end = (offset + num_bytes + KEPT_PAGE - 1) & ~<uint64_t> (KEPT_PAGE - 1)
    if persia_back(kept.file, kept.offset + first, end - first) == 0:
        return 0
    kept.is_void[0] = 1
    persia_stores_before()
    # A page that others have used must stay what it is.
    if first < offset and persia_back(kept.file, kept.offset + first, KEPT_PAGE) == 0:
        first += KEPT_PAGE
    if first >= end:
        return 0
    return persia_detach(<char *> start - (offset - first), end - first)


cdef void kept_clear(Kept *kept) noexcept nogil:
    kept.shard.num_chunks = 0
    persia_stores_before()
    kept_point(kept)
    kept.shard.num_formats = 0
    kept.shard.num_segments = 0
    persia_punch(kept.file, kept.offset + KEPT_SEGMENTS, KEPT_CONTROL - KEPT_SEGMENTS)
    persia_punch(kept.file, kept.offset + KEPT_SKETCH, KEPT_SHARD - KEPT_SKETCH)
    kept.newest_key = KEY_BEGIN


cdef uint32_t journal_group(uint32_t row_bytes) noexcept nogil:
    cdef uint32_t fitting = <uint32_t> GROUP_BYTES // row_bytes
    return min(max(fitting, <uint32_t> 1), <uint32_t> STEP_ROWS)


cdef void journal_hold(
    Kept *kept, const row_t *rows, float *const *values, uint32_t count, uint32_t row_bytes,
    Part *part
) noexcept nogil:
    cdef Journal *journal = &kept.shard.journal
    cdef uint64_t needed = <uint64_t> count * row_bytes
    cdef uint32_t i
    if needed > kept.images_backed:
        kept_back(kept, kept.images, KEPT_IMAGES, needed)
        kept.images_backed = needed
    for i in range(count):
        memcpy(kept.images + <size_t> i * row_bytes, values[i], row_bytes)
    memcpy(journal.rows, rows, count * sizeof(row_t))
    journal.row_bytes = row_bytes
    journal.part = 0
    if part != NULL:
        journal.part = <uint64_t> (part - kept.shard.parts) + 1
        journal.tag = part.tag
        journal.num_done = part.num_done
    persia_stores_before()
    kept_point(kept)
    journal.num_held = count
    persia_stores_before()
    kept_point(kept)
