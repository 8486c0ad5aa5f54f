"""Eviction policies against their model, and the bounds of one request."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from persia._core.base.halves import DTYPES
from persia._core.kernels.optim import RowOptimizer
from persia.errors import ConfigError
from tests.core.machine import KINDS, PolicyMachine
from tests.core.policies import DIM, new_store, stream, train
from tests.core.stores import held, u64
from tests.reference.policies import Kind
from tests.support import kernels
from tests.support.profiles import tries

# Random requests under random policies; what is held is compared with the model's after each.
TestPolicies = PolicyMachine.TestCase
TestPolicies.settings = tries(80, stateful_step_count=50)


class ScorerMachine(PolicyMachine):
    """A user's scorer beside the others, with and without expiry."""

    policies = st.integers(0, len(KINDS) + 2)

    @property
    def kinds(self) -> tuple[Kind, ...]:  # type: ignore[override]
        name = kernels.load("scorer")
        return (*KINDS, (name, None, 0), (name, "steps", 5))


TestScorers = ScorerMachine.TestCase
TestScorers.settings = tries(80, stateful_step_count=50)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_a_scorer_sees_values_and_state(dtype: str, optimizer: str) -> None:
    sums = {"initial_accumulator_value": 2.0} if optimizer == "adagrad" else {}
    store = new_store(
        100,
        (kernels.load("scorer", "-DBY_VALUE=1"), None, 0),
        optimizer=RowOptimizer(optimizer, lr=0.5, **sums),
    )
    signs = np.arange(90, dtype=np.uint64)
    values = np.tile((signs % 10).astype(np.float32)[:, None], DIM)
    store.write(signs, values, None, policy=1, dtype=dtype)
    # Their classes are 0 to 9, or 2 to 11; those of new rows 15.
    train(store, signs, 1, policy=1, dtype=dtype)
    train(store, range(1000, 1040), 2, policy=1, dtype=dtype)
    store.check()
    found, _, _ = store.read(signs, DIM, dtype=dtype)
    gone = set(signs[~found].tolist())
    assert gone == {sign for sign in range(90) if sign % 10 < 3} | {3, 13, 23}
    assert store.stats()["evicted_native"] == store.stats()["evicted"] == 30


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_write_is_scored_by_what_it_writes(dtype: str) -> None:
    """Of rows that are new, that are there, and that have expired."""
    scorer = kernels.load("scorer", "-DBY_VALUE=2")
    optimizer = RowOptimizer("adagrad", lr=0.5, initial_accumulator_value=2.0)
    store = new_store(100, (scorer, None, 0), (scorer, "steps", 5), optimizer=optimizer)
    signs = np.arange(100, dtype=np.uint64)

    def write(values: Any, states: Any, policy: int) -> None:
        rows = np.tile(np.asarray(values, np.float32)[:, None], DIM)
        store.write(signs, rows, states, policy=policy, dtype=dtype)

    def lowest(count: int, policy: int) -> set[int]:
        """The signs of rows that new ones with values of 9 drive out."""
        new = np.arange(1000, 1000 + count, dtype=np.uint64)
        rows = np.full((count, DIM), 9, np.float32)
        store.write(new, rows, None, policy=policy, dtype=dtype)
        found, _, _ = store.read(signs, DIM, dtype=dtype)
        store.delete(new)
        store.check()
        return set(signs[~found].tolist())

    for policy in (1, 2):
        store.clear()
        tens = signs // 10
        write(9 - tens, None, policy)
        assert lowest(10, policy) == set(range(90, 100))
        write(tens, None, policy)
        assert lowest(20, policy) == set(range(20))
        # By the words of state that come with them, too.
        states = np.tile((9 - tens).astype(np.float32)[:, None], DIM).view(np.uint32)
        write(np.zeros(100), states, policy)
        assert lowest(30, policy) == set(range(70, 100))
    store.set_clocks(0, 100)
    write(tens, None, 2)
    assert store.stats()["expired"] == 70
    assert lowest(10, 2) == set(range(10))


def test_a_library_without_a_scorer_is_no_policy() -> None:
    with pytest.raises(ConfigError, match="expected a library with a scorer, it has its optim"):
        new_store(100, (kernels.load("adagrad"), None, 0))
    with pytest.raises(ConfigError, match="has not loaded its library"):
        new_store(100, ("native:absent:" + "0" * 64, None, 0))
    one, other = kernels.load("scorer"), kernels.load("scorer", "-DTAG=5")
    new_store(100, (one, None, 0), (other, None, 0))
    with pytest.raises(ConfigError, match="a policy comes twice"):
        new_store(100, (one, None, 0), (one, None, 0))


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
        found = store.read(u64(asked), DIM)[0]
        for sign, is_there in zip(asked.tolist(), found.tolist(), strict=True):
            age = now - last.get(sign, -(1 << 40))
            assert is_there or age >= ttl
            assert not is_there or age <= ttl + ttl // 16
        used = rng.integers(0, 1000, 5)
        train(store, np.unique(used), turn, policy=1)
        last.update(dict.fromkeys(used.tolist(), now))
        if turn % 20 == 0:
            store.check()


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
        found, _, _ = store.read(u64(range(0, 60_000, 7)), DIM)
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


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        ([("fifo", None, 0)], "a policy is"),
        ([("lru", "hours", 1)], "a policy is"),
        ([("lru", None, 1)], "a policy is"),
        ([("lru", "steps", 0)], "a policy is"),
        ([("lru", "steps", 1 << 61)], "a ttl must be"),
        ([("lru", None, 0)], "twice"),
        ([("lru", "steps", n) for n in range(1, 65)], "at most 64 policies"),
    ],
)
def test_policies_out_of_range(kinds: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        new_store(100, *kinds)


def test_requests_name_policies_and_thresholds_that_there_are() -> None:
    store = new_store(100, ("lfu", None, 0))
    with pytest.raises(ConfigError, match=r"policy must be in 0\.\.1, got 2"):
        train(store, [1], policy=2)
    with pytest.raises(ConfigError, match=r"admit_at must be .* without sketch_bytes, got 2"):
        train(store, [1], admit_at=2)
    with pytest.raises(ConfigError, match=r"policy must be in 0\.\.1, got 7"):
        store.write(u64([1]), np.zeros((1, DIM), np.float32), None, policy=7)
    counting = new_store(100, sketch_bytes=64)
    for threshold in (0, 256):
        with pytest.raises(ConfigError, match="admit_at must be"):
            train(counting, [1], admit_at=threshold)
