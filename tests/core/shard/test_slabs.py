"""Memory of rows: what it costs, when it comes, who gets it next."""

from __future__ import annotations

import gc
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from persia._core.kernels.optim import MAX_DIM, RowOptimizer
from persia._core.store.store import EmbeddingStore
from persia.errors import ConfigError, DimMismatch
from tests.benchmarks.memory import resident
from tests.core.stores import ADAGRAD, UNIFORM, evaluate, new_store, train, u64


def test_an_empty_chunk_serves_another_dim_and_old_hints_find_nothing() -> None:
    store = new_store(10**6)
    _, old_hints, _, _ = train(store, range(1000), 32)
    used = store.stats()["bytes"]
    assert store.delete(u64(range(1000))) == 1000
    store.check()
    assert store.stats()["bytes"] < used - 100_000
    wanted, hints, _, _ = train(store, range(2000, 3000), 8)
    assert set(hints.tolist()) & set(old_hints.tolist())  # the same chunk
    assert store.update(u64(range(1000)), old_hints, np.ones((1000, 32), np.float32)) == 1000
    assert store.update(u64(range(1000)), old_hints, np.ones((1000, 8), np.float32)) == 1000
    assert np.array_equal(evaluate(store, range(2000, 3000), 8)[0], wanted)
    store.check()


def test_clear_gives_memory_back_and_keeps_the_counts() -> None:
    store = new_store(50_000, num_shards=4)
    empty = store.stats()["bytes"]
    train(store, range(60_000), 16)
    full = store.stats()
    store.clear()
    store.check()
    assert len(store) == 0
    assert store.stats()["bytes"] == empty
    assert store.stats()["evicted"] == full["evicted"] > 0
    assert evaluate(store, range(100), 16)[1] == 100
    assert train(store, range(100), 32)[2] == 100  # with another dim as well


def test_w60_an_empty_store_of_any_capacity_is_small() -> None:
    before = resident() if sys.platform == "linux" else 0
    store = EmbeddingStore(10**9, memory_limit=2**40)
    assert store.stats()["bytes"] < 2 << 20
    if sys.platform == "linux":
        assert resident() - before < 16 << 20
    store.configure(ADAGRAD)
    train(store, range(100), 16)
    assert store.stats()["bytes"] < 3 << 20


def test_w61_a_row_costs_little_more_than_its_values() -> None:
    store = new_store(10**9, ADAGRAD)
    for first in range(0, 150_000, 10_000):
        train(store, range(first, first + 10_000), 16)
    assert store.stats()["bytes"] / len(store) < 16 + 2 * 64 + 30


def huge_mappings() -> dict[str, int]:
    """Return the resident bytes of mappings that may be of huge pages, by where they begin.

    Those of a store are, of an allocator not. The kernel may at any time make a huge page of
    one of which only a part was touched, such as an index table.
    """
    mapping = re.compile(
        r"^([0-9a-f]+)-[0-9a-f]+ .*?^Rss: *(\d+) kB$.*?^VmFlags:([^\n]*)$",
        re.MULTILINE | re.DOTALL,
    )
    found = mapping.findall(Path("/proc/self/smaps").read_text())
    return {begin: int(kb) << 10 for begin, kb, flags in found if "hg" in flags.split()}


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="reads Linux's flags"
)
@pytest.mark.parametrize("bound", ["none", "capacity", "memory"])
def test_memory_for_rows_is_there_before_they_come(bound: str) -> None:
    """Or its first touch would stop a whole shard, for as long as clearing 2 MiB takes."""
    in_chunk = (2 << 20) // (16 + 2 * 64)
    many = 100_000
    limit = {"memory": many * 160}.get(bound, 0)
    gc.collect()
    others = huge_mappings().keys()
    store = new_store(many if bound == "capacity" else 10**9, ADAGRAD, memory_limit=limit)

    def resident_rows() -> int:
        return max(size for begin, size in huge_mappings().items() if begin not in others)

    train(store, range(many), 16)
    jumps = 0
    for first in range(many, many + 4 * in_chunk, 200):
        # Where an eighth of a chunk is left.
        is_watched = 0 <= (first + 200) % in_chunk - (in_chunk - in_chunk // 8) < 200
        before = resident_rows() if is_watched else 0
        train(store, range(first, first + 200), 16)
        jumps += is_watched and resident_rows() - before > 1 << 20
    store.check()
    assert jumps == (4 if bound == "none" else 0)


def test_a_store_is_cleared_while_memory_for_rows_is_made() -> None:
    store = new_store(10**9, num_shards=2, num_threads=1)
    batches = [range(first, first + 1000) for first in range(0, 30_000, 1000)]
    with ThreadPoolExecutor(3) as pool:
        training = [
            pool.submit(lambda part: [train(store, b, 2048) for b in part], batches[number::3])
            for number in range(3)
        ]
        while not all(future.done() for future in training):
            store.clear()
            store.check()
        for future in training:
            future.result()
    assert train(store, range(100), 2048)[2] <= 100
    store.check()


def test_too_many_shapes_of_rows() -> None:
    store = new_store(10_000)
    for dim in range(1, 65):
        train(store, [dim], dim)
    with pytest.raises(ConfigError, match="64 shapes"):
        train(store, [65], 65)
    store.check()
    assert len(store) == 64
    assert train(store, [64], 64)[2] == 0


def test_refused_requests_use_up_no_shape() -> None:
    store = new_store(10_000)
    train(store, [1], 1)
    for dim in range(2, 100):
        with pytest.raises(DimMismatch):
            train(store, [1], dim)
        with pytest.raises(DimMismatch):
            store.write(u64([1]), np.zeros((1, dim), np.float32), None)
        train(store, [2], dim, admit=0.0)
    assert train(store, [2], 100)[2] == 1


@pytest.mark.parametrize("dim", [1, 2, 3, 1000, MAX_DIM])
def test_dims_from_one_to_the_largest(dim: int) -> None:
    store = new_store(4, RowOptimizer("adam"))
    for first in range(0, 12, 3):
        rows, hints, _, _ = train(store, range(first, first + 3), dim)
        assert np.array_equal(rows[2], UNIFORM.values(0, first + 2, dim))
        assert store.update(u64(range(first, first + 3)), hints, rows) == 0
        store.check()
