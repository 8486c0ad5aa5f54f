from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from persia._core.base import cpu
from persia._core.kernels import pooling
from persia.errors import ConfigError, DataError
from tests.reference import pooling as model
from tests.support.profiles import tries

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

MODES = ["sum", "mean", "sqrt", "max"]


@pytest.fixture(params=cpu.available())
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    cpu.select(request.param)
    yield request.param
    cpu.select(None)


def normals(rng: np.random.Generator, n: int, dim: int) -> NDArray[np.float32]:
    return rng.standard_normal((n, dim), dtype=np.float32)


def same(got: NDArray[Any], want: NDArray[Any]) -> bool:
    """Equal shapes and bits, but for the sign of zero in an untouched sum."""
    return got.shape == want.shape and bool(np.array_equal(got, want, equal_nan=True))


def make_bags(
    rng: np.random.Generator,
    *,
    lengths: list[int] | None,
    num_samples: int,
    num_distinct: int,
    num_rows: int,
    rounds: int,
    with_slots: bool,
) -> model.Bags:
    """A feature of random ids; ``lengths`` None gives one id a sample."""
    offsets = None
    num_ids = num_samples
    if lengths is not None:
        offsets = np.cumsum([0, *lengths], dtype=np.uint32)
        num_ids = int(offsets[-1])
    slots = None
    if with_slots:
        slots = rng.integers(0, num_rows, num_distinct * rounds, dtype=np.uint32)
    inverse = rng.integers(0, num_distinct, num_ids, dtype=np.uint32)
    return model.Bags(slots, rounds, inverse, offsets)


def weighted(rng: np.random.Generator, bags: model.Bags) -> model.Bags:
    """The same ids with weights, some of which are 0 or negative."""
    weights = rng.standard_normal(len(bags.inverse), dtype=np.float32)
    return dataclasses.replace(bags, weights=np.where(weights > 1, np.float32(0), weights))


def pool(
    mode: str, bags: model.Bags, rows: NDArray[np.float32]
) -> tuple[NDArray[np.float32], NDArray[np.int32] | None]:
    num_samples = len(bags.samples())
    out = np.full((num_samples, rows.shape[1]), np.nan, np.float32)
    argmax = pooling.pool(
        mode, rows, bags.slots, bags.rounds, bags.inverse, bags.offsets, out, bags.weights
    )
    return out, argmax


def pool_grad(
    mode: str,
    bags: model.Bags,
    grad: NDArray[np.float32],
    argmax: NDArray[np.int32] | None,
    skip: NDArray[np.uint8] | None,
    out: NDArray[np.float32],
) -> NDArray[np.float32]:
    out = out.copy()
    pooling.pool_grad(
        mode,
        grad,
        bags.slots,
        bags.rounds,
        bags.inverse,
        bags.offsets,
        argmax,
        skip,
        out,
        bags.weights,
    )
    return out


@st.composite
def features(draw: st.DrawFn) -> tuple[model.Bags, int, int, int]:
    """(bags, number of distinct ids, number of rows, seed)."""
    seed = draw(st.integers(0, 2**32 - 1))
    num_distinct = draw(st.integers(1, 12))
    with_slots = draw(st.booleans())
    rounds = draw(st.integers(1, 3)) if with_slots else 1
    num_rows = draw(st.integers(1, 20)) if with_slots else num_distinct
    lengths = draw(st.none() | st.lists(st.integers(0, 5), max_size=30))
    num_samples = draw(st.integers(0, 60)) if lengths is None else len(lengths)
    bags = make_bags(
        np.random.default_rng(seed),
        lengths=lengths,
        num_samples=num_samples,
        num_distinct=num_distinct,
        num_rows=num_rows,
        rounds=rounds,
        with_slots=with_slots,
    )
    return bags, num_distinct, num_rows, seed


