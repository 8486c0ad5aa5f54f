"""What each kind of request does in one shard, whose lock is held."""

from libc.string cimport memcpy, memset

from persia._core.base.hashing cimport mix64
from persia._core.base.types cimport NO_ROW, position_t, row_t, sign_t, uint32_t, uint64_t
from persia._core.kernels.native cimport persia_scorer_t, persia_use_t
from persia._core.kernels.optim cimport persia_call_t, persia_step_t
from persia._core.shard.changes cimport row_changes, row_enters
from persia._core.shard.eviction cimport (
    SCORED, Policy, begin_use, eviction_note_expired, eviction_order,
)
from persia._core.shard.persistent_shard cimport (
    ALL_DONE, Part, crash_point, journal_group, journal_hold, journal_release, part_begin,
    part_of,
)
from persia._core.shard.recency cimport (
    NO_ORDER, OFFSET_BITS, recency_begin, recency_expired, recency_prefetch, recency_settle,
    recency_touch,
)
from persia._core.shard.row_format cimport (
    STEP_ROWS, Format, HalfSteps, read_values, run_steps, steps_add, steps_begin, write_values,
)
from persia._core.shard.shard cimport Shard, shard_drop, shard_end_request
from persia._core.shard.sign_index cimport (
    Bucket, home_bucket, index_fetch_next, index_find, index_guess, index_insert, index_remove,
)
from persia._core.shard.sketch cimport sketch_admits, sketch_key, sketch_prefetch
from persia._core.shard.slabs cimport (
    CACHE_LINE, NO_POSITION, PLACE_BITS, Row, Slab, Slabs, has_format, is_place, is_row_of,
    persia_prefetch, persia_prefetch_write, row_at, row_values, slabs_drop_row, slabs_new_row,
    slabs_slab,
)
from persia._core.store.request cimport (
    STATUS_DIM, STATUS_NO_MEMORY, STATUS_NO_VALUES, STATUS_OK, STATUS_OTHER, STATUS_SHAPES,
    Request, RequestResult,
)

cdef extern from "portable.h" nogil:
    void persia_stream_floats(float *out, const float *values, uint32_t count) noexcept
    void persia_stream_end() noexcept

cdef extern from "kernels.h" nogil:
    persia_call_t persia_new_call(uint64_t number, void *kept) noexcept

cdef extern from "kernel_crash.h" nogil:
    """
    /* The class that a user's kernel says. */
    static uint32_t persia_score(
        const persia_scorer_t *scorer, const char *name, const persia_use_t *use)
    {
        persia_running_kernel = name;
        const uint32_t grade = scorer->score(use);
        persia_running_kernel = NULL;
        return grade < 15 ? grade : 15;
    }
    """
    uint32_t persia_score(
        const persia_scorer_t *scorer, const char *name, const persia_use_t *use) noexcept
    void persia_watch_crashes() noexcept

cdef enum:
    GROUP = 16              # signs; with 8, a step takes 1.08 times as long
    RING = 64               # signs of four groups
    RING_MASK = 63

# The signs of a lookup or an update are pipelined in groups:
#
#     g           fetch the lines of the index where its signs belong
#     g - 1       guess the rows by their tags, fetch them
#     g - 2       compare the signs; fetch where the rows stand in the order of use, and
#                 what else a sign may belong to whose guess was wrong
#     g - 3       touch or insert, copy out
#     at the end  evict: what has expired, then down to the capacity
#
# Each stage asks for the lines that the next one reads. It finds out first which these are, and
# then asks for all of a group without anything in between: a processor goes on past a fetch
# only once it knows the page, and looks up several pages at once only if their fetches are near
# each other. What a stage has found of a sign is in a ring of as many groups as there are
# stages.
cdef struct Ring:
    uint64_t[RING] hashes
    row_t[RING] rows
    Row *at[RING]           # NULL where there is no row


cdef inline void prefetch_row(const Row *row, uint32_t num_bytes) noexcept nogil:
    # From the line's begin: a row of less than a line may still lie in two.
    cdef const char *end = <const char *> row + num_bytes
    cdef const char *line = <const char *> (<size_t> row & ~<size_t> (CACHE_LINE - 1))
    while line < end:
        persia_prefetch(line)
        line += CACHE_LINE


