from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from persia._core.base.hashing import mix64_array
from persia._core.kernels.initial import Initializer
from persia._core.kernels.optim import RowOptimizer
from persia._core.store.store import EmbeddingStore
from persia.errors import ConfigError, DataError, DimMismatch, NotConfigured
from tests.reference.hashing import mix64, shard
from tests.reference.store import admits, shard_capacities, unmix64

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
    capacity: int,
    optimizer: RowOptimizer | None = None,
    *,
    num_shards: int = 1,
    seed: int = 0,
    memory_limit: int = 0,
    num_threads: int = 1,
) -> EmbeddingStore:
    store = EmbeddingStore(
        capacity,
        num_shards=num_shards,
        seed=seed,
        memory_limit=memory_limit,
        num_threads=num_threads,
    )
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
) -> tuple[Floats, Words, int, int]:
    """Rows, hints, and how many were inserted and refused."""
    array = u64(signs)
    rows = np.full((len(array), dim), np.nan, np.float32)
    hints = np.full(len(array), 7, np.uint32)
    inserted, refused = store.lookup_train(array, initializer, admit, batch_id, rows, hints)
    return rows, hints, inserted, refused


def evaluate(store: EmbeddingStore, signs: Signs, dim: int = 4) -> tuple[Floats, int]:
    array = u64(signs)
    rows = np.full((len(array), dim), np.nan, np.float32)
    return rows, store.lookup_eval(array, rows)


def held(store: EmbeddingStore, shard: int = 0) -> list[int]:
    """Signs of a shard that holds one shape, oldest first."""
    return [int(sign) for signs, _, _ in store.shard_entries(shard) for sign in signs]


# --- recency ------------------------------------------------------------------------------


def test_a_row_touched_while_its_segment_is_merged_keeps_one_place() -> None:
    # Every 2048 appends the newest segment closes; both it and the one before have few live
    # entries then, so they merge, and the touch that closed it is of a row that moved.
    store = new_store(1000)
    train(store, range(300))
    for shift in range(60):
        hot = np.roll(np.arange(100), shift)
        train(store, hot)
        store.check()
        assert held(store)[-100:] == list(hot)
    assert held(store)[:200] == list(range(100, 300))


@pytest.mark.parametrize("capacity", [1, 2, 3, 10])
def test_entries_are_bounded_after_a_batch_larger_than_the_capacity(capacity: int) -> None:
    store = new_store(capacity)
    for first in range(0, 5000, 500):
        train(store, range(first, first + 500))
        store.check()
        assert store.stats()["entries"] <= 1.25 * capacity
        assert held(store) == list(range(first + 500 - capacity, first + 500))


# --- the index ----------------------------------------------------------------------------


def sign_of_bucket(bucket: int, serial: int) -> int:
    """A sign whose home is that bucket; serials differ in the tag and above it."""
    return unmix64((serial + 1) << 32 | bucket)


def test_a_search_ends_although_rows_passed_every_bucket() -> None:
    store = new_store(64)
    # Two buckets of twelve. The thirteenth row passes the first, then room is made there, the
    # second fills, and its thirteenth row passes on to the first.
    first = [sign_of_bucket(0, serial) for serial in range(13)]
    train(store, first)
    assert store.delete(u64(first[:10])) == 10
    second = [sign_of_bucket(1, serial) for serial in range(100, 112)]
    expected, _, _, _ = train(store, second)
    store.check()
    for bucket in range(2):
        rows, missing = evaluate(store, [sign_of_bucket(bucket, 999)])
        assert missing == 1
        assert not rows.any()
    assert np.array_equal(evaluate(store, second)[0], expected)
    assert evaluate(store, first)[1] == 10


# --- the memory limit ---------------------------------------------------------------------


LIMIT = 8 << 20


def test_a_first_request_beyond_the_limit_leaves_a_useful_store() -> None:
    store = new_store(10**9, memory_limit=LIMIT)
    train(store, range(200_000), 16)
    assert store.stats()["memory_limited"]
    assert len(store) * (16 + 64) > LIMIT // 2
    for first in range(0, 10_000, 1000):
        train(store, range(first, first + 1000), 16)
        assert held(store)[-1000:] == list(range(first, first + 1000))
    assert len(store) * (16 + 64) > LIMIT // 2
    store.check()


def test_the_limit_holds_and_the_rows_stay_many() -> None:
    rng = np.random.default_rng(1)
    store = new_store(10**9, memory_limit=LIMIT)
    rows = []
    for step in range(1500):
        dim = (8, 64)[step % 2]
        signs = np.unique(rng.integers(0, 500_000, 1000)) * 2 + dim // 64
        train(store, signs, dim)
        stats = store.stats()
        assert stats["bytes"] < 1.06 * LIMIT
        rows.append(stats["rows"])
    store.check()
    # Half the rows of each dim: 48 and 272 bytes, beside some 12 for index and order.
    assert min(rows[500:]) > 0.85 * LIMIT / ((48 + 272) / 2 + 12)


