"""What each kind of request does in one shard, whose lock is held.

Its signs are pipelined:

    i            fetch the line of the index where sign i belongs
    i - AHEAD    guess its row by the tag, fetch the row
    i - 2 AHEAD  compare the signs; fetch where the row stands in the order of use
    i - 3 AHEAD  touch or insert, copy out
    at the end   evict: what has expired, then down to the capacity

Each stage asks for the lines that the next one reads, so that some thirty misses are under way
at any time and none is waited for.
"""

from libc.string cimport memcpy, memset

from persia._core.eviction cimport eviction_note_expired, eviction_order
from persia._core.hashing cimport mix64
from persia._core.optim cimport persia_step_t
from persia._core.recency cimport (
    NO_ORDER, OFFSET_BITS, recency_begin, recency_expired, recency_prefetch, recency_settle,
    recency_touch,
)
from persia._core.request cimport (
    STATUS_DIM, STATUS_NO_MEMORY, STATUS_OK, STATUS_SHAPES, Batch, Tally,
)
from persia._core.row_format cimport (
    STEP_ROWS, HalfSteps, read_values, run_steps, steps_add, steps_begin, write_values,
)
from persia._core.shard cimport Shard, shard_drop, shard_end_request
from persia._core.sign_index cimport (
    home_bucket, index_find, index_guess, index_insert, index_remove,
)
from persia._core.sketch cimport sketch_admits, sketch_key, sketch_prefetch
from persia._core.slabs cimport (
    CACHE_LINE, NO_POSITION, PLACE_BITS, Row, Slab, has_format, is_place, is_row_of,
    persia_prefetch, persia_prefetch_write, row_at, row_values, slabs_drop_row, slabs_new_row,
    slabs_slab,
)
from persia._core.types cimport NO_ROW, row_t, sign_t, uint32_t, uint64_t

cdef enum:
    AHEAD = 8               # signs between two stages of a request


cdef inline void prefetch_row(const Row *row, uint32_t num_bytes) noexcept nogil:
    # From the line's begin: a row of less than a line may still lie in two.
    cdef const char *end = <const char *> row + num_bytes
    cdef const char *line = <const char *> (<size_t> row & ~<size_t> (CACHE_LINE - 1))
    while line < end:
        persia_prefetch(line)
        line += CACHE_LINE


cdef inline bint is_admitted(Shard *shard, Batch batch, uint64_t hash) noexcept nogil:
    if batch.admit_at > 1:
        return sketch_admits(
            &shard.sketch, sketch_key(hash), batch.admit_at, batch.is_repeated)
    return batch.admit_all or mix64(batch.admission_key ^ hash) < batch.admission_below


cdef inline bint has_expired(Shard *shard, row_t row) noexcept nogil:
    return shard.recency.has_ttl and recency_expired(
        &shard.recency, row_at(&shard.slabs, row).position >> OFFSET_BITS,
        shard.recency.clocks)


cdef inline bint is_gone(Shard *shard, Batch batch, row_t row) noexcept nogil:
    """Whether a read answers as if there were no row: it has expired and is not dropped yet."""
    return row == NO_ROW or shard.recency.has_ttl and recency_expired(
        &shard.recency, row_at(&shard.slabs, row).position >> OFFSET_BITS,
        batch.clocks)


cdef inline int use_row(
    Shard *shard, Batch batch, row_t row, uint64_t hash, bint is_new
) noexcept nogil:
    """Make the row the newest of the order where its policy wants it; -1: no memory."""
    cdef uint32_t order = batch.order_of_use
    if order == NO_ORDER:
        order = eviction_order(
            &shard.eviction, &shard.recency, batch.policy,
            NO_POSITION if is_new else row_at(&shard.slabs, row).position,
            batch.admission_key ^ hash)
    return recency_touch(&shard.recency, &shard.slabs, row, order)


cdef void fill_row(Shard *shard, Batch batch, row_t row, Tally *tally) noexcept nogil:
    """Initial values and state."""
    cdef Row *at = row_at(&shard.slabs, row)
    cdef float *values = row_values(at) if tally.scratch == NULL else tally.scratch
    batch.initializer.fill(batch.seed, at.sign, values, batch.dim)
    if tally.scratch != NULL:
        write_values(&batch.format, row_values(at), values)
    batch.optimizer.fill_state(row_values(at) + batch.format.value_words, batch.dim)
    shard.num_inserted += 1


