"""Which row goes next: by LRU, LFU or a user's scorer, several policies in a shard.

A policy is (kind, ttl), and with SCORED a user's kernel. It owns orders of use, and what it
knows of a row is where the row stands, so no policy costs a byte in a row or a read of one:

    LRU     one order for all its rows
    LFU     class 15   used about 32 thousand times     newest end <- a use that moves up
            ...
            class  1   used about twice
            class  0   used once                        newest end <- a new row
            drained    was class 0 before the last halving; part of class 0, its old end

    SCORED  classes as of LFU; at each use a user's kernel says which one the row is in

    going next: the oldest row of the lowest class that has one

Expiry is by segments, which a sweep looks at in turn (see ``recency``).
"""

from libc.stdlib cimport free, realloc
from libc.string cimport memset

from persia._core.base.types cimport int64_t
from persia._core.shard.recency cimport (
    NO_SEGMENT, Order, Segment, recency_add_orders, recency_drain, recency_expired,
    recency_oldest,
)


cdef void eviction_free(Eviction *eviction) noexcept nogil:
    free(eviction.policies)
    memset(eviction, 0, sizeof(Eviction))


cdef void eviction_save(const Eviction *eviction, ShardFile *file) noexcept nogil:
    cdef uint32_t i
    for i in range(eviction.num_policies):
        file.shard.policies[i].lowest = eviction.policies[i].lowest
        file.shard.policies[i].num_uses = eviction.policies[i].num_uses


cdef bint eviction_attach(Eviction *eviction, const ShardFile *file) noexcept nogil:
    cdef uint32_t i
    for i in range(eviction.num_policies):
        if file.shard.policies[i].lowest >= LFU_ORDERS:
            return False
        turn(&eviction.policies[i], <uint32_t> file.shard.policies[i].lowest)
        eviction.policies[i].num_uses = file.shard.policies[i].num_uses
    return True


cdef int add_orders(Policy *policy, Recency *recency) noexcept nogil:
    cdef int64_t first = recency_add_orders(
        recency, 1 if policy.kind == LRU else LFU_ORDERS, policy.clock, policy.ttl)
    if first < 0:
        return -1
    policy.first = <uint32_t> first
    turn(policy, 0)
    return 0


# Counts are halved (as by TinyLFU, Einziger, Friedman and Manes 2017) once there were ten uses
# for each row of the policy. Halving takes every row to the class below. So the ring of orders
# is turned by one place, which moves nothing:
#
#     orders     a  b  c  d ... q         a b c ... are the orders, one letter each
#     before     0  1  2  3 ... drained       the class that each one is of
#     after      drained 0  1  2 ... 15       q is empty then
#
# and what was class 0 goes, a few segments a request, to the old end of what was class 1. A
# touch in the meantime takes it for class 0, and eviction takes it first, so that it does not
# show. Until it is done counts are not halved again.
cdef void turn(Policy *policy, uint32_t lowest) noexcept nogil:
    """Make this place of the ring class 0; nothing is counted yet since."""
    cdef uint32_t grade, place, known
    policy.lowest = lowest
    policy.num_uses = 0
    for grade in range(<uint32_t> LFU_ORDERS):
        place = policy_order(policy, grade) - policy.first
        known = 0 if grade == LFU_CLASSES else grade     # not drained yet: class 0
        policy.masks[place] = <uint16_t> ((1 << known) - 1)
        policy.stays[place] = <uint8_t> (policy_order(policy, known) - policy.first)
        policy.ups[place] = <uint8_t> (
            policy_order(policy, min(known + 1, <uint32_t> LFU_CLASSES - 1)) - policy.first)


cdef int eviction_policy(
    Eviction *eviction, Recency *recency, uint32_t kind, uint32_t clock, uint64_t ttl,
    const persia_scorer_t *scorer, const char *scorer_name
) noexcept nogil:
    cdef uint32_t i
    cdef Policy *policies
    cdef Policy *policy
    for i in range(eviction.num_policies):
        policy = &eviction.policies[i]
        if policy.kind == kind and policy.clock == clock and policy.ttl == ttl and (
                policy.scorer == scorer):
            return <int> i
    if eviction.num_policies == MAX_POLICIES:
        return -1
    policies = <Policy *> realloc(
        eviction.policies, (eviction.num_policies + 1) * sizeof(Policy))
    if policies == NULL:
        return -1
    eviction.policies = policies
    policy = &policies[eviction.num_policies]
    memset(policy, 0, sizeof(Policy))
    policy.kind = kind
    policy.clock = clock
    policy.ttl = ttl
    policy.scorer = scorer
    policy.scorer_name = scorer_name
    if add_orders(policy, recency) < 0:
        return -1
    eviction.num_policies += 1
    return <int> eviction.num_policies - 1


