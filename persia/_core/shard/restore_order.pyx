"""How restored rows get their places back.

Files hold rows by bucket, orders of use are by shard, and the two have no bits in common: a
file has a few rows of every shard. So a restored row is first the newest of its order, and
noted; once all are there, they are put in the order they had and used again in that order,
each at the time of its last use. A row that was dropped meanwhile is met no more.
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


cdef Arrival *new_rows(uint64_t capacity) noexcept nogil:
    """Room for so many; NULL: no memory. Of many it is the system's again once it is freed."""
    cdef size_t num_bytes = capacity * sizeof(Arrival)
    if num_bytes < <size_t> MAPPED_BYTES:
        return <Arrival *> malloc(num_bytes)
    return <Arrival *> persia_map(num_bytes, MAPPED_BYTES)


cdef void free_rows(Arrival *rows, uint64_t capacity) noexcept nogil:
    cdef size_t num_bytes = capacity * sizeof(Arrival)
    if num_bytes < <size_t> MAPPED_BYTES:
        free(rows)
    else:
        persia_unmap(rows, num_bytes)


cdef int grow(Arrivals *arrivals, uint64_t capacity) noexcept nogil:
    cdef Arrival *rows = new_rows(capacity)
    if rows == NULL:
        return -1
    if arrivals.count:
        memcpy(rows, arrivals.rows, arrivals.count * sizeof(Arrival))
    free_rows(arrivals.rows, arrivals.capacity)
    arrivals.rows = rows
    arrivals.capacity = capacity
    return 0


cdef int arrivals_expect(Arrivals *arrivals, uint64_t num_rows) noexcept nogil:
    """Have room for so many more; pages of it become resident as they are used."""
    if arrivals.count + num_rows <= arrivals.capacity:
        return 0
    return grow(arrivals, arrivals.count + num_rows)


cdef int arrivals_add(
    Arrivals *arrivals, row_t row, sign_t sign, uint64_t order, uint64_t age, uint64_t ttl
) noexcept nogil:
    cdef Arrival *at
    if arrivals.count == arrivals.capacity and grow(
            arrivals, arrivals.capacity + arrivals.capacity // 2 + 64) < 0:
        return -1
    at = &arrivals.rows[arrivals.count]
    arrivals.count += 1
    at.row = row
    at.tag = <uint32_t> sign
    at.order = <uint32_t> min(order, <uint64_t> 0xFFFFFFFF)
    at.age = <uint32_t> min(age // part_of(ttl), <uint64_t> 0xFFFFFFFF)
    return 0


cdef void arrivals_free(Arrivals *arrivals) noexcept nogil:
    free_rows(arrivals.rows, arrivals.capacity)
    memset(arrivals, 0, sizeof(Arrivals))


cdef void sort_by_digit(
    const Arrival *rows, Arrival *out, uint64_t count, uint32_t shift
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


cdef int sort(Arrivals *arrivals, Arrivals *spare, uint32_t last) noexcept nogil:
    cdef Arrivals swapped
    cdef uint32_t shift
    if spare.capacity < arrivals.count and grow(spare, arrivals.capacity) < 0:
        return -1
    for shift in range(0, 32, 11):
        if last >> shift == 0:      # nor above
            break
        sort_by_digit(arrivals.rows, spare.rows, arrivals.count, shift)
        spare.count = arrivals.count
        arrivals.count = 0
        swapped = arrivals[0]
        arrivals[0] = spare[0]
        spare[0] = swapped
    return 0


cdef int settle_row(
    Recency *recency, Slabs *slabs, const Arrival *at
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


cdef int arrivals_settle(
    Arrivals *arrivals, Arrivals *spare, Recency *recency, Slabs *slabs, const uint64_t *clocks
) noexcept nogil:
    cdef Arrivals settled
    cdef uint64_t i, count
    cdef uint32_t last = 0
    cdef uint32_t *numbers
    cdef int status = 0
    if arrivals.count == 0:
        arrivals_free(arrivals)
        return 0
    for i in range(arrivals.count):
        last = max(last, arrivals.rows[i].order)
    numbers = numbers_by_order(arrivals, spare, last)
    if numbers == NULL and sort(arrivals, spare, last) < 0:
        return -1
    recency_begin(recency, slabs, clocks)
    count = arrivals.count if numbers == NULL else <uint64_t> last + 1
    for i in range(count):
        if numbers == NULL:
            if i + AHEAD < count:
                persia_prefetch_write(row_at(slabs, arrivals.rows[i + AHEAD].row))
            status = settle_row(recency, slabs, &arrivals.rows[i])
        else:
            if i + 2 * AHEAD < count:       # if it is none, of what is not read
                persia_prefetch(&arrivals.rows[numbers[i + 2 * AHEAD]])
            if i + AHEAD < count and numbers[i + AHEAD] != NONE:
                persia_prefetch_write(
                    row_at(slabs, arrivals.rows[numbers[i + AHEAD]].row))
            if numbers[i] != NONE:
                status = settle_row(recency, slabs, &arrivals.rows[numbers[i]])
        if status < 0:
            break
    recency_end(recency)
    recency_settle(recency)
    settled = arrivals[0]
    arrivals[0] = spare[0]
    arrivals_free(arrivals)
    spare[0] = settled
    spare.count = 0
    return status


cdef uint32_t *numbers_by_order(
    const Arrivals *arrivals, Arrivals *spare, uint32_t last
) noexcept nogil:
    """Which arrival each order up to the last is of, or NONE; NULL unless no two are of one.

    So it is where a shard gets its own rows back; then a sort has nothing to compare.
    """
    cdef uint64_t i
    cdef uint32_t *numbers
    if last >= 2 * arrivals.count or arrivals.count >= NONE:
        return NULL
    if spare.capacity < arrivals.count and grow(spare, arrivals.capacity) < 0:
        return NULL
    numbers = <uint32_t *> spare.rows
    memset(numbers, 0xFF, (<size_t> last + 1) * sizeof(uint32_t))
    for i in range(arrivals.count):
        if numbers[arrivals.rows[i].order] != NONE:
            return NULL
        numbers[arrivals.rows[i].order] = <uint32_t> i
    return numbers