cdef void renew_row(Shard *shard, Batch batch, row_t row, Tally *tally) noexcept nogil:
    """A row that has expired begins anew in its place."""
    eviction_note_expired(
        &shard.eviction, &shard.recency, row_at(&shard.slabs, row).position)
    fill_row(shard, batch, row, tally)


cdef row_t insert(
    Shard *shard, Batch batch, uint64_t hash, sign_t sign, Tally *tally
) noexcept nogil:
    """A new row with initial values and state, the most recent one; NO_ROW: see the tally."""
    cdef int slab = slabs_slab(&shard.slabs, &batch.format)
    cdef row_t row
    cdef Row *at
    if slab < 0:
        tally.status = STATUS_SHAPES
        return NO_ROW
    tally.status = STATUS_NO_MEMORY     # until the row is in
    row = slabs_new_row(&shard.slabs, <uint32_t> slab)
    if row == NO_ROW:
        return NO_ROW
    at = row_at(&shard.slabs, row)
    at.sign = sign
    if index_insert(&shard.index, &shard.slabs, hash, row) < 0:
        slabs_drop_row(&shard.slabs, row)
        return NO_ROW
    if use_row(shard, batch, row, hash, True) < 0:
        index_remove(&shard.index, hash, row)
        slabs_drop_row(&shard.slabs, row)
        return NO_ROW
    tally.status = STATUS_OK
    fill_row(shard, batch, row, tally)
    return row


cdef inline void fetch_bucket(Shard *shard, Batch batch, uint32_t i) noexcept nogil:
    persia_prefetch(home_bucket(&shard.index, batch.hashes[i]))


cdef inline void guess_row(
    Shard *shard, Batch batch, uint32_t i, uint32_t row_bytes
) noexcept nogil:
    cdef row_t row = index_guess(&shard.index, batch.hashes[i])
    batch.rows[i] = row
    if row != NO_ROW:
        prefetch_row(row_at(&shard.slabs, row), row_bytes)


cdef inline row_t find_row(Shard *shard, Batch batch, uint32_t i) noexcept nogil:
    """The row of place i, by its guess if that is right."""
    cdef row_t row = batch.rows[i]
    cdef sign_t sign = batch.signs[batch.order[i]]
    if row == NO_ROW:
        if not home_bucket(&shard.index, batch.hashes[i]).num_passed:
            return NO_ROW
    elif is_row_of(row_at(&shard.slabs, row), sign):
        return row
    return index_find(&shard.index, &shard.slabs, batch.hashes[i], sign)


cdef inline bint has_shape(
    const Shard *shard, row_t row, Batch batch, uint32_t place, Tally *tally
) noexcept nogil:
    """Whether the row is as the request has it; if not, the tally says what it is."""
    cdef const Slab *slab = &shard.slabs.slabs[shard.slabs.views[row >> PLACE_BITS].slab]
    if has_format(slab, &batch.format):
        return True
    note_shape(slab, batch.signs[place], tally)
    return False


cdef void note_shape(const Slab *slab, sign_t sign, Tally *tally) noexcept nogil:
    tally.status = STATUS_DIM
    tally.sign = sign
    tally.dim = slab.dim
    tally.dtype = slab.dtype
    tally.state_words = slab.state_words


cdef void train_shard(
    Shard *shard, Batch batch, uint32_t begin, uint32_t end, Tally *tally
) noexcept nogil:
    """Serve one shard's part of a training lookup. The lock is held."""
    cdef uint32_t row_bytes = <uint32_t> sizeof(Row) + 4 * batch.format.value_words
    cdef uint32_t i
    cdef row_t row
    recency_begin(&shard.recency, &shard.slabs, batch.clocks)
    for i in range(begin, end + 3 * AHEAD):
        if i < end:
            fetch_bucket(shard, batch, i)
        if i >= begin + AHEAD and i < end + AHEAD:
            guess_row(shard, batch, i - AHEAD, row_bytes)
        if i >= begin + 2 * AHEAD and i < end + 2 * AHEAD:
            row = find_row(shard, batch, i - 2 * AHEAD)
            batch.rows[i - 2 * AHEAD] = row
            if row != NO_ROW:
                recency_prefetch(&shard.recency, row_at(&shard.slabs, row).position)
            elif batch.admit_at > 1:
                sketch_prefetch(&shard.sketch, sketch_key(batch.hashes[i - 2 * AHEAD]))
            prefetch_out(batch, i - 2 * AHEAD)
        if i >= begin + 3 * AHEAD and not train_row(shard, batch, i - 3 * AHEAD, tally):
            break
    shard_end_request(shard, end - begin)


