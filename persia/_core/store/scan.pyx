"""Rows of one prefix, read piece by piece while requests change them.

    cursor    | shard (32 bits) | row number (32 bits) |     the next place to look at

A row never moves while it is there, so a walk over all places in order meets it once. Nothing
is kept between two pieces: a reader that never comes back costs nothing, and no request waits
for one. A snapshot would have all rows of one moment, and copy those that change meanwhile.
"""

import numpy as np

from libc.string cimport memcpy, memset

from persia._core.base.types cimport row_t, uint32_t, uint64_t
from persia._core.shard.recency cimport NUM_CLOCKS, OFFSET_BITS, recency_expired
from persia._core.shard.row_format cimport read_values
from persia._core.shard.shard cimport (
    PyThread_acquire_lock, PyThread_release_lock, Shard, shard_leave,
)
from persia._core.shard.slabs cimport (
    NO_POSITION, PLACE_BITS, PLACE_MASK, ChunkView, Row, has_format, row_values,
)
from persia._core.store.snapshot_part cimport HELD_PLACES, HELD_ROWS

from persia.errors import DataError

cdef enum:
    # Places that one piece looks at: where rows of the prefix are few, it ends without many.
    MAX_LOOKS = 0x400000


cdef void scan_begin(
    Scan *scan, uint64_t prefix, uint32_t prefix_bits, const uint64_t *clocks
) noexcept nogil:
    memset(scan, 0, sizeof(Scan))
    scan.prefix = prefix
    scan.mask = ~((<uint64_t> 1 << (64 - prefix_bits)) - 1)
    memcpy(scan.clocks, clocks, NUM_CLOCKS * sizeof(uint64_t))


cdef void put_row(Scan *scan, Row *row) noexcept nogil:
    cdef const float *values = row_values(row)
    cdef uint64_t at = scan.count
    scan.count += 1
    if scan.signs == NULL:
        return
    scan.signs[at] = row.sign
    read_values(&scan.format, scan.values + at * scan.format.dim, values)
    if scan.states != NULL:
        memcpy(
            scan.states + at * scan.format.state_words, values + scan.format.value_words,
            scan.format.state_words * sizeof(uint32_t))


cdef void scan_held(Shard *shard, Scan *scan, uint64_t end) noexcept nogil:
    """Look at places under the lock: until there are rows up to ``end``, or long enough."""
    cdef uint32_t chunk = scan.at >> PLACE_BITS, place = scan.at & PLACE_MASK
    cdef uint32_t num_places, looks = 0
    cdef const ChunkView *view
    cdef Row *row
    while chunk < shard.slabs.num_chunks and scan.count < end and looks < HELD_PLACES:
        view = &shard.slabs.views[chunk]
        num_places = shard.slabs.states[chunk].num_touched
        # The chunk may be cut into fewer rows than when the cursor was made, or others.
        if shard.slabs.states[chunk].num_live == 0 or not has_format(
                &shard.slabs.slabs[view.slab], &scan.format):
            place = num_places
        while place < num_places and scan.count < end and looks < HELD_PLACES:
            row = <Row *> (view.base + <uint64_t> place * view.stride)
            place += 1
            looks += 1
            if row.position == <uint32_t> NO_POSITION or row.sign & scan.mask != scan.prefix:
                continue
            # As a read, which takes what has expired for gone, though it is not dropped yet.
            if not (shard.recency.has_ttl and recency_expired(
                    &shard.recency, row.position >> OFFSET_BITS, scan.clocks)):
                put_row(scan, row)
        if place >= num_places:
            chunk += 1
            place = 0
    scan.at = (chunk << PLACE_BITS) | place
    scan.is_over = chunk >= shard.slabs.num_chunks
    scan.looks += looks


cdef void scan_shard(Shard *shard, Scan *scan, uint64_t max_looks) noexcept nogil:
    """Go on until the shard is over, there is no room, or enough was looked at."""
    scan.is_over = False
    while not scan.is_over and scan.count < scan.room and scan.looks < max_looks:
        PyThread_acquire_lock(shard.lock, 1)
        scan_held(shard, scan, min(scan.room, scan.count + HELD_ROWS))
        PyThread_release_lock(shard.lock)
        shard_leave(shard)


cdef tuple scan_rows(
    Scan *scan, Shard *shards, uint32_t num_shards, uint64_t cursor, uint32_t max_rows,
    bint with_states
):
    cdef uint32_t number = <uint32_t> (cursor >> 32)
    cdef uint64_t[::1] signs
    cdef float[:, ::1] values
    cdef uint32_t[:, ::1] states
    if not 1 <= max_rows or number >= num_shards:
        raise DataError(
            f"a scan: expected a cursor of one of {num_shards} shards and at least one row, "
            f"got {cursor:#x} and {max_rows}")
    words = scan.format.state_words if with_states else 0
    found = (
        np.empty(max_rows, np.uint64), np.empty((max_rows, scan.format.dim), np.float32),
        np.empty((max_rows, words), np.uint32))
    signs, values, states = found
    scan.signs, scan.values = &signs[0], &values[0, 0]
    scan.states = &states[0, 0] if words else NULL
    scan.room = max_rows
    scan.at = <row_t> cursor
    with nogil:
        while number < num_shards:
            scan_shard(&shards[number], scan, MAX_LOOKS)
            if not scan.is_over:
                break
            number += 1
            scan.at = 0
    following = None if number == num_shards else <uint64_t> number << 32 | scan.at
    # Copies: a view of few rows would keep the memory of all.
    if scan.count < max_rows:
        found = tuple([array[:scan.count].copy() for array in found])
    return found[0], found[1], found[2] if with_states else None, following


cdef uint64_t scan_count(Scan *scan, Shard *shards, uint32_t num_shards) noexcept:
    cdef uint32_t number
    scan.room = 0xFFFFFFFFFFFFFFFF
    with nogil:
        for number in range(num_shards):
            scan.at = 0
            scan_shard(&shards[number], scan, scan.room)
    return scan.count