cdef inline bint is_admitted(Shard *shard, Request request, uint64_t hash) noexcept nogil:
    if request.admit_at > 1:
        return sketch_admits(
            &shard.sketch, sketch_key(hash), request.admit_at, request.is_repeated)
    return request.admit_all or mix64(request.admission_key ^ hash) < request.admission_below


cdef inline bint has_expired(Shard *shard, row_t row) noexcept nogil:
    return shard.recency.has_ttl and recency_expired(
        &shard.recency, row_at(&shard.slabs, row).position >> OFFSET_BITS,
        shard.recency.clocks)


cdef inline bint is_gone(Shard *shard, Request request, row_t row) noexcept nogil:
    """Whether a read answers as if there were no row: it has expired and is not dropped yet."""
    return row == NO_ROW or shard.recency.has_ttl and recency_expired(
        &shard.recency, row_at(&shard.slabs, row).position >> OFFSET_BITS,
        request.clocks)


cdef uint32_t scored_order(
    const Policy *policy, const Shard *shard, Request request, Row *at, position_t position,
    uint64_t draw, float *scratch
) noexcept nogil:
    """The order that a row enters by the word of a user's kernel."""
    cdef persia_use_t use
    use.sign, use.draw = at.sign, draw
    use.dim, use.num_state_words = request.dim, request.state_words
    use.values, use.state = row_values(at), row_values(at) + request.format.value_words
    if scratch != NULL:
        read_values(&request.format, scratch, row_values(at))
        use.values = scratch
    begin_use(policy, &shard.recency, position, &use)
    return policy.first + persia_score(policy.scorer, policy.scorer_name, &use)


cdef inline int use_row(
    Shard *shard, Request request, row_t row, uint64_t hash, bint is_new,
    const RequestResult *result
) noexcept nogil:
    """Make the row the newest of the order where its policy wants it; -1: no memory."""
    cdef uint32_t order = request.order_of_use
    cdef uint64_t draw
    cdef position_t position
    if order == NO_ORDER:
        draw = request.admission_key ^ hash
        position = NO_POSITION if is_new else row_at(&shard.slabs, row).position
        if shard.eviction.policies[request.policy].kind == SCORED:
            order = scored_order(
                &shard.eviction.policies[request.policy], shard, request,
                row_at(&shard.slabs, row), position, draw, result.scratch)
        else:
            order = eviction_order(
                &shard.eviction, &shard.recency, request.policy, position, draw)
    return recency_touch(
        &shard.recency, &shard.slabs, row, row_at(&shard.slabs, row), order)


cdef void watch_scorers() noexcept:
    persia_watch_crashes()


cdef inline void write_row(
    Request request, float *values, uint32_t place, bint is_new
) noexcept nogil:
    """What a write has for a row: values, and a state, without which a new one has its own."""
    write_values(&request.format, values, request.gradients + <size_t> place * request.dim)
    if request.states != NULL:
        memcpy(
            values + request.format.value_words,
            request.states + <size_t> place * request.state_words,
            request.state_words * sizeof(float))
    elif is_new or not request.keeps_states:
        request.optimizer.fill_state(values + request.format.value_words, request.dim)


cdef bint fill_row(
    Shard *shard, Request request, row_t row, uint32_t place, RequestResult *result
) noexcept nogil:
    """First values and state, of a write its own; False: the result says why there are none."""
    cdef Row *at = row_at(&shard.slabs, row)
    cdef float *values = row_values(at) if result.scratch == NULL else result.scratch
    cdef int code
    if request.initializer is None:
        write_row(request, row_values(at), place, True)
        shard.num_inserted += 1
        return True
    code = request.initializer.fill(request.seed, at.sign, values, request.dim)
    if code:
        result.status, result.sign, result.code = STATUS_NO_VALUES, at.sign, code
        return False
    if result.scratch != NULL:
        write_values(&request.format, row_values(at), values)
    request.optimizer.fill_state(row_values(at) + request.format.value_words, request.dim)
    shard.num_inserted += 1
    return True


