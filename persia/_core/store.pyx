"""The embedding store: rows by sign; those that its policies rank last go first.

    sign --mix64--> shard --index--> row number --slabs--> | header | values | state |
                                          \\--recency--> order of use

A request holds distinct signs of one dim. It is split by shard (stable, so that the order
inside a shard is the order of the request) and each shard is served once, under its lock:

    i            fetch the line of the index where sign i belongs
    i - AHEAD    guess its row by the tag, fetch the row
    i - 2 AHEAD  compare the signs; fetch where the row stands in the order of use
    i - 3 AHEAD  touch or insert, copy out
    at the end   evict: what has expired, then down to the capacity

Each stage asks for the lines that the next one reads, so that some thirty misses are under way
at any time and none is waited for. Shards do not know each other, so threads take disjoint
shards and the result does not depend on their number. Policies hold within a shard, LRU
exactly; a training lookup is a use, an update or an evaluation is not.

Values: a new row is a pure function of (seed, sign), an admission of (seed, sign, batch id);
so a repeated call repeats itself, and the number of servers, shards and threads does not show
as long as nothing is evicted.
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np

cimport cython

from cpython.mem cimport PyMem_Calloc, PyMem_Free
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from persia._core.eviction cimport (
    LFU, LRU, MAX_POLICIES, Policy, SWEPT_ROWS, SWEPT_SEGMENTS, eviction_age, eviction_free,
    eviction_note_expired, eviction_nth_order, eviction_order, eviction_policy,
    eviction_restart, eviction_sweep, eviction_take, policy_num_draining,
    policy_num_rows,
)
from persia._core.halves cimport dtype_name, dtype_number, rounding_key
from persia._core.hashing cimport mix64, shard_of
from persia._core.initial cimport Initializer
from persia._core.optim cimport RowOptimizer, persia_step_t
from persia._core.recency cimport (
    CLOCK_MS, CLOCK_STEPS, NO_CLOCK, NO_ORDER, NO_SEGMENT, OFFSET_BITS, SEGMENT_ENTRIES, Order,
    Segment, recency_begin, recency_bytes, recency_end, recency_expired, recency_free,
    recency_init, recency_mergeable, recency_prefetch, recency_remove, recency_settle,
    recency_touch, recency_walk, segment_at,
)
from persia._core.row_format cimport (
    STEP_ROWS, Format, HalfSteps, read_values, run_steps, scratch_size, set_format, steps_add,
    steps_begin, write_values,
)
from persia._core.sign_index cimport (
    BUCKET_SLOTS, home_bucket, index_bytes, index_find, index_free, index_guess, index_init,
    index_insert, index_remove,
)
from persia._core.sketch cimport (
    MAX_COUNT, sketch_admits, sketch_free, sketch_init, sketch_key, sketch_prefetch,
)
from persia._core.slabs cimport (
    CACHE_LINE, NO_POSITION, PLACE_BITS, Row, Slab, has_format, is_place, is_row_of,
    persia_prefetch, persia_prefetch_write, row_at, row_values, slabs_drop_row, slabs_free,
    slabs_init, slabs_new_row, slabs_slab,
)
from persia._core.types cimport NO_ROW, uint8_t

from persia.errors import ConfigError, DataError, DimMismatch, InternalError, NotConfigured

cdef extern from "portable.h":
    const bint PERSIA_DEBUG

cdef extern from "pythread.h" nogil:
    PyThread_type_lock PyThread_allocate_lock() noexcept
    void PyThread_free_lock(PyThread_type_lock lock) noexcept
    int PyThread_acquire_lock(PyThread_type_lock lock, int wait) noexcept
    void PyThread_release_lock(PyThread_type_lock lock) noexcept

cdef enum:
    AHEAD = 8               # signs between two stages of a request
    EVICT_ROWS = 64
    SWEPT_PER_SEGMENT = 128     # signs of a request for which one segment more is looked at
    # Above this a thread pool is worth its 20 microseconds.
    MIN_THREADED_SIGNS = 2048

# Keys the admission draws, so that they are not those of the initial values.
cdef uint64_t ADMISSION = <uint64_t> 0xAD3175510B5E5EED
cdef Initializer ZEROS = Initializer("zeros")

cdef enum:
    MAX_DIM = 65536         # a row must fit its chunk several times
    STATUS_OK = 0
    STATUS_NO_MEMORY = 1
    STATUS_DIM = 2
    STATUS_SHAPES = 3


cdef inline void prefetch_row(const Row *row, uint32_t num_bytes) noexcept nogil:
    # From the line's begin: a row of less than a line may still lie in two.
    cdef const char *end = <const char *> row + num_bytes
    cdef const char *line = <const char *> (<size_t> row & ~<size_t> (CACHE_LINE - 1))
    while line < end:
        persia_prefetch(line)
        line += CACHE_LINE


cdef uint64_t shard_bytes(const Shard *shard) noexcept nogil:
    return (
        shard.slabs.bytes_used + index_bytes(&shard.index) + recency_bytes(&shard.recency)
        + shard.sketch.num_bytes)


cdef int shard_init(Shard *shard, uint64_t sketch_bytes) noexcept nogil:
    slabs_init(&shard.slabs)
    recency_init(&shard.recency)
    memset(&shard.sketch, 0, sizeof(shard.sketch))
    if eviction_restart(&shard.eviction, &shard.recency) < 0:
        return -1
    if sketch_bytes and sketch_init(&shard.sketch, sketch_bytes) < 0:
        return -1
    shard.soft_capacity = shard.capacity
    shard.byte_peak = shard.byte_limit
    shard.is_limited = False
    return index_init(&shard.index, &shard.slabs)


cdef void shard_free(Shard *shard) noexcept nogil:
    index_free(&shard.index)
    recency_free(&shard.recency)
    sketch_free(&shard.sketch)
    slabs_free(&shard.slabs)


cdef void drop(Shard *shard, row_t row) noexcept nogil:
    index_remove(&shard.index, mix64(row_at(&shard.slabs, row).sign), row)
    recency_remove(&shard.recency, &shard.slabs, row)
    slabs_drop_row(&shard.slabs, row)


cdef void drop_rows(Shard *shard, const row_t *rows, uint32_t count) noexcept nogil:
    cdef uint32_t i
    for i in range(count):
        persia_prefetch_write(row_at(&shard.slabs, rows[i]))
    for i in range(count):
        persia_prefetch_write(
            home_bucket(&shard.index, mix64(row_at(&shard.slabs, rows[i]).sign)))
    for i in range(count):
        drop(shard, rows[i])


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


cdef void end_request(Shard *shard, uint32_t num_signs) noexcept nogil:
    """Bring the rows within ttl, capacity and limit, then the orders within their bounds."""
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
    end_request(shard, end - begin)


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
    end_request(shard, end - begin)


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
            drop(shard, row)
    recency_settle(&shard.recency)


@cython.final
cdef class Batch:
    """One request: its arguments, and its signs in shard order. Reused."""

    def __cinit__(self):
        self.num_signs = 0
        self.capacity = 0
        self.hashes = NULL
        self.order = NULL
        self.rows = NULL
        self.starts = NULL

    def __dealloc__(self):
        free(self.hashes)
        free(self.order)
        free(self.rows)
        free(self.starts)

    def serve(self, uint32_t first, uint32_t end):
        """Serve shards first..end, each under its lock."""
        cdef Tally mine
        cdef uint32_t i, floats = scratch_size(&self.format)
        cdef Shard *shard
        memset(&mine, 0, sizeof(Tally))
        if floats:
            mine.scratch = <float *> malloc(floats * sizeof(float))
            if mine.scratch == NULL:
                raise MemoryError(f"scratch of {floats} floats for rows of 2-byte values")
        with nogil:
            for i in range(first, end):
                if self.starts[i] == self.starts[i + 1]:
                    continue
                shard = &self.shards[i]
                PyThread_acquire_lock(shard.lock, 1)
                self.serve_shard(shard, self, self.starts[i], self.starts[i + 1], &mine)
                PyThread_release_lock(shard.lock)
                if mine.status != STATUS_OK:
                    break
        free(mine.scratch)
        add_tally(&self.tally, &mine)

    cdef int reserve(self, uint32_t num_signs, uint32_t num_shards) except -1:
        if self.starts == NULL:
            self.starts = <uint32_t *> malloc((num_shards + 1) * sizeof(uint32_t))
        if num_signs > self.capacity:
            free(self.hashes)
            free(self.order)
            free(self.rows)
            self.capacity = 0
            self.hashes = <uint64_t *> malloc(num_signs * sizeof(uint64_t))
            self.order = <uint32_t *> malloc(num_signs * sizeof(uint32_t))
            self.rows = <row_t *> malloc(num_signs * sizeof(row_t))
            if self.hashes == NULL or self.order == NULL or self.rows == NULL:
                raise MemoryError(f"scratch for a request of {num_signs} signs")
            self.capacity = num_signs
        if self.starts == NULL:
            raise MemoryError(f"scratch for {num_shards} shards")
        self.num_signs = num_signs
        return 0


cdef void split(Batch batch, uint32_t num_shards) noexcept nogil:
    """Order the request by shard, stable. Hashing twice is cheaper than keeping the hashes."""
    cdef const sign_t *signs = batch.signs
    cdef uint32_t *starts = batch.starts
    cdef uint32_t i, shard, start, count
    cdef uint64_t hash
    memset(starts, 0, (num_shards + 1) * sizeof(uint32_t))
    if num_shards == 1:
        for i in range(batch.num_signs):
            batch.hashes[i] = mix64(signs[i])
            batch.order[i] = i
        starts[1] = batch.num_signs
        return
    for i in range(batch.num_signs):
        starts[shard_of(mix64(signs[i]), num_shards)] += 1
    start = 0
    for shard in range(num_shards):
        count = starts[shard]
        starts[shard] = start
        start += count
    for i in range(batch.num_signs):
        hash = mix64(signs[i])
        shard = shard_of(hash, num_shards)
        batch.hashes[starts[shard]] = hash
        batch.order[starts[shard]] = i
        starts[shard] += 1
    # Each start now is the next shard's; shift them back by one.
    shard = num_shards
    while shard > 0:
        starts[shard] = starts[shard - 1]
        shard -= 1
    starts[0] = 0


cdef inline void add_tally(Tally *total, const Tally *part) noexcept nogil:
    total.num_missing += part.num_missing
    total.num_refused += part.num_refused
    if total.status == STATUS_OK and part.status != STATUS_OK:
        total.status = part.status
        total.sign = part.sign
        total.dim = part.dim
        total.dtype = part.dtype
        total.state_words = part.state_words


@cython.final
cdef class EmbeddingStore:
    """See the stub for the contract of each method."""

    def __cinit__(
        self, capacity, *, num_shards=16, seed=0, memory_limit=0, num_threads=1,
        policies=(), sketch_bytes=0
    ):
        self.shards = NULL
        self.batches = []
        self.pool = None
        self.optimizer = None
        memset(self.clocks, 0, sizeof(self.clocks))
        if not 1 <= capacity < 2**63:
            raise ConfigError(f"capacity must be in 1..2**63-1 rows, got {capacity}")
        if not 1 <= num_shards <= 1024:
            raise ConfigError(f"num_shards must be in 1..1024, got {num_shards}")
        if not 0 <= memory_limit < 2**63:
            raise ConfigError(f"memory_limit must be in 0..2**63-1 bytes, got {memory_limit}")
        if not 1 <= num_threads <= 1024:
            raise ConfigError(f"num_threads must be in 1..1024, got {num_threads}")
        self.capacity = capacity
        self.seed = seed & 0xFFFFFFFFFFFFFFFF
        self.memory_limit = memory_limit
        # A shard of a handful of rows would make LRU coarse; 64 each is the least.
        self.num_shards = max(1, min(num_shards, capacity // 64))
        self.num_threads = min(num_threads, self.num_shards)
        self.shards = <Shard *> PyMem_Calloc(self.num_shards, sizeof(Shard))
        if self.shards == NULL:
            raise MemoryError(f"{self.num_shards} shards")
        self.policies = (("lru", None, 0), *policies)
        kinds = [numbers_of(kind, clock, ttl) for kind, clock, ttl in self.policies]
        if len(set(kinds)) < len(kinds):
            raise ConfigError(f"a policy comes twice in {self.policies}")
        if len(kinds) > MAX_POLICIES:
            raise ConfigError(f"a store has at most {MAX_POLICIES} policies, got {len(kinds)}")
        if not 0 <= sketch_bytes < 2**63:
            raise ConfigError(f"sketch_bytes must be in 0..2**63-1, got {sketch_bytes}")
        # Divided over shards; a remainder is worth a line each.
        self.sketch_bytes = sketch_bytes
        cdef uint32_t i
        for i in range(self.num_shards):
            self.shards[i].capacity = self.capacity // self.num_shards + (
                i < self.capacity % self.num_shards)
            self.shards[i].byte_limit = self.memory_limit // self.num_shards
            self.shards[i].lock = PyThread_allocate_lock()
            if self.shards[i].lock == NULL or (
                    shard_init(&self.shards[i], self.shard_sketch_bytes()) < 0):
                raise MemoryError(f"shard {i} of {self.num_shards}")
            for number, (kind, clock, ttl) in enumerate(kinds):
                if eviction_policy(
                        &self.shards[i].eviction, &self.shards[i].recency, kind, clock,
                        ttl) != <int> number:
                    raise MemoryError(f"policy {number} of shard {i}")
        if self.num_threads > 1:
            self.pool = ThreadPoolExecutor(
                self.num_threads - 1, thread_name_prefix="persia-store")

    def __dealloc__(self):
        cdef uint32_t i
        if self.shards == NULL:
            return
        for i in range(self.num_shards):
            shard_free(&self.shards[i])
            eviction_free(&self.shards[i].eviction)
            if self.shards[i].lock != NULL:
                PyThread_free_lock(self.shards[i].lock)
        PyMem_Free(self.shards)

    def close(self):
        """Stop the store's threads; a later request runs on its caller's."""
        pool, self.pool = self.pool, None
        if pool is not None:
            pool.shutdown(wait=True)

    def __len__(self):
        cdef uint64_t total = 0
        cdef uint32_t i
        for i in range(self.num_shards):
            total += self.shards[i].recency.num_live
        return total

    def configure(self, RowOptimizer optimizer not None):
        cdef uint32_t i, slab, dim
        for i in range(self.num_shards):
            for slab in range(self.shards[i].slabs.num_slabs):
                dim = self.shards[i].slabs.slabs[slab].dim
                if self.shards[i].slabs.slabs[slab].num_live and (
                        self.shards[i].slabs.slabs[slab].state_words
                        != optimizer.state_width(dim)):
                    raise ConfigError(
                        f"optimizer {optimizer.name} keeps {optimizer.state_width(dim)} words "
                        f"of state for dim {dim}, the {len(self)} rows held keep "
                        f"{self.shards[i].slabs.slabs[slab].state_words}: clear them first")
        self.optimizer = optimizer

    cdef Batch begin(
        self, const uint64_t[::1] signs, serve_t serve_shard, uint32_t dim,
        RowOptimizer optimizer, uint32_t dtype
    ):
        """A request on these signs, split by shard; its arguments are still to be filled in."""
        cdef Batch batch
        if signs.shape[0] >= NO_ROW:
            raise DataError(f"a request holds at most 2**32-2 signs, got {signs.shape[0]}")
        batch = self.batches.pop() if self.batches else Batch()
        batch.reserve(<uint32_t> signs.shape[0], self.num_shards)
        batch.shards = self.shards
        batch.serve_shard = serve_shard
        batch.signs = &signs[0] if signs.shape[0] else NULL
        batch.dim = dim
        batch.optimizer = optimizer
        batch.state_words = 0 if optimizer is None else optimizer.state_width(dim)
        set_format(&batch.format, dtype, dim, batch.state_words)
        batch.seed = self.seed
        self.set_policy(batch, 0)
        batch.admit_at = 1
        batch.is_repeated = False
        batch.admission_key = mix64(mix64(self.seed ^ ADMISSION))
        memcpy(batch.clocks, self.clocks, sizeof(self.clocks))
        memset(&batch.tally, 0, sizeof(Tally))
        with nogil:
            split(batch, self.num_shards)
        return batch

    cdef Tally run(self, Batch batch) except *:
        """Serve the request on all threads, give its scratch back, raise what it met."""
        cdef Tally tally
        batch.held = (self, batch.held)     # for threads that outlast an interrupted call
        pool = self.pool                    # close() may take it away meanwhile
        if pool is None or batch.num_signs < MIN_THREADED_SIGNS:
            batch.serve(0, self.num_shards)
        else:
            bounds = [
                i * self.num_shards // self.num_threads for i in range(self.num_threads + 1)]
            others = [
                pool.submit(batch.serve, bounds[i], bounds[i + 1])
                for i in range(1, self.num_threads)]
            batch.serve(bounds[0], bounds[1])
            for other in others:
                other.result()
        tally = batch.tally
        dim = batch.dim
        dtype = dtype_name(batch.format.dtype)
        batch.held = None
        batch.optimizer = None
        batch.initializer = None
        self.batches.append(batch)
        if PERSIA_DEBUG:
            self.check()
        if tally.status == STATUS_NO_MEMORY:
            raise MemoryError(f"no memory for another row of dim {dim} ({len(self)} held)")
        if tally.status == STATUS_SHAPES:
            raise ConfigError(f"no more than 64 shapes of rows fit; dim {dim} is one more")
        if tally.status == STATUS_DIM:
            raise DimMismatch(
                f"sign {tally.sign:#018x} is stored with dim {tally.dim} of "
                f"{dtype_name(tally.dtype)} and {tally.state_words} words of state; the "
                f"request is for dim {dim} of {dtype}")
        return tally

    def lookup_train(
        self, const uint64_t[::1] signs not None, Initializer initializer not None,
        double admit_probability, uint64_t batch_id, float[:, ::1] rows_out not None,
        uint32_t[::1] hints_out not None, RowOptimizer optimizer=None, *,
        uint32_t policy=0, uint32_t admit_at=1, bint repeated=False,
        dtype="float32",
    ):
        cdef Batch batch
        cdef Tally tally
        cdef uint32_t number = dtype_number(dtype)
        optimizer = self.chosen(optimizer, "a training lookup")
        check_rows("rows_out", signs.shape[0], rows_out.shape[0], rows_out.shape[1])
        check_length("hints_out", signs.shape[0], hints_out.shape[0])
        if not 0.0 <= admit_probability <= 1.0:
            raise ConfigError(f"admit_probability must be in 0..1, got {admit_probability}")
        self.check_policy(policy)
        if not 1 <= admit_at <= (MAX_COUNT if self.sketch_bytes else 1):
            raise ConfigError(
                f"admit_at must be in 1..{MAX_COUNT}, and 1 without sketch_bytes, "
                f"got {admit_at}")
        if signs.shape[0] == 0:
            return 0, 0
        batch = self.begin(signs, train_shard, <uint32_t> rows_out.shape[1], optimizer, number)
        batch.initializer = initializer
        batch.admission_key = mix64(mix64(self.seed ^ ADMISSION) ^ batch_id)
        batch.admit_all = admit_probability >= 1.0
        self.set_policy(batch, policy)
        batch.admit_at = admit_at
        batch.is_repeated = repeated
        batch.admission_below = 0 if batch.admit_all else <uint64_t> (
            admit_probability * 18446744073709551616.0)
        batch.rows_out = &rows_out[0, 0]
        batch.hints_out = &hints_out[0]
        batch.held = (signs, rows_out, hints_out)
        tally = self.run(batch)
        return tally.num_missing, tally.num_refused

    def lookup_eval(
        self, const uint64_t[::1] signs not None, float[:, ::1] rows_out not None, *,
        dtype="float32",
    ):
        cdef Batch batch
        cdef uint32_t number = dtype_number(dtype)
        check_rows("rows_out", signs.shape[0], rows_out.shape[0], rows_out.shape[1])
        if signs.shape[0] == 0:
            return 0
        batch = self.begin(signs, eval_shard, <uint32_t> rows_out.shape[1], None, number)
        batch.rows_out = &rows_out[0, 0]
        batch.held = (signs, rows_out)
        return self.run(batch).num_missing

    def update(
        self, const uint64_t[::1] signs not None, const uint32_t[::1] hints,
        const float[:, ::1] gradients not None, RowOptimizer optimizer=None, *,
        dtype="float32", uint64_t number=0
    ):
        cdef Batch batch
        cdef uint32_t row_dtype = dtype_number(dtype)
        optimizer = self.chosen(optimizer, "an update")
        check_rows("gradients", signs.shape[0], gradients.shape[0], gradients.shape[1])
        if hints is not None:
            check_length("hints", signs.shape[0], hints.shape[0])
        if signs.shape[0] == 0:
            return 0
        batch = self.begin(
            signs, update_shard, <uint32_t> gradients.shape[1], optimizer, row_dtype)
        batch.rounding_key = rounding_key(self.seed, number)
        batch.hints = NULL
        if hints is not None:
            batch.hints = &hints[0]
        batch.gradients = &gradients[0, 0]
        batch.held = (signs, hints, gradients)
        return self.run(batch).num_missing

    def read(
        self, const uint64_t[::1] signs not None, uint32_t dim, state_words=None, *,
        dtype="float32",
    ):
        cdef Batch batch
        cdef uint32_t number = dtype_number(dtype)
        cdef float[:, ::1] values_view
        cdef uint32_t[:, ::1] states_view
        cdef uint8_t[::1] found_view
        cdef uint32_t words
        if state_words is None:
            words = self.chosen(None, "reading without state_words").state_width(dim)
        else:
            words = state_words
        found = np.zeros(signs.shape[0], dtype=np.uint8)
        values = np.zeros((signs.shape[0], dim), dtype=np.float32)
        states = np.zeros((signs.shape[0], words), dtype=np.uint32)
        if signs.shape[0]:
            check_rows("values", signs.shape[0], signs.shape[0], dim)
            batch = self.begin(signs, read_shard, dim, None, number)
            found_view = found
            values_view = values
            states_view = states
            batch.found = &found_view[0]
            batch.held = (signs, found, values, states)
            batch.rows_out = &values_view[0, 0]
            batch.states_out = &states_view[0, 0] if words else NULL
            batch.state_words = words
            set_format(&batch.format, number, dim, words)
            self.run(batch)
        return found.astype(bool), values, states

    def write(
        self, const uint64_t[::1] signs not None, const float[:, ::1] values not None,
        const uint32_t[:, ::1] states, RowOptimizer optimizer=None, *, uint32_t policy=0,
        dtype="float32"
    ):
        cdef Batch batch
        cdef uint32_t number = dtype_number(dtype)
        cdef uint32_t dim
        optimizer = self.chosen(optimizer, "writing rows")
        self.check_policy(policy)
        check_rows("values", signs.shape[0], values.shape[0], values.shape[1])
        dim = <uint32_t> values.shape[1]
        words = optimizer.state_width(dim)
        if states is not None and (
                states.shape[0] != signs.shape[0] or states.shape[1] != words):
            raise DataError(
                f"states must be [{signs.shape[0]}, {words}] for {optimizer.name} and "
                f"dim {dim}, got [{states.shape[0]}, {states.shape[1]}]")
        if signs.shape[0] == 0:
            return
        batch = self.begin(signs, write_shard, dim, optimizer, number)
        batch.initializer = ZEROS
        self.set_policy(batch, policy)
        batch.gradients = &values[0, 0]
        batch.held = (signs, values, states)
        batch.states = NULL
        if states is not None and words:
            batch.states = &states[0, 0]
        self.run(batch)

    def delete(self, const uint64_t[::1] signs not None):
        cdef Batch batch
        if signs.shape[0] == 0:
            return 0
        batch = self.begin(signs, delete_shard, 0, None, 0)
        batch.held = (signs,)
        return signs.shape[0] - self.run(batch).num_missing

    def clear(self):
        cdef uint32_t i
        cdef Shard *shard
        cdef uint64_t sketch_bytes = self.shard_sketch_bytes()
        cdef int status
        for i in range(self.num_shards):
            shard = &self.shards[i]
            with nogil:
                PyThread_acquire_lock(shard.lock, 1)
                shard_free(shard)
                status = shard_init(shard, sketch_bytes)
                PyThread_release_lock(shard.lock)
            if status < 0:
                raise MemoryError(f"shard {i} of {self.num_shards}")

    def shard_entries(self, uint32_t number):
        cdef Shard *shard
        cdef uint32_t segment, offset, i, count, slab, dim, words, nth, order
        cdef row_t[EVICT_ROWS] rows
        cdef uint64_t[::1] signs_view
        cdef float[:, ::1] values_view
        cdef uint32_t[:, ::1] states_view
        cdef Py_ssize_t at
        cdef Row *row
        cdef Format format
        if number >= self.num_shards:
            raise DataError(f"shard must be in 0..{self.num_shards - 1}, got {number}")
        shard = &self.shards[number]
        blocks = []
        with nogil:
            PyThread_acquire_lock(shard.lock, 1)
        try:
            for slab in range(shard.slabs.num_slabs):
                count = <uint32_t> shard.slabs.slabs[slab].num_live
                if count == 0:
                    continue
                dim = shard.slabs.slabs[slab].dim
                words = shard.slabs.slabs[slab].state_words
                set_format(&format, shard.slabs.slabs[slab].dtype, dim, words)
                signs = np.empty(count, dtype=np.uint64)
                values = np.empty((count, dim), dtype=np.float32)
                states = np.empty((count, words), dtype=np.uint32)
                signs_view = signs
                values_view = values
                states_view = states
                at = 0
                with nogil:
                    nth = 0
                    while True:
                        order = eviction_nth_order(&shard.eviction, nth)
                        if order == NO_ORDER:
                            break
                        nth += 1
                        segment = shard.recency.orders[order].oldest
                        offset = 0
                        while True:
                            count = recency_walk(
                                &shard.recency, &segment, &offset, rows, EVICT_ROWS)
                            if count == 0:
                                break
                            for i in range(count):
                                if shard.slabs.views[rows[i] >> PLACE_BITS].slab != slab:
                                    continue
                                row = row_at(&shard.slabs, rows[i])
                                if recency_expired(
                                        &shard.recency, row.position >> OFFSET_BITS,
                                        self.clocks):
                                    continue
                                signs_view[at] = row.sign
                                read_values(&format, &values_view[at, 0], row_values(row))
                                if words:
                                    memcpy(
                                        &states_view[at, 0],
                                        row_values(row) + format.value_words,
                                        words * sizeof(float))
                                at += 1
                blocks.append((signs[:at], values[:at], states[:at]))
        finally:
            PyThread_release_lock(shard.lock)
        return blocks

    def iterate(self):
        for number in range(self.num_shards):
            yield from self.shard_entries(number)

    def policy_stats(self):
        cdef uint32_t i, number
        cdef Shard *shard
        totals = [
            dict.fromkeys(("rows", "draining", "evicted", "expired"), 0)
            for _ in self.policies]
        for i in range(self.num_shards):
            shard = &self.shards[i]
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

    def stats(self):
        cdef uint32_t i, number
        cdef Shard *shard
        totals = dict.fromkeys(
            ("rows", "bytes", "evicted", "evicted_lru", "evicted_lfu", "expired", "inserted",
             "refused", "missing", "entries"), 0)
        limited = False
        for i in range(self.num_shards):
            shard = &self.shards[i]
            with nogil:
                PyThread_acquire_lock(shard.lock, 1)
            totals["rows"] += shard.recency.num_live
            totals["bytes"] += shard_bytes(shard)
            for number in range(shard.eviction.num_policies):
                totals["evicted"] += shard.eviction.policies[number].num_evicted
                kind = "evicted_lfu" if shard.eviction.policies[number].kind == LFU else (
                    "evicted_lru")
                totals[kind] += shard.eviction.policies[number].num_evicted
                totals["expired"] += shard.eviction.policies[number].num_expired
            totals["inserted"] += shard.num_inserted
            totals["refused"] += shard.num_refused
            totals["missing"] += shard.num_missing
            totals["entries"] += shard.recency.num_held
            limited = limited or shard.is_limited
            PyThread_release_lock(shard.lock)
        totals["memory_limited"] = limited
        return totals

    def check(self):
        cdef uint32_t i
        cdef const char *broken
        for i in range(self.num_shards):
            with nogil:
                PyThread_acquire_lock(self.shards[i].lock, 1)
                broken = broken_invariant(&self.shards[i])
                PyThread_release_lock(self.shards[i].lock)
            if broken != NULL:
                raise InternalError(f"shard {i}: {broken.decode()}")

    def set_clocks(self, uint64_t milliseconds, uint64_t steps):
        if max(milliseconds, steps) >= 1 << 61:
            raise DataError(f"times must be below 2**61, got {milliseconds} and {steps}")
        # A request that read an earlier time may come later; clocks do not go back.
        self.clocks[CLOCK_MS] = max(self.clocks[CLOCK_MS], milliseconds)
        self.clocks[CLOCK_STEPS] = max(self.clocks[CLOCK_STEPS], steps)

    cdef uint64_t shard_sketch_bytes(self) noexcept:
        return (self.sketch_bytes + self.num_shards - 1) // self.num_shards

    cdef void set_policy(self, Batch batch, uint32_t policy) noexcept:
        cdef Policy *of_first = &self.shards[0].eviction.policies[policy]
        batch.policy = policy
        batch.order_of_use = of_first.first if of_first.kind == LRU else NO_ORDER

    cdef int check_policy(self, uint32_t policy) except -1:
        if policy >= len(self.policies):
            raise ConfigError(
                f"policy must be in 0..{len(self.policies) - 1}, got {policy}")
        return 0

    cdef RowOptimizer chosen(self, RowOptimizer given, str what):
        """The optimizer given with the call, or else the store's own."""
        if given is None and self.optimizer is None:
            raise NotConfigured(f"{what} needs an optimizer; configure() gives the store one")
        return self.optimizer if given is None else given


