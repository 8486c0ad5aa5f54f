"""What a shard keeps in its server's state file, and how it takes memory from there.

    file     | header 4 GiB | shard 0, 128 GiB | shard 1 | ...         sparse: only what is used
    shard    | SavedShard | old images | segments | sketch | rows, 64 GiB |
"""

from persia._core.base.types cimport row_t, uint32_t, uint64_t
from persia._core.shard.row_format cimport STEP_ROWS

cdef extern from "portable.h" nogil:
    # The compiler keeps the stores before this before those behind it.
    void persia_stores_before() noexcept
    void *persia_map_file(
        int file, uint64_t offset, size_t num_bytes, size_t alignment) noexcept
    int persia_back(int file, uint64_t offset, size_t num_bytes) noexcept
    int persia_detach(void *start, size_t num_bytes) noexcept
    void persia_punch(int file, uint64_t offset, uint64_t num_bytes) noexcept
    void persia_die() noexcept

cdef extern from *:
    """
    #define PERSIA_FILE_HEADER (1ULL << 32)
    #define PERSIA_FILE_SHARD (1ULL << 37)
    #define PERSIA_FILE_SKETCH (1ULL << 30)
    #define PERSIA_FILE_ROWS (1ULL << 36)
    #define PERSIA_KEY_STEP (1ULL << 24)
    #define PERSIA_KEY_BEGIN (1ULL << 63)
    #define PERSIA_ALL_DONE (1ULL << 63)
    """
    const uint64_t FILE_HEADER "PERSIA_FILE_HEADER"
    const uint64_t FILE_SHARD "PERSIA_FILE_SHARD"       # bytes of file a shard has for itself
    const uint64_t FILE_SKETCH "PERSIA_FILE_SKETCH"     # offsets in these
    const uint64_t FILE_ROWS "PERSIA_FILE_ROWS"
    const uint64_t KEY_STEP "PERSIA_KEY_STEP"
    const uint64_t KEY_BEGIN "PERSIA_KEY_BEGIN"
    const uint64_t ALL_DONE "PERSIA_ALL_DONE"

cdef enum:
    FILE_PAGE = 4096
    FILE_IMAGES = 0x100000          # offsets of a shard's old images and segments
    FILE_SEGMENTS = 0x200000
    FILE_CONTROL = 0x8000000        # and the end of what is mapped as one piece
    IMAGE_BYTES = 0x100000
    GROUP_BYTES = 0x40000           # old images of one group, unless one row alone takes more
    NUM_SLOTS = 256                 # updates that may be under way, or cut short
    FILE_FORMATS = 64
    FILE_POLICIES = 64
    FILE_CHUNKS = 32767

cdef struct SavedFormat:
    uint32_t dim
    uint32_t dtype
    uint32_t state_words
    uint32_t unused

cdef struct SavedPolicy:
    uint64_t lowest
    uint64_t num_uses

cdef struct SavedSegment:
    uint64_t key                    # order of use inside an order: older segments have less
    uint64_t first_use, last_use
    uint64_t tick
    uint64_t order

cdef struct Part:                   # of one update, in this shard
    uint64_t tag                    # which update and which of its tables; grows with both
    uint64_t num_done               # signs, or ALL_DONE
    uint64_t sum                    # of what was asked, so that another request is not it

# A step changes values and state of up to STEP_ROWS rows, which no single store can publish. So
# the old bytes are kept from before the step until ``num_done`` says that it is over; a new
# process copies them back unless the part got beyond them.
cdef struct Journal:                # old images of the rows in hand
    uint64_t num_held               # rows; 0: none is in hand
    uint64_t part                   # 1 + the slot of the update, or 0
    uint64_t tag, num_done          # of the part when they were taken
    uint64_t row_bytes
    row_t[STEP_ROWS] rows

cdef struct SavedShard:
    uint64_t num_formats
    uint64_t num_chunks
    uint64_t num_segments           # ever made
    uint64_t num_counted, next_halved   # of the sketch
    uint64_t tick
    uint64_t[4] clocks
    Journal journal
    SavedPolicy[FILE_POLICIES] policies
    Part[NUM_SLOTS] parts
    SavedFormat[FILE_FORMATS] formats
    uint64_t[FILE_CHUNKS] chunks    # format | places touched << 32

cdef struct ShardFile:                   # a process's handle on all this
    int fd
    uint64_t offset                 # of the shard in the file
    SavedShard *shard
    char *images
    SavedSegment *segments
    uint64_t images_backed          # bytes
    uint64_t newest_key
    uint64_t *is_void               # in the file: it is no longer whole
    uint64_t *crash_in              # for tests: points to go; 0: no crash


cdef inline void crash_point(const ShardFile *file) noexcept nogil:
    """A place where a test may have the process end."""
    if file.crash_in[0]:
        file.crash_in[0] -= 1
        if file.crash_in[0] == 0:
            persia_die()


# Map the shard's control part; -1: that cannot be done. Nothing is read.
cdef int file_init(
    ShardFile *file, int fd, uint32_t number, uint64_t *is_void, uint64_t *crash_in
) noexcept nogil
cdef void file_free(ShardFile *file) noexcept nogil
# Make sure of memory for mapped bytes of the shard, so that a store never meets a full file
# system. Where there is none it is the process's own, and the file is void. -1: no memory.
cdef int file_back(
    ShardFile *file, void *start, uint64_t offset, size_t num_bytes) noexcept nogil
# Forget all rows, and give their memory back.
cdef void file_clear(ShardFile *file) noexcept nogil

# Before and after rows are changed in place. A new process puts back what was in hand.
cdef void journal_hold(
    ShardFile *file, const row_t *rows, float *const *values, uint32_t count,
    uint32_t row_bytes, Part *part) noexcept nogil
cdef uint32_t journal_group(uint32_t row_bytes) noexcept nogil


cdef inline void journal_release(ShardFile *file, Part *part, uint64_t num_done) noexcept nogil:
    """The rows in hand are as they shall be, and ``num_done`` signs of the part."""
    persia_stores_before()
    crash_point(file)
    if part != NULL:
        part.num_done = num_done
        persia_stores_before()
        crash_point(file)
    file.shard.journal.num_held = 0
    persia_stores_before()
    crash_point(file)


cdef inline Part *part_of(const ShardFile *file, uint32_t slot) noexcept nogil:
    """The part of the update in that slot, from 1 on; NULL for 0: no update goes on with it."""
    return &file.shard.parts[slot - 1] if slot else NULL


# The order of the stores matters: a part whose tag is written has its sum and its count. A
# process killed in between leaves tag 0, which is no update's.
cdef inline bint part_begin(Part *part, uint64_t tag, uint64_t sum) noexcept nogil:
    """Begin a part, or go on with it; False: this is not the request that was cut short."""
    if part.tag == tag:
        return part.sum == sum
    part.tag = 0
    persia_stores_before()
    part.num_done = 0
    part.sum = sum
    persia_stores_before()
    part.tag = tag
    persia_stores_before()
    return True


cdef inline void file_segment(
    ShardFile *file, uint32_t number, uint32_t order, uint64_t key
) noexcept nogil:
    file.segments[number].key = key
    file.segments[number].order = order
    persia_stores_before()
