"""What a store counts, and whether it is sound.

Each function takes one shard's lock after another: between two of them the store may change.
"""

from persia._core.base.hashing cimport mix64
from persia._core.base.types cimport row_t, uint64_t
from persia._core.shard.eviction cimport policy_num_draining, policy_num_rows
from persia._core.shard.recency cimport (
    NO_SEGMENT, OFFSET_BITS, SEGMENT_ENTRIES, Order, Segment, recency_mergeable, segment_at,
)
from persia._core.shard.shard cimport PyThread_acquire_lock, PyThread_release_lock, shard_bytes
from persia._core.shard.sign_index cimport BUCKET_SLOTS, index_find
from persia._core.shard.slabs cimport Row, is_place, is_row_of, row_at

from persia.errors import InternalError

# Of ``row_counts``.
COUNTS = (
    "rows", "bytes", "evicted", "evicted_lru", "evicted_lfu", "evicted_native", "expired",
    "inserted", "refused", "missing", "entries",
)


cdef list policy_counts(Shard *shards, uint32_t num_shards, uint32_t num_policies):
    cdef uint32_t i, number
    cdef Shard *shard
    totals = [
        dict.fromkeys(("rows", "draining", "evicted", "expired"), 0)
        for _ in range(num_policies)]
    for i in range(num_shards):
        shard = &shards[i]
        with nogil:
            PyThread_acquire_lock(shard.lock, 1)
        for number, total in enumerate(totals):
            total["rows"] += policy_num_rows(
                &shard.eviction.policies[number], &shard.recency)
            total["draining"] += policy_num_draining(
                &shard.eviction.policies[number], &shard.recency)
            total["evicted"] += shard.eviction.policies[number].num_evicted
            total["expired"] += shard.eviction.policies[number].num_expired
        PyThread_release_lock(shard.lock)
    return totals


cdef dict row_counts(Shard *shards, uint32_t num_shards):
    cdef uint32_t i, number
    cdef Shard *shard
    totals = dict.fromkeys(COUNTS, 0)
    limited = False
    for i in range(num_shards):
        shard = &shards[i]
        with nogil:
            PyThread_acquire_lock(shard.lock, 1)
        totals["rows"] += shard.recency.num_live
        totals["bytes"] += shard_bytes(shard)
        for number in range(shard.eviction.num_policies):
            totals["evicted"] += shard.eviction.policies[number].num_evicted
            kind = ("lru", "lfu", "native")[shard.eviction.policies[number].kind]
            totals[f"evicted_{kind}"] += shard.eviction.policies[number].num_evicted
            totals["expired"] += shard.eviction.policies[number].num_expired
        totals["inserted"] += shard.num_inserted
        totals["refused"] += shard.num_refused
        totals["missing"] += shard.num_missing
        totals["entries"] += shard.recency.num_held
        limited = limited or shard.is_limited
        PyThread_release_lock(shard.lock)
    totals["memory_limited"] = limited
    return totals


# --- invariants: a walk over everything, for tests and the debug build -----------------------


cdef int check_invariants(Shard *shards, uint32_t num_shards) except -1:
    cdef uint32_t i
    cdef const char *broken
    for i in range(num_shards):
        with nogil:
            PyThread_acquire_lock(shards[i].lock, 1)
            broken = broken_invariant(&shards[i])
            PyThread_release_lock(shards[i].lock)
        if broken != NULL:
            raise InternalError(f"shard {i}: {broken.decode()}")
    return 0


# Messages begin with the module whose invariant it is, and its number there.
cdef const char *broken_order(
    Shard *shard, uint32_t number, uint64_t *num_live, uint64_t *num_held
) noexcept nogil:
    """Walk one order of use and add to the totals."""
    cdef const Order *order = &shard.recency.orders[number]
    cdef uint32_t at = order.oldest, previous = NO_SEGMENT
    cdef uint32_t offset, taken, count
    cdef uint64_t in_order = 0
    cdef Segment *segment
    cdef Row *row
    cdef row_t held
    while at != NO_SEGMENT:
        segment = segment_at(&shard.recency, at)
        if segment.previous != previous or segment.order != number:
            return b"recency: a segment does not know its predecessor or its order"
        if segment.next != NO_SEGMENT and at == order.open:
            return b"recency I6: a segment that is not the newest is open"
        if segment.first_use > segment.last_use or (
                segment.last_use > segment.first_use + order.grain):
            return b"recency I6: the uses of a segment are too far apart"
        taken = 0
        count = 0
        for offset in range(<uint32_t> SEGMENT_ENTRIES):
            if (segment.live[offset // 64] >> (offset % 64)) & 1:
                if not (segment.held[offset // 64] >> (offset % 64)) & 1:
                    return b"recency I2: an entry is live and not held"
                held = segment.rows[taken]
                row = row_at(&shard.slabs, held)
                if row.position != ((at << OFFSET_BITS) | offset):
                    return b"recency I1: a live entry is not at its row's position"
                if index_find(
                        &shard.index, &shard.slabs, mix64(row.sign), row.sign) != held:
                    return b"index I1: a live row is not found by its sign"
                if not (is_place(&shard.slabs, held) and is_row_of(row, row.sign)):
                    return b"slabs: a live row is not a valid hint"
                count += 1
            taken += (segment.held[offset // 64] >> (offset % 64)) & 1
        if taken != segment.num_held or count != segment.num_live:
            return b"recency I2: a segment's counts are not its bits"
        if 4 * segment.num_held > 5 * segment.num_live:
            return b"recency I3: more than a fifth of a segment is dead"
        in_order += count
        num_held[0] += taken
        if recency_mergeable(&shard.recency, previous):
            return b"recency I5: two thin neighbours"
        previous = at
        at = segment.next
    if previous != order.newest:
        return b"recency: the last segment is not the newest"
    if order.open != NO_SEGMENT and order.open != order.newest:
        return b"recency I6: the open segment is not the newest"
    if in_order != order.num_live:
        return b"recency: an order's count is not the sum"
    num_live[0] += in_order
    return NULL


cdef const char *broken_invariant(Shard *shard) noexcept nogil:
    """Walk everything; the first invariant that does not hold, or NULL."""
    cdef uint32_t offset, i, slot, count
    cdef uint64_t num_live = 0, num_held = 0, in_index = 0, in_slabs = 0
    cdef const char *broken
    for i in range(shard.recency.num_orders):
        broken = broken_order(shard, i, &num_live, &num_held)
        if broken != NULL:
            return broken
    if num_live != shard.recency.num_live or num_held != shard.recency.num_held:
        return b"recency: the totals are not the sums"
    if num_live > shard.soft_capacity:
        return b"store: more rows than the capacity"
    for i in range(shard.index.num_tables):
        count = 0
        for offset in range(shard.index.tables[i].num_buckets):
            for slot in range(<uint32_t> BUCKET_SLOTS):
                count += shard.index.tables[i].buckets[offset].tags[slot] != 0
        if count != shard.index.tables[i].count:
            return b"index I2: a table's count is not its tags"
        if 2 * count > 21 * shard.index.tables[i].num_buckets:
            return b"index I2: a table is too full"
        in_index += count
    for i in range(shard.slabs.num_slabs):
        in_slabs += shard.slabs.slabs[i].num_live
    if in_index != num_live or in_slabs != num_live:
        return b"store: index, slabs and order of use count different rows"
    return NULL
