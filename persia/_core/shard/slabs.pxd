"""Where rows live: fixed chunks, cut into rows of one shape, never moved.

    row number   | chunk (15 bits) | place in the chunk (17 bits) |
    row          | sign u64 | position u32 | stamp u32 | values x dim | state u32 x w |
"""

from persia._core.base.types cimport position_t, row_t, sign_t, uint32_t, uint64_t, uint8_t
from persia._core.shard.persistent_shard cimport ShardFile
from persia._core.shard.row_format cimport Format

cdef extern from "portable.h" nogil:
    void persia_prefetch(const void *address) noexcept
    void persia_prefetch_write(const void *address) noexcept
    uint32_t persia_popcount(uint64_t bits) noexcept
    uint32_t persia_lowest_bit(uint64_t bits) noexcept

cdef enum:
    CHUNK_BYTES = 0x200000          # one huge page
    CHUNKS_PER_REGION = 16          # address space is reserved 32 MiB at a time
    PLACE_BITS = 17                 # 2 MiB / 24 bytes, the smallest row, is below 2**17
    PLACE_MASK = 0x1FFFF
    MAX_CHUNKS = 32767              # the last chunk number would contain NO_ROW
    SMALL_CHUNKS = 4                # chunks of a shard that start on small pages
    SMALL_BACKED = 0x10000          # bytes of one that are backed at a time
    NO_CHUNK = 0xFFFFFFFF
    NO_POSITION = 0xFFFFFFFF
    MAX_SLABS = 64
    BLOCK_BYTES = 32768             # an index table of full size
    CACHE_LINE = 64

cdef struct Row:
    sign_t sign                     # of a freed row: the next freed place of its chunk
    position_t position             # place in the order of use; NO_POSITION: the row is free
    uint32_t stamp                  # epoch of its last change; see ``changes``

cdef struct ChunkView:              # what a lookup needs of a chunk, 16 bytes
    char *base
    uint32_t stride                 # bytes from row to row, a multiple of 8
    uint32_t slab

cdef struct ChunkState:             # what allocation needs of a chunk
    uint32_t num_places             # rows that fit
    uint32_t num_touched            # places handed out since it was empty
    uint32_t num_live
    uint32_t freed                  # first freed place, or NO_ROW
    uint32_t previous, next         # among the slab's chunks that have room
    uint32_t bytes_backed           # of memory that is there; all, where rows are not kept
    bint is_small                   # on small pages, and not full yet

cdef struct Slab:
    uint32_t dim
    uint32_t dtype                  # of the values; see ``row_format``
    uint32_t state_words            # 4 bytes each
    uint32_t stride
    uint32_t open                   # first chunk with room, or NO_CHUNK
    uint64_t num_live

cdef struct Regions:                # address space, taken chunk by chunk
    char **starts
    uint32_t count
    uint32_t capacity
    uint32_t num_taken              # chunks, the first ones
    uint32_t num_used               # chunks that were taken before: resident, and not zeroed

cdef struct Slabs:
    # where rows are, so that they outlive the process, or NULL
    ShardFile *file
    ChunkView *views
    ChunkState *states
    uint32_t num_chunks
    uint32_t chunk_capacity         # of the two arrays above
    Slab[MAX_SLABS] slabs
    uint32_t num_slabs
    Regions rows                    # the chunks of ``views``, in their order
    Regions blocks
    uint32_t num_mapped             # chunks taken from both
    char *block_next                # unused rest of the newest block chunk
    uint64_t block_left             # bytes
    bint is_block_small             # that chunk is on small pages
    bint is_block_used              # that chunk has been taken before
    bint is_room_wanted             # a chunk is nearly full; see slabs_ahead
    uint32_t num_ahead              # chunks of rows made resident, whether taken yet or not
    uint64_t bytes_used             # handed out at least once: what is or will be resident


cdef struct Spare:                  # memory of rows that are no more, and of their index
    Regions rows
    Regions blocks


cdef struct Ahead:                  # a chunk that no row is in yet
    char *base                      # NULL: none
    ShardFile *file
    uint64_t offset                 # of the chunk in its file, where it has one


cdef inline Row *row_at(const Slabs *slabs, row_t row) noexcept nogil:
    """The row of that number; the caller got it from ``slabs_new_row``."""
    cdef ChunkView *view = &slabs.views[row >> PLACE_BITS]
    return <Row *> (view.base + <uint64_t> (row & PLACE_MASK) * view.stride)


cdef inline float *row_values(Row *row) noexcept nogil:
    return <float *> (row + 1)


cdef inline bint has_format(const Slab *slab, const Format *format) noexcept nogil:
    return slab.dim == format.dim and slab.dtype == format.dtype and (
        slab.state_words == format.state_words)


cdef inline bint is_place(const Slabs *slabs, row_t row) noexcept nogil:
    """Whether a number from outside names a row, live or freed."""
    cdef uint32_t chunk = row >> PLACE_BITS
    return chunk < slabs.num_chunks and (row & PLACE_MASK) < slabs.states[chunk].num_touched


cdef inline bint is_row_of(const Row *row, sign_t sign) noexcept nogil:
    """Whether the row is live and holds ``sign``; in a freed row that field links places."""
    return row.sign == sign and row.position != NO_POSITION


cdef void slabs_init(Slabs *slabs) noexcept nogil
# Take the chunks and formats of a shard's file, before it is known which places are free;
# NULL, or what is wrong with it; an empty text: no memory.
cdef const char *slabs_attach(Slabs *slabs) noexcept nogil
# Sort the places of an attached chunk out; rows of it are at rows[0..count], which has room for
# all its places.
cdef uint32_t slabs_scan(Slabs *slabs, uint32_t chunk, row_t *rows) noexcept nogil
cdef void slabs_free(Slabs *slabs) noexcept nogil
# Keep the memory, which slabs_free will not give back then, for slabs that have taken none yet
# and are not kept; and give back what they have not taken of it.
cdef Spare slabs_spare(Slabs *slabs) noexcept nogil
cdef void slabs_reuse(Slabs *slabs, const Spare *spare) noexcept nogil
cdef void slabs_trim(Slabs *slabs) noexcept nogil
# The slab of that shape, made if there is none; -1: too many shapes, or no memory.
cdef int slabs_slab(Slabs *slabs, const Format *format) noexcept nogil
# NO_ROW: no memory. The row is live with NO_POSITION until it enters the order of use.
cdef row_t slabs_new_row(Slabs *slabs, uint32_t slab) noexcept nogil
cdef void slabs_drop_row(Slabs *slabs, row_t row) noexcept nogil
# The chunk to make resident before it is needed, if one is; then that is left to the caller.
cdef Ahead slabs_ahead(Slabs *slabs) noexcept nogil
# Make it resident. Takes milliseconds, and no lock; the slabs must stay till then.
cdef void back_ahead(const Ahead *ahead) noexcept nogil
# BLOCK_BYTES zeroed bytes, line-aligned, for the life of the slabs; NULL: no memory.
cdef void *slabs_new_block(Slabs *slabs) noexcept nogil