cdef bint renew_row(
    Shard *shard, Request request, row_t row, uint32_t place, RequestResult *result
) noexcept nogil:
    """A row that has expired begins again in its place; False: it is gone, as it cannot."""
    cdef bint is_filled
    row_changes(&shard.changes, &shard.slabs, row, row_at(&shard.slabs, row))
    eviction_note_expired(
        &shard.eviction, &shard.recency, row_at(&shard.slabs, row).position)
    hold(shard, request, row)
    is_filled = fill_row(shard, request, row, place, result)
    release(shard)
    if not is_filled:
        shard_drop(shard, row)
    return is_filled


cdef inline void hold(Shard *shard, Request request, row_t row) noexcept nogil:
    """One row is about to be changed in place; a new process would put it back."""
    cdef float *values
    if shard.file != NULL:
        values = row_values(row_at(&shard.slabs, row))
        journal_hold(
            shard.file, &row, &values, 1,
            4 * (request.format.value_words + request.format.state_words), NULL)


cdef inline void release(Shard *shard) noexcept nogil:
    if shard.file != NULL:
        journal_release(shard.file, NULL, 0)


cdef row_t new_row(
    Shard *shard, Request request, uint64_t hash, sign_t sign, RequestResult *result
) noexcept nogil:
    cdef int slab = slabs_slab(&shard.slabs, &request.format)
    cdef row_t row
    cdef Row *at
    if slab < 0:
        result.status = STATUS_SHAPES
        return NO_ROW
    result.status = STATUS_NO_MEMORY     # until the row is in
    row = slabs_new_row(&shard.slabs, <uint32_t> slab)
    if row == NO_ROW:
        return NO_ROW
    at = row_at(&shard.slabs, row)
    at.sign = sign
    if index_insert(&shard.index, &shard.slabs, hash, row) < 0:
        slabs_drop_row(&shard.slabs, row)
        return NO_ROW
    return row


cdef void drop_new_row(Shard *shard, uint64_t hash, row_t row) noexcept nogil:
    index_remove(&shard.index, hash, row)
    slabs_drop_row(&shard.slabs, row)


cdef row_t insert(
    Shard *shard, Request request, uint64_t hash, uint32_t place, sign_t sign,
    RequestResult *result
) noexcept nogil:
    """A new row with first values and state, the most recent one; NO_ROW: see the result."""
    cdef row_t row = new_row(shard, request, hash, sign, result)
    if row == NO_ROW:
        return NO_ROW
    # It is a row once it stands in the order of use, so it is filled before.
    if not fill_row(shard, request, row, place, result):
        drop_new_row(shard, hash, row)
        return NO_ROW
    if shard.file != NULL:
        crash_point(shard.file)
    if use_row(shard, request, row, hash, True, result) < 0:
        shard.num_inserted -= 1
        drop_new_row(shard, hash, row)
        return NO_ROW
    if shard.file != NULL:
        crash_point(shard.file)
    result.status = STATUS_OK
    row_enters(&shard.changes, &shard.slabs, row)
    return row


cdef inline uint64_t end_of_group(uint64_t begin, uint64_t end) noexcept nogil:
    return begin + GROUP if begin + GROUP < end else end


cdef inline void fetch_buckets(
    const Shard *shard, Request request, Ring *ring, uint64_t begin, uint64_t end
) noexcept nogil:
    cdef const Bucket *buckets[GROUP]
    cdef const sign_t *sorted = request.sorted
    cdef uint64_t i, hash
    for i in range(begin, end):
        hash = mix64(sorted[i])
        ring.hashes[i & RING_MASK] = hash
        buckets[i - begin] = home_bucket(&shard.index, hash)
    for i in range(begin, end):
        persia_prefetch(buckets[i - begin])


cdef inline void guess_row(const Shard *shard, Ring *ring, uint64_t i) noexcept nogil:
    cdef row_t row = index_guess(&shard.index, &shard.slabs, ring.hashes[i & RING_MASK])
    ring.rows[i & RING_MASK] = row
    ring.at[i & RING_MASK] = NULL if row == NO_ROW else row_at(&shard.slabs, row)


