"""Calls of ``pooling`` made together: the same bytes on any number of threads."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from persia._core.base.threads import ThreadPool
from persia._core.ids.feature_batch import FeatureBatch
from persia._core.kernels.pool_calls import PoolCalls
from persia._core.kernels.pooling import pool, pool_grad, scatter_add
from persia.errors import ConfigError, DataError

ROWS, DIM = 500, 8


def feature(rng: np.random.Generator, num_ids: int, kind: str) -> dict[str, Any]:
    """Return the arguments that a call and its gradient share."""
    offsets = None
    if kind != "single":
        edges = np.sort(rng.integers(0, num_ids + 1, num_ids // 3))
        offsets = np.concatenate([[0], edges, [num_ids]]).astype(np.uint32)
    stacked = rng.integers(0, ROWS, 2 * ROWS).astype(np.uint32) if kind == "stack" else None
    return {
        "slots": stacked,
        "rounds": 1 if stacked is None else 2,
        "inverse": rng.integers(0, ROWS, num_ids).astype(np.uint32),
        "offsets": offsets,
        "weights": rng.normal(size=num_ids).astype(np.float32) if kind == "weights" else None,
    }


def size_of(arguments: dict[str, Any]) -> int:
    ids, offsets = arguments["inverse"], arguments["offsets"]
    return len(ids) if offsets is None else len(offsets) - 1


CASES = [
    (mode, kind, num_ids)
    for mode, kind in [
        ("sum", "single"), ("sum", "bags"), ("sum", "weights"), ("sum", "stack"),
        ("mean", "bags"), ("sqrt", "stack"), ("max", "bags"), ("max", "single"),
    ]
    for num_ids in (0, 7, 40_000)
]  # fmt: skip


@pytest.mark.parametrize("num_threads", [1, 3])
def test_all_calls_at_once_are_each_call_alone(num_threads: int) -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(ROWS, DIM)).astype(np.float32)
    calls, expected = PoolCalls(), []
    made: list[tuple[NDArray[np.float32], NDArray[np.int32] | None]] = []
    for mode, kind, num_ids in CASES:
        given = feature(rng, num_ids, kind)
        wanted, out = (np.full((size_of(given), DIM), 9, np.float32) for _ in range(2))
        expected.append((wanted, pool(mode, rows, out=wanted, **given)))
        made.append((out, calls.pool(mode, rows, out=out, **given)))
    with closing(ThreadPool(num_threads)) as threads:
        assert calls.run(threads)
    for (wanted, maxima), (out, own) in zip(expected, made, strict=True):
        assert wanted.tobytes() == out.tobytes()
        assert (maxima is None) is (own is None)
        assert maxima is None or own is None or np.array_equal(maxima, own)


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("bad", [None, np.inf, np.nan])
def test_sums_are_set_to_zero_added_in_order_and_looked_at(
    num_threads: int, bad: float | None
) -> None:
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(ROWS, DIM)).astype(np.float32)
    calls, expected, made = PoolCalls(), [], []
    for mode, kind, num_ids in CASES:
        wanted, sums = np.zeros((ROWS, DIM), np.float32), np.full((ROWS, DIM), np.nan, "f4")
        calls.begin_sums(sums)
        for _ in range(2):  # two features of a group, and one that is raw
            given = feature(rng, num_ids, kind)
            grad = rng.normal(size=(size_of(given), DIM)).astype(np.float32)
            skip = rng.integers(0, 2, len(grad)).astype(np.uint8)
            argmax = pool(mode, rows, out=np.empty_like(grad), **given)
            pool_grad(mode, grad, argmax=argmax, skip=skip, out=wanted, **given)
            calls.pool_grad(mode, grad, argmax=argmax, skip=skip, out=sums, **given)
        raw = rng.normal(size=(ROWS, DIM)).astype(np.float32)
        scatter_add(raw, None, 1, wanted)
        calls.scatter_add(raw, None, 1, sums)
        expected.append(wanted)
        made.append(sums)
    if bad is not None:
        one = np.zeros((ROWS, DIM), np.float32)
        one[-1, -1] = bad
        calls.scatter_add(one, None, 1, made[-1])
        expected[-1] += one
    with closing(ThreadPool(num_threads)) as threads:
        assert calls.run(threads) is (bad is None)
    for wanted, sums in zip(expected, made, strict=True):
        assert wanted.tobytes() == sums.tobytes()


def test_parts_without_sums_keep_what_is_there() -> None:
    sums = np.ones((2, DIM), np.float32)
    calls = PoolCalls()
    calls.begin_sums(None)
    calls.scatter_add(np.full((2, DIM), np.inf, np.float32), None, 1, sums)
    assert calls.run(ThreadPool(1))
    assert np.isinf(sums).all()
    assert PoolCalls().run(ThreadPool(1))


def test_what_does_not_fit_is_refused_when_it_is_added() -> None:
    calls = PoolCalls()
    ids, rows = np.zeros(2, np.uint32), np.ones((1, DIM), np.float32)
    out = np.ones((2, DIM), np.float32)
    with pytest.raises(DataError, match="begin_sums"):
        calls.pool_grad("sum", out, None, 1, ids, None, None, None, rows)
    with pytest.raises(DataError, match="begin_sums"):
        calls.scatter_add(rows, None, 1, rows)
    with pytest.raises(ConfigError, match="pooling"):
        calls.pool("median", rows, None, 1, ids, None, out)
    with pytest.raises(DataError, match="inverse"):
        calls.pool("sum", rows, None, 1, ids + np.uint32(1), None, out)
    assert calls.run(ThreadPool(1))
    assert (out == 1).all()


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_sums_of_one_feature_are_the_same_without_zeros(mode: str, num_threads: int) -> None:
    rng = np.random.default_rng(2)
    rows = rng.normal(size=(ROWS, DIM)).astype(np.float32)
    offsets = np.arange(0, ROWS + 101, 2, dtype=np.uint32)
    first_seen = np.concatenate([np.arange(ROWS), rng.integers(0, ROWS, 100)])
    calls, expected, made = PoolCalls(), [], []
    for ids in (first_seen, rng.permutation(first_seen), np.zeros(ROWS + 100)):
        inverse = ids.astype(np.uint32)
        grad = rng.normal(size=(len(offsets) - 1, DIM)).astype(np.float32)
        grad[0] = -0.0
        argmax = pool(mode, rows, None, 1, inverse, offsets, np.empty_like(grad))
        wanted, sums = np.zeros((ROWS, DIM), np.float32), np.full((ROWS, DIM), np.nan, "f4")
        pool_grad(mode, grad, None, 1, inverse, offsets, argmax, None, wanted)
        calls.begin_sums(sums)
        calls.pool_grad(mode, grad, None, 1, inverse, offsets, argmax, None, sums)
        expected.append(wanted)
        made.append(sums)
    with closing(ThreadPool(num_threads)) as threads:
        assert calls.run(threads)
    for wanted, sums in zip(expected, made, strict=True):
        assert wanted.tobytes() == sums.tobytes()


@pytest.mark.parametrize("mode", ["sum", "mean", "sqrt", "max"])
@pytest.mark.parametrize("kind", ["single", "bags", "weights", "none"])
def test_a_feature_batch_is_its_numbers(mode: str, kind: str) -> None:
    rng = np.random.default_rng(3)
    ids = rng.integers(0, 50, 0 if kind == "none" else 90).astype(np.uint64)
    offsets = None if kind == "single" else np.arange(0, len(ids) + 1, 3)
    weights = rng.normal(size=len(ids)).astype(np.float32) if kind == "weights" else None
    if offsets is None:
        feature = FeatureBatch.from_single("f", ids)
    else:
        feature = FeatureBatch.from_csr("f", ids, offsets, weights)
    rows = rng.normal(size=(feature.num_distinct, DIM)).astype(np.float32)
    found = []
    numbers: NDArray[np.uint32] | FeatureBatch
    for numbers, edges in ((feature.inverse, feature.offsets), (feature, None)):
        out = np.full((feature.batch_size, DIM), 9, np.float32)
        sums = np.full(rows.shape, 9, np.float32)
        calls = PoolCalls()
        own = None if numbers is feature else feature.weights
        if weights is not None and mode != "sum":
            with pytest.raises(DataError, match="weights"):
                calls.pool(mode, rows, None, 1, numbers, edges, out, own)
            return
        argmax = calls.pool(mode, rows, None, 1, numbers, edges, out, own)
        assert calls.run(ThreadPool(1))
        calls = PoolCalls()
        calls.begin_sums(sums)
        calls.pool_grad(mode, out, None, 1, numbers, edges, argmax, None, sums, own)
        assert calls.run(ThreadPool(1))
        found.append(out.tobytes() + sums.tobytes())
    assert found[0] == found[1]
    few, short = rows[:-1].copy(), out[:-1].copy()
    if len(ids):
        with pytest.raises(DataError, match="inverse"):
            calls.pool(mode, few, None, 1, feature, None, out)
        with pytest.raises(DataError, match="out"):
            calls.pool(mode, rows, None, 1, feature, None, short)