cdef inline void prefetch_out(Batch batch, uint32_t i) noexcept nogil:
    cdef float *out = batch.rows_out + <size_t> batch.order[i] * batch.dim
    persia_prefetch_write(out)
    persia_prefetch_write(out + batch.dim - 1)


cdef inline bint train_row(Shard *shard, Batch batch, uint32_t i, Tally *tally) noexcept nogil:
    """Touch or insert the row of place i and copy it out; False: the tally says why not."""
    cdef uint32_t place = batch.order[i]
    cdef sign_t sign = batch.signs[place]
    cdef row_t row = batch.rows[i]
    cdef float *out = batch.rows_out + <size_t> place * batch.dim
    cdef bint is_new
    if row == NO_ROW:
        # Again, because the sign may have come twice in this request.
        row = index_find(&shard.index, &shard.slabs, batch.hashes[i], sign)
    # An id whose row has expired is a new one; refused, it leaves the row to the sweep.
    is_new = row == NO_ROW or has_expired(shard, row)
    if is_new and not is_admitted(shard, batch, batch.hashes[i]):
        tally.num_refused += 1
        shard.num_refused += 1
        batch.hints_out[place] = NO_ROW
        memset(out, 0, batch.dim * sizeof(float))
        return True
    if row == NO_ROW:
        row = insert(shard, batch, batch.hashes[i], sign, tally)
        if row == NO_ROW:
            return False
        tally.num_missing += 1
    else:
        if not has_shape(shard, row, batch, place, tally):
            return False
        if is_new:
            renew_row(shard, batch, row, tally)
            tally.num_missing += 1
        if use_row(shard, batch, row, batch.hashes[i], is_new) < 0:
            tally.status = STATUS_NO_MEMORY
            return False
    batch.hints_out[place] = row
    read_values(&batch.format, out, row_values(row_at(&shard.slabs, row)))
    return True


cdef void eval_shard(
    Shard *shard, Batch batch, uint32_t begin, uint32_t end, Tally *tally
) noexcept nogil:
    """Serve one shard's part of an evaluation lookup; changes nothing but a count."""
    cdef uint32_t row_bytes = <uint32_t> sizeof(Row) + 4 * batch.format.value_words
    cdef uint32_t i, place
    cdef float *out
    cdef const Slab *slab
    cdef row_t row
    for i in range(begin, end + 2 * AHEAD):
        if i < end:
            fetch_bucket(shard, batch, i)
        if i >= begin + AHEAD and i < end + AHEAD:
            guess_row(shard, batch, i - AHEAD, row_bytes)
            prefetch_out(batch, i - AHEAD)
        if i < begin + 2 * AHEAD:
            continue
        row = find_row(shard, batch, i - 2 * AHEAD)
        place = batch.order[i - 2 * AHEAD]
        out = batch.rows_out + <size_t> place * batch.dim
        if is_gone(shard, batch, row):
            tally.num_missing += 1
            shard.num_missing += 1
            memset(out, 0, batch.dim * sizeof(float))
            continue
        slab = &shard.slabs.slabs[shard.slabs.views[row >> PLACE_BITS].slab]
        if slab.dim != batch.dim or slab.dtype != batch.format.dtype:
            note_shape(slab, batch.signs[place], tally)
            return
        read_values(&batch.format, out, row_values(row_at(&shard.slabs, row)))


cdef inline bint has_hint(Shard *shard, Batch batch, uint32_t i) noexcept nogil:
    return batch.hints != NULL and is_place(&shard.slabs, batch.hints[batch.order[i]])


