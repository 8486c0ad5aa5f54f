"""The store against its model: random requests, and after each one every key is compared."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

from persia._core.base.halves import DTYPES
from persia._core.kernels.optim import RowOptimizer
from persia._core.store.store import EmbeddingStore
from persia.errors import DimMismatch
from tests.core.stores import NO_ROW, UNIFORM, Floats, entries, evaluate, train, u64
from tests.reference.hashing import unmix64
from tests.reference.policies import Kind
from tests.reference.store import Row, Store

EDGES = [0, 1, 2**32 - 1, 2**63, 2**64 - 1]
# Equal in bucket and tag, so that only the sign in the row distinguishes them.
TWINS = [unmix64(serial << 40 | 0x1F00000000) for serial in range(30)]
POOL = EDGES + TWINS + [7919 * number + 3 for number in range(400)]
HOT = POOL[:60:2]

OPTIMIZERS: dict[str, tuple[str, dict[str, float]]] = {
    "sgd": ("sgd", {"lr": 0.5}),
    "adagrad": ("adagrad", {"lr": 0.1}),
    "shared": ("adagrad", {"lr": 0.1, "vectorwise_shared": True}),
    "rowwise_adam": ("rowwise_adam", {"lr": 0.1}),
}
KINDS: tuple[Kind, ...] = (
    ("lfu", None, 0),
    ("lru", "steps", 5),
    ("lfu", "milliseconds", 1),
    ("lru", "milliseconds", 3),
)


@st.composite
def many(draw: st.DrawFn, most: int, repeats: bool) -> list[int]:
    """From 20 ids on, chosen by one seed: lists of such a size would be slow to draw."""
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    places = rng.choice(len(POOL), draw(st.integers(20, most)), replace=repeats)
    return [POOL[place] for place in places]


def lists(pool: list[int], least: int, most: int, repeats: bool) -> Any:
    return st.lists(st.sampled_from(pool), min_size=least, max_size=most, unique=not repeats)


def requests(most: int, repeats: bool) -> Any:
    few, hot = lists(POOL, 1, 12, repeats), lists(HOT, 1, 20, repeats)
    return st.one_of(few, hot, many(most, repeats))


def own(name: str) -> Any:
    """What the class of the machine says for this argument."""
    return st.runner().flatmap(attrgetter(name))


def bits(values: Floats) -> NDArray[np.uint32]:
    return np.ascontiguousarray(values).view(np.uint32)


class StoreMachine(RuleBasedStateMachine):
    capacities = st.one_of(st.integers(1, 12), st.integers(13, 150))
    num_shards = st.just(1)
    dtypes: ClassVar[dict[int, str]] = dict.fromkeys((1, 5, 8), "float32")  # by dim
    requests = requests(len(POOL), True)
    hammered = lists(HOT, 15, 30, True)
    probabilities = st.sampled_from([0.0, 0.5, 1.0])
    kinds: tuple[Kind, ...] = ()
    policies = st.just(0)
    thresholds = st.just(1)
    sketch_lines = st.just(0)

    @initialize(data=st.data(), optimizer=st.sampled_from(sorted(OPTIMIZERS)))
    def start(self, data: st.DataObject, optimizer: str) -> None:
        capacity = data.draw(self.capacities, "capacity")
        num_shards = data.draw(self.num_shards, "num_shards")
        sketch_bytes = 64 * data.draw(self.sketch_lines, "sketch_lines")
        self.set_up(optimizer, capacity, num_shards, sketch_bytes)

    def set_up(
        self, optimizer: str, capacity: int, num_shards: int, sketch_bytes: int = 0
    ) -> None:
        name, options = OPTIMIZERS[optimizer]
        real = RowOptimizer(name, **options)
        more: dict[str, Any] = {"policies": self.kinds, "sketch_bytes": sketch_bytes}
        self.store = EmbeddingStore(capacity, num_shards=num_shards, seed=11, **more)
        self.store.configure(real)
        complete: dict[str, Any] = dict(real.options)
        self.model = Store(capacity, num_shards, 11, name, complete, self.kinds, sketch_bytes)
        assert self.store.num_shards == self.model.num_shards
        self.words = {dim: real.state_words(dim) for dim in self.dtypes}
        self.known: set[int] = set()
        self.hints: dict[int, int] = {}
        self.batch_id = 0

    def dim_of(self, sign: int) -> int:
        return list(self.dtypes)[sign % len(self.dtypes)]

    def by_dim(self, signs: list[int]) -> dict[int, list[int]]:
        """A request is of one dim; a sign has its own."""
        groups: dict[int, list[int]] = {}
        for sign in signs:
            groups.setdefault(self.dim_of(sign), []).append(sign)
        return groups

    def _num_evicted(self) -> NDArray[np.int64]:
        return np.array([one["evicted"] for one in self.store.policy_stats()])

    def _end(self, before: NDArray[np.int64]) -> None:
        self.model.end_request((self._num_evicted() - before).tolist())

    def ask(self, signs: list[int], *, repeated: bool = False, **how: Any) -> None:
        self.known.update(signs)
        self.batch_id += not repeated
        for dim, part in self.by_dim(signs).items():
            how |= {"batch_id": self.batch_id, "repeated": repeated, "dtype": self.dtypes[dim]}
            before = self._num_evicted()
            rows, hints, *counts = train(self.store, part, dim, **how)
            expected, held, *expected_counts = self.model.lookup_train(part, dim, **how)
            assert counts == expected_counts
            assert np.array_equal(bits(rows), bits(expected))
            assert [hint != NO_ROW for hint in hints.tolist()] == held
            self.hints.update(zip(part, hints.tolist(), strict=True))
            self._end(before)

    @rule(
        signs=own("requests"),
        policy=own("policies"),
        admit=own("probabilities"),
        admit_at=own("thresholds"),
        repeats=st.booleans(),
    )
    def lookup_train(self, signs: list[int], repeats: bool, **how: Any) -> None:
        self.ask(signs, **how)
        if repeats:
            self.ask(signs, **how, repeated=True)

    @rule(signs=own("hammered"), policy=own("policies"), times=st.integers(5, 80))
    def hammer(self, signs: list[int], policy: int, times: int) -> None:
        """Enough uses to close segments of the order of use while few entries live, to climb
        a few classes and to halve their counts."""
        for turn in range(times):
            self.ask(signs[turn % len(signs) :] + signs[: turn % len(signs)], policy=policy)
            self.store.check()

    @precondition(lambda self: self.kinds)
    @rule(milliseconds=st.integers(0, 2), steps=st.integers(-2, 3))
    def time_goes_on(self, milliseconds: int, steps: int) -> None:
        now = self.model.clocks
        times = now["milliseconds"] + milliseconds, max(now["steps"] + steps, 0)
        self.store.set_clocks(*times)
        self.model.set_clocks(*times)

    @rule(signs=own("requests"))
    def lookup_eval(self, signs: list[int]) -> None:
        self.known.update(signs)
        for dim, part in self.by_dim(signs).items():
            rows, missing = evaluate(self.store, part, dim, dtype=self.dtypes[dim])
            expected, absent = self.model.lookup_eval(part, dim)
            assert missing == absent
            assert np.array_equal(bits(rows), bits(expected))

    @rule(
        signs=own("requests"),
        kind=st.sampled_from(["kept", "none", "garbage", "others"]),
        seed=st.integers(0, 2**16),
    )
    def update(self, signs: list[int], kind: str, seed: int) -> None:
        self.known.update(signs)
        rng = np.random.default_rng(seed)
        for dim, part in self.by_dim(signs).items():
            hints: NDArray[np.uint32] | None = None
            if kind == "kept":  # right or stale
                hints = np.array([self.hints.get(sign, NO_ROW) for sign in part], np.uint32)
            elif kind == "garbage":
                hints = rng.integers(0, 2**32, len(part)).astype(np.uint32)
                hints >>= rng.integers(0, 32, len(part)).astype(np.uint32)
            elif kind == "others":
                kept = list(self.hints.values()) or [0]
                hints = rng.choice(np.array(kept, np.uint32), len(part))
            gradients = rng.standard_normal((len(part), dim)).astype(np.float32)
            dtype = self.dtypes[dim]
            missing = self.store.update(u64(part), hints, gradients, dtype=dtype, number=seed)
            assert missing == self.model.update(part, gradients, seed)

    @rule(
        signs=own("requests"),
        policy=own("policies"),
        with_states=st.booleans(),
        seed=st.integers(0, 2**16),
    )
    def write(self, signs: list[int], policy: int, with_states: bool, seed: int) -> None:
        self.known.update(signs)
        rng = np.random.default_rng(seed)
        for dim, part in self.by_dim(signs).items():
            values = rng.standard_normal((len(part), dim)).astype(np.float32)
            states = None
            if with_states:
                states = rng.random((len(part), self.words[dim]), np.float32).view(np.uint32)
            how: dict[str, Any] = {"dtype": self.dtypes[dim], "policy": policy}
            before = self._num_evicted()
            self.store.write(u64(part), values, states, **how)
            self.model.write(part, values, states, **how)
            self._end(before)

    @rule(signs=own("requests"))
    def delete(self, signs: list[int]) -> None:
        assert self.store.delete(u64(signs)) == self.model.delete(signs)

    @rule(reuse=st.booleans())
    def clear(self, reuse: bool) -> None:
        self.store.clear(reuse=reuse)
        self.model.clear()

    @precondition(lambda self: any(map(self.model.order, range(self.model.num_shards))))
    @rule(data=st.data())
    def another_dim(self, data: st.DataObject) -> None:
        numbers = range(self.model.num_shards)
        held = [sign for number in numbers for sign in self.model.order(number)]
        sign = held[data.draw(st.integers(0, len(held) - 1), "place")]
        right = self.dim_of(sign)
        dtype = self.dtypes[right]
        for dim in {1, 5, 8} - {right}:  # smaller and larger ones
            self._refuses(sign, dim, dtype)
        self._refuses(sign, right, DTYPES[(DTYPES.index(dtype) + 1) % 3])

    def _refuses(self, sign: int, dim: int, dtype: str) -> None:
        rows = np.zeros((1, dim), np.float32)
        hints = np.array([self.hints.get(sign, 0)], np.uint32)
        one = u64([sign])
        for request in (
            lambda: self.store.lookup_train(one, UNIFORM, 1.0, 1, rows, hints, dtype=dtype),
            lambda: self.store.lookup_eval(one, rows, dtype=dtype),
            lambda: self.store.update(one, hints, rows, dtype=dtype),
            lambda: self.store.read(one, dim, dtype=dtype),
            lambda: self.store.write(one, rows, None, dtype=dtype),
        ):
            before = self._num_evicted()
            with pytest.raises(DimMismatch):
                request()
            self._end(before)  # what has expired is dropped all the same

    @invariant()
    def every_key_has_its_own_row(self) -> None:
        for dim, signs in self.by_dim(sorted(self.known)).items():
            dtype = self.dtypes[dim]
            found, values, states = self.store.read(u64(signs), dim, dtype=dtype)
            rows, missing = evaluate(self.store, signs, dim, dtype=dtype)
            zeros = np.zeros(dim, np.float32), np.zeros(self.words[dim], np.float32)
            absent = Row(dtype, *zeros)
            expected = [self.model.get(sign) or absent for sign in signs]
            assert found.tolist() == [row is not absent for row in expected]
            assert missing == len(signs) - found.sum()
            self.model.counts["missing"] += missing
            wanted = bits(np.array([row.values for row in expected], np.float32))
            assert np.array_equal(bits(values), wanted)
            assert np.array_equal(bits(rows), wanted)
            wanted_states = bits(np.array([row.state for row in expected], np.float32))
            assert np.array_equal(states, wanted_states)

    @invariant()
    def order_of_use(self) -> None:
        for number, shapes in enumerate(entries(self.store)):
            order = {}
            for signs, values, states in shapes:
                order[values.shape[1]] = signs.tolist()
                for sign, value, state in zip(signs.tolist(), values, states, strict=True):
                    row = self.model.shards[number].rows[sign]
                    assert bits(value).tobytes() == row.values.tobytes()
                    assert state.tobytes() == row.state.tobytes()
            assert order == self.by_dim(self.model.order(number))

    @invariant()
    def numbers(self) -> None:
        self.store.check()
        stats = self.store.stats()
        assert len(self.store) == stats["rows"] == len(self.model)
        assert {name: stats[name] for name in self.model.counts} == self.model.counts
        assert stats["entries"] <= 1.25 * stats["rows"]
        assert not stats["memory_limited"]
        by_policy = self.store.policy_stats()
        orders = zip(*(shard.orders for shard in self.model.shards), strict=True)
        assert [one["rows"] for one in by_policy] == [sum(map(len, some)) for some in orders]
        for name in ("rows", "evicted", "expired"):
            assert sum(one[name] for one in by_policy) == stats[name]


class ShardedMachine(StoreMachine):
    capacities = st.integers(1, 700)
    num_shards = st.integers(1, 8) | st.just(1024)
    dtypes: ClassVar[dict[int, str]] = {1: "float16", 5: "bfloat16", 8: "float32"}


class PolicyMachine(StoreMachine):
    """With expiry, counted admission and orders of several policies, in one shard."""

    capacities = st.integers(1, 150)
    dtypes: ClassVar[dict[int, str]] = {2: "float32"}
    requests = requests(200, False)
    hammered = lists(HOT, 1, 20, False)
    probabilities = st.just(1.0)
    kinds = KINDS
    policies = st.integers(0, len(KINDS))
    thresholds = st.sampled_from([1, 1, 2, 3, 9])
    sketch_lines = st.integers(1, 3)