cdef inline void fetch_rows(
    const Ring *ring, uint64_t begin, uint64_t end, uint32_t row_bytes
) noexcept nogil:
    cdef uint64_t i
    for i in range(begin, end):
        if ring.at[i & RING_MASK] != NULL:
            prefetch_row(ring.at[i & RING_MASK], row_bytes)


cdef inline void guess_rows(
    const Shard *shard, Ring *ring, uint64_t begin, uint64_t end, uint32_t row_bytes
) noexcept nogil:
    cdef uint64_t i
    for i in range(begin, end):
        guess_row(shard, ring, i)
    fetch_rows(ring, begin, end, row_bytes)


cdef inline void settle_row(
    const Shard *shard, Ring *ring, uint64_t i, sign_t sign
) noexcept nogil:
    """Keep the row of place i if it is the right one; else fetch where ``index_find`` looks."""
    cdef const Row *at = ring.at[i & RING_MASK]
    if at != NULL and is_row_of(at, sign):
        return
    if at == NULL:
        index_fetch_next(&shard.index, &shard.slabs, ring.hashes[i & RING_MASK])
    ring.rows[i & RING_MASK] = NO_ROW
    ring.at[i & RING_MASK] = NULL


cdef inline row_t find_row(
    const Shard *shard, Ring *ring, uint64_t i, sign_t sign
) noexcept nogil:
    """The row of place i, by its guess if that is right."""
    cdef Row *at = ring.at[i & RING_MASK]
    cdef uint64_t hash = ring.hashes[i & RING_MASK]
    cdef row_t row = NO_ROW
    if at != NULL and is_row_of(at, sign):
        return ring.rows[i & RING_MASK]
    # Without a guess there is no row, unless one went on from a full bucket.
    if at != NULL or home_bucket(&shard.index, hash).num_passed:
        row = index_find(&shard.index, &shard.slabs, hash, sign)
    ring.rows[i & RING_MASK] = row
    ring.at[i & RING_MASK] = NULL if row == NO_ROW else row_at(&shard.slabs, row)
    return row


cdef inline uint32_t slab_of(const Slabs *slabs, const Format *format) noexcept nogil:
    """The slab of these rows, or a number that is no slab's."""
    cdef uint32_t slab = 0
    while slab < slabs.num_slabs and not has_format(&slabs.slabs[slab], format):
        slab += 1
    return slab


cdef inline bint has_shape(
    const Shard *shard, row_t row, Request request, sign_t sign, RequestResult *result
) noexcept nogil:
    """Whether the row is as the request has it; if not, the result says what it is."""
    cdef const Slab *slab = &shard.slabs.slabs[shard.slabs.views[row >> PLACE_BITS].slab]
    if has_format(slab, &request.format):
        return True
    note_shape(slab, sign, result)
    return False


cdef void note_shape(const Slab *slab, sign_t sign, RequestResult *result) noexcept nogil:
    result.status = STATUS_DIM
    result.sign = sign
    result.dim = slab.dim
    result.dtype = slab.dtype
    result.state_words = slab.state_words


cdef void train_shard(
    Shard *shard, Request request, uint32_t begin, uint32_t end, RequestResult *result
) noexcept nogil:
    """Serve one shard's part of a training lookup. The lock is held."""
    cdef uint32_t row_bytes = <uint32_t> sizeof(Row) + 4 * request.format.value_words
    cdef uint32_t slab = slab_of(&shard.slabs, &request.format)
    cdef Ring ring
    cdef uint64_t at, i
    cdef bint is_good = True
    recency_begin(&shard.recency, &shard.slabs, request.clocks)
    at = begin
    while at < <uint64_t> end + 3 * GROUP:
        fetch_buckets(shard, request, &ring, at, end_of_group(at, end))
        if at >= <uint64_t> begin + GROUP:
            guess_rows(shard, &ring, at - GROUP, end_of_group(at - GROUP, end), row_bytes)
        if at >= <uint64_t> begin + 2 * GROUP:
            find_rows(
                shard, request, &ring, at - 2 * GROUP, end_of_group(at - 2 * GROUP, end))
        if at >= <uint64_t> begin + 3 * GROUP:
            for i in range(at - 3 * GROUP, end_of_group(at - 3 * GROUP, end)):
                is_good = train_row(shard, request, &ring, i, slab, result)
                if not is_good:
                    break
        if not is_good:
            break
        at += GROUP
    # Stores past the caches are weakly ordered: the fence comes before the lock is released.
    persia_stream_end()
    shard_end_request(shard, end - begin)


