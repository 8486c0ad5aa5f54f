"""Rows and counts that come back into a store from a file."""

from libc.stdlib cimport malloc
from libc.string cimport memcpy, memset

import numpy as np

from persia._core.base.hashing cimport mix64
from persia._core.base.types cimport NO_ROW, row_t, sign_t, uint32_t, uint64_t, uint8_t
from persia._core.shard.changes cimport row_changes, row_enters
from persia._core.shard.eviction cimport LFU_CLASSES, Policy, policy_order
from persia._core.shard.persistent_shard cimport journal_hold, journal_release
from persia._core.shard.recency cimport (
    OFFSET_BITS, Order, Recency, recency_begin, recency_end, recency_settle, recency_touch,
    recency_touch_at, segment_at,
)
from persia._core.shard.shard cimport (
    MAPPED_BYTES, PyThread_acquire_lock, PyThread_release_lock, RestoredRow, RestoredRows,
    Shard, restored_free, shard_end_request, shard_settle,
)
from persia._core.shard.sign_index cimport home_bucket, index_expect, index_find
from persia._core.shard.slabs cimport (
    CACHE_LINE, NO_POSITION, PLACE_BITS, Row, Slab, Slabs, has_format, is_place,
    persia_prefetch, persia_prefetch_write, row_at, row_values, slabs_trim,
)
from persia._core.store.request cimport STATUS_NO_MEMORY, STATUS_OK, Request, RequestResult
from persia._core.store.requests cimport drop_new_row, new_row, note_shape

from persia.errors import DataError

cdef extern from "portable.h" nogil:
    void *persia_map(size_t num_bytes, size_t alignment) noexcept

cdef enum:
    # Of smaller rows, under a memory limit, more may come than were prepared for.
    EXPECTED_ROW_BYTES = 128
    AHEAD = 8               # signs whose lines of the block and of the index are fetched early
    ROWS_AHEAD = 16         # rows fetched early
    TTL_PARTS = 1048576     # to which ages are kept
    DIGITS = 2048           # of 11 bits
    NONE = 0xFFFFFFFF


cdef void restore_shard(
    Shard *shard, Request request, uint32_t begin, uint32_t end, RequestResult *result
) noexcept nogil:
    """Insert or overwrite whole rows, bit for bit; where they stood is noted for later."""
    cdef const Policy *policy = &shard.eviction.policies[request.policy]
    cdef uint64_t i
    cdef uint32_t place
    cdef row_t row
    recency_begin(&shard.recency, &shard.slabs, request.clocks)
    for i in range(begin, <uint64_t> end + AHEAD):
        if i < end:
            persia_prefetch(values_of(request, request.order[i]))
            if request.states != NULL:
                persia_prefetch(states_of(request, request.order[i]))
            persia_prefetch(home_bucket(&shard.index, mix64(request.sorted[i])))
        if i < <uint64_t> begin + AHEAD:
            continue
        place = request.order[i - AHEAD]
        row = restore_row(shard, request, request.sorted[i - AHEAD], place, result)
        if row == NO_ROW:
            break
        if restored_add(
                &shard.restored, row, request.sorted[i - AHEAD], request.orders[place],
                request.ages[place], policy.ttl) < 0:
            result.status = STATUS_NO_MEMORY
            break
    shard_end_request(shard, end - begin)


cdef row_t restore_row(
    Shard *shard, Request request, sign_t sign, uint32_t place, RequestResult *result
) noexcept nogil:
    """NO_ROW: see the result."""
    cdef uint64_t hash = mix64(sign)
    cdef uint32_t order = policy_order(
        &shard.eviction.policies[request.policy],
        min(request.uses[place], <uint32_t> LFU_CLASSES - 1))
    cdef row_t row = index_find(&shard.index, &shard.slabs, hash, sign)
    cdef bint is_new = row == NO_ROW
    cdef float *values
    cdef const Slab *slab
    if is_new:
        row = new_row(shard, request, hash, sign, result)
        if row == NO_ROW:
            return NO_ROW
    else:
        slab = &shard.slabs.slabs[shard.slabs.views[row >> PLACE_BITS].slab]
        if not has_format(slab, &request.format):
            note_shape(slab, sign, result)
            return NO_ROW
    values = row_values(row_at(&shard.slabs, row))
    if is_new:
        fill_row(request, values, place)      # whole, before it is a row
    if recency_touch(
            &shard.recency, &shard.slabs, row, row_at(&shard.slabs, row), order) < 0:
        result.status = STATUS_NO_MEMORY
        if is_new:
            drop_new_row(shard, hash, row)
        return NO_ROW
    result.status = STATUS_OK
    if is_new:
        row_enters(&shard.changes, &shard.slabs, row)
    else:
        row_changes(&shard.changes, &shard.slabs, row, row_at(&shard.slabs, row))
        if shard.file != NULL:
            journal_hold(
                shard.file, &row, &values, 1,
                4 * (request.format.value_words + request.format.state_words), NULL)
        fill_row(request, values, place)
        if shard.file != NULL:
            journal_release(shard.file, NULL, 0)
    return row


