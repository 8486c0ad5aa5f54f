"""One shard: its rows, and what keeps them within their bounds."""

from libc.stdlib cimport free
from libc.string cimport memcpy, memset

from persia._core.base.hashing cimport mix64
from persia._core.shard.changes cimport note_clear, row_drops
from persia._core.shard.eviction cimport (
    SWEPT_ROWS, SWEPT_SEGMENTS, eviction_age, eviction_restart, eviction_save, eviction_sweep,
    eviction_take,
)
from persia._core.shard.persistent_shard cimport file_clear
from persia._core.shard.recency cimport (
    NUM_CLOCKS, recency_bytes, recency_end, recency_free, recency_init, recency_remove,
    recency_settle,
)
from persia._core.shard.sign_index cimport (
    home_bucket, index_bytes, index_free, index_init, index_remove,
)
from persia._core.shard.sketch cimport sketch_free, sketch_init, sketch_map
from persia._core.shard.slabs cimport (
    CHUNK_BYTES, Spare, persia_prefetch_write, row_at, slabs_ahead, slabs_drop_row, slabs_free,
    slabs_init, slabs_reuse, slabs_spare,
)

cdef extern from "portable.h" nogil:
    void persia_unmap(void *start, size_t num_bytes) noexcept

cdef enum:
    EVICT_ROWS = 64
    SWEPT_PER_SEGMENT = 128     # signs of a request for which one segment more is looked at


cdef uint64_t shard_bytes(const Shard *shard) noexcept nogil:
    return (
        shard.slabs.bytes_used + index_bytes(&shard.index) + recency_bytes(&shard.recency)
        + shard.sketch.num_bytes)


cdef int shard_init(Shard *shard, uint64_t sketch_bytes) noexcept nogil:
    slabs_init(&shard.slabs)
    shard.slabs.file = shard.file
    recency_init(&shard.recency)
    shard.recency.file = shard.file
    memset(&shard.sketch, 0, sizeof(shard.sketch))
    if eviction_restart(&shard.eviction, &shard.recency) < 0:
        return -1
    if sketch_bytes and shard.file != NULL:
        if sketch_map(&shard.sketch, sketch_bytes, shard.file) < 0:
            return -1
    elif sketch_bytes and sketch_init(&shard.sketch, sketch_bytes) < 0:
        return -1
    shard.soft_capacity = shard.capacity
    shard.byte_peak = shard.byte_limit
    shard.is_limited = False
    return index_init(&shard.index, &shard.slabs)


cdef void shard_free(Shard *shard) noexcept nogil:
    index_free(&shard.index)
    recency_free(&shard.recency)
    sketch_free(&shard.sketch)
    restored_free(&shard.restored)
    slabs_free(&shard.slabs)


cdef void restored_free(RestoredRows *restored) noexcept nogil:
    cdef size_t num_bytes = restored.capacity * sizeof(RestoredRow)
    if num_bytes < <size_t> MAPPED_BYTES:
        free(restored.rows)
    else:
        persia_unmap(restored.rows, num_bytes)
    memset(restored, 0, sizeof(RestoredRows))


cdef int shard_clear(Shard *shard, uint64_t sketch_bytes, bint is_reused) noexcept nogil:
    cdef Spare spare
    cdef int status
    # A chunk is made resident without the lock: its memory must not go meanwhile.
    shard_settle(shard)
    note_clear(&shard.changes)
    is_reused = is_reused and shard.file == NULL
    if is_reused:
        spare = slabs_spare(&shard.slabs)
    shard_free(shard)
    # The file forgets its rows before the shard begins again in it.
    if shard.file != NULL:
        file_clear(shard.file)
    status = shard_init(shard, sketch_bytes)
    if is_reused:
        slabs_reuse(&shard.slabs, &spare)
    return status


cdef Ahead shard_ahead(Shard *shard) noexcept nogil:
    cdef Ahead ahead
    ahead.base = NULL
    shard.slabs.is_room_wanted = False
    # At its limits a shard takes rows in the place of others.
    if shard.recency.num_live < shard.soft_capacity and (
            shard.byte_limit == 0 or shard_bytes(shard) + CHUNK_BYTES <= shard.byte_limit):
        ahead = slabs_ahead(&shard.slabs)
    if ahead.base != NULL:
        persia_count(&shard.num_backing, 1)
    return ahead