cdef inline void find_rows(
    const Shard *shard, Request request, Ring *ring, uint64_t begin, uint64_t end
) noexcept nogil:
    """Settle on rows; fetch what a touch changes and where the values go."""
    cdef uint64_t i
    cdef const Row *at
    cdef float *out
    for i in range(begin, end):
        settle_row(shard, ring, i, request.sorted[i])
    for i in range(begin, end):
        at = ring.at[i & RING_MASK]
        if at != NULL:
            recency_prefetch(&shard.recency, at.position)
        elif request.admit_at > 1:
            sketch_prefetch(&shard.sketch, sketch_key(ring.hashes[i & RING_MASK]))
    if request.is_streamed:
        return
    for i in range(begin, end):
        out = request.rows_out + <size_t> request.order[i] * request.dim
        persia_prefetch_write(out)
        persia_prefetch_write(out + request.dim - 1)


cdef inline void hand_on(Request request, float *out, const float *row) noexcept nogil:
    if request.is_streamed:
        persia_stream_floats(out, row, request.dim)
    else:
        read_values(&request.format, out, row)


cdef inline bint train_row(
    Shard *shard, Request request, const Ring *ring, uint64_t i, uint32_t slab,
    RequestResult *result
) noexcept nogil:
    """Touch or insert the row of place i and copy it out; False: the result says why not."""
    cdef uint32_t place = request.order[i]
    cdef uint64_t hash = ring.hashes[i & RING_MASK]
    cdef row_t row = ring.rows[i & RING_MASK]
    cdef Row *at = ring.at[i & RING_MASK]
    cdef float *out = request.rows_out + <size_t> place * request.dim
    cdef bint is_new
    if row == NO_ROW:
        # Its guess was wrong, or it is new, unless the sign came twice in this request.
        row = index_find(&shard.index, &shard.slabs, hash, request.sorted[i])
    # An id whose row has expired is a new one; refused, it leaves the row to the sweep.
    is_new = row == NO_ROW or has_expired(shard, row)
    if is_new and not is_admitted(shard, request, hash):
        result.num_refused += 1
        shard.num_refused += 1
        request.hints_out[place] = NO_ROW
        memset(out, 0, request.dim * sizeof(float))
        return True
    if row == NO_ROW:
        row = insert(shard, request, hash, place, request.sorted[i], result)
        if row == NO_ROW:
            return False
        result.num_missing += 1
    else:
        if shard.slabs.views[row >> PLACE_BITS].slab != slab and not has_shape(
                shard, row, request, request.sorted[i], result):
            return False
        if is_new:
            if not renew_row(shard, request, row, place, result):
                return False
            result.num_missing += 1
        if use_row(shard, request, row, hash, is_new, result) < 0:
            result.status = STATUS_NO_MEMORY
            return False
    request.hints_out[place] = row
    if at == NULL:
        at = row_at(&shard.slabs, row)
    hand_on(request, out, row_values(at))
    return True


cdef void eval_shard(
    Shard *shard, Request request, uint32_t begin, uint32_t end, RequestResult *result
) noexcept nogil:
    """Serve one shard's part of an evaluation lookup; changes nothing but a count."""
    cdef uint32_t row_bytes = <uint32_t> sizeof(Row) + 4 * request.format.value_words
    cdef Ring ring
    cdef uint64_t at, i
    at = begin
    while at < <uint64_t> end + 3 * GROUP:
        fetch_buckets(shard, request, &ring, at, end_of_group(at, end))
        if at >= <uint64_t> begin + GROUP:
            guess_rows(shard, &ring, at - GROUP, end_of_group(at - GROUP, end), row_bytes)
        if at >= <uint64_t> begin + 2 * GROUP:
            for i in range(at - 2 * GROUP, end_of_group(at - 2 * GROUP, end)):
                settle_row(shard, &ring, i, request.sorted[i])
        if at >= <uint64_t> begin + 3 * GROUP:
            for i in range(at - 3 * GROUP, end_of_group(at - 3 * GROUP, end)):
                if not eval_row(shard, request, &ring, i, result):
                    return
        at += GROUP
    persia_stream_end()