@tries(60)
@given(feature=features(), mode=st.sampled_from(MODES), dim=st.integers(1, 70) | st.just(300))
def test_pooling_and_gradient_agree_with_the_model(
    feature: tuple[model.Bags, int, int, int], mode: str, dim: int
) -> None:
    bags, num_distinct, num_rows, seed = feature
    rng = np.random.default_rng(seed)
    if mode == "sum" and seed % 3:
        bags = weighted(rng, bags)
    # Few different values, so that equal maxima occur.
    rows = np.round(normals(rng, num_rows, dim), 1 if mode == "max" else 6)
    out, argmax = pool(mode, bags, rows)
    want, want_argmax = model.pool(mode, bags, rows)
    assert same(out, want)
    assert (argmax is None) == (want_argmax is None)
    if argmax is not None and want_argmax is not None:
        assert same(argmax, want_argmax)

    grad, start = normals(rng, len(want), dim), normals(rng, num_rows, dim)
    skip = rng.integers(0, 2, len(want), dtype=np.uint8) if seed % 2 else None
    got = pool_grad(mode, bags, grad, argmax, skip, start)
    assert same(got, model.pool_grad(mode, bags, grad, want_argmax, skip, start))

    vectors = np.full((num_distinct, dim), np.nan, np.float32)
    pooling.gather(rows, bags.slots, bags.rounds, vectors)
    assert same(vectors, model.gather(bags, rows, num_distinct))
    distinct_grad = normals(rng, num_distinct, dim)
    got = start.copy()
    pooling.scatter_add(distinct_grad, bags.slots, bags.rounds, got)
    assert same(got, model.scatter_add(bags, distinct_grad, start))


def test_w64_every_variant_gives_the_same_bytes() -> None:
    for dim in range(1, 71):
        results: list[list[bytes]] = []
        for one in cpu.available():
            cpu.select(one)
            rng = np.random.default_rng(dim)
            # Enough ids to reach past the prefetch distance.
            bags = make_bags(
                rng,
                lengths=[dim % 3, 0, 40, 1, 7],
                num_samples=5,
                num_distinct=30,
                num_rows=40,
                rounds=1 + dim % 2,
                with_slots=True,
            )
            rows, grad = normals(rng, 40, dim), normals(rng, 5, dim)
            rows[3, 0], grad[1, dim - 1] = np.nan, np.inf
            found: list[NDArray[Any]] = []
            for mode in MODES:
                out, argmax = pool(mode, bags, rows)
                found += [out, pool_grad(mode, bags, grad, argmax, None, rows)]
                found += [] if argmax is None else [argmax]
            heavy = weighted(rng, bags)
            found += [pool("sum", heavy, rows)[0]]
            found += [pool_grad("sum", heavy, grad, None, None, rows)]
            vectors = np.zeros((30, dim), np.float32)
            pooling.gather(rows, bags.slots, bags.rounds, vectors)
            sums = np.zeros((40, dim), np.float32)
            pooling.scatter_add(vectors, bags.slots, bags.rounds, sums)
            pooling.index_add(vectors, rng.integers(0, 40, 30), sums)
            found += [vectors, sums, pooling.nonfinite(rows), pooling.nonfinite(grad)]
            results.append([array.tobytes() for array in found])
        cpu.select(None)
        assert all(other == results[0] for other in results), dim


