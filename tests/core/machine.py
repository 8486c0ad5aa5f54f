"""The store against its model: random requests, and after each one every key is compared."""

from __future__ import annotations

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
from tests.core.stores import NO_ROW, UNIFORM, Floats, entries, u64
from tests.reference.hashing import unmix64
from tests.reference.store import Row, Store

DIMS = (1, 5, 8)
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

few = st.lists(st.sampled_from(POOL), min_size=1, max_size=12)
hot = st.lists(st.sampled_from(HOT), min_size=1, max_size=20)


@st.composite
def many(draw: st.DrawFn, pool: list[int], most: int, repeats: bool) -> list[int]:
    """From 20 ids on, chosen by one seed: lists of such a size would be slow to draw."""
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    places = rng.choice(len(pool), draw(st.integers(20, most)), replace=repeats)
    return [pool[place] for place in places]


requests = st.one_of(few, hot, many(POOL, len(POOL), True))
probabilities = st.sampled_from([0.0, 0.5, 1.0])


def dim_of(sign: int) -> int:
    return DIMS[sign % 3]


def by_dim(signs: list[int]) -> dict[int, list[int]]:
    """A request is of one dim; a sign has its own."""
    groups: dict[int, list[int]] = {}
    for sign in signs:
        groups.setdefault(dim_of(sign), []).append(sign)
    return groups


def bits(values: Floats) -> NDArray[np.uint32]:
    return np.ascontiguousarray(values).view(np.uint32)