cdef void shard_drop(Shard *shard, row_t row) noexcept nogil:
    row_drops(&shard.changes, &shard.slabs, row)
    index_remove(&shard.index, mix64(row_at(&shard.slabs, row).sign), row)
    recency_remove(&shard.recency, &shard.slabs, row)
    slabs_drop_row(&shard.slabs, row)


cdef void drop_rows(Shard *shard, const row_t *rows, uint32_t count) noexcept nogil:
    cdef uint32_t i
    # Rows, then the buckets of their signs, then the work: each pass meets what the one before
    # has fetched.
    for i in range(count):
        persia_prefetch_write(row_at(&shard.slabs, rows[i]))
    for i in range(count):
        persia_prefetch_write(
            home_bucket(&shard.index, mix64(row_at(&shard.slabs, rows[i]).sign)))
    for i in range(count):
        shard_drop(shard, rows[i])


cdef void expire(Shard *shard, uint32_t num_signs) noexcept nogil:
    """Drop expired rows: a bounded number, but no fewer than the request may have added."""
    cdef row_t[EVICT_ROWS] rows
    cdef uint32_t num_looks = SWEPT_SEGMENTS + num_signs // SWEPT_PER_SEGMENT
    cdef uint64_t left = <uint64_t> SWEPT_ROWS + num_signs
    cdef uint32_t count
    while left:
        count = eviction_sweep(
            &shard.eviction, &shard.recency, rows,
            EVICT_ROWS if left > EVICT_ROWS else <uint32_t> left, &num_looks)
        if count == 0:
            return
        drop_rows(shard, rows, count)
        left -= count


cdef void shard_expire(Shard *shard, const uint64_t *clocks) noexcept nogil:
    """Drop every row that has expired by then."""
    cdef row_t[EVICT_ROWS] rows
    cdef uint32_t i, count, num_looks
    if not shard.recency.has_ttl:
        return
    for i in range(<uint32_t> NUM_CLOCKS):
        shard.recency.clocks[i] = max(shard.recency.clocks[i], clocks[i])
    shard.eviction.swept = 0
    num_looks = shard.recency.num_segments
    while True:
        count = eviction_sweep(&shard.eviction, &shard.recency, rows, EVICT_ROWS, &num_looks)
        if count == 0:
            break
        drop_rows(shard, rows, count)
    recency_settle(&shard.recency)


cdef void evict(Shard *shard) noexcept nogil:
    """Drop the rows that go next until the shard is within its capacity."""
    cdef row_t[EVICT_ROWS] rows
    cdef uint32_t count
    cdef uint64_t excess
    while shard.recency.num_live > shard.soft_capacity:
        excess = shard.recency.num_live - shard.soft_capacity
        count = eviction_take(
            &shard.eviction, &shard.recency, rows,
            EVICT_ROWS if excess > EVICT_ROWS else <uint32_t> excess)
        drop_rows(shard, rows, count)


cdef void shard_end_request(Shard *shard, uint32_t num_signs) noexcept nogil:
    cdef uint64_t after
    cdef uint64_t fitting
    recency_end(&shard.recency)
    if shard.recency.has_ttl:
        expire(shard, num_signs)
    if shard.byte_limit:
        after = shard_bytes(shard)
        if after <= shard.byte_limit:
            shard.soft_capacity = shard.capacity
            shard.byte_peak = shard.byte_limit
        elif after > shard.byte_peak:
            # Memory that was handed out stays with the store, so the shard keeps the share of
            # its rows that the limit is of its bytes; later rows take the places of the
            # others. Only growth counts: the same bytes again would cost rows each time.
            shard.is_limited = True
            shard.byte_peak = after
            fitting = <uint64_t> (
                <double> shard.recency.num_live * shard.byte_limit / after)
            if fitting < shard.soft_capacity:
                shard.soft_capacity = fitting
    evict(shard)
    eviction_age(&shard.eviction, &shard.recency, &shard.slabs)
    recency_settle(&shard.recency)
    if shard.file != NULL:
        keep(shard)


cdef void keep(Shard *shard) noexcept nogil:
    """Write down what rows and segments do not say."""
    # Plain stores: after a kill in between, these are of this request or the one before, and
    # either will do.
    eviction_save(&shard.eviction, shard.file)
    shard.file.shard.tick = shard.recency.tick
    memcpy(shard.file.shard.clocks, shard.recency.clocks, sizeof(shard.recency.clocks))
    shard.file.shard.num_counted = shard.sketch.num_counted
    shard.file.shard.next_halved = shard.sketch.next_halved
