"""Eviction and admission policies against their model, and the bounds of one call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from numpy.typing import NDArray

from persia._core.kernels.initial import Initializer
from persia._core.kernels.optim import RowOptimizer
from persia._core.store.store import EmbeddingStore
from persia.errors import ConfigError
from tests.reference.policies import LR, Kind, Shard
from tests.support.profiles import tries

Floats = NDArray[np.float32]

DIM = 2
UNIFORM = Initializer("uniform")
NO_ROW = 2**32 - 1
POOL = [7919 * number + 3 for number in range(300)]
KINDS: tuple[Kind, ...] = (
    ("lfu", None, 0),
    ("lru", "steps", 5),
    ("lfu", "milliseconds", 1),
    ("lru", "milliseconds", 3),
)


def array(signs: Any) -> NDArray[np.uint64]:
    return np.array(signs, dtype=np.uint64)


def new_store(capacity: int, *kinds: Kind, **arguments: Any) -> EmbeddingStore:
    store = EmbeddingStore(
        capacity, **({"num_shards": 1, "seed": 11} | arguments), policies=kinds
    )
    store.configure(RowOptimizer("sgd", lr=LR))
    return store


def train(
    store: EmbeddingStore, signs: Any, batch_id: int = 0, **policy: Any
) -> tuple[Floats, int, int]:
    """Rows, and how many were inserted and refused."""
    rows = np.full((len(signs), DIM), np.nan, np.float32)
    hints = np.zeros(len(signs), np.uint32)
    counts = store.lookup_train(array(signs), UNIFORM, 1.0, batch_id, rows, hints, **policy)
    return rows, *counts


def held(store: EmbeddingStore) -> list[int]:
    """Signs in the order of eviction, policy after policy."""
    return [int(sign) for signs, _, _ in store.shard_entries(0) for sign in signs]


few = st.lists(st.sampled_from(POOL), min_size=1, max_size=12, unique=True)
hot = st.lists(st.sampled_from(POOL[:30]), min_size=1, max_size=20, unique=True)


@st.composite
def many(draw: st.DrawFn) -> list[int]:
    """Up to the whole pool, chosen by one seed: lists of such a size would be slow to draw."""
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    return [POOL[i] for i in rng.permutation(len(POOL))[: draw(st.integers(20, 200))]]


requests = st.one_of(few, hot, many())
policies = st.integers(0, len(KINDS))


class PolicyMachine(RuleBasedStateMachine):
    @initialize(capacity=st.integers(1, 150), num_lines=st.integers(1, 3))
    def start(self, capacity: int, num_lines: int) -> None:
        self.store = new_store(capacity, *KINDS, sketch_bytes=64 * num_lines)
        self.model = Shard(capacity, KINDS, 11, DIM, 64 * num_lines)
        self.batch_id = 0

    def _train(
        self, signs: list[int], policy: int, admit_at: int = 1, repeated: bool = False
    ) -> None:
        before = self.store.policy_stats()
        rows, _, _ = train(
            self.store,
            signs,
            self.batch_id,
            policy=policy,
            admit_at=admit_at,
            repeated=repeated,
        )
        expected = self.model.lookup_train(signs, self.batch_id, policy, admit_at, repeated)
        assert np.array_equal(rows, expected)
        self._end(before)

    def _end(self, before: list[dict[str, int]]) -> None:
        after = self.store.policy_stats()
        self.model.end_request(
            [new["evicted"] - old["evicted"] for old, new in zip(before, after, strict=True)]
        )

    @rule(
        signs=requests,
        policy=policies,
        admit_at=st.sampled_from([1, 1, 2, 3, 9]),
        repeats=st.booleans(),
    )
    def lookup_train(self, signs: list[int], policy: int, admit_at: int, repeats: bool) -> None:
        self.batch_id += 1
        self._train(signs, policy, admit_at)
        if repeats:
            self._train(signs, policy, admit_at, repeated=True)

    @rule(signs=hot, policy=policies, times=st.integers(5, 60))
    def hammer(self, signs: list[int], policy: int, times: int) -> None:
        """Enough uses to climb a few classes and to halve their counts."""
        for turn in range(times):
            self.batch_id += 1
            self._train(signs[turn % len(signs) :] + signs[: turn % len(signs)], policy)

    @rule(milliseconds=st.integers(0, 2), steps=st.integers(-2, 3))
    def time_goes_on(self, milliseconds: int, steps: int) -> None:
        now = self.model.clocks
        times = now["milliseconds"] + milliseconds, max(now["steps"] + steps, 0)
        self.store.set_clocks(*times)
        self.model.set_clocks(*times)

    @rule(signs=requests, policy=policies, seed=st.integers(0, 2**16))
    def write(self, signs: list[int], policy: int, seed: int) -> None:
        values = np.random.default_rng(seed).random((len(signs), DIM), np.float32)
        before = self.store.policy_stats()
        self.store.write(array(signs), values, None, policy=policy)
        self.model.write(signs, values, policy)
        self._end(before)

    @rule(signs=requests, seed=st.integers(0, 2**16))
    def update(self, signs: list[int], seed: int) -> None:
        gradients = np.random.default_rng(seed).random((len(signs), DIM), np.float32)
        self.store.update(array(signs), None, gradients)
        self.model.update(signs, gradients)

    @rule(signs=few)
    def delete(self, signs: list[int]) -> None:
        self.store.delete(array(signs))
        self.model.delete(signs)

    @rule(reuse=st.booleans())
    def clear(self, reuse: bool) -> None:
        self.store.clear(reuse=reuse)
        self.model.clear()

    @invariant()
    def every_key_has_its_own_row(self) -> None:
        found, values, _ = self.store.read(array(POOL), DIM)
        rows = np.full_like(values, np.nan)
        missing = self.store.lookup_eval(array(POOL), rows)
        expected = [self.model.get(sign) for sign in POOL]
        assert found.tolist() == [row is not None for row in expected]
        assert missing == len(POOL) - found.sum()
        zeros = np.zeros(DIM, np.float32)
        wanted = np.array([zeros if row is None else row for row in expected])
        assert np.array_equal(values, wanted)
        assert np.array_equal(rows, wanted)

    @invariant()
    def orders_and_counts(self) -> None:
        self.store.check()
        assert held(self.store) == self.model.order()
        stats = self.store.stats()
        assert {name: stats[name] for name in self.model.counts} == self.model.counts
        by_policy = self.store.policy_stats()
        assert [one["rows"] for one in by_policy] == [len(one) for one in self.model.orders]
        for name in ("rows", "evicted", "expired"):
            assert sum(one[name] for one in by_policy) == stats[name]


TestPolicies = PolicyMachine.TestCase
TestPolicies.settings = tries(40, stateful_step_count=25)


# --- LFU ------------------------------------------------------------------------------------


def stream(store: EmbeddingStore, first: int, count: int, batch_id: int, **policy: Any) -> None:
    """Ids that come once, a hundred a batch."""
    for start in range(first, first + count, 100):
        train(store, range(start, start + 100), batch_id + start, **policy)


def test_a_scan_drives_out_what_is_used_often_by_lru_and_not_by_lfu() -> None:
    kept = []
    for kinds in ((), (("lfu", None, 0),)):
        store = new_store(1000, *kinds)
        policy = len(kinds)
        for turn in range(20):
            train(store, range(300), turn, policy=policy)
        stream(store, 10_000, 5000, 100, policy=policy)
        kept.append(len(set(range(300)) & set(held(store))))
        store.check()
    assert kept == [0, 300]


def test_what_was_used_often_once_goes_in_the_end() -> None:
    store = new_store(1000, ("lfu", None, 0))
    for turn in range(64):
        train(store, range(300), turn, policy=1)
    # Two uses each keep a new id above one; halvings bring the old ones down to that.
    for turn in range(400):
        ids = range(10_000 + 250 * (turn // 2), 10_250 + 250 * (turn // 2))
        train(store, ids, 1000 + turn, policy=1)
    assert not set(range(300)) & set(held(store))


def test_counts_of_lfu_mean_powers_of_two() -> None:
    # A use moves up from class c once in 2**c times: after n uses about log2(n).
    store = new_store(10_000, ("lfu", None, 0))
    stream(store, 10_000, 5000, 0, policy=1)  # or ten uses of each row would halve its count
    for turn in range(31):
        train(store, range(500), turn, policy=1)
    for turn in range(31, 34):
        train(store, range(500, 600), turn, policy=1)
    train(store, range(600, 700), 34, policy=1)
    order = {sign: place for place, sign in enumerate(held(store))}
    parts = (range(10_000, 15_000), range(600, 700), range(500, 600), range(500))
    ranks = [np.median([order[sign] for sign in part]) for part in parts]
    assert ranks == sorted(ranks)


# --- several policies -----------------------------------------------------------------------


def test_policies_that_share_a_shard_give_up_rows_unused_for_equally_long() -> None:
    # Ids that come once, into both policies alike: both keep those of about the same batches.
    store = new_store(40_000, ("lfu", None, 0))
    for turn in range(200):
        first = 1_000_000 + 1000 * turn
        train(store, range(first, first + 500), turn)
        train(store, range(first + 500, first + 1000), turn, policy=1)
    rows = [one["rows"] for one in store.policy_stats()]
    assert sum(rows) == 40_000
    # A segment is of 2048 uses, and all its rows are as young as its youngest.
    assert abs(rows[0] - rows[1]) <= 2 * 2048


def test_a_flood_in_one_group_takes_no_row_from_another_that_uses_it() -> None:
    for kinds in ((("lfu", None, 0),), (("lru", "steps", 1 << 40),)):
        store = new_store(8000, *kinds)
        for turn in range(30):
            train(store, range(2000), turn)
            stream(store, 10_000 + 1000 * turn, 1000, turn, policy=1)
        assert [one["evicted"] for one in store.policy_stats()] == [0, 24_000]
        assert set(range(2000)) <= set(held(store))


def test_rows_loaded_in_the_order_of_a_dump_are_evicted_in_it() -> None:
    store = new_store(3000, ("lfu", None, 0))
    rng = np.random.default_rng(0)
    for turn in range(50):
        train(store, np.unique(rng.zipf(1.3, 200) % 3000), turn, policy=1)
    other = new_store(3000, ("lfu", None, 0))
    for signs, values, states in store.shard_entries(0):
        other.write(signs, values, states, policy=1)
    assert held(other) == held(store)


# --- expiry ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lru", "lfu"])
@pytest.mark.parametrize("ttl", [1, 15, 16, 100, 1000])
def test_a_row_lives_for_its_ttl_and_no_more_than_a_sixteenth_longer(
    kind: str, ttl: int
) -> None:
    store = new_store(10_000, (kind, "milliseconds", ttl))
    rng = np.random.default_rng(ttl)
    last: dict[int, int] = {}
    now = 0
    for turn in range(300):
        now += int(rng.integers(0, max(ttl // 8, 2)))
        store.set_clocks(now, 0)
        asked = np.arange(1000)
        found = store.read(array(asked), DIM)[0]
        for sign, is_there in zip(asked.tolist(), found.tolist(), strict=True):
            age = now - last.get(sign, -(1 << 40))
            assert is_there or age >= ttl
            assert not is_there or age <= ttl + ttl // 16
        used = rng.integers(0, 1000, 5)
        train(store, np.unique(used), turn, policy=1)
        last.update(dict.fromkeys(used.tolist(), now))
        if turn % 20 == 0:
            store.check()


def test_an_expired_row_begins_anew_and_is_admitted_anew() -> None:
    store = new_store(1000, ("lru", "steps", 1), sketch_bytes=4096)
    first, _, _ = train(store, [1, 2], policy=1)
    store.update(array([1, 2]), None, np.ones((2, DIM), np.float32))
    store.set_clocks(0, 1)
    again, inserted, refused = train(store, [1], policy=1)
    assert (inserted, refused) == (1, 0)
    assert np.array_equal(again[0], first[0])
    rows, inserted, refused = train(store, [2], policy=1, admit_at=3)
    assert (inserted, refused, rows.any()) == (0, 1, np.False_)


def test_clocks_do_not_go_back() -> None:
    store = new_store(1000, ("lru", "steps", 5))
    store.set_clocks(0, 100)
    train(store, [1], policy=1)
    store.set_clocks(0, 3)
    train(store, [2], policy=1)
    store.set_clocks(0, 104)
    assert store.read(array([1, 2]), DIM)[0].all()


# --- bounds of one call ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lru", "lfu"])
def test_rows_that_expire_at_once_are_dropped_a_few_at_a_time_and_served_never(
    kind: str,
) -> None:
    store = new_store(100_000, (kind, "milliseconds", 1000))
    for start in range(0, 60_000, 5000):
        train(store, range(start, start + 5000), start, policy=1)
    store.set_clocks(10_000, 0)
    before = len(store)
    requests = 0
    while len(store) > requests + 1:
        found, _, _ = store.read(array(range(0, 60_000, 7)), DIM)
        assert not found.any()
        train(store, [1_000_000 + requests], requests, policy=1)
        requests += 1
        assert before - len(store) <= 513
        before = len(store)
    assert 60_000 // 513 <= requests <= 2 * 60_000 // 513
    store.check()
    assert store.stats()["expired"] == 60_000


def test_expiry_keeps_up_with_any_request() -> None:
    store = new_store(1_000_000, ("lru", "steps", 2))
    for step in range(30):
        store.set_clocks(0, step)
        train(store, range(20_000 * step, 20_000 * (step + 1)), step, policy=1)
        assert len(store) <= 20_000 * 3 + 512
    store.check()


def test_halving_moves_a_few_segments_a_request() -> None:
    store = new_store(400_000, ("lfu", None, 0))
    for start in range(0, 200_000, 20_000):
        train(store, range(start, start + 20_000), start, policy=1)
    assert store.policy_stats()[1]["draining"] == 0
    turn = 0
    while store.policy_stats()[1]["draining"] == 0:  # ten uses a row, and counts are halved
        train(store, range(200_000 - 50_000, 200_000), turn, policy=1)
        turn += 1
    before = store.policy_stats()[1]["draining"]
    assert before > 100_000
    calls = 0
    while before:
        train(store, [0], turn + calls, policy=1)
        after = store.policy_stats()[1]["draining"]
        assert before - after <= 4 * 2048 + 1
        before = after
        calls += 1
    assert calls >= 150_000 // (4 * 2048)
    store.check()


# --- admission by count ---------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [2, 3, 7, 255])
def test_an_id_is_admitted_at_its_nth_appearance(threshold: int) -> None:
    store = new_store(1000, sketch_bytes=1 << 20)
    for turn in range(1, threshold + 1):
        assert train(store, [5, 6], turn, admit_at=threshold)[1:] == (
            (2, 0) if turn == threshold else (0, 2)
        )
        # The same request again, because its reply was lost.
        assert train(store, [5, 6], turn, admit_at=threshold, repeated=True)[2] == (
            0 if turn == threshold else 2
        )


def test_ids_that_share_counters_are_admitted_before_and_never_after_their_turn() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        store = new_store(100, sketch_bytes=64)
        appeared: dict[int, int] = {}
        for turn in range(7):  # fewer than eight a line: nothing is forgotten
            sign = int(rng.integers(0, 3))
            rows, _, _ = train(store, [sign], turn, admit_at=3)
            appeared[sign] = appeared.get(sign, 0) + 1
            assert rows.any() or appeared[sign] < 3


def test_ids_that_come_once_are_seldom_admitted_and_are_forgotten() -> None:
    store = new_store(100_000, sketch_bytes=1 << 14)
    inserted = [
        train(store, range(first, first + 1000), first, admit_at=2)[1]
        for first in range(10_000, 40_000, 1000)
    ]
    assert sum(inserted[5:]) / 25_000 < 0.02
    # 256 lines are halved once in 2048 appearances, so ids that come less often never get in.
    refused = [
        train(store, [1, *range(first, first + 5000)], first, admit_at=3)[0][0].any()
        for first in range(50_000, 100_000, 5000)
    ]
    assert not any(refused)


def test_the_sketch_counts_towards_the_memory() -> None:
    plain, counting = new_store(1000), new_store(1000, sketch_bytes=1 << 20)
    assert counting.stats()["bytes"] - plain.stats()["bytes"] == 1 << 20
    train(counting, [5], 1, admit_at=2)
    counting.clear()
    assert train(counting, [5], 2, admit_at=2)[2] == 1
    assert counting.stats()["bytes"] - new_store(1000).stats()["bytes"] < (1 << 20) + (1 << 16)


# --- what cannot be used --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kinds", "arguments", "message"),
    [
        ([("fifo", None, 0)], {}, "a policy is"),
        ([("lru", "hours", 1)], {}, "a policy is"),
        ([("lru", None, 1)], {}, "a policy is"),
        ([("lru", "steps", 0)], {}, "a policy is"),
        ([("lru", "steps", 1 << 61)], {}, "a ttl must be"),
        ([("lru", None, 0)], {}, "twice"),
        ([("lru", "steps", n) for n in range(1, 65)], {}, "at most 64 policies"),
        ([], {"sketch_bytes": -1}, "sketch_bytes must be"),
    ],
)
def test_policies_out_of_range(kinds: Any, arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        new_store(100, *kinds, **arguments)


def test_requests_name_policies_and_thresholds_that_there_are() -> None:
    store = new_store(100, ("lfu", None, 0))
    with pytest.raises(ConfigError, match=r"policy must be in 0\.\.1, got 2"):
        train(store, [1], policy=2)
    with pytest.raises(ConfigError, match=r"admit_at must be .* without sketch_bytes, got 2"):
        train(store, [1], admit_at=2)
    with pytest.raises(ConfigError, match=r"policy must be in 0\.\.1, got 7"):
        store.write(array([1]), np.zeros((1, DIM), np.float32), None, policy=7)
    counting = new_store(100, sketch_bytes=64)
    for threshold in (0, 256):
        with pytest.raises(ConfigError, match="admit_at must be"):
            train(counting, [1], admit_at=threshold)