@tries(60)
@given(
    lengths=st.lists(st.integers(0, 4), max_size=12),
    mode=st.sampled_from(["sum", "mean", "sqrt"]),
    dim=st.sampled_from([1, 8, 16, 33, 300]),
    seed=st.integers(0, 2**32 - 1),
)
def test_sums_that_begin_without_zeros_are_those_that_begin_with_them(
    lengths: list[int], mode: str, dim: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    lengths = [1] * len(lengths) if seed % 2 else lengths
    ids = rng.integers(0, 6, sum(lengths))
    numbers = {int(one): number for number, one in enumerate(dict.fromkeys(ids))}
    inverse = np.array([numbers[int(one)] for one in ids], np.uint32)
    offsets = None if seed % 2 else np.cumsum([0, *lengths], dtype=np.uint32)
    bags = model.Bags(None, 1, inverse, offsets)
    grad = normals(rng, len(lengths), dim)
    grad[rng.random(grad.shape) < 0.2] = -0.0  # 0 + -0 is 0
    zeros = np.zeros((len(numbers), dim), np.float32)
    got = np.full_like(zeros, np.nan)
    for level in cpu.available():
        cpu.select(level)
        assert pooling.begin_grad(mode, grad, inverse, offsets, got)
        assert same(got, model.pool_grad(mode, bags, grad, None, None, zeros))
    cpu.select(None)


@pytest.mark.parametrize("inverse", [[1, 0], [0, 2, 1], [0, 0]])
def test_ids_in_another_order_do_not_begin_sums(inverse: list[int]) -> None:
    out = np.zeros((max(2, max(inverse) + 1), 3), np.float32)
    grad = np.ones((len(inverse), 3), np.float32)
    assert not pooling.begin_grad("sum", grad, np.array(inverse, np.uint32), None, out)


def test_sums_that_cannot_begin() -> None:
    out, numbers = np.zeros((1, 3), np.float32), np.zeros(2, np.uint32)
    with pytest.raises(ConfigError, match="expected one of sum, mean, sqrt, got 'max'"):
        pooling.begin_grad("max", np.ones((2, 3), np.float32), numbers, None, out)
    with pytest.raises(DataError, match="inverse must be below 1"):
        pooling.begin_grad("sum", np.ones((2, 3), np.float32), numbers + 1, None, out)
    with pytest.raises(DataError, match="grad must have shape"):
        pooling.begin_grad("sum", np.ones((3, 3), np.float32), numbers, None, out)


@pytest.mark.parametrize("dim", [1, 8, 33])
def test_weights_agree_with_embedding_bag(dim: int) -> None:
    rng = np.random.default_rng(13)
    bags = make_bags(
        rng,
        lengths=[3, 0, 1, 8, 2, 0, 5],
        num_samples=7,
        num_distinct=6,
        num_rows=6,
        rounds=1,
        with_slots=False,
    )
    bags = weighted(rng, bags)
    assert bags.offsets is not None
    assert bags.weights is not None
    rows, grad = normals(rng, 6, dim), normals(rng, 7, dim)
    weight = torch.from_numpy(rows.copy()).requires_grad_()
    peer = torch.nn.functional.embedding_bag(
        torch.from_numpy(bags.inverse.astype(np.int64)),
        weight,
        torch.from_numpy(bags.offsets[:-1].astype(np.int64)),
        mode="sum",
        per_sample_weights=torch.from_numpy(bags.weights),
    )
    torch.autograd.backward([peer], [torch.from_numpy(grad)])
    out, _ = pool("sum", bags, rows)
    # Torch sums in another order.
    np.testing.assert_allclose(out, peer.detach().numpy(), rtol=1e-6, atol=2e-6)
    got = pool_grad("sum", bags, grad, None, None, np.zeros_like(rows))
    assert weight.grad is not None
    np.testing.assert_allclose(got, weight.grad.numpy(), rtol=1e-6, atol=2e-6)


def test_weights_of_one_change_no_bit() -> None:
    rng = np.random.default_rng(14)
    bags = make_bags(
        rng,
        lengths=[3, 0, 1],
        num_samples=3,
        num_distinct=3,
        num_rows=9,
        rounds=2,
        with_slots=True,
    )
    ones = dataclasses.replace(bags, weights=np.ones(4, np.float32))
    rows, grad = normals(rng, 9, 16), normals(rng, 3, 16)
    assert same(pool("sum", ones, rows)[0], pool("sum", bags, rows)[0])
    wanted = pool_grad("sum", bags, grad, None, None, rows)
    assert same(pool_grad("sum", ones, grad, None, None, rows), wanted)


def test_weights_that_do_not_fit() -> None:
    inverse = np.zeros(4, np.uint32)
    rows, weights = np.ones((1, 2), np.float32), np.ones(4, np.float32)
    wrong = model.Bags(None, 1, inverse, None, weights[:3])
    with pytest.raises(DataError, match="weights must have 4 entries, got 3"):
        pool("sum", wrong, rows)
    with pytest.raises(DataError, match="weights must have 4 entries, got 3"):
        pool_grad("sum", wrong, np.ones((4, 2), np.float32), None, None, rows)
    for mode in ("mean", "sqrt", "max"):
        with pytest.raises(DataError, match=f"for pooling sum, got them for {mode}"):
            pool(mode, model.Bags(None, 1, inverse, None, weights), rows)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("dim", [1, 5, 8, 16, 33])
def test_values_and_gradients_agree_with_embedding_bag(mode: str, dim: int) -> None:
    rng = np.random.default_rng(11)
    lengths = [3, 0, 1, 8, 2, 0, 5]
    bags = make_bags(
        rng,
        lengths=lengths,
        num_samples=7,
        num_distinct=6,
        num_rows=6,
        rounds=1,
        with_slots=False,
    )
    assert bags.offsets is not None
    assert len(bags.inverse) > len(set(bags.inverse.tolist()))
    rows, grad = normals(rng, 6, dim), normals(rng, 7, dim)
    weight = torch.from_numpy(rows.copy()).requires_grad_()
    peer = torch.nn.functional.embedding_bag(
        torch.from_numpy(bags.inverse.astype(np.int64)),
        weight,
        torch.from_numpy(bags.offsets[:-1].astype(np.int64)),
        mode=mode,
    )
    torch.autograd.backward([peer], [torch.from_numpy(grad)])
    out, argmax = pool(mode, bags, rows)
    # Torch sums in another order; at most 8 values of size 3 here.
    np.testing.assert_allclose(out, peer.detach().numpy(), rtol=1e-6, atol=1e-6)
    got = pool_grad(mode, bags, grad, argmax, None, np.zeros_like(rows))
    assert weight.grad is not None
    np.testing.assert_allclose(got, weight.grad.numpy(), rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("mode", MODES)
def test_gradient_agrees_with_autograd_through_a_hash_stack(mode: str) -> None:
    rng = np.random.default_rng(12)
    bags = make_bags(
        rng,
        lengths=[2, 0, 6, 1],
        num_samples=4,
        num_distinct=5,
        num_rows=7,
        rounds=3,
        with_slots=True,
    )
    rows, grad = normals(rng, 7, 6), normals(rng, 4, 6)
    weight = torch.from_numpy(rows.copy()).requires_grad_()
    pooled = []
    for sample in bags.samples():
        stack = [sum(weight[row] for row in bags.rows_of(one)) for one in sample]
        if not stack:
            pooled.append(torch.zeros(6))
            continue
        vectors = torch.stack([torch.as_tensor(one) for one in stack])
        if mode == "max":
            pooled.append(vectors.max(dim=0).values)
        else:
            divisor = {"sum": 1.0, "mean": len(sample), "sqrt": len(sample) ** 0.5}[mode]
            pooled.append(vectors.sum(dim=0) / divisor)
    result = torch.stack(pooled)
    torch.autograd.backward([result], [torch.from_numpy(grad)])
    out, argmax = pool(mode, bags, rows)
    np.testing.assert_allclose(out, result.detach().numpy(), rtol=1e-5, atol=1e-6)
    got = pool_grad(mode, bags, grad, argmax, None, np.zeros_like(rows))
    assert weight.grad is not None
    np.testing.assert_allclose(got, weight.grad.numpy(), rtol=1e-5, atol=1e-6)


def test_w12_the_rounds_of_a_hash_stack_are_summed_for_raw_slots(level: str) -> None:
    rows = np.arange(12, dtype=np.float32).reshape(6, 2)
    slots = np.array([0, 5, 3, 3, 1, 4], np.uint32)
    vectors = np.zeros((3, 2), np.float32)
    pooling.gather(rows, slots, 2, vectors)
    assert vectors.tolist() == [[10, 12], [12, 14], [10, 12]]
    # Every round of an id receives the whole gradient; a row met twice receives it twice.
    sums = np.zeros((6, 2), np.float32)
    pooling.scatter_add(np.array([[1, 2], [10, 20], [100, 200]], np.float32), slots, 2, sums)
    assert sums.tolist() == [[1, 2], [100, 200], [0, 0], [20, 40], [100, 200], [1, 2]]


@pytest.mark.parametrize("mode", MODES)
def test_an_empty_sample_is_a_zero_row_and_gives_no_gradient(mode: str, level: str) -> None:
    bags = model.Bags(None, 1, np.zeros(0, np.uint32), np.zeros(4, np.uint32))
    rows = np.ones((2, 5), np.float32)
    out, argmax = pool(mode, bags, rows)
    assert out.tolist() == [[0.0] * 5] * 3
    assert argmax is None or argmax.tolist() == [[-1] * 5] * 3
    grad = np.ones((3, 5), np.float32)
    assert same(pool_grad(mode, bags, grad, argmax, None, rows), rows)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("offsets", [None, np.zeros(1, np.uint32)])
def test_a_feature_without_samples_or_rows_is_legal(
    mode: str, offsets: NDArray[np.uint32] | None
) -> None:
    bags = model.Bags(np.zeros(0, np.uint32), 2, np.zeros(0, np.uint32), offsets)
    rows = np.zeros((0, 3), np.float32)
    out, argmax = pool(mode, bags, rows)
    assert out.shape == (0, 3)
    pool_grad(mode, bags, out, argmax, np.zeros(0, np.uint8), rows)
    pooling.gather(rows, bags.slots, 2, rows)
    pooling.scatter_add(rows, bags.slots, 2, rows)
    pooling.index_add(rows, np.zeros(0, np.int64), rows)
    assert pooling.nonfinite(rows).shape == (0,)


@pytest.mark.parametrize("mode", MODES)
def test_a_single_id_keeps_its_bits(mode: str, level: str) -> None:
    rng = np.random.default_rng(9)
    rows = normals(rng, 50, 19)
    rows[4] = -0.0
    inverse = rng.permutation(50).astype(np.uint32)
    for offsets in (None, np.arange(51, dtype=np.uint32)):
        out, argmax = pool(mode, model.Bags(None, 1, inverse, offsets), rows)
        assert out.tobytes() == rows[inverse].tobytes()
        assert argmax is None or (argmax == inverse[:, None]).all()


def test_of_equal_maxima_the_first_id_wins(level: str) -> None:
    rows = np.array([[1.0] * 9, [2.0] * 9, [2.0] * 9], np.float32)
    for order, want in (([0, 1, 2], 1), ([2, 0, 1], 2), ([1, 2, 1], 1)):
        bags = model.Bags(None, 1, np.array(order, np.uint32), np.array([0, 3], np.uint32))
        _, argmax = pool("max", bags, rows)
        assert argmax is not None
        assert argmax.tolist() == [[want] * 9]


def test_skipped_samples_leave_no_trace(level: str) -> None:
    inverse, offsets = np.array([0, 1, 0], np.uint32), np.array([0, 2, 3], np.uint32)
    bags = model.Bags(None, 1, inverse, offsets)
    grad = np.array([[np.nan, 1.0], [3.0, 4.0]], np.float32)
    skip = pooling.nonfinite(grad)
    assert skip.tolist() == [1, 0]
    got = pool_grad("sum", bags, grad, None, skip, np.zeros((2, 2), np.float32))
    assert got.tolist() == [[3.0, 4.0], [0.0, 0.0]]


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_nonfinite_finds_each_value_in_each_place(value: float, level: str) -> None:
    for dim in (1, 3, 8, 17, 64):
        for j in range(dim):
            matrix = np.full((3, dim), np.finfo(np.float32).max, np.float32)
            matrix[1, j] = value
            assert pooling.nonfinite(matrix).tolist() == [0, 1, 0]


def test_nonfinite_takes_every_finite_value(level: str) -> None:
    info = np.finfo(np.float32)
    row = [info.max, info.min, info.tiny, info.smallest_subnormal, 0.0, -0.0, 1.0, -1.0, 3.0]
    assert pooling.nonfinite(np.array([row, row], np.float32)).tolist() == [0, 0]


def test_index_add_adds_in_order(level: str) -> None:
    rng = np.random.default_rng(4)
    grad, index = normals(rng, 100, 13), rng.integers(0, 9, 100)
    out = normals(rng, 9, 13)
    want = out.copy()
    np.add.at(want, index, grad)
    pooling.index_add(grad, index, out)
    assert same(out, want)


# Two samples of ids [0, 1] and [1], two rounds, four rows of dim 3.
def good() -> dict[str, Any]:
    return {
        "mode": "sum",
        "rows": np.ones((4, 3), np.float32),
        "slots": np.array([0, 1, 2, 3], np.uint32),
        "rounds": 2,
        "inverse": np.array([0, 1, 1], np.uint32),
        "offsets": np.array([0, 2, 3], np.uint32),
        "out": np.full((2, 3), 7.0, np.float32),
    }


def u32(*numbers: int) -> NDArray[np.uint32]:
    return np.array(numbers, np.uint32)


DAMAGED: list[tuple[dict[str, Any], str]] = [
    ({"slots": u32(0, 1, 2, 4)}, r"slots must be below 4 \(the rows\), got 4"),
    ({"slots": u32(0, 1, 2, 2**32 - 1)}, r"slots must be below 4 .*, got 4294967295"),
    ({"slots": u32(0, 1, 2)}, "slots must hold 2 per distinct id, got 3"),
    ({"slots": None}, "slots must be given for 2 rounds"),
    ({"rounds": 0}, "rounds must be at least 1, got 0"),
    ({"rounds": -1}, "rounds must be at least 1, got -1"),
    ({"inverse": u32(0, 1, 2)}, r"inverse must be below 2 \(the distinct ids\), got 2"),
    ({"offsets": u32()}, "offsets must hold one more than the samples"),
    ({"offsets": u32(1, 2, 3)}, r"offsets must rise from 0 to 3 \(the ids\), got 1 to 3"),
    ({"offsets": u32(0, 2, 4)}, "got 0 to 4"),
    ({"offsets": u32(0, 4, 3)}, "got 0 to 3 with 1 descents"),
    ({"offsets": u32(0, 3)}, r"must have shape \(1, 3\), got \(2, 3\)"),
    ({"offsets": None}, r"must have shape \(3, 3\), got \(2, 3\)"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGED)
def test_numbers_out_of_range_are_refused_before_anything_is_written(
    damage: dict[str, Any], message: str
) -> None:
    case = {**good(), **damage}
    with pytest.raises(DataError, match=message):
        pooling.pool(*case.values())
    assert (case["out"] == 7.0).all()
    rows = case["rows"]
    grad = np.ones((2, 3), np.float32)
    case = {key: case[key] for key in ("slots", "rounds", "inverse", "offsets")}
    with pytest.raises(DataError, match=message):
        pooling.pool_grad("sum", grad, argmax=None, skip=None, out=rows, **case)
    assert (rows == 1.0).all()


@pytest.mark.parametrize("shape", [(1, 3), (3, 3), (2, 2), (2, 4)])
def test_outputs_of_another_shape_are_refused(shape: tuple[int, int]) -> None:
    case = {**good(), "out": np.zeros(shape, np.float32)}
    with pytest.raises(DataError, match=r"out must have shape \(2, 3\)"):
        pooling.pool(*case.values())
    with pytest.raises(DataError, match=r"out must have shape \(2, 3\)"):
        pooling.gather(case["rows"], case["slots"], 2, case["out"])
    with pytest.raises(DataError, match=r"grad must have shape \(2, 3\)"):
        pooling.scatter_add(case["out"], case["slots"], 2, case["rows"])


def test_gradients_that_do_not_fit_are_refused() -> None:
    case = good()
    feature = {key: case[key] for key in ("slots", "rounds", "inverse", "offsets")}
    rows, grad = case["rows"], np.ones((2, 3), np.float32)
    short = np.zeros(1, np.uint8)
    with pytest.raises(DataError, match="skip must have 2 entries, got 1"):
        pooling.pool_grad("sum", grad, argmax=None, skip=short, out=rows, **feature)
    with pytest.raises(DataError, match="argmax must be given for max"):
        pooling.pool_grad("max", grad, argmax=None, skip=None, out=rows, **feature)
    few = np.zeros((1, 3), np.int32)
    with pytest.raises(DataError, match=r"argmax must have shape \(2, 3\)"):
        pooling.pool_grad("max", grad, argmax=few, skip=None, out=rows, **feature)
    for wrong in (2, -2, 2**31 - 1, -(2**31)):
        argmax = np.full((2, 3), -1, np.int32)
        argmax[1, 2] = wrong
        with pytest.raises(DataError, match=rf"argmax must be in -1\.\.1, got {wrong}"):
            pooling.pool_grad("max", grad, argmax=argmax, skip=None, out=rows, **feature)
    assert (rows == 1.0).all()


@pytest.mark.parametrize("wrong", [4, -1, 2**63 - 1, -(2**63)])
def test_an_index_out_of_range_is_refused(wrong: int) -> None:
    out = np.zeros((4, 3), np.float32)
    with pytest.raises(DataError, match=rf"index must be in 0\.\.3, got {wrong}"):
        pooling.index_add(np.ones((2, 3), np.float32), np.array([0, wrong]), out)
    assert not out.any()


@pytest.mark.parametrize("mode", ["", "SUM", "raw", None])
def test_an_unknown_mode_is_refused(mode: Any) -> None:
    with pytest.raises(ConfigError, match="pooling: expected one of sum, mean, sqrt, max, got"):
        pooling.pool(*{**good(), "mode": mode}.values())