cdef inline const char *values_of(Request request, uint32_t place) noexcept nogil:
    return request.raw_values + <size_t> place * request.dim * (
        4 if request.format.half == NULL else 2)


cdef inline const uint32_t *states_of(Request request, uint32_t place) noexcept nogil:
    return request.states + <size_t> place * request.state_words


cdef inline void fill_row(Request request, float *values, uint32_t place) noexcept nogil:
    memcpy(
        values, values_of(request, place),
        <size_t> request.dim * (4 if request.format.half == NULL else 2))
    if request.states == NULL:
        request.optimizer.fill_state(values + request.format.value_words, request.dim)
    else:
        memcpy(
            values + request.format.value_words, states_of(request, place),
            request.state_words * sizeof(float))


# --- how restored rows get their places back ------------------------------------------------
#
# Files hold rows by bucket, orders of use are by shard, and the two have no bits in common: a
# file has a few rows of every shard.


cdef inline uint64_t part_of(uint64_t ttl) noexcept nogil:
    """What ages are counted in, so that any that matters fits 32 bits."""
    return ttl // TTL_PARTS + 1


cdef RestoredRow *new_rows(uint64_t capacity) noexcept nogil:
    """NULL: no memory. A large array is mapped, so that its pages go back once it is freed."""
    cdef size_t num_bytes = capacity * sizeof(RestoredRow)
    if num_bytes < <size_t> MAPPED_BYTES:
        return <RestoredRow *> malloc(num_bytes)
    return <RestoredRow *> persia_map(num_bytes, MAPPED_BYTES)


cdef int grow(RestoredRows *restored, uint64_t capacity) noexcept nogil:
    cdef RestoredRows before = restored[0]
    restored.rows = new_rows(capacity)
    if restored.rows == NULL:
        restored[0] = before
        return -1
    restored.capacity = capacity
    if restored.count:
        memcpy(restored.rows, before.rows, restored.count * sizeof(RestoredRow))
    restored_free(&before)
    return 0


cdef int restored_expect(RestoredRows *restored, uint64_t num_rows) noexcept nogil:
    """Make room for ``num_rows`` more; its pages become resident as they are used."""
    if restored.count + num_rows <= restored.capacity:
        return 0
    return grow(restored, restored.count + num_rows)


