"""Stores with several policies, and the machine that compares one with its model."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from persia._core.store.store import EmbeddingStore
from tests.core import stores
from tests.core.machine import many
from tests.core.stores import Floats, held, u64
from tests.reference.policies import Kind, Shard

DIM = 2
KINDS: tuple[Kind, ...] = (
    ("lfu", None, 0),
    ("lru", "steps", 5),
    ("lfu", "milliseconds", 1),
    ("lru", "milliseconds", 3),
)


def new_store(capacity: int, *kinds: Kind, **arguments: Any) -> EmbeddingStore:
    return stores.new_store(capacity, policies=kinds, **({"seed": 11} | arguments))


def train(
    store: EmbeddingStore, signs: Any, batch_id: int = 0, **policy: Any
) -> tuple[Floats, int, int]:
    """Rows, and how many were inserted and refused."""
    rows, _, *counts = stores.train(store, signs, DIM, batch_id=batch_id, **policy)
    return rows, counts[0], counts[1]


def stream(store: EmbeddingStore, first: int, count: int, batch_id: int, **policy: Any) -> None:
    """Ids that come once, a hundred a batch."""
    for start in range(first, first + count, 100):
        train(store, range(start, start + 100), batch_id + start, **policy)


POOL = [7919 * number + 3 for number in range(300)]
few = st.lists(st.sampled_from(POOL), min_size=1, max_size=12, unique=True)
hot = st.lists(st.sampled_from(POOL[:30]), min_size=1, max_size=20, unique=True)


requests = st.one_of(few, hot, many(POOL, 200, False))
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
        self.store.write(u64(signs), values, None, policy=policy)
        self.model.write(signs, values, policy)
        self._end(before)

    @rule(signs=requests, seed=st.integers(0, 2**16))
    def update(self, signs: list[int], seed: int) -> None:
        gradients = np.random.default_rng(seed).random((len(signs), DIM), np.float32)
        self.store.update(u64(signs), None, gradients)
        self.model.update(signs, gradients)

    @rule(signs=few)
    def delete(self, signs: list[int]) -> None:
        self.store.delete(u64(signs))
        self.model.delete(signs)

    @rule(reuse=st.booleans())
    def clear(self, reuse: bool) -> None:
        self.store.clear(reuse=reuse)
        self.model.clear()

    @invariant()
    def every_key_has_its_own_row(self) -> None:
        found, values, _ = self.store.read(u64(POOL), DIM)
        rows = np.full_like(values, np.nan)
        missing = self.store.lookup_eval(u64(POOL), rows)
        expected = [self.model.get(sign) for sign in POOL]
        assert found.tolist() == [row is not None for row in expected]
        assert missing == len(POOL) - found.sum()
        zeros = np.zeros(DIM, np.float32)
        wanted = np.array([zeros if row is None else row for row in expected])
        assert np.array_equal(values, wanted)
        assert np.array_equal(rows, wanted)

    @invariant()
    def order_of_use(self) -> None:
        assert held(self.store) == self.model.order()

    @invariant()
    def numbers(self) -> None:
        self.store.check()
        stats = self.store.stats()
        assert {name: stats[name] for name in self.model.counts} == self.model.counts
        by_policy = self.store.policy_stats()
        assert [one["rows"] for one in by_policy] == [len(one) for one in self.model.orders]
        for name in ("rows", "evicted", "expired"):
            assert sum(one[name] for one in by_policy) == stats[name]
