"""Open addressing in small tables that double, then split one at a time.

    directory (2**depth entries)          table: 1..512 buckets of 12 places
    +---+---+---+---+                     +--------------------------------------+
    | 0 | 1 | 0 | 2 |   -- entry -->      | 12 tags | passed | 12 row numbers    |  one line
    +---+---+---+---+                     +--------------------------------------+

A place holds an 8-bit tag and the row number; the sign itself stands in the row, which a lookup
reads anyway.

Invariants, true between calls:

    I1  A live row is in the table its hash leads to, in the first bucket from its home on
        that had a free place when it came; every bucket it passed counts it in num_passed.
    I2  table.count is the number of its non-zero tags, and at most 10.5 per bucket, so that
        an insertion finds a place.
    I3  Every directory entry whose low table.depth bits are table.pattern points at the table.

Cost: 5.3 bytes a place, 6 to 12 bytes a row. Not taken: the sign in the index (8 more bytes a
row, and the row's line is needed all the same); one big table that is rehashed as a whole.
"""

from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memset

from persia._core.base.hashing cimport mix64
from persia._core.shard.slabs cimport persia_prefetch, slabs_new_block

cdef extern from "stdlib.h" nogil:
    int posix_memalign(void **block, size_t alignment, size_t num_bytes) noexcept


cdef int index_init(SignIndex *index, Slabs *slabs) noexcept nogil:
    """An index of one table of one bucket; -1: no memory, and ``index_free`` is safe."""
    index.depth = 0
    index.num_tables = 0
    index.table_capacity = 0
    index.directory = <Entry *> malloc(sizeof(Entry))
    index.tables = NULL
    index.scratch = <row_t *> malloc(MAX_BUCKETS * BUCKET_SLOTS * sizeof(row_t))
    if index.directory == NULL or index.scratch == NULL or add_table(index, slabs, 1) < 0:
        return -1
    point_entries(index, 0)
    return 0


cdef void index_free(SignIndex *index) noexcept nogil:
    """Give back everything but the tables of full size, which go with the slabs."""
    if index.num_tables == 1 and index.tables[0].num_buckets < MAX_BUCKETS:
        free(index.tables[0].buckets)
    free(index.directory)
    free(index.tables)
    free(index.scratch)
    index.directory = NULL
    index.tables = NULL
    index.scratch = NULL
    index.num_tables = 0


cdef uint64_t index_bytes(const SignIndex *index) noexcept nogil:
    """What the index holds outside the slabs."""
    return (
        (<uint64_t> 1 << index.depth) * sizeof(Entry)
        + index.table_capacity * sizeof(Table)
        + (index.tables[0].num_buckets % MAX_BUCKETS) * sizeof(Bucket)
        + MAX_BUCKETS * BUCKET_SLOTS * sizeof(row_t))


cdef Bucket *new_buckets(Slabs *slabs, uint32_t count) noexcept nogil:
    """Empty buckets; NULL: no memory.

    Only a shard's first table is ever smaller than a block, and then comes from malloc:
    little tables in a chunk would leave the last one of a big shard almost unused.
    """
    cdef void *buckets = NULL
    if count == MAX_BUCKETS:
        return <Bucket *> slabs_new_block(slabs)
    if posix_memalign(&buckets, sizeof(Bucket), count * sizeof(Bucket)) != 0:
        return NULL
    memset(buckets, 0, count * sizeof(Bucket))
    return <Bucket *> buckets


cdef int add_table(SignIndex *index, Slabs *slabs, uint32_t num_buckets) noexcept nogil:
    """Append a table of empty buckets; -1: no memory."""
    cdef Table *tables
    cdef Table *table
    cdef uint32_t capacity
    if index.num_tables == index.table_capacity:
        capacity = index.table_capacity * 2 if index.table_capacity else 1
        tables = <Table *> realloc(index.tables, capacity * sizeof(Table))
        if tables == NULL:
            return -1
        index.tables = tables
        index.table_capacity = capacity
    table = &index.tables[index.num_tables]
    table.buckets = new_buckets(slabs, num_buckets)
    if table.buckets == NULL:
        return -1
    table.num_buckets = num_buckets
    table.count = 0
    table.depth = 0
    table.pattern = 0
    index.num_tables += 1
    return 0


cdef void point_entries(SignIndex *index, uint32_t number) noexcept nogil:
    """Restore I3 for one table."""
    cdef Table *table = &index.tables[number]
    cdef uint32_t i = table.pattern
    while i < (<uint32_t> 1 << index.depth):
        index.directory[i].buckets = table.buckets
        index.directory[i].mask = table.num_buckets - 1
        index.directory[i].table = number
        i += <uint32_t> 1 << table.depth


cdef void place(Table *table, uint64_t hash, row_t row) noexcept nogil:
    """Write the row into the table, which has room by I2."""
    cdef uint32_t mask = table.num_buckets - 1
    cdef uint32_t at = <uint32_t> hash & mask
    cdef Bucket *bucket = &table.buckets[at]
    cdef uint32_t found = places_of(bucket, 0)
    cdef uint32_t slot
    while found == 0:
        bucket.num_passed += 1
        at = (at + 1) & mask
        bucket = &table.buckets[at]
        found = places_of(bucket, 0)
    slot = persia_lowest_bit(found)
    bucket.tags[slot] = tag_of(hash)
    bucket.rows[slot] = row
    table.count += 1


