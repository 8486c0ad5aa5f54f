"""Rows of two-byte values in the store; ``machine`` has the rest."""

from __future__ import annotations

import numpy as np
import pytest

from persia._core.base import halves
from persia._core.kernels.optim import OPTIONS, RowOptimizer
from tests.core.stores import UNIFORM, Floats, new_store, train, u64

HALVES = ["float16", "bfloat16"]
# An f32 between two values of each kind, beyond all of them, and lost.
EXTREME = [-3.4e38, 3.4e38, np.inf, -np.inf, np.nan]


def shortened(rows: Floats, dtype: str) -> Floats:
    codes = halves.narrow(np.ascontiguousarray(rows).ravel(), dtype)
    return halves.widen(codes, dtype).reshape(rows.shape)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dim", [1, 7, 16, 700])
def test_a_step_is_the_f32_step_rounded(name: str, dim: int, dtype: str) -> None:
    # A bound comes before the rounding, which may take the value next to it.
    optimizer = RowOptimizer(name, weight_bound=0.3 if dim == 16 else 0.0, lr=0.05)
    store = new_store(10**6, optimizer, seed=5, num_shards=2)
    signs = u64(range(0, 3 * 70, 3))
    values, hints, _, _ = train(store, signs, dim, dtype=dtype)
    initial = np.array([UNIFORM.values(5, int(sign), dim) for sign in signs])
    assert np.array_equal(values, shortened(initial, dtype))
    state = np.tile(optimizer.new_state(dim), (len(signs), 1)).view(np.float32)
    rng = np.random.default_rng(dim)
    for number in range(3):
        gradients = rng.standard_normal((len(signs), dim)).astype(np.float32)
        gradients[:5, 0] = EXTREME
        rows = np.concatenate([values, state], axis=1)
        optimizer.step_rows(rows, gradients)
        codes = halves.round_rows(np.ascontiguousarray(rows[:, :dim]), signs, dtype, 5, number)
        values = halves.widen(codes.ravel(), dtype).reshape(values.shape)
        state = rows[:, dim:]
        kept = hints if number else None
        assert store.update(signs, kept, gradients, dtype=dtype, number=number) == 0
        found, read, states = store.read(signs, dim, dtype=dtype)
        assert found.all()
        assert read.tobytes() == values.tobytes()
        assert states.tobytes() == np.ascontiguousarray(state).tobytes()
        rows_out = np.empty_like(values)
        store.lookup_eval(signs, rows_out, dtype=dtype)
        assert rows_out.tobytes() == values.tobytes()
    store.check()


@pytest.mark.parametrize(("dim", "share"), [(16, 0.67), (32, 0.6), (64, 0.56)])
def test_sgd_rows_take_little_more_than_half(dim: int, share: float) -> None:
    taken = []
    for dtype in ("float32", *HALVES):
        store = new_store(10**6, RowOptimizer("sgd", lr=0.05))
        for first in range(0, 60_000, 10_000):
            train(store, range(first, first + 10_000), dim, dtype=dtype)
        taken.append(store.stats()["bytes"] / len(store))
    assert taken[1] == taken[2] <= share * taken[0]