class StoreMachine(RuleBasedStateMachine):
    capacities = st.one_of(st.integers(1, 12), st.integers(13, 150))
    num_shards = st.just(1)
    dtypes: ClassVar[dict[int, str]] = dict.fromkeys(DIMS, "float32")

    @initialize(data=st.data(), optimizer=st.sampled_from(sorted(OPTIMIZERS)))
    def start(self, data: st.DataObject, optimizer: str) -> None:
        capacity = data.draw(self.capacities, "capacity")
        self.set_up(optimizer, capacity, data.draw(self.num_shards, "num_shards"))

    def set_up(self, optimizer: str, capacity: int, num_shards: int) -> None:
        name, options = OPTIMIZERS[optimizer]
        real = RowOptimizer(name, **options)
        self.store = EmbeddingStore(capacity, num_shards=num_shards, seed=11)
        self.store.configure(real)
        complete: dict[str, Any] = dict(real.options)
        self.model = Store(capacity, num_shards, 11, name, complete)
        assert self.store.num_shards == self.model.num_shards
        self.words = {dim: real.state_words(dim) for dim in DIMS}
        self.known: set[int] = set()
        self.hints: dict[int, int] = {}
        self.batch_id = 0

    def _train(self, signs: list[int], probability: float) -> None:
        self.known.update(signs)
        self.batch_id += 1
        for dim, part in by_dim(signs).items():
            rows = np.full((len(part), dim), np.nan, np.float32)
            hints = np.full(len(part), 1, np.uint32)
            counts = self.store.lookup_train(
                u64(part),
                UNIFORM,
                probability,
                self.batch_id,
                rows,
                hints,
                dtype=self.dtypes[dim],
            )
            expected, held, inserted, refused = self.model.lookup_train(
                part, dim, probability, self.batch_id, self.dtypes[dim]
            )
            assert counts == (inserted, refused)
            assert np.array_equal(bits(rows), bits(expected))
            assert [hint != NO_ROW for hint in hints.tolist()] == held
            self.hints.update(zip(part, hints.tolist(), strict=True))

    @rule(signs=requests, probability=probabilities)
    def lookup_train(self, signs: list[int], probability: float) -> None:
        self._train(signs, probability)

    @rule(
        signs=st.lists(st.sampled_from(HOT), min_size=15, max_size=30),
        times=st.integers(10, 80),
    )
    def hammer(self, signs: list[int], times: int) -> None:
        """Enough uses to close segments of the order of use while few entries live."""
        for turn in range(times):
            self._train(signs[turn % len(signs) :] + signs[: turn % len(signs)], 1.0)
            self.store.check()

    @rule(signs=requests)
    def lookup_eval(self, signs: list[int]) -> None:
        self.known.update(signs)
        for dim, part in by_dim(signs).items():
            rows = np.full((len(part), dim), np.nan, np.float32)
            missing = self.store.lookup_eval(u64(part), rows, dtype=self.dtypes[dim])
            expected, absent = self.model.lookup_eval(part, dim)
            assert missing == absent
            assert np.array_equal(bits(rows), bits(expected))

    @rule(
        signs=requests,
        kind=st.sampled_from(["kept", "none", "garbage", "others"]),
        seed=st.integers(0, 2**16),
    )
    def update(self, signs: list[int], kind: str, seed: int) -> None:
        self.known.update(signs)
        rng = np.random.default_rng(seed)
        for dim, part in by_dim(signs).items():
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
            assert missing == self.model.update(part, gradients, dtype, seed)

    @rule(signs=requests, with_states=st.booleans(), seed=st.integers(0, 2**16))
    def write(self, signs: list[int], with_states: bool, seed: int) -> None:
        self.known.update(signs)
        rng = np.random.default_rng(seed)
        for dim, part in by_dim(signs).items():
            values = rng.standard_normal((len(part), dim)).astype(np.float32)
            states = None
            if with_states:
                states = rng.random((len(part), self.words[dim]), np.float32).view(np.uint32)
            self.store.write(u64(part), values, states, dtype=self.dtypes[dim])
            self.model.write(part, values, states, self.dtypes[dim])

    @rule(signs=requests)
    def delete(self, signs: list[int]) -> None:
        assert self.store.delete(u64(signs)) == self.model.delete(signs)

    @rule(reuse=st.booleans())
    def clear(self, reuse: bool) -> None:
        self.store.clear(reuse=reuse)
        self.model.clear()

    @precondition(lambda self: len(self.model) > 0)
    @rule(data=st.data())
    def another_dim(self, data: st.DataObject) -> None:
        held = [sign for shard in self.model.shards for sign in shard]
        sign = held[data.draw(st.integers(0, len(held) - 1), "place")]
        right = dim_of(sign)
        dtype = self.dtypes[right]
        self._refuses(sign, DIMS[(DIMS.index(right) + 1) % 3], dtype)
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
            with pytest.raises(DimMismatch):
                request()

    @invariant()
    def every_key_has_its_own_row(self) -> None:
        for dim, signs in by_dim(sorted(self.known)).items():
            dtype = self.dtypes[dim]
            found, values, states = self.store.read(u64(signs), dim, dtype=dtype)
            rows = np.full_like(values, np.nan)
            missing = self.store.lookup_eval(u64(signs), rows, dtype=dtype)
            absent = Row(np.zeros(dim, np.float32), np.zeros(self.words[dim], np.float32))
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
        for number, shard in enumerate(entries(self.store)):
            order = {}
            for signs, values, states in shard:
                order[values.shape[1], states.shape[1]] = signs.tolist()
                for i, sign in enumerate(signs.tolist()):
                    row = self.model.shards[number][sign]
                    assert bits(values[i]).tobytes() == row.values.tobytes()
                    assert states[i].tobytes() == row.state.tobytes()
            assert order == self.model.order(number)

    @invariant()
    def numbers(self) -> None:
        self.store.check()
        stats = self.store.stats()
        assert len(self.store) == stats["rows"] == len(self.model)
        assert {name: stats[name] for name in self.model.counts} == self.model.counts
        assert stats["entries"] <= 1.25 * stats["rows"]
        assert not stats["memory_limited"]


class ShardedMachine(StoreMachine):
    capacities = st.integers(1, 700)
    num_shards = st.integers(1, 8) | st.just(1024)
    dtypes: ClassVar[dict[int, str]] = {1: "float16", 5: "bfloat16", 8: "float32"}