cdef inline bint eval_row(
    Shard *shard, Request request, Ring *ring, uint64_t i, RequestResult *result
) noexcept nogil:
    """Copy the row of place i out; False: the result says why not."""
    cdef row_t row = ring.rows[i & RING_MASK]
    cdef float *out = request.rows_out + <size_t> request.order[i] * request.dim
    cdef const Slab *slab
    if row == NO_ROW:
        row = index_find(
            &shard.index, &shard.slabs, ring.hashes[i & RING_MASK], request.sorted[i])
    if is_gone(shard, request, row):
        result.num_missing += 1
        shard.num_missing += 1
        memset(out, 0, request.dim * sizeof(float))
        return True
    slab = &shard.slabs.slabs[shard.slabs.views[row >> PLACE_BITS].slab]
    if slab.dim != request.dim or slab.dtype != request.format.dtype:
        note_shape(slab, request.sorted[i], result)
        return False
    hand_on(request, out, row_values(row_at(&shard.slabs, row)))
    return True


cdef struct Steps:                  # rows and their gradients, for one call of a kernel
    row_t[STEP_ROWS] numbers
    float *values[STEP_ROWS]
    const float *sums[STEP_ROWS]
    uint32_t count
    HalfSteps half                  # instead, where rows are not f32
    persia_step_t step
    uint32_t group                  # rows for which it is called
    uint32_t first                  # place where the part of this shard begins
    uint32_t image                  # bytes of a row that a new process may put back
    Part *part                      # of an update that goes on if it is cut short, or NULL


cdef inline void find_hinted(
    const Shard *shard, Request request, Ring *ring, uint64_t begin, uint64_t end,
    uint32_t row_bytes
) noexcept nogil:
    """Guess rows, unless there are row numbers kept from the lookup: they need no index."""
    cdef uint64_t i
    cdef row_t row
    for i in range(begin, end):
        row = NO_ROW if request.hints == NULL else request.hints[request.order[i]]
        if is_place(&shard.slabs, row):
            ring.rows[i & RING_MASK] = row
            ring.at[i & RING_MASK] = row_at(&shard.slabs, row)
        else:
            guess_row(shard, ring, i)
    fetch_rows(ring, begin, end, row_bytes)
    for i in range(begin, end):
        prefetch_row(
            <const Row *> (request.gradients + <size_t> request.order[i] * request.dim),
            4 * request.dim)


cdef void update_shard(
    Shard *shard, Request request, uint32_t begin, uint32_t end, RequestResult *result
) noexcept nogil:
    """Step one shard's rows. A sign that is gone skips exactly its own gradient."""
    cdef uint32_t row_bytes = <uint32_t> sizeof(Row) + 4 * (
        request.format.value_words + request.state_words)
    cdef uint32_t slab = slab_of(&shard.slabs, &request.format)
    cdef Ring ring
    cdef Steps steps
    cdef uint64_t at, i
    cdef bint is_good = True
    if not steps_init(shard, request, &steps, &begin, end, result):
        return
    at = begin
    while at < <uint64_t> end + 2 * GROUP:
        fetch_unhinted(shard, request, &ring, at, end_of_group(at, end))
        if at >= <uint64_t> begin + GROUP:
            find_hinted(
                shard, request, &ring, at - GROUP, end_of_group(at - GROUP, end), row_bytes)
        if at >= <uint64_t> begin + 2 * GROUP:
            for i in range(at - 2 * GROUP, end_of_group(at - 2 * GROUP, end)):
                is_good = update_row(shard, request, &ring, i, slab, &steps, result)
                if not is_good:
                    break
        if not is_good:
            break
        at += GROUP
    # Whatever stopped it, it is not run again.
    step_gathered(shard, request, &steps, result, ALL_DONE)


