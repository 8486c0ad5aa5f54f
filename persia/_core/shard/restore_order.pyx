"""How restored rows get their places back.

Files hold rows by bucket, orders of use are by shard, and the two have no bits in common: a
file has a few rows of every shard.
"""

from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from persia._core.shard.recency cimport (
    OFFSET_BITS, Order, recency_begin, recency_end, recency_settle, recency_touch_at,
    segment_at,
)
from persia._core.shard.slabs cimport (
    NO_POSITION, Row, is_place, persia_prefetch, persia_prefetch_write, row_at,
)

cdef extern from "portable.h" nogil:
    void *persia_map(size_t num_bytes, size_t alignment) noexcept
    void persia_unmap(void *start, size_t num_bytes) noexcept

cdef enum:
    MAPPED_BYTES = 0x200000
    DIGITS = 2048                   # of 11 bits
    AHEAD = 16                      # rows fetched early
    NONE = 0xFFFFFFFF


cdef inline uint64_t part_of(uint64_t ttl) noexcept nogil:
    """What ages are counted in, so that any that matters fits 32 bits."""
    return ttl // TTL_PARTS + 1


cdef RestoredRow *new_rows(uint64_t capacity) noexcept nogil:
    """NULL: no memory. A large array is mapped, so that its pages go back once it is freed."""
    cdef size_t num_bytes = capacity * sizeof(RestoredRow)
    if num_bytes < <size_t> MAPPED_BYTES:
        return <RestoredRow *> malloc(num_bytes)
    return <RestoredRow *> persia_map(num_bytes, MAPPED_BYTES)


cdef void free_rows(RestoredRow *rows, uint64_t capacity) noexcept nogil:
    cdef size_t num_bytes = capacity * sizeof(RestoredRow)
    if num_bytes < <size_t> MAPPED_BYTES:
        free(rows)
    else:
        persia_unmap(rows, num_bytes)


cdef int grow(RestoredRows *restored, uint64_t capacity) noexcept nogil:
    cdef RestoredRow *rows = new_rows(capacity)
    if rows == NULL:
        return -1
    if restored.count:
        memcpy(rows, restored.rows, restored.count * sizeof(RestoredRow))
    free_rows(restored.rows, restored.capacity)
    restored.rows = rows
    restored.capacity = capacity
    return 0


cdef int restored_expect(RestoredRows *restored, uint64_t num_rows) noexcept nogil:
    """Make room for ``num_rows`` more; its pages become resident as they are used."""
    if restored.count + num_rows <= restored.capacity:
        return 0
    return grow(restored, restored.count + num_rows)


# A restored row is first the newest of its order, and noted here with its place of then.
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


cdef void restored_free(RestoredRows *restored) noexcept nogil:
    free_rows(restored.rows, restored.capacity)
    memset(restored, 0, sizeof(RestoredRows))


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
# at the time of its last use. A row that was dropped meanwhile is left out.
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
            if i + AHEAD < count:
                persia_prefetch_write(row_at(slabs, restored.rows[i + AHEAD].row))
            status = settle_row(recency, slabs, &restored.rows[i])
        else:
            if i + 2 * AHEAD < count:       # if it is none, of what is not read
                persia_prefetch(&restored.rows[numbers[i + 2 * AHEAD]])
            if i + AHEAD < count and numbers[i + AHEAD] != NONE:
                persia_prefetch_write(
                    row_at(slabs, restored.rows[numbers[i + AHEAD]].row))
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