cdef tuple numbers_of(str kind, clock, ttl):
    """A policy as the core's (kind, clock, ttl)."""
    kinds = {"lru": LRU, "lfu": LFU}
    clocks = {None: NO_CLOCK, "milliseconds": CLOCK_MS, "steps": CLOCK_STEPS}
    if kind not in kinds or clock not in clocks or (clock is None) != (ttl == 0):
        raise ConfigError(
            f"a policy is (lru or lfu, None or milliseconds or steps, ttl), "
            f"got ({kind!r}, {clock!r}, {ttl!r})")
    if not 0 <= ttl < 2**61:
        raise ConfigError(f"a ttl must be in 0..2**61-1, got {ttl}")
    return kinds[kind], clocks[clock], ttl


cdef int check_length(str name, Py_ssize_t expected, Py_ssize_t got) except -1:
    if expected != got:
        raise DataError(f"{name} must have one element a sign, {expected}, got {got}")
    return 0


cdef int check_rows(
    str name, Py_ssize_t num_signs, Py_ssize_t num_rows, Py_ssize_t dim
) except -1:
    if num_rows != num_signs:
        raise DataError(f"{name} must have one row a sign, {num_signs}, got {num_rows}")
    if not 1 <= dim <= MAX_DIM:
        raise DataError(f"{name} must have 1..{MAX_DIM} columns (the dim), got {dim}")
    return 0


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