cdef int eviction_restart(Eviction *eviction, Recency *recency) noexcept nogil:
    cdef uint32_t i
    # Numbers of policies stay what requests have, though their orders are new.
    eviction.swept = 0
    for i in range(eviction.num_policies):
        if add_orders(&eviction.policies[i], recency) < 0:
            return -1
    return 0


cdef uint64_t policy_num_draining(
    const Policy *policy, const Recency *recency
) noexcept nogil:
    if policy.kind == LRU:
        return 0
    return recency.orders[policy_order(policy, LFU_CLASSES)].num_live


cdef uint64_t policy_num_rows(const Policy *policy, const Recency *recency) noexcept nogil:
    cdef uint32_t i
    cdef uint64_t total = 0
    for i in range(policy.first, policy.first + (1 if policy.kind == LRU else LFU_ORDERS)):
        total += recency.orders[i].num_live
    return total


cdef uint32_t next_segment(const Policy *policy, const Recency *recency) noexcept nogil:
    """The segment of the row that the policy would give, or NO_SEGMENT: it has no rows."""
    cdef uint32_t grade
    cdef const Order *order = &recency.orders[policy_order(policy, LFU_CLASSES)]
    if order.num_live:
        return order.oldest
    if policy.kind != LRU:
        for grade in range(<uint32_t> LFU_CLASSES):
            order = &recency.orders[policy_order(policy, grade)]
            if order.num_live:
                return order.oldest
    return NO_SEGMENT


# Policies share a shard's capacity. Each names the row it would give; the one whose segment was
# used least recently goes, so that rows of different policies live equally long unless LFU has
# counted more than one use. A segment's time is that of its newest entry, at most 2048 uses of
# its order later.
cdef uint32_t eviction_take(
    Eviction *eviction, const Recency *recency, row_t *rows, uint32_t count
) noexcept nogil:
    cdef uint32_t i, number, best = NO_SEGMENT
    cdef Policy *giver = NULL
    for i in range(eviction.num_policies):
        number = next_segment(&eviction.policies[i], recency)
        if number != NO_SEGMENT and (
                best == NO_SEGMENT
                or segment_at(recency, number).tick < segment_at(recency, best).tick):
            best = number
            giver = &eviction.policies[i]
    if best == NO_SEGMENT:
        return 0
    # No more than the segment has: the next one may be younger than another policy's.
    count = recency_oldest(
        recency, best, rows, min(count, segment_at(recency, best).num_live))
    giver.num_evicted += count
    return count


cdef Policy *policy_of(const Eviction *eviction, uint32_t order) noexcept nogil:
    cdef uint32_t i = eviction.num_policies - 1
    while eviction.policies[i].first > order:
        i -= 1
    return &eviction.policies[i]


cdef uint32_t eviction_sweep(
    Eviction *eviction, const Recency *recency, row_t *rows, uint32_t count,
    uint32_t *num_looks
) noexcept nogil:
    cdef const Segment *segment
    cdef uint32_t number
    while num_looks[0] and recency.num_segments:
        number = eviction.swept if eviction.swept < recency.num_segments else 0
        segment = segment_at(recency, number)
        if recency_expired(recency, number, recency.clocks) and segment.num_live:
            # The cursor stays: there may be more of it.
            eviction.swept = number
            count = recency_oldest(recency, number, rows, min(count, segment.num_live))
            policy_of(eviction, segment.order).num_expired += count
            return count
        eviction.swept = number + 1
        num_looks[0] -= 1
    return 0


cdef void eviction_note_expired(
    Eviction *eviction, const Recency *recency, position_t position
) noexcept nogil:
    policy_of(
        eviction, segment_at(recency, position >> OFFSET_BITS).order).num_expired += 1


cdef void eviction_age(Eviction *eviction, Recency *recency, Slabs *slabs) noexcept nogil:
    cdef Policy *policy
    cdef uint32_t i, drained
    for i in range(eviction.num_policies):
        policy = &eviction.policies[i]
        if policy.kind != LFU:
            continue
        drained = policy_order(policy, LFU_CLASSES)
        recency_drain(
            recency, slabs, drained, policy_order(policy, 0), DRAINED_SEGMENTS)
        if recency.orders[drained].newest != NO_SEGMENT:
            continue
        if policy.num_uses >= HALVING_USES * policy_num_rows(policy, recency):
            turn(policy, policy_order(policy, 1) - policy.first)