cdef bint steps_init(
    Shard *shard, Request request, Steps *steps, uint32_t *begin, uint32_t end,
    RequestResult *result
) noexcept nogil:
    """Nothing is gathered yet. False: there is nothing to be done, or see the result."""
    steps.count = 0
    steps.step = request.optimizer.step()
    steps.group = STEP_ROWS
    steps.first = begin[0]
    steps.part = NULL
    steps_begin(&steps.half)
    if shard.file == NULL:
        return True
    steps.image = 4 * (request.format.value_words + request.state_words)
    steps.group = journal_group(steps.image)
    steps.part = part_of(shard.file, request.slot)
    if steps.part == NULL:
        return True
    if steps.part.tag > request.tag:
        # A later part of the same update has begun here, so this one was done.
        return False
    if begin_part(request, steps.part, begin, end):
        return True
    result.status = STATUS_OTHER
    return False


cdef void step_gathered(
    Shard *shard, Request request, Steps *steps, RequestResult *result, uint64_t num_done
) noexcept nogil:
    """Step the rows gathered; then ``num_done`` signs of this part are done."""
    cdef bint is_half = request.format.half != NULL
    cdef persia_call_t call
    # Copies of f32 rows are what the journal holds.
    call = persia_new_call(
        request.number, NULL if shard.file == NULL or is_half else shard.file.images)
    if shard.file != NULL:
        if is_half:
            journal_hold(
                shard.file, steps.half.numbers, steps.half.rows, steps.half.count,
                steps.image, steps.part)
        else:
            journal_hold(
                shard.file, steps.numbers, steps.values, steps.count, steps.image, steps.part)
    if is_half:
        run_steps(
            &request.format, &steps.half, steps.step, &request.optimizer.settings,
            request.rounding_key, result.scratch, &call)
    elif steps.count:
        steps.step(
            steps.values, NULL, steps.sums, steps.count, request.dim,
            &request.optimizer.settings, &call)
        steps.count = 0
    if call.num_failed:
        if is_half:
            note_failure(shard, steps.half.numbers, &call, result)
        else:
            note_failure(shard, steps.numbers, &call, result)
    if shard.file != NULL:
        journal_release(shard.file, steps.part, num_done)


cdef void note_failure(
    const Shard *shard, const row_t *numbers, const persia_call_t *call, RequestResult *result
) noexcept nogil:
    """Rows that a kernel failed for are left out; all others of the request are stepped."""
    if result.num_failed == 0:
        result.failed = row_at(&shard.slabs, numbers[call.first_failed]).sign
        result.code = call.code
    result.num_failed += call.num_failed


cdef bint begin_part(Request request, Part *part, uint32_t *begin, uint32_t end) noexcept nogil:
    """Go to where this part of an update was cut short; False: it was another one."""
    cdef uint32_t count = end - begin[0]
    cdef uint64_t sum = mix64(
        request.sorted[begin[0]] ^ mix64(request.sorted[end - 1]) ^ count)
    if not part_begin(part, request.tag, sum):
        return False
    begin[0] += <uint32_t> min(part.num_done, <uint64_t> count)
    return True


cdef inline void fetch_unhinted(
    const Shard *shard, Request request, Ring *ring, uint64_t begin, uint64_t end
) noexcept nogil:
    """Fetch lines of the index for signs without a row number; of others nothing is needed."""
    cdef uint64_t i, hash
    for i in range(begin, end):
        if request.hints == NULL or not is_place(&shard.slabs, request.hints[request.order[i]]):
            hash = mix64(request.sorted[i])
            ring.hashes[i & RING_MASK] = hash
            persia_prefetch(home_bucket(&shard.index, hash))