# A restored row is first the newest of its order, and noted here with its place of then. -1: no
# memory.
cdef int restored_add(
    RestoredRows *restored, row_t row, sign_t sign, uint64_t order, uint64_t age, uint64_t ttl
) noexcept nogil:
    cdef RestoredRow *at
    if restored.count == restored.capacity and grow(
            restored, restored.capacity + restored.capacity // 2 + 64) < 0:
        return -1
    at = &restored.rows[restored.count]
    restored.count += 1
    at.row = row
    at.tag = <uint32_t> sign
    at.order = <uint32_t> min(order, <uint64_t> 0xFFFFFFFF)
    at.age = <uint32_t> min(age // part_of(ttl), <uint64_t> 0xFFFFFFFF)
    return 0


cdef void sort_by_digit(
    const RestoredRow *rows, RestoredRow *out, uint64_t count, uint32_t shift
) noexcept nogil:
    """A stable pass of a radix sort."""
    cdef uint64_t[DIGITS] ends
    cdef uint64_t i, total = 0, below
    cdef uint32_t digit
    memset(ends, 0, sizeof(ends))
    for i in range(count):
        ends[(rows[i].order >> shift) % DIGITS] += 1
    for digit in range(<uint32_t> DIGITS):
        below = total
        total += ends[digit]
        ends[digit] = below
    for i in range(count):
        digit = (rows[i].order >> shift) % DIGITS
        out[ends[digit]] = rows[i]
        ends[digit] += 1


cdef int sort(RestoredRows *restored, RestoredRows *spare, uint32_t last) noexcept nogil:
    cdef RestoredRows swapped
    cdef uint32_t shift
    if spare.capacity < restored.count and grow(spare, restored.capacity) < 0:
        return -1
    for shift in range(0, 32, 11):
        if last >> shift == 0:      # nor above
            break
        sort_by_digit(restored.rows, spare.rows, restored.count, shift)
        spare.count = restored.count
        restored.count = 0
        swapped = restored[0]
        restored[0] = spare[0]
        spare[0] = swapped
    return 0


cdef int settle_row(
    Recency *recency, Slabs *slabs, const RestoredRow *at
) noexcept nogil:
    cdef const Order *order
    cdef Row *row
    cdef uint64_t age, now
    cdef uint32_t number
    if not is_place(slabs, at.row):
        return 0            # its chunk was emptied since, and may hold fewer, larger rows now
    row = row_at(slabs, at.row)
    if <uint32_t> row.sign != at.tag or row.position == <uint32_t> NO_POSITION:
        return 0
    number = segment_at(recency, row.position >> OFFSET_BITS).order
    order = &recency.orders[number]
    now = recency.clocks[order.clock]
    age = min(at.age * part_of(order.ttl), now)
    # A tick each, so that policies take turns as they did.
    recency.tick += 1
    return recency_touch_at(
        recency, slabs, at.row, number, now - age if order.ttl else now)


# Once all rows are there, they are put in the order they had and used again in that order, each
# at the time of its last use. A row that was dropped meanwhile is left out. Spare is only room,
# to put them in order, and is left to the next shard. -1: no memory.
cdef int restored_settle(
    RestoredRows *restored, RestoredRows *spare, Recency *recency, Slabs *slabs,
    const uint64_t *clocks
) noexcept nogil:
    cdef RestoredRows settled
    cdef uint64_t i, count
    cdef uint32_t last = 0
    cdef uint32_t *numbers
    cdef int status = 0
    if restored.count == 0:
        restored_free(restored)
        return 0
    for i in range(restored.count):
        last = max(last, restored.rows[i].order)
    numbers = numbers_by_order(restored, spare, last)
    if numbers == NULL and sort(restored, spare, last) < 0:
        return -1
    recency_begin(recency, slabs, clocks)
    count = restored.count if numbers == NULL else <uint64_t> last + 1
    for i in range(count):
        if numbers == NULL:
            if i + ROWS_AHEAD < count:
                persia_prefetch_write(row_at(slabs, restored.rows[i + ROWS_AHEAD].row))
            status = settle_row(recency, slabs, &restored.rows[i])
        else:
            if i + 2 * ROWS_AHEAD < count:       # if it is none, of what is not read
                persia_prefetch(&restored.rows[numbers[i + 2 * ROWS_AHEAD]])
            if i + ROWS_AHEAD < count and numbers[i + ROWS_AHEAD] != NONE:
                persia_prefetch_write(
                    row_at(slabs, restored.rows[numbers[i + ROWS_AHEAD]].row))
            if numbers[i] != NONE:
                status = settle_row(recency, slabs, &restored.rows[numbers[i]])
        if status < 0:
            break
    recency_end(recency)
    recency_settle(recency)
    settled = restored[0]
    restored[0] = spare[0]
    restored_free(restored)
    spare[0] = settled
    spare.count = 0
    return status


cdef uint32_t *numbers_by_order(
    const RestoredRows *restored, RestoredRows *spare, uint32_t last
) noexcept nogil:
    """Which arrival each order up to the last is of, or NONE; NULL unless no two are of one.

    So it is where a shard gets its own rows back; then a sort has nothing to compare.
    """
    cdef uint64_t i
    cdef uint32_t *numbers
    if last >= 2 * restored.count or restored.count >= NONE:
        return NULL
    if spare.capacity < restored.count and grow(spare, restored.capacity) < 0:
        return NULL
    numbers = <uint32_t *> spare.rows
    memset(numbers, 0xFF, (<size_t> last + 1) * sizeof(uint32_t))
    for i in range(restored.count):
        if numbers[restored.rows[i].order] != NONE:
            return NULL
        numbers[restored.rows[i].order] = <uint32_t> i
    return numbers


# --- all shards -------------------------------------------------------------------------------


cdef int expect_rows(
    Shard *shards, uint32_t num_shards, uint64_t num_rows, uint32_t share, uint32_t num_shares
) except -1:
    cdef uint32_t i
    cdef int status
    cdef uint64_t each = num_rows // num_shards
    if shards[0].byte_limit:
        # An index for rows that will not fit would take the room of those that do.
        each = min(each, shards[0].byte_limit // EXPECTED_ROW_BYTES)
    for i in range(share, num_shards, num_shares):
        with nogil:
            PyThread_acquire_lock(shards[i].lock, 1)
            # More than the mean, as signs are spread by a hash.
            status = restored_expect(&shards[i].restored, each + each // 64)
            if status == 0:
                status = index_expect(&shards[i].index, &shards[i].slabs, each)
            PyThread_release_lock(shards[i].lock)
        if status < 0:
            raise MemoryError(f"{num_rows} rows in {num_shards} shards")
    return 0


cdef int settle_rows(
    Shard *shards, uint32_t num_shards, const uint64_t *clocks, uint32_t share,
    uint32_t num_shares
) except -1:
    cdef uint32_t i
    cdef int status = 0
    cdef Shard *shard
    cdef RestoredRows spare
    memset(&spare, 0, sizeof(spare))
    for i in range(share, num_shards, num_shares):
        shard = &shards[i]
        with nogil:
            PyThread_acquire_lock(shard.lock, 1)
            # ``spare`` is memory of the shard before: it is swapped, not allocated, for each.
            status = restored_settle(
                &shard.restored, &spare, &shard.recency, &shard.slabs, clocks)
            shard_settle(shard)
            slabs_trim(&shard.slabs)
            PyThread_release_lock(shard.lock)
        if status < 0:
            break
    restored_free(&spare)
    if status < 0:
        raise MemoryError(f"the order of the rows restored to shard {i}")
    return 0


cdef inline uint64_t counter_bytes(const Shard *shard) noexcept nogil:
    return shard.sketch.num_lines * CACHE_LINE


cdef tuple read_sketch(Shard *shards, uint32_t num_shards):
    cdef uint32_t i
    counts = np.zeros((num_shards, counter_bytes(&shards[0])), np.uint8)
    numbers = np.zeros((num_shards, 2), np.uint64)
    cdef uint8_t[:, ::1] view = counts
    if view.shape[1]:
        for i in range(num_shards):
            with nogil:
                PyThread_acquire_lock(shards[i].lock, 1)
                memcpy(&view[i, 0], shards[i].sketch.lines, view.shape[1])
                PyThread_release_lock(shards[i].lock)
            numbers[i] = shards[i].sketch.num_counted, shards[i].sketch.next_halved
    return counts, numbers


cdef int write_sketch(
    Shard *shards, uint32_t num_shards, const uint8_t[:, ::1] counts,
    const uint64_t[:, ::1] numbers
) except -1:
    cdef uint32_t i
    cdef uint64_t num_bytes = counter_bytes(&shards[0])
    if (counts.shape[0], counts.shape[1]) != (num_shards, num_bytes) or (
            (numbers.shape[0], numbers.shape[1]) != (num_shards, 2)):
        raise DataError(
            f"counts of ids not admitted must be [{num_shards}, {num_bytes}] and "
            f"[{num_shards}, 2] for this store, got "
            f"[{counts.shape[0]}, {counts.shape[1]}] and "
            f"[{numbers.shape[0]}, {numbers.shape[1]}]")
    if num_bytes == 0:
        return 0
    # All numbers are checked before anything is written.
    for i in range(num_shards):
        if numbers[i, 1] >= num_bytes // CACHE_LINE:
            raise DataError(
                f"next line to halve must be below {num_bytes // CACHE_LINE}, "
                f"got {numbers[i, 1]} for shard {i}")
    for i in range(num_shards):
        with nogil:
            PyThread_acquire_lock(shards[i].lock, 1)
            memcpy(shards[i].sketch.lines, &counts[i, 0], num_bytes)
            shards[i].sketch.num_counted = numbers[i, 0]
            shards[i].sketch.next_halved = numbers[i, 1]
            PyThread_release_lock(shards[i].lock)
    return 0
