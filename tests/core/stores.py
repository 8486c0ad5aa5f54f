"""Stores for the tests of this folder, requests to them, and what they hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from persia._core.base.halves import widen
from persia._core.kernels.initial import Initializer
from persia._core.kernels.optim import RowOptimizer
from persia._core.store.blocks import RowBlock
from persia._core.store.store import EmbeddingStore
from tests.reference.hashing import shard as number_of_shard

Floats = NDArray[np.float32]
Words = NDArray[np.uint32]
Signs = Sequence[int] | NDArray[np.int64] | NDArray[np.uint64]
UNIFORM = Initializer("uniform")
ZEROS = Initializer("zeros")
ADAGRAD = RowOptimizer("adagrad", lr=0.1)
NO_ROW = 2**32 - 1


def u64(signs: Iterable[int] | NDArray[np.uint64]) -> NDArray[np.uint64]:
    if isinstance(signs, np.ndarray):
        return np.ascontiguousarray(signs, np.uint64)
    return np.array(list(signs), dtype=np.uint64)


def new_store(
    capacity: int, optimizer: RowOptimizer | None = None, **arguments: Any
) -> EmbeddingStore:
    store = EmbeddingStore(capacity, **({"num_shards": 1} | arguments))
    store.configure(optimizer or RowOptimizer("sgd", lr=0.5))
    return store


def train(
    store: EmbeddingStore,
    signs: Signs,
    dim: int = 4,
    *,
    admit: float = 1.0,
    batch_id: int = 0,
    initializer: Initializer = UNIFORM,
    **arguments: Any,
) -> tuple[Floats, Words, int, int]:
    """Rows, hints, and how many were inserted and refused."""
    array = u64(signs)
    rows = np.full((len(array), dim), np.nan, np.float32)
    hints = np.full(len(array), 7, np.uint32)
    counts = store.lookup_train(array, initializer, admit, batch_id, rows, hints, **arguments)
    return rows, hints, *counts


def evaluate(
    store: EmbeddingStore, signs: Signs, dim: int = 4, dtype: str = "float32"
) -> tuple[Floats, int]:
    array = u64(signs)
    rows = np.full((len(array), dim), np.nan, np.float32)
    return rows, store.lookup_eval(array, rows, dtype=dtype)


Entries = tuple[NDArray[np.uint64], Floats, Words]  # signs, values, states


def entries(store: EmbeddingStore) -> list[list[Entries]]:
    """Rows by shard and shape, in the order in which they go, policy after policy."""
    shapes: dict[tuple[Any, ...], list[RowBlock]] = {}
    for block in blocks_of(store):
        shard = number_of_shard(int(block.signs[0]), store.num_shards)
        shapes.setdefault((shard, block.dtype, block.dim, block.state_words), []).append(block)
    shards: list[list[Entries]] = [[] for _ in range(store.num_shards)]
    for (shard, dtype, dim, _), blocks in shapes.items():
        policies = np.repeat([block.policy for block in blocks], [len(one) for one in blocks])
        signs, values, states, orders = (
            np.concatenate([block.arrays[i] for block in blocks]) for i in range(4)
        )
        if dtype != "float32":
            values = widen(values.ravel(), dtype).reshape(-1, dim)
        at = np.lexsort((orders, policies))
        shards[shard].append((signs[at], values[at], states[at]))
    return shards


def orders_of(store: EmbeddingStore) -> list[list[int]]:
    """The signs of each shape of each shard, oldest first."""
    return [signs.tolist() for shard in entries(store) for signs, _, _ in shard]


def held(store: EmbeddingStore, shard: int = 0) -> list[int]:
    """Signs of a shard that holds one shape, oldest first."""
    return [int(sign) for signs, _, _ in entries(store)[shard] for sign in signs]


Rows = dict[int, tuple[Any, ...]]
DIM = 5


def adagrad_store(num_rows: int = 0, **arguments: Any) -> EmbeddingStore:
    store = new_store(
        **({"capacity": 100_000, "num_shards": 4, "seed": 3} | arguments), optimizer=ADAGRAD
    )
    add(store, range(num_rows))
    return store


def add(store: EmbeddingStore, signs: Any, **arguments: Any) -> None:
    train(store, signs, DIM, **arguments)


def update(store: EmbeddingStore, signs: Any) -> None:
    signs = u64(signs)
    store.update(signs, None, np.ones((len(signs), DIM), np.float32))


def rows_of(blocks: list[RowBlock]) -> Rows:
    """Policy, dtype, values, state and class of each sign, which must come once."""
    rows: Rows = {}
    for block in blocks:
        assert {len(array) for array in block.arrays} == {len(block)} != {0}
        for i, sign in enumerate(block.signs.tolist()):
            values: Any = block.values[i]
            kept = values if block.dtype == "float32" else widen(values, block.dtype)
            state = block.states[i].tobytes()
            assert sign not in rows
            rows[sign] = block.policy, block.dtype, kept.tobytes(), state, int(block.uses[i])
    return rows


def contents(store: EmbeddingStore) -> dict[int, tuple[bytes, bytes]]:
    return contents_of(blocks_of(store))


def contents_of(blocks: list[RowBlock]) -> dict[int, tuple[bytes, bytes]]:
    return values_of(rows_of(blocks))


def values_of(rows: Rows) -> dict[int, tuple[bytes, bytes]]:
    return {sign: (row[2], row[3]) for sign, row in rows.items()}


def take_changes(
    store: EmbeddingStore, name: str, max_rows: int = 65536
) -> tuple[bool, Rows, list[int]]:
    """Whether it is full, its rows, and what was deleted, of a committed snapshot."""
    with store.begin_snapshot(name) as snapshot:
        rows = rows_of(list(snapshot.blocks(max_rows)))
        gone = snapshot.deleted().tolist()
        snapshot.commit()
        return snapshot.is_full, rows, gone


def in_order(blocks: list[RowBlock]) -> list[int]:
    """Signs by their orders, which must be comparable: of one shard."""
    pairs = [pair for block in blocks for pair in zip(block.orders, block.signs, strict=True)]
    assert len({order for order, _ in pairs}) == len(pairs)
    return [int(sign) for _, sign in sorted(pairs)]


def blocks_of(store: EmbeddingStore, max_rows: int = 65536) -> list[RowBlock]:
    with store.begin_snapshot() as one:
        return list(one.blocks(max_rows))


def shuffled(blocks: list[RowBlock]) -> list[RowBlock]:
    rng = np.random.default_rng(7)
    return [blocks[i] for i in rng.permutation(len(blocks))]


def restore_all(
    store: EmbeddingStore, blocks: list[RowBlock], optimizer: RowOptimizer | None = None
) -> None:
    for block in blocks:
        store.restore(block, optimizer)
    store.end_restore()
    store.check()


def block_with(**changed: Any) -> RowBlock:
    """One of three rows, or as many as the signs given, of five zeros."""
    n = len(changed.get("signs", range(3)))
    arguments: dict[str, Any] = {
        "policy": 0,
        "dtype": "float32",
        "signs": np.arange(n, dtype=np.uint64),
        "values": np.zeros((n, 5), np.float32),
        "states": np.zeros((n, 5), np.uint32),
        "orders": np.zeros(n, np.uint64),
        "uses": np.zeros(n, np.uint32),
        "ages": np.zeros(n, np.uint64),
    }
    return RowBlock(**(arguments | changed))