def test_memory_follows_rows_that_change_their_dim() -> None:
    rng = np.random.default_rng(2)
    limit = 2 * LIMIT
    store = new_store(10**9, memory_limit=limit)
    for phase in range(4):
        dim = (8, 64)[phase % 2]
        for _ in range(250):
            signs = np.unique(rng.integers(0, 10**6, 2000)) * 2 + dim // 64
            train(store, signs, dim)
            assert store.stats()["bytes"] < 1.5 * limit
        store.check()
        assert store.stats()["bytes"] < 1.1 * limit
        assert len(store) > 0.75 * limit / (16 + 4 * dim + 15)


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


def resident() -> int:
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * 4096


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


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("bound", ["none", "capacity", "memory"])
def test_memory_for_rows_is_there_before_they_come(bound: str) -> None:
    """Or its first touch would stop a whole shard, for as long as clearing 2 MiB takes."""
    in_chunk = (2 << 20) // (16 + 2 * 64)
    many = 100_000
    limit = {"memory": many * 160}.get(bound, 0)
    store = new_store(many if bound == "capacity" else 10**9, ADAGRAD, memory_limit=limit)
    train(store, range(many), 16)
    jumps = (
        0  # where an eighth of a chunk is left; what others in the process do comes anywhere
    )
    before = resident()
    for first in range(many, many + 4 * in_chunk, 200):
        train(store, range(first, first + 200), 16)
        after = resident()
        at = (first + 200) % in_chunk - (in_chunk - in_chunk // 8)
        jumps += 0 <= at < 200 and after - before > 1 << 20
        before = after
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


# --- recency under stress -----------------------------------------------------------------


def uniform(rng: np.random.Generator, step: int) -> NDArray[np.int64]:
    return rng.integers(0, 5000, 400)


def scan(rng: np.random.Generator, step: int) -> NDArray[np.int64]:
    return np.arange(step * 350, step * 350 + 400)


def hot_and_slow(rng: np.random.Generator, step: int) -> NDArray[np.int64]:
    return np.concatenate([rng.permutation(300), [10**6 + 2 * step, 10**6 + 2 * step + 1]])


def zipf(rng: np.random.Generator, step: int) -> NDArray[np.int64]:
    return rng.zipf(1.2, 400) % 20_000


def every_fifth(rng: np.random.Generator, step: int) -> NDArray[np.int64]:
    """Leaves old segments at just less than four fifths live, again and again."""
    return np.arange(step % 5, 3000, 5) if step % 3 else scan(rng, step)


def sawtooth(rng: np.random.Generator, step: int) -> NDArray[np.int64]:
    return np.arange(0, 2500 >> (step % 12))[::-1]


@pytest.mark.parametrize("pattern", [uniform, scan, hot_and_slow, zipf, every_fifth, sawtooth])
@pytest.mark.parametrize("capacity", [700, 3000])
def test_order_of_use_is_exact_under(pattern: Any, capacity: int) -> None:
    rng = np.random.default_rng(3)
    store = new_store(capacity)
    order: dict[int, None] = {}
    for step in range(150):
        signs = pattern(rng, step)
        train(store, signs, 1)
        for sign in signs.tolist():
            order.pop(sign, None)
            order[sign] = None
        while len(order) > capacity:
            del order[next(iter(order))]
        if step % 7 == 0:
            gone = rng.choice(np.array(list(order)), len(order) // 20, replace=False)
            assert store.delete(u64(gone)) == len(gone)
            for sign in gone.tolist():
                del order[sign]
        assert held(store) == list(order)
        assert store.stats()["entries"] <= 1.25 * len(order)
        store.check()


def test_order_within_a_batch_is_first_seen() -> None:
    store = new_store(5)
    train(store, [1, 2, 3, 4, 5])
    train(store, [4, 1])
    assert held(store) == [2, 3, 5, 4, 1]
    train(store, [9, 3, 8])
    assert held(store) == [4, 1, 9, 3, 8]


def test_w26_updates_evaluations_and_reads_are_no_uses() -> None:
    store = new_store(4)
    _, hints, _, _ = train(store, [1, 2, 3, 4])
    one = u64([1])
    for _ in range(3):
        evaluate(store, [1, 2])
        store.update(one, hints[:1], np.ones((1, 4), np.float32))
        store.read(one, 4)
        list(store.iterate())
    assert held(store) == [1, 2, 3, 4]
    train(store, [5])
    assert held(store) == [2, 3, 4, 5]
    assert store.stats()["evicted"] == 1
    store.write(u64([2]), np.ones((1, 4), np.float32), None)
    assert held(store) == [3, 4, 5, 2]


def test_w26_capacity_is_divided_over_shards_without_loss() -> None:
    store = new_store(1003, num_shards=7)
    train(store, range(30_000))
    assert shard_capacities(1003, 7) == [144, 144, 143, 143, 143, 143, 143]
    assert [len(held(store, number)) for number in range(7)] == shard_capacities(1003, 7)
    for number in range(7):
        wanted = [sign for sign in range(30_000) if shard(sign, 7) == number]
        assert held(store, number) == wanted[-shard_capacities(1003, 7)[number] :]
    assert len(store) == 1003


@pytest.mark.parametrize("num_shards", [1, 2, 5, 16, 1024])
def test_a_shard_has_at_least_64_rows(num_shards: int) -> None:
    for capacity in (1, 63, 64, 127, 128, 64 * num_shards, 64 * num_shards - 1):
        store = EmbeddingStore(capacity, num_shards=num_shards)
        assert store.num_shards == len(shard_capacities(capacity, num_shards))


def test_rows_are_evicted_only_after_they_were_copied_out() -> None:
    store = new_store(3)
    wanted = np.array([UNIFORM.values(0, sign, 4) for sign in range(2000)])
    rows, hints, inserted, _ = train(store, range(2000))
    assert np.array_equal(rows, wanted)
    assert inserted == 2000
    assert (hints != NO_ROW).all()
    # Their hints are stale now, but the numbers were reused by nobody: nothing is stepped.
    assert store.update(u64(range(2000)), hints, np.ones((2000, 4), np.float32)) == 1997
    after, missing = evaluate(store, range(2000))
    assert missing == 1997
    assert np.array_equal(after[1997:], wanted[1997:] - np.float32(0.5))


def test_a_batch_keeps_old_rows_it_uses_late() -> None:
    store = new_store(10)
    train(store, range(10))
    store.update(u64([0]), None, np.full((1, 4), 2, np.float32))
    rows, _, inserted, _ = train(store, [*range(100, 150), 0])
    assert inserted == 50
    assert np.array_equal(rows[50], UNIFORM.values(0, 0, 4) - np.float32(1))
    assert held(store) == [*range(141, 150), 0]


# --- the index under stress ---------------------------------------------------------------


def crafted(kind: str, count: int) -> list[int]:
    if kind == "bucket":  # same home bucket in any table
        return [unmix64((serial << 9 | 77) & (2**64 - 1)) for serial in range(1, count + 1)]
    if kind == "tag":  # every bucket, one tag
        return [
            unmix64((serial >> 17) << 40 | 0x5A << 32 | serial * 0x8003 % 2**32)
            for serial in range(count)
        ]
    if kind == "tag 0 and 1":  # 0 is stored as 1
        return [
            unmix64(serial << 33 | (serial & 1) << 32 | 3 * serial) for serial in range(count)
        ]
    # The directory bits agree up to the top one: splits find everything on one side.
    return [
        unmix64(serial << 32 | (serial & 1) << 24 | serial & 511) for serial in range(count)
    ]


@pytest.mark.parametrize("kind", ["bucket", "tag", "tag 0 and 1", "directory"])
def test_adversarial_signs(kind: str) -> None:
    signs = crafted(kind, 9000)
    assert len(set(signs)) == len(signs)
    store = new_store(8000)
    for first in range(0, 9000, 600):
        train(store, signs[first : first + 600], 1)
        store.check()
    assert held(store) == signs[-8000:]
    gone = signs[1500:9000:3]
    assert store.delete(u64(gone)) == len(gone)
    store.check()
    absent = set(gone) | set(signs[:1000])
    found, values, _ = store.read(u64(signs), 1)
    assert found.tolist() == [sign not in absent for sign in signs]
    wanted = np.array([UNIFORM.values(0, sign, 1) for sign in signs]) * found[:, None]
    assert np.array_equal(values, wanted)
    assert evaluate(store, [sign ^ 1 << 63 for sign in signs], 1)[1] == len(signs)


def test_signs_that_no_hash_bit_parts_are_refused_when_a_table_is_full() -> None:
    signs = [unmix64(serial << 32 | 12345) for serial in range(6000)]
    store = new_store(10**6)
    train(store, range(100), 1)
    with pytest.raises(MemoryError, match="dim 1"):
        train(store, signs, 1)
    store.check()
    assert len(store) >= 5000
    assert evaluate(store, range(100), 1)[1] == 0
    held_of_them = len(signs) - evaluate(store, signs, 1)[1]
    assert store.delete(u64(signs)) == held_of_them
    store.check()
    assert train(store, signs[:5000], 1)[2] == 5000


def test_growth_through_doublings_and_splits() -> None:
    store = new_store(10**6)
    total = 0
    for size in (1, 9, 1, 1, 11, 20, 40, 90, 200, 500, 2000, 3000, 9000, 30_000):
        rows, hints, inserted, _ = train(store, range(total, total + size), 2)
        assert inserted == size
        total += size
        store.check()
        assert evaluate(store, range(total), 2)[1] == 0
        assert store.update(u64(range(total - size, total)), hints, 0 * rows) == 0
    for first in range(0, total, 997):
        store.delete(u64(range(first, first + 900)))
    store.check()
    kept = [sign for sign in range(total) if sign % 997 >= 900]
    assert held(store) == kept


# --- hints --------------------------------------------------------------------------------


def test_hints_of_any_value_step_the_right_rows() -> None:
    store = new_store(1000, num_shards=3)
    start, hints, _, _ = train(store, range(500))
    train(store, range(10_000, 10_400), 8)
    signs = u64(range(500))
    ones = np.full((500, 4), 2, np.float32)
    rng = np.random.default_rng(5)
    kinds = [
        hints,
        hints[::-1].copy(),
        np.full(500, NO_ROW, np.uint32),
        np.zeros(500, np.uint32),
        np.arange(500, dtype=np.uint32) << 17,
        np.full(500, 2**17 - 1, np.uint32),
        rng.integers(0, 2**32, 500).astype(np.uint32),
        None,
    ]
    for step, kind in enumerate(kinds, 1):
        assert store.update(signs, kind, ones) == 0
        wanted = start.copy()
        for _ in range(step):
            wanted = wanted - np.float32(0.5) * ones
        assert np.array_equal(evaluate(store, range(500))[0], wanted)


def test_a_freed_rows_link_is_no_sign() -> None:
    # A freed row keeps the place of the next freed one where its sign stood.
    store = new_store(100)
    _, hints, _, _ = train(store, range(50, 80))
    store.delete(u64(range(50, 79)))
    for sign in range(40):
        signs = u64([sign] * 30)
        assert store.update(signs, hints, np.ones((30, 4), np.float32)) == 30
    train(store, range(29))  # reuse them
    store.check()
    assert store.update(u64(range(50, 80)), hints, np.ones((30, 4), np.float32)) == 29


# --- values, states, admission ------------------------------------------------------------


@pytest.mark.parametrize(
    "optimizer",
    [
        RowOptimizer("sgd", lr=0.1),
        RowOptimizer("sgd", lr=0.1, momentum=0.9),
        ADAGRAD,
        RowOptimizer("adagrad", initial_accumulator_value=0.25, vectorwise_shared=True),
        RowOptimizer("adam"),
    ],
    ids=["sgd", "momentum", "adagrad", "shared", "adam"],
)
@pytest.mark.parametrize("dim", [1, 7, 16])
def test_new_rows_have_the_optimizers_first_state(optimizer: RowOptimizer, dim: int) -> None:
    store = new_store(30, optimizer)
    rng = np.random.default_rng(6)
    for first in range(0, 200, 20):  # so that places are reused
        signs = u64(range(first, first + 20))
        train(store, signs, dim)
        found, values, states = store.read(signs, dim)
        assert found.all()
        assert np.array_equal(states, np.tile(optimizer.new_state(dim), (20, 1)))
        rows = np.concatenate([values, states.view(np.float32)], axis=1)
        for _ in range(3):
            gradients = rng.standard_normal((20, dim)).astype(np.float32)
            store.update(signs, None, gradients)
            optimizer.step_rows(rows, gradients)
        _, values, states = store.read(signs, dim)
        assert np.array_equal(values, rows[:, :dim])
        assert np.array_equal(states, rows[:, dim:].view(np.uint32))
        store.write(signs, values, None)
        assert np.array_equal(
            store.read(signs, dim)[2], np.tile(optimizer.new_state(dim), (20, 1))
        )


def test_w27_admission_depends_on_seed_sign_and_batch_only() -> None:
    signs = list(range(3000))
    refusals = []
    for num_shards in (1, 8):
        store = new_store(10**6, num_shards=num_shards, seed=9)
        rows, hints, inserted, refused = train(store, signs, admit=0.3, batch_id=5)
        admitted = [admits(9, sign, 5, 0.3) for sign in signs]
        assert (hints != NO_ROW).tolist() == admitted
        assert inserted == sum(admitted)
        assert refused == len(signs) - inserted == store.stats()["refused"]
        assert not rows[hints == NO_ROW].any()
        assert 0.25 < inserted / len(signs) < 0.35
        # Again: the same draw, so the same refusals; held rows need none.
        again, _, more, refused_again = train(store, signs, admit=0.3, batch_id=5)
        assert (more, refused_again) == (0, refused)
        assert np.array_equal(again, rows)
        _, _, more, _ = train(store, signs, admit=0.3, batch_id=6)
        assert more == sum(admits(9, s, 6, 0.3) and not admits(9, s, 5, 0.3) for s in signs)
        refusals.append(refused)
    assert refusals[0] == refusals[1]
    store = new_store(10**6)
    assert train(store, signs, admit=0.0)[3] == 3000
    assert train(store, signs, admit=1.0)[2] == 3000
    assert train(store, signs, admit=0.0)[3] == 0


def test_a_refused_sign_comes_twice() -> None:
    store = new_store(10)
    rows, hints, inserted, refused = train(store, [5, 5, 6], admit=0.0)
    assert (inserted, refused) == (0, 3)
    assert not rows.any()
    assert (hints == NO_ROW).all()


@pytest.mark.parametrize("count", [3, 511, 513, 5000])
def test_a_request_may_repeat_a_sign(count: int) -> None:
    rng = np.random.default_rng(7)
    signs = rng.integers(0, max(2, count // 3), count)
    store = new_store(10**5, num_shards=4)
    rows, hints, inserted, _ = train(store, signs)
    assert inserted == len(set(signs.tolist())) == len(store)
    store.check()
    assert np.array_equal(rows, evaluate(store, signs)[0])
    gradients = rng.integers(-4, 4, (count, 4)).astype(np.float32)
    wanted = {sign: UNIFORM.values(0, sign, 4) for sign in set(signs.tolist())}
    for sign, gradient in zip(signs.tolist(), gradients, strict=True):
        wanted[sign] = wanted[sign] - np.float32(0.5) * gradient
    assert store.update(u64(signs), hints, gradients) == 0
    assert np.array_equal(evaluate(store, signs)[0], [wanted[sign] for sign in signs.tolist()])
    store.write(u64(signs), gradients, None)
    last = dict(zip(signs.tolist(), gradients, strict=True))
    assert np.array_equal(evaluate(store, signs)[0], [last[sign] for sign in signs.tolist()])
    assert store.delete(u64(signs)) == inserted
    store.check()


def test_bounds_apply_to_updates() -> None:
    store = new_store(10, RowOptimizer("sgd", weight_bound=0.25, lr=1.0))
    train(store, [1])
    store.update(u64([1]), None, np.array([[9, -9, 0, np.inf]], np.float32))
    rows, _ = evaluate(store, [1])
    assert rows[0, :2].tolist() == [-0.25, 0.25]
    assert rows[0, 3] == -0.25


# --- errors -------------------------------------------------------------------------------


def test_nothing_trains_before_configure() -> None:
    store = EmbeddingStore(10)
    row = np.zeros((1, 4), np.float32)
    with pytest.raises(NotConfigured, match="training lookup"):
        train(store, [1])
    with pytest.raises(NotConfigured, match="update"):
        store.update(u64([1]), None, row)
    with pytest.raises(NotConfigured, match="writing"):
        store.write(u64([1]), row, None)
    with pytest.raises(NotConfigured, match="reading"):
        store.read(u64([1]), 4)
    assert evaluate(store, [1])[1] == 1
    assert not store.read(u64([1]), 4, 0)[0].any()
    assert store.delete(u64([1])) == 0
    store.check()


def test_configure_keeps_rows_only_of_the_same_state_size() -> None:
    store = new_store(100)
    train(store, range(10))
    store.configure(RowOptimizer("sgd", lr=0.25))
    assert store.optimizer is not None
    assert store.optimizer.options["lr"] == 0.25
    with pytest.raises(ConfigError, match=r"adagrad keeps 4 words.*10 rows.*keep 0"):
        store.configure(ADAGRAD)
    assert store.optimizer.name == "sgd"
    store.delete(u64(range(10)))
    store.configure(ADAGRAD)
    train(store, range(10))
    # One word or four: another width, although both are Adagrad.
    with pytest.raises(ConfigError, match="keeps 1 words"):
        store.configure(RowOptimizer("adagrad", vectorwise_shared=True))
    store.clear()
    store.configure(RowOptimizer("adam"))
    train(store, range(10))
    store.check()


def test_an_optimizer_that_comes_with_the_call_is_that_calls() -> None:
    """Rows of one dim under several optimizers, as a server's tables have them."""
    store = EmbeddingStore(1000, num_shards=4)
    rng = np.random.default_rng(4)
    for first, name in ((0, "sgd"), (100, "lion"), (200, "ftrl"), (300, "adam")):
        optimizer = RowOptimizer(name, lr=0.5)
        signs, hints = u64(range(first, first + 50)), np.empty(50, np.uint32)
        rows = np.empty((50, 4), np.float32)
        store.lookup_train(signs, UNIFORM, 1.0, 0, rows, hints, optimizer)
        words = optimizer.state_words(4)
        _, values, states = store.read(signs, 4, words)
        expected = np.concatenate([values, states.view(np.float32)], axis=1)
        gradients = rng.standard_normal((50, 4)).astype(np.float32)
        store.update(signs, hints, gradients, optimizer)
        optimizer.step_rows(expected, gradients)
        _, values, states = store.read(signs, 4, words)
        assert np.array_equal(values, expected[:, :4])
        assert np.array_equal(states, expected[:, 4:].view(np.uint32))
        store.write(signs, values, states, optimizer)
        store.write(signs, values, None, optimizer)
        assert np.array_equal(
            store.read(signs, 4, words)[2], np.tile(optimizer.new_state(4), (50, 1))
        )
    with pytest.raises(DimMismatch, match="0 words of state"):
        store.update(u64([0]), None, gradients[:1], optimizer)
    with pytest.raises(DataError, match=r"states must be \[50, 9\] for adam"):
        store.write(signs, values, np.empty((50, 4), np.uint32), optimizer)
    assert len(store) == 200
    store.check()


def test_w34_gradients_of_another_dim_or_state_are_refused() -> None:
    store = new_store(100, ADAGRAD)
    wanted, hints, _, _ = train(store, range(20), 8)
    for dim in (1, 4, 7, 9, 16):
        for some in (hints, None):
            with pytest.raises(DimMismatch, match=f"stored with dim 8 .* for dim {dim}"):
                store.update(u64(range(20)), some, np.ones((20, dim), np.float32))
    assert np.array_equal(evaluate(store, range(20), 8)[0], wanted)
    with pytest.raises(DimMismatch, match="8 words"):
        store.read(u64([1]), 8, 9)
    with pytest.raises(DimMismatch, match="dim 8"):
        evaluate(store, [1], 4)
    with pytest.raises(DimMismatch, match="dim 8"):
        train(store, [1], 4)
    store.check()


def test_a_dim_mismatch_leaves_a_sound_store() -> None:
    store = new_store(50, num_shards=1)
    train(store, range(0, 100, 2), 8)
    with pytest.raises(DimMismatch, match="0x0000000000000062 is stored with dim 8"):
        train(store, [*range(101, 191, 2), 98, 99], 4)
    store.check()
    assert len(store) == 50
    assert evaluate(store, [98], 8)[1] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"capacity": 0}, "capacity"),
        ({"capacity": -1}, "capacity"),
        ({"capacity": 2**63}, "capacity"),
        ({"capacity": 1, "num_shards": 0}, "num_shards"),
        ({"capacity": 1, "num_shards": 1025}, "num_shards"),
        ({"capacity": 1, "memory_limit": -1}, "memory_limit"),
        ({"capacity": 1, "num_threads": 0}, "num_threads"),
    ],
)
def test_settings_out_of_range(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EmbeddingStore(**arguments)


def test_arrays_that_do_not_fit_each_other() -> None:
    store = new_store(100, ADAGRAD)
    train(store, [1, 2])
    signs = u64([1, 2])
    rows = np.zeros((2, 4), np.float32)
    hints = np.zeros(2, np.uint32)
    words = np.zeros((2, 4), np.uint32)
    none = np.zeros((2, 0), np.float32)
    requests: list[tuple[str, Any]] = [
        ("rows_out", lambda: store.lookup_train(signs, UNIFORM, 1.0, 0, rows[:1], hints)),
        ("rows_out", lambda: store.lookup_train(signs, UNIFORM, 1.0, 0, none, hints)),
        ("hints_out", lambda: store.lookup_train(signs, UNIFORM, 1.0, 0, rows, hints[:1])),
        ("rows_out", lambda: store.lookup_eval(signs[:1], rows)),
        ("gradients", lambda: store.update(signs[:1], None, rows)),
        ("hints", lambda: store.update(signs, hints[:1], rows)),
        ("values", lambda: store.write(signs[:1], rows, None)),
        ("states", lambda: store.write(signs, rows, words[:1])),
        ("states", lambda: store.write(signs, rows, words[:, :3].copy())),
        ("values", lambda: store.read(signs, 0)),
        ("values", lambda: store.read(signs, 65_537, 0)),
        ("shard", lambda: store.shard_entries(1)),
    ]
    for message, request in requests:
        with pytest.raises(DataError, match=message):
            request()
    for probability in (-0.1, 1.1, float("nan")):
        with pytest.raises(ConfigError, match="admit_probability"):
            store.lookup_train(signs, UNIFORM, probability, 0, rows, hints)
    wrong: list[Any] = [
        lambda: store.lookup_eval(signs.astype(np.int64), rows),
        lambda: store.lookup_eval(signs, rows.astype(np.float64)),
        lambda: store.lookup_eval(signs, np.zeros((2, 8), np.float32)[:, ::2]),
        lambda: store.lookup_eval(signs.reshape(1, 2), rows),
    ]
    for request in wrong:
        with pytest.raises(ValueError, match=r"dtype|contiguous|dimensions"):
            request()
    assert held(store) == [1, 2]
    store.check()


def test_empty_requests() -> None:
    store = new_store(10)
    none = u64([])
    rows = np.zeros((0, 4), np.float32)
    hints = np.zeros(0, np.uint32)
    assert store.lookup_train(none, UNIFORM, 1.0, 0, rows, hints) == (0, 0)
    assert store.lookup_eval(none, rows) == 0
    assert store.update(none, hints, rows) == 0
    assert store.update(none, None, rows) == 0
    store.write(none, rows, None)
    assert store.delete(none) == 0
    found, values, states = store.read(none, 4)
    assert (found.shape, values.shape, states.shape) == ((0,), (0, 4), (0, 0))
    assert list(store.iterate()) == []
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


@pytest.mark.parametrize("dim", [1, 2, 3, 1000, 65_536])
def test_dims_from_one_to_the_largest(dim: int) -> None:
    store = new_store(4, RowOptimizer("adam"))
    for first in range(0, 12, 3):
        rows, hints, _, _ = train(store, range(first, first + 3), dim)
        assert np.array_equal(rows[2], UNIFORM.values(0, first + 2, dim))
        assert store.update(u64(range(first, first + 3)), hints, rows) == 0
        store.check()


# --- threads ------------------------------------------------------------------------------


def test_threads_of_a_request_change_nothing() -> None:
    results = []
    for num_threads in (1, 2, 4):
        rng = np.random.default_rng(8)
        store = new_store(6000, ADAGRAD, num_shards=8, seed=3, num_threads=num_threads)
        assert store.num_threads == num_threads
        out: list[bytes] = []
        for step in range(12):
            signs = rng.permutation(20_000)[:5000]
            rows, hints, inserted, refused = train(store, signs, 8, admit=0.7, batch_id=step)
            gradients = rng.standard_normal(rows.shape).astype(np.float32)
            missing = store.update(u64(signs), hints, gradients)
            out.append(rows.tobytes() + hints.tobytes())
            out.append(repr((inserted, refused, missing, store.stats())).encode())
        for block in store.iterate():
            out += [array.tobytes() for array in block]
        store.check()
        store.close()
        results.append(out)
    assert results[0] == results[1] == results[2]


def test_close_stops_threads_and_requests_still_work() -> None:
    store = new_store(10_000, num_shards=8, num_threads=3)
    wanted = train(store, range(5000))[0]
    store.close()
    store.close()
    assert np.array_equal(train(store, range(5000))[0], wanted)
    with pytest.raises(DimMismatch):
        train(store, range(5000), 8)


def test_errors_reach_the_caller_from_every_thread() -> None:
    store = new_store(100_000, num_shards=8, num_threads=4)
    train(store, range(5000))
    for sign in (0, 1, 2, 3, 4, 5, 6, 7):
        signs = np.arange(10_000, 14_000)
        signs[sign * 500] = sign
        with pytest.raises(DimMismatch, match="stored with dim 4"):
            train(store, signs, 8)
        store.delete(u64(np.arange(10_000, 14_000)))
    store.check()
    store.close()


@pytest.mark.parametrize("num_threads", [1, 2])
def test_updates_from_several_threads_add_up(num_threads: int) -> None:
    callers, steps = 4, 25
    store = new_store(10**6, RowOptimizer("sgd", lr=1.0), num_shards=8, num_threads=num_threads)
    start = Barrier(callers)

    def call(number: int) -> None:
        rng = np.random.default_rng(number)
        start.wait()
        for step in range(steps):
            shared = rng.permutation(3000)
            own = np.arange(10**6 * (number + 1), 10**6 * (number + 1) + 200) + 200 * step
            signs = np.concatenate([shared, own])
            _, hints, _, _ = train(store, signs, 8, initializer=ZEROS)
            ones = np.full((len(signs), 8), -1, np.float32)
            assert store.update(u64(signs), hints, ones) == 0
            store.stats()

    with ThreadPoolExecutor(callers) as pool:
        list(pool.map(call, range(callers)))
    store.check()
    assert len(store) == 3000 + callers * steps * 200
    assert (evaluate(store, range(3000), 8)[0] == callers * steps).all()
    for number in range(callers):
        first = 10**6 * (number + 1)
        assert (evaluate(store, range(first, first + 200 * steps), 8)[0] == 1).all()
    store.close()


def test_everything_at_once_from_several_threads() -> None:
    callers = 4
    store = new_store(900, ADAGRAD, num_shards=4, memory_limit=16 << 20)
    start = Barrier(callers)
    deleted = [0] * callers

    def call(number: int) -> None:
        rng = np.random.default_rng(number)
        start.wait()
        for step in range(60):
            signs = rng.integers(0, 3000, 700)
            _, hints, _, _ = train(store, signs, 4, admit=0.8, batch_id=step)
            store.update(u64(signs), hints, np.ones((700, 4), np.float32))
            evaluate(store, signs)
            deleted[number] += store.delete(u64(signs[:50]))
            store.write(u64(signs[50:60]), np.zeros((10, 4), np.float32), None)
            for shard_signs, values, states in store.iterate():
                assert len(shard_signs) == len(values) == len(states)
                assert len(set(shard_signs.tolist())) == len(shard_signs)
            store.check()

    with ThreadPoolExecutor(callers) as pool:
        list(pool.map(call, range(callers)))
    stats = store.stats()
    assert stats["rows"] == len(store) == stats["inserted"] - stats["evicted"] - sum(deleted)
    store.check()


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_signal_comes_when_the_threads_of_a_request_are_done(num_threads: int) -> None:
    store = new_store(100_000, num_shards=4, num_threads=num_threads)
    train(store, range(50_000))
    wanted = evaluate(store, range(50_000))[0]

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def look_up_until_then() -> None:
        signal.setitimer(signal.ITIMER_REAL, 1e-4)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            rows.fill(-1)
            store.lookup_eval(signs, rows)

    before = signal.signal(signal.SIGALRM, interrupt)
    signs, rows = u64(range(50_000)), np.empty_like(wanted)
    try:
        with pytest.raises(KeyboardInterrupt):
            look_up_until_then()
    finally:
        signal.signal(signal.SIGALRM, before)
    # Either none of it is written or all: nobody writes behind the caller's back.
    assert (rows == -1).all() or np.array_equal(rows, wanted)
    store.check()
    store.close()


def test_w63_a_dump_takes_one_shard_at_a_time() -> None:
    store = new_store(1000, num_shards=4)
    train(store, range(500))
    seen: list[int] = []
    for step, (signs, _, _) in enumerate(store.iterate()):
        seen += signs.tolist()
        train(store, range(1000 + step, 1003 + step))  # nothing is locked in between
    assert {sign for sign in seen if sign < 1000} == set(range(500))


# --- one long run -------------------------------------------------------------------------


@pytest.mark.slow
def test_ten_million_operations() -> None:
    """Every row that comes back is compared with a numpy model, under eviction throughout.

    Universe of signs, half of them of another dim. The model holds each sign's values, whether
    it is held, and the time of its last use; the oldest of each shard are evicted by that time.
    """
    rng = np.random.default_rng(10)
    universe, capacity, num_shards = 300_000, 100_000, 6
    width = {0: 2, 1: 6}
    signs = mix64_array(np.arange(universe, dtype=np.uint64) * np.uint64(3))
    hashes = mix64_array(signs)
    shards = ((hashes >> np.uint64(40)).astype(np.int64) % 1024) * num_shards // 1024
    capacities = np.array(shard_capacities(capacity, num_shards))
    keys = mix64_array(signs ^ np.uint64(mix64(4)))
    draws = [mix64_array(keys + np.uint64(j)) >> np.uint64(12) for j in range(6)]
    low, high = float(np.float32(-0.01)), float(np.float32(0.01))
    first = np.array([low + (high - low) * (d * 2.0**-52) for d in draws]).T.astype(np.float32)
    values = first.copy()
    alive = np.zeros(universe, bool)
    used = np.zeros(universe, np.int64)
    hints = np.zeros(universe, np.uint32)
    store = new_store(capacity, num_shards=num_shards, seed=4)
    clock = operations = step = 0

    def evict() -> None:
        for number in range(num_shards):
            there = np.flatnonzero(alive & (shards == number))
            excess = len(there) - capacities[number]
            if excess > 0:
                alive[there[np.argpartition(used[there], excess - 1)[:excess]]] = False

    def use(part: NDArray[np.int64]) -> None:
        nonlocal clock
        used[part] = np.arange(clock, clock + len(part))
        clock += len(part)

    while operations < 10_000_000:
        step += 1
        hot = (rng.zipf(1.15, 12_000) * 7919) % universe
        cold = rng.integers(0, universe, 4000)
        scanned = (np.arange(4000) + 4000 * step) % universe
        batch = rng.permutation(np.unique(np.concatenate([hot, cold, scanned])))
        for parity, dim in width.items():
            part = batch[batch % 2 == parity]
            fresh = part[~alive[part]]
            values[fresh] = first[fresh]
            rows, numbers, inserted, _ = train(store, signs[part], dim)
            assert inserted == len(fresh)
            assert np.array_equal(rows, values[part, :dim])
            alive[part] = True
            use(part)
            evict()
            hints[part] = numbers

            late = rng.permutation(np.unique(rng.choice(batch, 6000)))
            late = np.concatenate([late[late % 2 == parity], part[:3000]])
            late = np.unique(late)  # some with hints of long ago
            gradients = rng.standard_normal((len(late), dim)).astype(np.float32)
            missing = store.update(signs[late], hints[late], gradients)
            assert missing == np.count_nonzero(~alive[late])
            stepped = alive[late]
            values[late[stepped], :dim] -= np.float32(0.5) * gradients[stepped]

            some = np.unique(rng.integers(0, universe // 2, 5000)) * 2 + parity
            rows, missing = evaluate(store, signs[some], dim)
            assert missing == np.count_nonzero(~alive[some])
            assert np.array_equal(rows, values[some, :dim] * alive[some, None])

            gone = np.unique(rng.integers(0, universe // 2, 300)) * 2 + parity
            assert store.delete(signs[gone]) == np.count_nonzero(alive[gone])
            alive[gone] = False

            new = rng.permutation(np.unique(rng.integers(0, universe // 2, 300)) * 2 + parity)
            values[new, :dim] = rng.standard_normal((len(new), dim)).astype(np.float32)
            store.write(signs[new], values[new, :dim].copy(), None)
            alive[new] = True
            use(new)
            evict()
            operations += len(part) + len(late) + len(some) + len(gone) + len(new)
        stats = store.stats()
        assert stats["entries"] <= 1.25 * stats["rows"]
        if step % 50 == 1:
            store.check()
            for parity, dim in width.items():
                every = np.arange(parity, universe, 2)
                rows, missing = evaluate(store, signs[every], dim)
                assert np.array_equal(rows, values[every, :dim] * alive[every, None])
                assert missing == np.count_nonzero(~alive[every])
                operations += len(every)
    store.check()
    assert len(store) == np.count_nonzero(alive)