cdef inline bint update_row(
    Shard *shard, Request request, Ring *ring, uint64_t i, uint32_t slab, Steps *steps,
    RequestResult *result
) noexcept nogil:
    """Gather the row of place i, or step those gathered; False: the result says why not."""
    cdef row_t row
    cdef float *values
    cdef const float *sums = request.gradients + <size_t> request.order[i] * request.dim
    if ring.at[i & RING_MASK] == NULL or not is_row_of(
            ring.at[i & RING_MASK], request.sorted[i]):
        # No row number was kept, or it is another's now.
        ring.hashes[i & RING_MASK] = mix64(request.sorted[i])
    row = find_row(shard, ring, i, request.sorted[i])
    if row == NO_ROW:
        result.num_missing += 1
        shard.num_missing += 1
        return True
    if shard.slabs.views[row >> PLACE_BITS].slab != slab and not has_shape(
            shard, row, request, request.sorted[i], result):
        return False
    row_changes(&shard.changes, &shard.slabs, row, ring.at[i & RING_MASK])
    values = row_values(ring.at[i & RING_MASK])
    if request.format.half != NULL:
        while not steps_add(
                &request.format, &steps.half, row, values, sums, mix64(request.sorted[i])):
            step_gathered(shard, request, steps, result, i - steps.first)
        return True
    steps.numbers[steps.count] = row
    steps.values[steps.count] = values
    steps.sums[steps.count] = sums
    steps.count += 1
    if steps.count == steps.group:
        step_gathered(shard, request, steps, result, i + 1 - steps.first)
    return True


cdef void read_shard(
    Shard *shard, Request request, uint32_t begin, uint32_t end, RequestResult *result
) noexcept nogil:
    """Copy whole rows out; ``found`` says which there are. A row of another shape stops it."""
    cdef uint32_t i, place
    cdef const float *values
    cdef row_t row
    for i in range(begin, end):
        place = request.order[i]
        row = index_find(
            &shard.index, &shard.slabs, mix64(request.sorted[i]), request.sorted[i])
        # Of an expired row that is not dropped yet there is nothing to read.
        request.found[place] = not is_gone(shard, request, row)
        if not request.found[place]:
            continue
        if not has_shape(shard, row, request, request.sorted[i], result):
            return
        values = row_values(row_at(&shard.slabs, row))
        read_values(&request.format, request.rows_out + <size_t> place * request.dim, values)
        if request.state_words:       # otherwise states_out is NULL
            memcpy(
                request.states_out + <size_t> place * request.state_words,
                values + request.format.value_words, request.state_words * sizeof(float))


cdef void write_shard(
    Shard *shard, Request request, uint32_t begin, uint32_t end, RequestResult *result
) noexcept nogil:
    """Insert or overwrite whole rows; each becomes the most recent."""
    cdef uint32_t i, place
    cdef uint64_t hash
    cdef row_t row
    cdef bint is_new
    recency_begin(&shard.recency, &shard.slabs, request.clocks)
    for i in range(begin, end):
        place = request.order[i]
        hash = mix64(request.sorted[i])
        row = index_find(&shard.index, &shard.slabs, hash, request.sorted[i])
        if row == NO_ROW:
            if insert(
                    shard, request, hash, place, request.sorted[i], result) == NO_ROW:
                break
            continue
        if not has_shape(shard, row, request, request.sorted[i], result):
            break
        is_new = has_expired(shard, row)
        if is_new:
            if not renew_row(shard, request, row, place, result):
                break
        else:
            row_changes(&shard.changes, &shard.slabs, row, row_at(&shard.slabs, row))
            hold(shard, request, row)
            write_row(request, row_values(row_at(&shard.slabs, row)), place, False)
            release(shard)
        # Once it is written: a scorer sees its values.
        if use_row(shard, request, row, hash, is_new, result) < 0:
            result.status = STATUS_NO_MEMORY
            break
    shard_end_request(shard, end - begin)


cdef void delete_shard(
    Shard *shard, Request request, uint32_t begin, uint32_t end, RequestResult *result
) noexcept nogil:
    cdef uint32_t i
    cdef row_t row
    for i in range(begin, end):
        row = index_find(
            &shard.index, &shard.slabs, mix64(request.sorted[i]), request.sorted[i])
        if row == NO_ROW:
            result.num_missing += 1
        else:
            shard_drop(shard, row)
    recency_settle(&shard.recency)
