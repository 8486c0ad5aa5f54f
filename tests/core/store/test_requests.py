"""Requests row by row: hints, first values and states, admission."""

from __future__ import annotations

import numpy as np
import pytest

from persia._core.kernels.optim import RowOptimizer
from tests.core.stores import ADAGRAD, NO_ROW, UNIFORM, evaluate, new_store, train, u64
from tests.reference.store import admits


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
