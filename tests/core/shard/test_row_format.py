"""Rows of two-byte values in the store; ``machine`` has the rest."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from persia._core.base import cpu, halves
from persia._core.kernels.optim import OPTIONS, RowOptimizer
from tests.core.stores import UNIFORM, Floats, new_store, train, u64

HALVES = ["float16", "bfloat16"]
LRS: dict[str, Any] = {name: RowOptimizer(name, lr=0.05) for name in OPTIONS}


def shortened(rows: Floats, dtype: str) -> Floats:
    codes = halves.narrow(np.ascontiguousarray(rows).ravel(), dtype)
    return halves.widen(codes, dtype).reshape(rows.shape)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dim", [1, 7, 16, 700])
def test_a_step_is_the_f32_step_rounded(name: str, dim: int, dtype: str) -> None:
    optimizer = LRS[name]
    store = new_store(10**6, optimizer, seed=5, num_shards=2)
    signs = u64(range(0, 3 * 70, 3))
    values, hints, _, _ = train(store, signs, dim, dtype=dtype)
    initial = np.array([UNIFORM.values(5, int(sign), dim) for sign in signs])
    assert np.array_equal(values, shortened(initial, dtype))
    state = np.tile(optimizer.new_state(dim), (len(signs), 1)).view(np.float32)
    rng = np.random.default_rng(dim)
    for number in range(3):
        gradients = rng.standard_normal((len(signs), dim)).astype(np.float32)
        rows = np.concatenate([values, state], axis=1)
        optimizer.step_rows(rows, gradients)
        codes = halves.round_rows(np.ascontiguousarray(rows[:, :dim]), signs, dtype, 5, number)
        values = halves.widen(codes.ravel(), dtype).reshape(values.shape)
        state = rows[:, dim:]
        kept = hints if number else None
        assert store.update(signs, kept, gradients, dtype=dtype, number=number) == 0
        found, read, states = store.read(signs, dim, dtype=dtype)
        assert found.all()
        assert np.array_equal(read, values)
        assert states.tobytes() == np.ascontiguousarray(state).tobytes()
        rows_out = np.empty_like(values)
        store.lookup_eval(signs, rows_out, dtype=dtype)
        assert np.array_equal(rows_out, values)
    store.check()


@pytest.mark.parametrize("dtype", HALVES)
def test_neither_threads_shards_order_nor_instruction_set_shows(dtype: str) -> None:
    rng = np.random.default_rng(1)
    signs = rng.permutation(u64(range(5000)))
    gradients = rng.standard_normal((5000, 8)).astype(np.float32)
    results = []
    for isa in cpu.available():
        for num_shards, num_threads, step in ((1, 1, 1), (8, 2, -1), (3, 3, 1)):
            cpu.select(isa)
            store = new_store(
                10**6, LRS["adagrad"], seed=5, num_shards=num_shards, num_threads=num_threads
            )
            order = np.ascontiguousarray(signs[::step])
            _, hints, _, _ = train(store, order, 8, dtype=dtype)
            for number in range(2):
                part = np.ascontiguousarray(gradients[::step])
                store.update(order, hints, part, dtype=dtype, number=number)
            found, values, states = store.read(u64(range(5000)), 8, dtype=dtype)
            assert found.all()
            results.append((values.tobytes(), states.tobytes()))
            store.close()
    cpu.select(None)
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("dtype", HALVES)
def test_steps_too_small_to_be_seen_add_up(dtype: str) -> None:
    # A hundredth of what the values can show, a thousand times the same: to nearest, nothing
    # would ever happen.
    store = new_store(10**6, RowOptimizer("sgd", lr=1.0))
    signs = u64(range(500))
    store.write(signs, np.ones((500, 4), np.float32), None, dtype=dtype)
    gradient = np.float32(-0.01 * (2.0**-10 if dtype == "float16" else 2.0**-7))
    gradients = np.full((500, 4), gradient)
    assert shortened(np.array([[1 - gradient]], np.float32), dtype) == 1
    for number in range(1000):
        store.update(signs, None, gradients, dtype=dtype, number=number)
    moved = store.read(signs, 4, dtype=dtype)[1].astype(np.float64) - 1
    expected = -1000.0 * float(gradient)
    assert abs(moved.mean() / expected - 1) < 0.02
    assert (moved > 0).all()


@pytest.mark.parametrize("dtype", HALVES)
def test_what_is_read_is_written_back_unchanged(dtype: str) -> None:
    store = new_store(10**6, LRS["adam"], num_shards=3)
    signs = u64(range(300))
    train(store, signs, 5, dtype=dtype)
    rng = np.random.default_rng(3)
    for number in range(3):
        gradients = rng.standard_normal((300, 5)).astype(np.float32)
        store.update(signs, None, gradients, dtype=dtype, number=number)
    _, values, states = store.read(signs, 5, dtype=dtype)
    store.write(signs, values, states, dtype=dtype)
    again = store.read(signs, 5, dtype=dtype)
    assert again[1].tobytes() == values.tobytes()
    assert again[2].tobytes() == states.tobytes()
    copy = new_store(10**6, LRS["adam"])
    for block in store.iterate():
        copy.write(*block, dtype=dtype)
    assert copy.read(signs, 5, dtype=dtype)[1].tobytes() == values.tobytes()


def test_bounds_come_before_rounding_and_lost_rows_stay_lost() -> None:
    for dtype in HALVES:
        store = new_store(10**6, RowOptimizer("sgd", weight_bound=0.3, lr=1.0))
        train(store, [1], dtype=dtype)
        gradients = np.array([[9, -9, np.nan, np.inf]], np.float32)
        seen = set()
        for number in range(40):
            store.update(u64([1]), None, gradients, dtype=dtype, number=number)
            values = store.read(u64([1]), 4, dtype=dtype)[1][0]
            seen.add(float(values[1]))
            assert np.isnan(values[2])
        # 0.3 lies between two values, and rounding takes either.
        below = shortened(np.array([[0.3 * (1 - 2.0**-11)]], np.float32), dtype)
        assert len(seen) == 2
        assert min(seen) < 0.3 < max(seen)
        assert min(seen) <= float(below[0, 0]) <= max(seen)
        store = new_store(10**6, RowOptimizer("sgd", lr=1.0))
        store.write(u64([1]), np.zeros((1, 2), np.float32), None, dtype=dtype)
        store.update(u64([1]), None, np.array([[-3.4e38, -np.inf]], np.float32), dtype=dtype)
        values = store.read(u64([1]), 2, dtype=dtype)[1][0]
        assert values.tolist() == [
            65504.0 if dtype == "float16" else 3.3895313892515355e38,
            np.inf,
        ]


@pytest.mark.parametrize(("dim", "share"), [(16, 0.67), (32, 0.6), (64, 0.56)])
def test_sgd_rows_take_little_more_than_half(dim: int, share: float) -> None:
    taken = []
    for dtype in ("float32", *HALVES):
        store = new_store(10**6, LRS["sgd"])
        for first in range(0, 60_000, 10_000):
            train(store, range(first, first + 10_000), dim, dtype=dtype)
        taken.append(store.stats()["bytes"] / len(store))
    assert taken[1] == taken[2] <= share * taken[0]
