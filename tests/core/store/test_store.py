"""The store as a whole: against its model, its settings and errors, its threads."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import numpy as np
import pytest

from persia._core.base.halves import DTYPES
from persia._core.base.hashing import mix64_array
from persia._core.kernels.optim import RowOptimizer
from persia._core.store.store import EmbeddingStore
from persia.errors import ConfigError, DataError, DimMismatch, NotConfigured
from tests.core.machine import ShardedMachine, StoreMachine
from tests.core.stores import (
    ADAGRAD,
    UNIFORM,
    ZEROS,
    blocks_of,
    entries,
    evaluate,
    held,
    new_store,
    rows_of,
    train,
    u64,
)
from tests.support.profiles import tries

few_examples = tries(60, stateful_step_count=25)
TestOneShard = StoreMachine.TestCase
TestOneShard.settings = few_examples
TestManyShards = ShardedMachine.TestCase
TestManyShards.settings = few_examples


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
    assert blocks_of(store) == []
    store.check()


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_of_a_request_change_nothing(dtype: str) -> None:
    results = []
    for num_threads in (1, 2, 4):
        rng = np.random.default_rng(8)
        store = new_store(6000, ADAGRAD, num_shards=8, seed=3, num_threads=num_threads)
        assert store.num_threads == num_threads
        out: list[bytes] = []
        for step in range(12):
            signs = rng.permutation(20_000)[:5000]
            rows, hints, *counts = train(store, signs, 8, admit=0.7, batch_id=step, dtype=dtype)
            gradients = rng.standard_normal(rows.shape).astype(np.float32)
            missing = store.update(u64(signs), hints, gradients, dtype=dtype, number=step)
            out.append(rows.tobytes() + hints.tobytes())
            out.append(repr((counts, missing, store.stats())).encode())
        out += [array.tobytes() for shard in entries(store) for one in shard for array in one]
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
            rows_of(blocks_of(store))  # each sign once
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
    signs, rows = u64(range(50_000)), np.full_like(wanted, -1)  # it may come before the first
    try:
        with pytest.raises(KeyboardInterrupt):
            look_up_until_then()
    finally:
        signal.signal(signal.SIGALRM, before)
    # Either none of it is written or all: nothing is written after the caller has gone on.
    assert (rows == -1).all() or np.array_equal(rows, wanted)
    store.check()
    store.close()


@pytest.mark.slow
def test_a_million_operations() -> None:
    """The machine where tables, chunks and segments are many, under eviction throughout."""
    rng = np.random.default_rng(10)
    machine = StoreMachine()
    machine.set_up("sgd", 100_000, 6)
    signs = mix64_array(np.arange(300_000, dtype=np.uint64))
    for step in range(200):
        hot = (rng.zipf(1.15, 12_000) * 7919) % len(signs)
        cold = rng.integers(0, len(signs), 4000)
        scanned = (np.arange(4000) + 4000 * step) % len(signs)
        batch = signs[rng.permutation(np.concatenate([hot, cold, scanned]))]
        machine.ask(batch.tolist())
        late = rng.choice(np.array(sorted(machine.known), np.uint64), 3000)
        for some in (batch[:3000], late):  # some with hints of long ago
            machine.update(some.tolist(), "kept", step)
        machine.numbers()
        if step % 20 == 19:
            machine.every_key_has_its_own_row()
            machine.order_of_use()


def test_a_dim_mismatch_leaves_a_sound_store() -> None:
    store = new_store(50, num_shards=1)
    train(store, range(0, 100, 2), 8)
    with pytest.raises(DimMismatch, match="0x0000000000000062 is stored with dim 8"):
        train(store, [*range(101, 191, 2), 98, 99], 4)
    store.check()
    assert len(store) == 50
    assert evaluate(store, [98], 8)[1] == 0


def test_settings_out_of_range() -> None:
    wrong = {"capacity": (0, -1, 2**63), "num_shards": (0, 1025), "num_threads": (0,)}
    for name, values in wrong.items():
        for value in values:
            settings: dict[str, Any] = {"capacity": 1, name: value}
            with pytest.raises(ConfigError, match=name):
                EmbeddingStore(**settings)


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