cdef uint32_t take_rows(SignIndex *index, Table *table) noexcept nogil:
    """Move the table's rows to the scratch array and leave its buckets alone."""
    cdef uint32_t i, slot, count = 0
    for i in range(table.num_buckets):
        for slot in range(<uint32_t> BUCKET_SLOTS):
            if table.buckets[i].tags[slot]:
                index.scratch[count] = table.buckets[i].rows[slot]
                count += 1
    return count


cdef int double_table(SignIndex *index, Slabs *slabs, uint32_t number) noexcept nogil:
    cdef Table *table = &index.tables[number]
    cdef uint32_t i, count
    cdef Bucket *buckets = new_buckets(slabs, 2 * table.num_buckets)
    if buckets == NULL:
        return -1
    count = take_rows(index, table)
    free(table.buckets)     # of less than full size, so it came from malloc
    table.buckets = buckets
    table.num_buckets *= 2
    table.count = 0
    for i in range(count):
        place(table, mix64(row_at(slabs, index.scratch[i]).sign), index.scratch[i])
    point_entries(index, number)
    return 0


# By the table's next directory bit. An insertion pays for at most one table of 6144 places, so
# no request waits for the whole index.
cdef int split_table(SignIndex *index, Slabs *slabs, uint32_t number) noexcept nogil:
    """Send the rows whose next directory bit is 1 to a new table."""
    cdef Table *table
    cdef Table *other
    cdef Entry *directory
    cdef uint32_t i, count, ahead, bit
    cdef uint64_t hash
    if index.tables[number].depth == index.depth:
        directory = <Entry *> realloc(
            index.directory, (<size_t> 2 << index.depth) * sizeof(Entry))
        if directory == NULL:
            return -1
        index.directory = directory
        for i in range(<uint32_t> 1 << index.depth):
            directory[i + (<uint32_t> 1 << index.depth)] = directory[i]
        index.depth += 1
    if add_table(index, slabs, MAX_BUCKETS) < 0:
        return -1
    table = &index.tables[number]
    other = &index.tables[index.num_tables - 1]
    bit = table.depth
    count = take_rows(index, table)
    for i in range(table.num_buckets):
        table.buckets[i].num_passed = 0
        for ahead in range(<uint32_t> BUCKET_SLOTS):
            table.buckets[i].tags[ahead] = 0
    table.count = 0
    table.depth += 1
    other.depth = table.depth
    other.pattern = table.pattern | (<uint32_t> 1 << bit)
    for i in range(count):
        # The signs stand in rows all over memory: without the prefetch a split would take
        # a cache miss after the other, half a millisecond in all.
        if i + 16 < count:
            persia_prefetch(row_at(slabs, index.scratch[i + 16]))
        hash = mix64(row_at(slabs, index.scratch[i]).sign)
        if (hash >> (BUCKET_BITS + bit)) & 1:
            place(other, hash, index.scratch[i])
        else:
            place(table, hash, index.scratch[i])
    # Only now do searches reach the new table; the lock is held, so none came between.
    point_entries(index, number)
    point_entries(index, index.num_tables - 1)
    return 0


cdef int index_insert(
    SignIndex *index, Slabs *slabs, uint64_t hash, row_t row
) noexcept nogil:
    cdef uint32_t number = entry_of(index, hash).table
    # A split may leave everything on one side; then the next bit is tried. At MAX_DEPTH the
    # hash has no more bits, which four thousand million rows in one shard would need.
    while 2 * (index.tables[number].count + 1) > 21 * index.tables[number].num_buckets:
        if index.tables[number].num_buckets < MAX_BUCKETS:
            if double_table(index, slabs, number) < 0:
                return -1
        elif index.tables[number].depth == MAX_DEPTH:
            return -1
        elif split_table(index, slabs, number) < 0:
            return -1
        number = entry_of(index, hash).table
    place(&index.tables[number], hash, row)
    return 0


cdef int index_expect(SignIndex *index, Slabs *slabs, uint64_t num_rows) noexcept nogil:
    """Make an empty index as large as ``num_rows`` will make it, so that it need not split.

    No larger: tables split at seven eighths, and nearly all at the same number of rows.
    """
    cdef uint32_t number, count
    if index.num_tables != 1 or index.tables[0].count:
        return 0
    while index.tables[0].num_buckets < MAX_BUCKETS and (
            8 * num_rows > 7 * <uint64_t> BUCKET_SLOTS * index.tables[0].num_buckets):
        if double_table(index, slabs, 0) < 0:
            return -1
    while index.depth < MAX_DEPTH and (
            8 * num_rows > (7 * <uint64_t> BUCKET_SLOTS * MAX_BUCKETS) << index.depth):
        count = index.num_tables
        for number in range(count):
            if split_table(index, slabs, number) < 0:
                return -1
    return 0


# A search stops at the first bucket that no entry passed. Removal subtracts from the counts
# that insertion added to, so there are no tombstones.
cdef void index_remove(SignIndex *index, uint64_t hash, row_t row) noexcept nogil:
    cdef Table *table = &index.tables[entry_of(index, hash).table]
    cdef uint32_t mask = table.num_buckets - 1
    cdef uint32_t at = <uint32_t> hash & mask
    cdef uint8_t tag = tag_of(hash)
    cdef Bucket *bucket
    cdef uint32_t slot
    while True:
        bucket = &table.buckets[at]
        for slot in range(<uint32_t> BUCKET_SLOTS):
            if bucket.tags[slot] == tag and bucket.rows[slot] == row:
                bucket.tags[slot] = 0
                table.count -= 1
                return
        bucket.num_passed -= 1
        at = (at + 1) & mask