cdef void update_shard(
    Shard *shard, Batch batch, uint32_t begin, uint32_t end, Tally *tally
) noexcept nogil:
    """Step one shard's rows. A sign that is gone skips exactly its own gradient."""
    cdef uint32_t dim = batch.dim
    cdef uint32_t row_bytes = <uint32_t> sizeof(Row) + 4 * (
        batch.format.value_words + batch.state_words)
    cdef persia_step_t step = batch.optimizer.step()
    cdef float *values[STEP_ROWS]
    cdef const float *sums[STEP_ROWS]
    cdef uint32_t i, place, count = 0
    cdef bint is_half = batch.format.half != NULL
    cdef HalfSteps steps
    cdef row_t row
    steps_begin(&steps)
    for i in range(begin, end + 2 * AHEAD):
        if i < end and not has_hint(shard, batch, i):
            fetch_bucket(shard, batch, i)
        if i >= begin + AHEAD and i < end + AHEAD:
            if has_hint(shard, batch, i - AHEAD):
                # A row number kept from the lookup: no line of the index is read.
                row = batch.hints[batch.order[i - AHEAD]]
                batch.rows[i - AHEAD] = row
                prefetch_row(row_at(&shard.slabs, row), row_bytes)
            else:
                guess_row(shard, batch, i - AHEAD, row_bytes)
            place = batch.order[i - AHEAD]
            prefetch_row(<const Row *> (batch.gradients + <size_t> place * dim), 4 * dim)
        if i < begin + 2 * AHEAD:
            continue
        place = batch.order[i - 2 * AHEAD]
        row = find_row(shard, batch, i - 2 * AHEAD)
        if row == NO_ROW:
            tally.num_missing += 1
            shard.num_missing += 1
        elif not has_shape(shard, row, batch, place, tally):
            break
        elif is_half:
            while not steps_add(
                    &batch.format, &steps, row, row_values(row_at(&shard.slabs, row)),
                    batch.gradients + <size_t> place * dim, batch.hashes[i - 2 * AHEAD]):
                run_steps(
                    &batch.format, &steps, step, &batch.optimizer.settings,
                    batch.rounding_key, tally.scratch)
        else:
            values[count] = row_values(row_at(&shard.slabs, row))
            sums[count] = batch.gradients + <size_t> place * dim
            count += 1
        if count == STEP_ROWS:
            step(values, NULL, sums, count, dim, &batch.optimizer.settings)
            count = 0
    if count:
        step(values, NULL, sums, count, dim, &batch.optimizer.settings)
    run_steps(
        &batch.format, &steps, step, &batch.optimizer.settings, batch.rounding_key,
        tally.scratch)


cdef void read_shard(
    Shard *shard, Batch batch, uint32_t begin, uint32_t end, Tally *tally
) noexcept nogil:
    """Copy whole rows out; ``found`` says which there are. A row of another shape stops it."""
    cdef uint32_t i, place
    cdef const float *values
    cdef row_t row
    for i in range(begin, end):
        place = batch.order[i]
        row = index_find(&shard.index, &shard.slabs, batch.hashes[i], batch.signs[place])
        batch.found[place] = not is_gone(shard, batch, row)
        if not batch.found[place]:
            continue
        if not has_shape(shard, row, batch, place, tally):
            return
        values = row_values(row_at(&shard.slabs, row))
        read_values(&batch.format, batch.rows_out + <size_t> place * batch.dim, values)
        if batch.state_words:       # otherwise states_out is NULL
            memcpy(
                batch.states_out + <size_t> place * batch.state_words,
                values + batch.format.value_words, batch.state_words * sizeof(float))


cdef void write_shard(
    Shard *shard, Batch batch, uint32_t begin, uint32_t end, Tally *tally
) noexcept nogil:
    """Insert or overwrite whole rows; each becomes the most recent."""
    cdef uint32_t i, place
    cdef float *values
    cdef row_t row
    cdef bint is_new
    recency_begin(&shard.recency, &shard.slabs, batch.clocks)
    for i in range(begin, end):
        place = batch.order[i]
        row = index_find(&shard.index, &shard.slabs, batch.hashes[i], batch.signs[place])
        if row == NO_ROW:
            row = insert(shard, batch, batch.hashes[i], batch.signs[place], tally)
            if row == NO_ROW:
                break
        elif not has_shape(shard, row, batch, place, tally):
            break
        else:
            is_new = has_expired(shard, row)
            if is_new:
                renew_row(shard, batch, row, tally)
            if use_row(shard, batch, row, batch.hashes[i], is_new) < 0:
                tally.status = STATUS_NO_MEMORY
                break
        values = row_values(row_at(&shard.slabs, row))
        write_values(
            &batch.format, values, batch.gradients + <size_t> place * batch.dim)
        if batch.states != NULL:
            memcpy(
                values + batch.format.value_words,
                batch.states + <size_t> place * batch.state_words,
                batch.state_words * sizeof(float))
        else:
            batch.optimizer.fill_state(values + batch.format.value_words, batch.dim)
    shard_end_request(shard, end - begin)


cdef void delete_shard(
    Shard *shard, Batch batch, uint32_t begin, uint32_t end, Tally *tally
) noexcept nogil:
    cdef uint32_t i
    cdef row_t row
    for i in range(begin, end):
        row = index_find(
            &shard.index, &shard.slabs, batch.hashes[i], batch.signs[batch.order[i]])
        if row == NO_ROW:
            tally.num_missing += 1
        else:
            shard_drop(shard, row)
    recency_settle(&shard.recency)
