"""Eviction policies of one shard: which order of use a row enters, and which rows go next."""

from persia._core.base.types cimport position_t, row_t, uint16_t, uint32_t, uint64_t, uint8_t
from persia._core.kernels.native cimport persia_scorer_t, persia_use_t
from persia._core.shard.persistent_shard cimport ShardFile
from persia._core.shard.recency cimport OFFSET_BITS, Recency, segment_at
from persia._core.shard.slabs cimport NO_POSITION, Slabs

cdef enum:                      # kinds
    LRU = 0
    LFU = 1
    SCORED = 2                  # classes as of LFU, but a user's kernel says which

cdef enum:
    LFU_CLASSES = 16
    LFU_ORDERS = 17             # and one for what was class 0 before counts were halved
    MAX_POLICIES = 64
    HALVING_USES = 10           # uses a row, on average, between two halvings
    DRAINED_SEGMENTS = 4        # moved per request after a halving
    SWEPT_SEGMENTS = 64         # looked at per request for expired rows, and more with its size
    SWEPT_ROWS = 512            # dropped per request at most, and as many as it has signs

cdef struct Policy:
    uint32_t kind
    uint32_t clock
    uint64_t ttl                # times of the clock; 0: rows do not expire
    const persia_scorer_t *scorer   # of a user, or NULL; kept alive by the store
    const char *scorer_name
    uint32_t first              # of its orders: 1 for LRU, LFU_ORDERS for others
    uint32_t lowest             # LFU: where in the ring of orders class 0 is
    # LFU: where a use takes a row that stands in the ring at this place. It moves up if no bit
    # of its draw is in the mask.
    uint8_t[LFU_ORDERS] stays
    uint8_t[LFU_ORDERS] ups
    uint16_t[LFU_ORDERS] masks
    uint64_t num_uses           # LFU: since counts were halved
    uint64_t num_evicted
    uint64_t num_expired

cdef struct Eviction:
    Policy *policies
    uint32_t num_policies
    uint32_t swept              # segment where the next look for expired rows begins


# Frequency is an approximate count (Morris 1978, as in Redis): a use moves a row from class c
# to class c + 1 once in 2**c times, otherwise to the newest end of its class, so that class c
# means about 2**c uses. Draws are bits of mix64(sign) against bits of the request's key: the
# same request draws the same.
cdef inline uint32_t eviction_order(
    Eviction *eviction, const Recency *recency, uint32_t number, position_t position,
    uint64_t draw
) noexcept nogil:
    """The order that a row enters by this use; ``draw`` is uniform for (row, batch)."""
    cdef Policy *policy = &eviction.policies[number]
    cdef uint32_t place
    if policy.kind == LRU:
        return policy.first
    policy.num_uses += 1
    if position == NO_POSITION:
        return policy.first + policy.lowest
    # A row of another policy is far outside of the ring, and begins in class 0.
    place = segment_at(recency, position >> OFFSET_BITS).order - policy.first
    if place >= LFU_ORDERS:
        return policy.first + policy.lowest
    # One of two loaded values and no branch, since a draw cannot be predicted.
    return policy.first + (
        policy.stays[place] if draw & policy.masks[place] else policy.ups[place])


cdef inline void begin_use(
    const Policy *policy, const Recency *recency, position_t position, persia_use_t *use
) noexcept nogil:
    """Describe to a scorer where the row stands; one outside of its classes is new."""
    cdef uint32_t place = LFU_CLASSES
    if position != NO_POSITION:
        place = segment_at(recency, position >> OFFSET_BITS).order - policy.first
    use.is_new = place >= LFU_CLASSES
    use.before = 0 if use.is_new else place


cdef inline uint32_t policy_order(const Policy *policy, uint32_t grade) noexcept nogil:
    """The order of a frequency class; LFU_CLASSES: of what is still to be drained."""
    cdef uint32_t place = policy.lowest + grade
    if policy.kind == LRU:
        return policy.first
    return policy.first + (place - LFU_ORDERS if place >= LFU_ORDERS else place)


cdef void eviction_free(Eviction *eviction) noexcept nogil
# Write down what the orders do not say, and take it up again; False: it is out of range.
cdef void eviction_save(const Eviction *eviction, ShardFile *file) noexcept nogil
cdef bint eviction_attach(Eviction *eviction, const ShardFile *file) noexcept nogil
# The number of the policy, made if there is none; -1: no memory, or too many.
cdef int eviction_policy(
    Eviction *eviction, Recency *recency, uint32_t kind, uint32_t clock, uint64_t ttl,
    const persia_scorer_t *scorer, const char *scorer_name
) noexcept nogil
# Give every policy its orders in a new, empty Recency; counts stay. -1: no memory.
cdef int eviction_restart(Eviction *eviction, Recency *recency) noexcept nogil
# Up to ``count`` rows that go next, counted as evicted; the caller drops them all.
cdef uint32_t eviction_take(
    Eviction *eviction, const Recency *recency, row_t *rows, uint32_t count) noexcept nogil
# Up to ``count`` expired rows, counted as such; the caller drops them all and may ask again.
# ``num_looks`` segments may be looked at, and becomes how many still may; 0 rows is the end.
cdef uint32_t eviction_sweep(
    Eviction *eviction, const Recency *recency, row_t *rows, uint32_t count,
    uint32_t *num_looks
) noexcept nogil
# A row expired and begins again in its place.
cdef void eviction_note_expired(
    Eviction *eviction, const Recency *recency, position_t position) noexcept nogil
# After the uses of a request: halve counts when it is time, a bounded number of steps a call.
cdef void eviction_age(Eviction *eviction, Recency *recency, Slabs *slabs) noexcept nogil
# Rows that are still to be moved since counts were halved.
cdef uint64_t policy_num_draining(
    const Policy *policy, const Recency *recency) noexcept nogil
cdef uint64_t policy_num_rows(const Policy *policy, const Recency *recency) noexcept nogil
