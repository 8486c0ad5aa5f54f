"""A snapshot's part of one shard: begun in a moment, then read piece by piece."""

from persia._core.base.types cimport (
    int64_t, position_t, row_t, sign_t, uint32_t, uint64_t, uint8_t,
)
from persia._core.shard.changes cimport Entries, ImageBlock, Images, Watcher
from persia._core.shard.recency cimport SEGMENT_WORDS
from persia._core.shard.shard cimport Shard
from persia._core.shard.slabs cimport MAX_SLABS, Slab

cdef enum:
    HELD_ROWS = 1024                # copied under one hold of a shard's lock
    HELD_PLACES = 65536             # looked at

cdef struct SegmentCopy:
    uint64_t first_order            # rank of its first live row in the order of eviction
    uint64_t age                    # since its last use, by its policy's clock; 0: no ttl
    uint64_t first_entry            # in ``entries``
    uint32_t policy
    uint32_t uses                   # class of LFU or of a scorer
    uint32_t num_words              # of the two below that are in use
    uint64_t[SEGMENT_WORDS] held
    uint64_t[SEGMENT_WORDS] live

cdef struct OrderCopy:
    SegmentCopy *segments
    uint32_t num_segments
    uint64_t num_rows               # live and not expired
    Entries entries                 # of all segments, dead ones included

cdef struct SnapshotPart:
    Shard *shard
    Watcher watcher
    OrderCopy order
    position_t *where               # in the order, of each place; NULL until it is read
    uint8_t *chunk_slabs
    Slab[MAX_SLABS] slabs           # for their shapes
    uint32_t num_policies
    uint64_t *left                  # rows not given out yet, of each slab and policy
    row_t *changed                  # from the log; NULL: the part is of all rows
    sign_t *dropped
    uint64_t num_changed
    uint64_t num_dropped
    bint is_watching                # the watcher is linked into the shard
    bint is_partial                 # the log does not have all changes that were asked for
    int status                      # of the beginning; -1: no memory

cdef struct Cursor:                 # over the places of the rows of one slab and policy
    uint32_t slab
    uint32_t policy
    uint32_t chunk
    uint32_t place

cdef struct ImageCursor:
    ImageBlock *block
    size_t offset

cdef struct Columns:                # where rows go
    uint64_t *signs
    char *values
    uint32_t *states
    uint64_t *orders
    uint32_t *uses
    uint64_t *ages


# Copy what will be gone, and watch the rest. ``since`` 0 is all rows. -1: no memory, and
# ``part_end`` is safe.
cdef int part_begin(
    SnapshotPart *part, uint32_t since, uint32_t last, const uint64_t *clocks,
    bint sweeps) noexcept nogil
# Bytes of copies of all rows that were there.
cdef uint64_t part_copied_bytes(const SnapshotPart *part, uint64_t most_rows) noexcept nogil
# Before the first read; -1: no memory.
cdef int part_prepare(SnapshotPart *part) noexcept nogil
# Up to ``count`` rows from where the cursor is; fewer is the end. -1: the part is lost.
cdef int64_t part_read(
    SnapshotPart *part, Cursor *cursor, Columns *columns, uint32_t count) noexcept nogil
# Take the images kept so far; -1: the part is lost.
cdef int part_take_images(SnapshotPart *part, Images *images) noexcept nogil
# Add how many rows of each slab and policy there are.
cdef void images_count(
    const SnapshotPart *part, const Images *images, uint64_t *counts) noexcept nogil
cdef uint32_t images_read(
    SnapshotPart *part, ImageCursor *at, uint32_t slab, uint32_t policy, Columns *columns,
    uint32_t count) noexcept nogil
# Watch no longer, and give everything but ``dropped`` back; what was never begun is fine.
cdef void part_end(SnapshotPart *part) noexcept nogil
