"""Rows that come back into a shard, whose lock is held."""

from libc.string cimport memcpy

from persia._core.shard.restore_order cimport arrivals_add
from persia._core.shard.changes cimport row_changes, row_enters
from persia._core.shard.eviction cimport LFU_CLASSES, Policy, policy_order
from persia._core.base.hashing cimport mix64
from persia._core.shard.persistent_shard cimport journal_hold, journal_release
from persia._core.shard.recency cimport recency_begin, recency_touch
from persia._core.store.request cimport STATUS_NO_MEMORY, STATUS_OK, Batch, RequestResult
from persia._core.store.requests cimport drop_new_row, new_row, note_shape
from persia._core.shard.shard cimport Shard, shard_end_request
from persia._core.shard.sign_index cimport home_bucket, index_find
from persia._core.shard.slabs cimport (
    PLACE_BITS, Slab, has_format, persia_prefetch, row_at, row_values,
)
from persia._core.base.types cimport NO_ROW, row_t, sign_t, uint32_t, uint64_t

cdef enum:
    AHEAD = 8               # signs whose lines of the block and of the index are fetched early


cdef void restore_shard(
    Shard *shard, Batch batch, uint32_t begin, uint32_t end, RequestResult *tally
) noexcept nogil:
    """Insert or overwrite whole rows, bit for bit; where they stood is noted for later."""
    cdef const Policy *policy = &shard.eviction.policies[batch.policy]
    cdef uint64_t i
    cdef uint32_t place
    cdef row_t row
    recency_begin(&shard.recency, &shard.slabs, batch.clocks)
    for i in range(begin, <uint64_t> end + AHEAD):
        if i < end:
            persia_prefetch(values_of(batch, batch.order[i]))
            if batch.states != NULL:
                persia_prefetch(states_of(batch, batch.order[i]))
            persia_prefetch(home_bucket(&shard.index, mix64(batch.sorted[i])))
        if i < <uint64_t> begin + AHEAD:
            continue
        place = batch.order[i - AHEAD]
        row = restore_row(shard, batch, batch.sorted[i - AHEAD], place, tally)
        if row == NO_ROW:
            break
        if arrivals_add(
                &shard.arrivals, row, batch.sorted[i - AHEAD], batch.orders[place],
                batch.ages[place], policy.ttl) < 0:
            tally.status = STATUS_NO_MEMORY
            break
    shard_end_request(shard, end - begin)


cdef row_t restore_row(
    Shard *shard, Batch batch, sign_t sign, uint32_t place, RequestResult *tally
) noexcept nogil:
    """NO_ROW: see the tally."""
    cdef uint64_t hash = mix64(sign)
    cdef uint32_t order = policy_order(
        &shard.eviction.policies[batch.policy],
        min(batch.uses[place], <uint32_t> LFU_CLASSES - 1))
    cdef row_t row = index_find(&shard.index, &shard.slabs, hash, sign)
    cdef bint is_new = row == NO_ROW
    cdef float *values
    cdef const Slab *slab
    if is_new:
        row = new_row(shard, batch, hash, sign, tally)
        if row == NO_ROW:
            return NO_ROW
    else:
        slab = &shard.slabs.slabs[shard.slabs.views[row >> PLACE_BITS].slab]
        if not has_format(slab, &batch.format):
            note_shape(slab, sign, tally)
            return NO_ROW
    values = row_values(row_at(&shard.slabs, row))
    if is_new:
        fill_row(batch, values, place)      # whole, before it is a row
    if recency_touch(&shard.recency, &shard.slabs, row, order) < 0:
        tally.status = STATUS_NO_MEMORY
        if is_new:
            drop_new_row(shard, hash, row)
        return NO_ROW
    tally.status = STATUS_OK
    if is_new:
        row_enters(&shard.changes, &shard.slabs, row)
    else:
        row_changes(&shard.changes, &shard.slabs, row, row_at(&shard.slabs, row))
        if shard.kept != NULL:
            journal_hold(
                shard.kept, &row, &values, 1,
                4 * (batch.format.value_words + batch.format.state_words), NULL)
        fill_row(batch, values, place)
        if shard.kept != NULL:
            journal_release(shard.kept, NULL, 0)
    return row


cdef inline const char *values_of(Batch batch, uint32_t place) noexcept nogil:
    return batch.raw_values + <size_t> place * batch.dim * (
        4 if batch.format.half == NULL else 2)


cdef inline const uint32_t *states_of(Batch batch, uint32_t place) noexcept nogil:
    return batch.states + <size_t> place * batch.state_words


cdef inline void fill_row(Batch batch, float *values, uint32_t place) noexcept nogil:
    memcpy(
        values, values_of(batch, place),
        <size_t> batch.dim * (4 if batch.format.half == NULL else 2))
    if batch.states == NULL:
        batch.optimizer.fill_state(values + batch.format.value_words, batch.dim)
    else:
        memcpy(
            values + batch.format.value_words, states_of(batch, place),
            batch.state_words * sizeof(float))
