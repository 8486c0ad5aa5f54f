"""A shard's part of the state file: what a new process needs that the rows do not say.

    SavedShard    formats, chunks, clocks, policies; the journal; how far each update came
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
"""

from libc.string cimport memcpy, memset

cdef extern from "portable.h" nogil:
    void persia_unmap(void *start, size_t num_bytes) noexcept


cdef int file_init(
    ShardFile *file, int fd, uint32_t number, uint64_t *is_void, uint64_t *crash_in
) noexcept nogil:
    cdef char *start
    memset(file, 0, sizeof(ShardFile))
    file.fd = fd
    file.offset = FILE_HEADER + number * FILE_SHARD
    file.newest_key = KEY_BEGIN
    file.is_void = is_void
    file.crash_in = crash_in
    start = <char *> persia_map_file(fd, file.offset, FILE_CONTROL, FILE_PAGE)
    if start == NULL:
        return -1
    file.shard = <SavedShard *> start
    file.images = start + FILE_IMAGES
    file.segments = <SavedSegment *> (start + FILE_SEGMENTS)
    # The table of chunks is backed as it grows.
    return file_back(file, start, 0, sizeof(SavedShard) - FILE_CHUNKS * sizeof(uint64_t))


cdef void file_free(ShardFile *file) noexcept nogil:
    if file.shard != NULL:
        persia_unmap(file.shard, FILE_CONTROL)
    file.shard = NULL


# Memory is set aside before it is touched: a store to a page that a full tmpfs cannot give
# would be a SIGBUS. Where none is left, the process's own memory takes the place of the mapping
# and the file is void from then on: training goes on, and a kill would lose the rows, as it
# would without a file. The owner of the file asks for ``is_void`` and reports it.
cdef int file_back(
    ShardFile *file, void *start, uint64_t offset, size_t num_bytes
) noexcept nogil:
    # Of whole pages: those at the ends may have been backed before, which costs nothing.
    cdef uint64_t first = offset & ~<uint64_t> (FILE_PAGE - 1)
    cdef uint64_t end = (offset + num_bytes + FILE_PAGE - 1) & ~<uint64_t> (FILE_PAGE - 1)
    if persia_back(file.fd, file.offset + first, end - first) == 0:
        return 0
    file.is_void[0] = 1
    persia_stores_before()
    # A page that others have used must stay what it is.
    if first < offset and persia_back(file.fd, file.offset + first, FILE_PAGE) == 0:
        first += FILE_PAGE
    if first >= end:
        return 0
    return persia_detach(<char *> start - (offset - first), end - first)


cdef void file_clear(ShardFile *file) noexcept nogil:
    # The number first: without chunks no row in the file is reached.
    file.shard.num_chunks = 0
    persia_stores_before()
    crash_point(file)
    file.shard.num_formats = 0
    file.shard.num_segments = 0
    persia_punch(file.fd, file.offset + FILE_SEGMENTS, FILE_CONTROL - FILE_SEGMENTS)
    persia_punch(file.fd, file.offset + FILE_SKETCH, FILE_SHARD - FILE_SKETCH)
    file.newest_key = KEY_BEGIN


cdef uint32_t journal_group(uint32_t row_bytes) noexcept nogil:
    cdef uint32_t fitting = <uint32_t> GROUP_BYTES // row_bytes
    return min(max(fitting, <uint32_t> 1), <uint32_t> STEP_ROWS)


cdef void journal_hold(
    ShardFile *file, const row_t *rows, float *const *values, uint32_t count,
    uint32_t row_bytes, Part *part
) noexcept nogil:
    cdef Journal *journal = &file.shard.journal
    cdef uint64_t needed = <uint64_t> count * row_bytes
    cdef uint32_t i
    # Once per size: fallocate on pages that are there is a system call all the same.
    if needed > file.images_backed:
        file_back(file, file.images, FILE_IMAGES, needed)
        file.images_backed = needed
    for i in range(count):
        memcpy(file.images + <size_t> i * row_bytes, values[i], row_bytes)
    memcpy(journal.rows, rows, count * sizeof(row_t))
    journal.row_bytes = row_bytes
    journal.part = 0
    if part != NULL:
        journal.part = <uint64_t> (part - file.shard.parts) + 1
        journal.tag = part.tag
        journal.num_done = part.num_done
    persia_stores_before()
    crash_point(file)
    journal.num_held = count
    persia_stores_before()
    crash_point(file)
