"""From sign to row: a directory of small open-addressing tables, one cache line a bucket.

    bits of mix64(sign):   39..32 tag    31..9 directory, low bits first    8..0 bucket
"""

from persia._core.base.types cimport (
    NO_ROW, row_t, sign_t, uint16_t, uint32_t, uint64_t, uint8_t,
)
from persia._core.shard.slabs cimport Row, Slabs, persia_lowest_bit, persia_prefetch, row_at

cdef extern from "portable.h" nogil:
    uint32_t persia_equal_bytes(const uint8_t *bytes, uint8_t to) noexcept

cdef enum:
    BUCKET_SLOTS = 12
    PLACES = 0xFFF                  # of a bucket, as bits
    BUCKET_BITS = 9
    MAX_BUCKETS = 512               # of one table: 32 KiB, 6144 places
    MAX_DEPTH = 23                  # directory bits that the hash has

cdef struct Bucket:                 # 64 bytes
    uint8_t[BUCKET_SLOTS] tags      # 0: the place is empty
    uint16_t num_passed             # entries that found this bucket full and went on
    uint16_t unused
    row_t[BUCKET_SLOTS] rows

cdef struct Entry:                  # one directory entry, 16 bytes
    Bucket *buckets
    uint32_t mask                   # number of buckets - 1
    uint32_t table

cdef struct Table:
    Bucket *buckets
    uint32_t num_buckets            # a power of two
    uint32_t count                  # rows in it
    uint32_t depth                  # directory bits that all its signs share
    uint32_t pattern                # the value of those bits

cdef struct SignIndex:
    Entry *directory                # 2**depth entries
    uint32_t depth
    Table *tables
    uint32_t num_tables
    uint32_t table_capacity
    row_t *scratch                  # one table's rows while it is rebuilt


cdef inline uint8_t tag_of(uint64_t hash) noexcept nogil:
    cdef uint8_t tag = <uint8_t> (hash >> 32)
    return tag + (tag == 0)


cdef inline Entry *entry_of(const SignIndex *index, uint64_t hash) noexcept nogil:
    return &index.directory[
        <uint32_t> (hash >> BUCKET_BITS) & ((<uint32_t> 1 << index.depth) - 1)]


cdef inline Bucket *home_bucket(const SignIndex *index, uint64_t hash) noexcept nogil:
    cdef Entry *entry = entry_of(index, hash)
    return &entry.buckets[<uint32_t> hash & entry.mask]


cdef inline uint32_t places_of(const Bucket *bucket, uint8_t tag) noexcept nogil:
    """The places with this tag, as bits; with 0, the empty ones."""
    # Sixteen bytes of the bucket, of which the last four are no tags.
    return persia_equal_bytes(<const uint8_t *> bucket, tag) & PLACES


cdef inline void fetch_places(
    const Bucket *bucket, const Slabs *slabs, uint32_t places
) noexcept nogil:
    while places:
        persia_prefetch(row_at(slabs, bucket.rows[persia_lowest_bit(places)]))
        places &= places - 1


cdef inline row_t index_guess(
    const SignIndex *index, const Slabs *slabs, uint64_t hash
) noexcept nogil:
    """The first row of the home bucket with the right tag: right 97 times in 100, and free.

    It reads no row, so that the row can be prefetched before anybody needs it. Where there is
    more than one, or none and rows went on to the next bucket, it fetches these as well.
    """
    cdef Entry *entry = entry_of(index, hash)
    cdef uint32_t home = <uint32_t> hash & entry.mask
    cdef Bucket *bucket = &entry.buckets[home]
    cdef uint32_t found = places_of(bucket, tag_of(hash))
    if found == 0:
        if bucket.num_passed:
            persia_prefetch(&entry.buckets[(home + 1) & entry.mask])
        return NO_ROW
    fetch_places(bucket, slabs, found & (found - 1))
    return bucket.rows[persia_lowest_bit(found)]


cdef inline void index_fetch_next(
    const SignIndex *index, const Slabs *slabs, uint64_t hash
) noexcept nogil:
    """Fetch what ``index_find`` will compare in the bucket after the home bucket."""
    cdef Entry *entry = entry_of(index, hash)
    cdef uint32_t home = <uint32_t> hash & entry.mask
    cdef Bucket *bucket = &entry.buckets[(home + 1) & entry.mask]
    if entry.buckets[home].num_passed:
        fetch_places(bucket, slabs, places_of(bucket, tag_of(hash)))


cdef inline row_t index_find(
    const SignIndex *index, const Slabs *slabs, uint64_t hash, sign_t sign
) noexcept nogil:
    """The row of the sign, or NO_ROW."""
    cdef Entry *entry = entry_of(index, hash)
    cdef uint32_t home = <uint32_t> hash & entry.mask
    cdef uint32_t at = home
    cdef uint8_t tag = tag_of(hash)
    cdef Bucket *bucket
    cdef uint32_t found
    cdef row_t row
    while True:
        bucket = &entry.buckets[at]
        found = places_of(bucket, tag)
        while found:
            row = bucket.rows[persia_lowest_bit(found)]
            if row_at(slabs, row).sign == sign:
                return row
            found &= found - 1
        if bucket.num_passed == 0:
            return NO_ROW
        at = (at + 1) & entry.mask
        # Rows may have passed every bucket, each at a time when that one was full.
        if at == home:
            return NO_ROW


cdef int index_init(SignIndex *index, Slabs *slabs) noexcept nogil
cdef void index_free(SignIndex *index) noexcept nogil
# The row's sign is set and not in the index yet. -1: no memory, nothing changed.
cdef int index_insert(SignIndex *index, Slabs *slabs, uint64_t hash, row_t row) noexcept nogil
cdef int index_expect(SignIndex *index, Slabs *slabs, uint64_t num_rows) noexcept nogil
cdef void index_remove(SignIndex *index, uint64_t hash, row_t row) noexcept nogil
cdef uint64_t index_bytes(const SignIndex *index) noexcept nogil
