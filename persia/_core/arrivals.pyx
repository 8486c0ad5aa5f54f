"""How restored rows get their places back.

Files hold rows by bucket, orders of use are by shard, and the two have no bits in common: a
file has a few rows of every shard. So a restored row is first the newest of its order, and
noted; once all are there, they are sorted by the places they had and used again in that order,
each at the time of its last use. A row that was dropped meanwhile is met no more.
"""

from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from persia._core.recency cimport (
    OFFSET_BITS, Order, recency_begin, recency_end, recency_settle, recency_touch_at,
    segment_at,
)
from persia._core.slabs cimport NO_POSITION, Row, is_place, persia_prefetch_write, row_at

cdef extern from "portable.h" nogil:
    void *persia_map(size_t num_bytes, size_t alignment) noexcept
    void persia_unmap(void *start, size_t num_bytes) noexcept
    void persia_advise_huge(void *start, size_t num_bytes) noexcept

cdef enum:
    HUGE_PAGE = 0x200000
    DIGITS = 2048                   # of 11 bits
    AHEAD = 16                      # rows fetched early


cdef inline uint64_t part_of(uint64_t ttl) noexcept nogil:
    """What ages are counted in, so that any that matters fits 32 bits."""
    return ttl // TTL_PARTS + 1


cdef Arrival *new_rows(uint64_t capacity) noexcept nogil:
    """Room for so many; NULL: no memory. Of many it is on huge pages."""
    cdef size_t num_bytes = capacity * sizeof(Arrival)
    cdef void *start
    if num_bytes < <size_t> HUGE_PAGE:
        return <Arrival *> malloc(num_bytes)
    start = persia_map(num_bytes, HUGE_PAGE)
    if start != NULL:
        persia_advise_huge(start, num_bytes)
    return <Arrival *> start


cdef void free_rows(Arrival *rows, uint64_t capacity) noexcept nogil:
    cdef size_t num_bytes = capacity * sizeof(Arrival)
    if num_bytes < <size_t> HUGE_PAGE:
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


cdef int sort(Arrivals *arrivals) noexcept nogil:
    cdef Arrival *other = new_rows(arrivals.capacity)
    cdef Arrival *sorted_
    cdef uint64_t i
    cdef uint32_t shift, bits = 0
    if other == NULL:
        return -1
    for i in range(arrivals.count):
        bits |= arrivals.rows[i].order
    for shift in range(0, 32, 11):
        if bits >> shift == 0:      # nor above
            break
        sort_by_digit(arrivals.rows, other, arrivals.count, shift)
        sorted_ = other
        other = arrivals.rows
        arrivals.rows = sorted_
    free_rows(other, arrivals.capacity)
    return 0


cdef int arrivals_settle(
    Arrivals *arrivals, Recency *recency, Slabs *slabs, const uint64_t *clocks
) noexcept nogil:
    cdef const Arrival *at
    cdef const Order *order
    cdef Row *row
    cdef uint64_t i, age, now
    cdef uint32_t number
    cdef int status = 0
    if arrivals.count == 0:
        arrivals_free(arrivals)
        return 0
    if sort(arrivals) < 0:
        return -1
    recency_begin(recency, slabs, clocks)
    for i in range(arrivals.count):
        if i + AHEAD < arrivals.count:
            persia_prefetch_write(row_at(slabs, arrivals.rows[i + AHEAD].row))
        at = &arrivals.rows[i]
        if not is_place(slabs, at.row):
            continue        # its chunk was emptied since, and may hold fewer, larger rows now
        row = row_at(slabs, at.row)
        if <uint32_t> row.sign != at.tag or row.position == <uint32_t> NO_POSITION:
            continue
        number = segment_at(recency, row.position >> OFFSET_BITS).order
        order = &recency.orders[number]
        now = recency.clocks[order.clock]
        age = min(at.age * part_of(order.ttl), now)
        # A tick each, so that policies take turns as they did.
        recency.tick += 1
        if recency_touch_at(
                recency, slabs, at.row, number, now - age if order.ttl else now) < 0:
            status = -1
            break
    recency_end(recency)
    recency_settle(recency)
    arrivals_free(arrivals)
    return status
