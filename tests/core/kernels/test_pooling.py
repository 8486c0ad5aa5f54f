"""``persia._core.kernels.pooling`` against its model, torch, and itself on several threads."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from persia._core.base import cpu
from persia._core.base.threads import ThreadPool
from persia._core.ids.feature_batch import FeatureBatch
from persia._core.kernels import pooling
from persia._core.kernels.pooling import PoolCalls
from persia.errors import ConfigError, DataError, DataTypeError
from tests.reference import pooling as model
from tests.support.profiles import tries

Floats = NDArray[np.float32]
Numbers = NDArray[np.uint32]
MODES = ["sum", "mean", "sqrt", "max"]
ALONE = ThreadPool(1)


class Feature(NamedTuple):
    """A feature and where its rows are."""

    ids: FeatureBatch
    places: Numbers | None
    rounds: int

    @property
    def bags(self) -> model.Bags:
        ids = self.ids
        return model.Bags(self.places, self.rounds, ids.inverse, ids.offsets, ids.weights)


def normals(rng: np.random.Generator, n: int, dim: int) -> Floats:
    return rng.standard_normal((n, dim), dtype=np.float32)


def same(got: NDArray[Any], want: NDArray[Any]) -> bool:
    """Equal shapes and bits, but for the sign of zero in an untouched sum."""
    return got.shape == want.shape and bool(np.array_equal(got, want, equal_nan=True))


def make_feature(
    rng: np.random.Generator,
    lengths: Sequence[int] | None,
    num_rows: int,
    rounds: int = 0,
    weighted: bool = False,
    single: int = 0,
) -> Feature:
    """Random ids below ``num_rows``; ``lengths`` None gives ``single`` samples of one id each,
    ``rounds`` 0 no places."""
    num_ids = single if lengths is None else sum(lengths)
    values = rng.integers(0, num_rows, num_ids, dtype=np.uint64)
    weights = rng.standard_normal(num_ids, dtype=np.float32) if weighted else None
    if weights is not None:
        weights[weights > 1] = 0
    edges = np.arange(num_ids + 1) if lengths is None else np.cumsum([0, *lengths])
    ids = FeatureBatch.from_csr("f", values, edges, weights)
    places = None
    if rounds:
        places = rng.integers(0, num_rows, ids.num_distinct * rounds, dtype=np.uint32)
    return Feature(ids, places, rounds or 1)


def pool(mode: str, feature: Feature, rows: Floats) -> tuple[Floats, Any]:
    out = np.full((feature.ids.batch_size, rows.shape[1]), np.nan, np.float32)
    calls = PoolCalls()
    argmax = calls.pool(mode, rows, feature.places, feature.rounds, feature.ids, out)
    assert calls.run(ALONE)
    return out, argmax


def pool_grad(
    mode: str, feature: Feature, grad: Floats, argmax: Any, skip: Any, out: Floats
) -> Floats:
    out = out.copy()
    calls = PoolCalls()
    calls.begin_sums(None)
    calls.pool_grad(mode, grad, feature.places, feature.rounds, feature.ids, argmax, skip, out)
    calls.run(ALONE)
    return out


@st.composite
def features(draw: st.DrawFn) -> tuple[Feature, int, int]:
    """(feature, number of rows, seed)."""
    seed = draw(st.integers(0, 2**32 - 1))
    lengths = draw(st.none() | st.lists(st.integers(0, 5), max_size=30))
    num_rows, rounds = draw(st.integers(1, 20)), draw(st.integers(0, 3))
    rng = np.random.default_rng(seed)
    single = draw(st.integers(0, 60))
    feature = make_feature(rng, lengths, num_rows, rounds, seed % 3 == 1, single)
    return feature, num_rows, seed


@pytest.mark.usefixtures("level")
@tries(60)
@given(drawn=features(), mode=st.sampled_from(MODES), dim=st.integers(1, 70) | st.just(300))
def test_pooling_and_gradient_agree_with_the_model(
    drawn: tuple[Feature, int, int], mode: str, dim: int
) -> None:
    feature, num_rows, seed = drawn
    mode = mode if feature.ids.weights is None else "sum"
    rng, bags = np.random.default_rng(seed), feature.bags
    num_distinct = feature.ids.num_distinct
    # Few different values, so that equal maxima occur.
    rows = np.round(normals(rng, num_rows, dim), 1 if mode == "max" else 6)
    out, argmax = pool(mode, feature, rows)
    want, want_argmax = model.pool(mode, bags, rows)
    assert same(out, want)
    assert argmax is want_argmax is None or same(argmax, want_argmax)  # type: ignore[arg-type]

    grad, start = normals(rng, len(want), dim), normals(rng, num_rows, dim)
    grad[rng.random(grad.shape) < 0.1] = -0.0  # 0 + -0 is 0
    skip = rng.integers(0, 2, len(want), dtype=np.uint8) if seed % 2 else None
    if skip is not None:
        grad[skip == 1, 0] = np.nan  # leaves no trace
    got = pool_grad(mode, feature, grad, argmax, skip, start)
    assert same(got, model.pool_grad(mode, bags, grad, want_argmax, skip, start))
    # Set to zero first, or written where a row's first gradient comes.
    sums = np.full((num_rows if feature.places is not None else num_distinct, dim), np.nan)
    sums = sums.astype(np.float32)
    calls = PoolCalls()
    calls.begin_sums(sums)
    calls.pool_grad(mode, grad, feature.places, feature.rounds, feature.ids, argmax, skip, sums)
    assert calls.run(ALONE)
    zeros = np.zeros_like(sums)
    assert same(sums, model.pool_grad(mode, bags, grad, want_argmax, skip, zeros))
    assert not np.signbit(sums[sums == 0]).any()
    # Of rows that are parts of longer ones, and with their norm.
    wide = np.full((len(grad), dim + 3), np.inf, np.float32)
    wide[:, 2 : dim + 2] = grad
    again, calls = np.full_like(sums, np.nan), PoolCalls()
    calls.begin_sums(again)
    calls.pool_grad(
        *(mode, wide[:, 2 : dim + 2], feature.places, feature.rounds, feature.ids),
        *(argmax, skip, again),
    )
    (norm,) = calls.run_with_norms(ALONE)
    assert same(again, sums)
    assert np.isclose(norm, np.linalg.norm(sums.astype(np.float64)), rtol=1e-6)

    vectors = np.full((num_distinct, dim), np.nan, np.float32)
    window = rows if feature.places is not None else rows[:num_distinct]
    pooling.gather(window, feature.places, feature.rounds, vectors)
    assert same(vectors, model.gather(bags, rows, num_distinct))
    distinct_grad, got = normals(rng, num_distinct, dim), start.copy()
    calls = PoolCalls()
    calls.begin_sums(None)
    calls.scatter_add(distinct_grad, feature.places, feature.rounds, got[: len(window)])
    assert calls.run(ALONE)
    assert same(got, model.scatter_add(bags, distinct_grad, start))


def test_w64_every_variant_gives_the_same_bytes() -> None:
    for dim in range(1, 71):
        results: list[list[bytes]] = []
        for one in cpu.available():
            cpu.select(one)
            rng = np.random.default_rng(dim)
            # Enough ids to reach past the prefetch distance.
            lengths = [dim % 3, 0, 40, 1, 7]
            feature = make_feature(rng, lengths, 40, 1 + dim % 2)
            heavy = make_feature(rng, lengths, 40, 1 + dim % 2, weighted=True)
            rows, grad = normals(rng, 40, dim), normals(rng, 5, dim)
            rows[3, 0], grad[1, dim - 1] = np.nan, np.inf
            found: list[NDArray[Any]] = []
            for mode in MODES:
                out, argmax = pool(mode, feature, rows)
                found += [out, pool_grad(mode, feature, grad, argmax, None, rows)]
                found += [] if argmax is None else [argmax]
            found += [pool("sum", heavy, rows)[0]]
            found += [pool_grad("sum", heavy, grad, None, None, rows)]
            vectors = np.zeros((feature.ids.num_distinct, dim), np.float32)
            pooling.gather(rows, feature.places, feature.rounds, vectors)
            sums = np.zeros((40, dim), np.float32)
            pooling.index_add(vectors, rng.integers(0, 40, len(vectors)), sums)
            found += [vectors, sums, pooling.nonfinite(rows), pooling.nonfinite(grad)]
            results.append([array.tobytes() for array in found])
        cpu.select(None)
        assert all(other == results[0] for other in results), dim


@pytest.mark.parametrize("mode", ["sum", "mean", "max", "weighted"])
@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("dim", [1, 5, 8, 16, 33])
def test_values_and_gradients_agree_with_embedding_bag(
    mode: str, rounds: int, dim: int
) -> None:
    rng = np.random.default_rng(11)
    feature = make_feature(rng, [3, 0, 1, 8, 2, 0, 5], 6, rounds, mode == "weighted")
    ids, mode = feature.ids, mode if mode != "weighted" else "sum"
    assert ids.offsets is not None
    assert ids.num_ids > ids.num_distinct
    rows, grad = normals(rng, 6, dim), normals(rng, 7, dim)
    weight = torch.from_numpy(rows.copy()).requires_grad_()
    assert feature.places is not None
    stack = weight[torch.from_numpy(feature.places.astype(np.int64))]
    peer = torch.nn.functional.embedding_bag(
        torch.from_numpy(ids.inverse.astype(np.int64)),
        stack.reshape(-1, rounds, dim).sum(dim=1),
        torch.from_numpy(ids.offsets[:-1].astype(np.int64)),
        mode=mode,
        per_sample_weights=None
        if ids.weights is None
        else torch.from_numpy(ids.weights.copy()),
    )
    torch.autograd.backward([peer], [torch.from_numpy(grad)])
    out, argmax = pool(mode, feature, rows)
    # Torch sums in another order.
    np.testing.assert_allclose(out, peer.detach().numpy(), rtol=1e-5, atol=2e-6)
    got = pool_grad(mode, feature, grad, argmax, None, np.zeros_like(rows))
    assert weight.grad is not None
    np.testing.assert_allclose(got, weight.grad.numpy(), rtol=1e-5, atol=4e-6)


def test_w12_the_rounds_of_a_hash_stack_are_summed_for_raw_slots(level: str) -> None:
    rows = np.arange(12, dtype=np.float32).reshape(6, 2)
    places = np.array([0, 5, 3, 3, 1, 4], np.uint32)
    vectors = np.zeros((3, 2), np.float32)
    pooling.gather(rows, places, 2, vectors)
    assert vectors.tolist() == [[10, 12], [12, 14], [10, 12]]
    # Every round of an id receives the whole gradient; a row met twice receives it twice.
    sums, calls = np.full((6, 2), np.nan, np.float32), PoolCalls()
    calls.begin_sums(sums)
    calls.scatter_add(np.array([[1, 2], [10, 20], [100, 200]], np.float32), places, 2, sums)
    assert calls.run(ALONE)
    assert sums.tolist() == [[1, 2], [100, 200], [0, 0], [20, 40], [100, 200], [1, 2]]


@pytest.mark.parametrize("mode", MODES)
def test_a_feature_without_samples_or_rows_is_legal(mode: str) -> None:
    rows, none = np.zeros((0, 3), np.float32), np.zeros(0, np.uint32)
    feature = Feature(FeatureBatch.from_list("f", []), none, 2)
    out, argmax = pool(mode, feature, rows)
    assert out.shape == (0, 3)
    pool_grad(mode, feature, out, argmax, np.zeros(0, np.uint8), rows)
    pooling.gather(rows, none, 2, rows)
    pooling.index_add(rows, np.zeros(0, np.int64), rows)
    assert pooling.nonfinite(rows).shape == (0,)


@pytest.mark.parametrize("mode", MODES)
def test_a_single_id_keeps_its_bits(mode: str, level: str) -> None:
    rng = np.random.default_rng(9)
    rows = normals(rng, 50, 19)
    rows[4] = -0.0
    for lengths in (None, [1] * 50, [*([1] * 50), 0]):
        feature = make_feature(rng, lengths, 50, single=50)
        numbers = feature.ids.inverse
        out, argmax = pool(mode, feature, rows)
        assert out[:50].tobytes() == rows[numbers].tobytes()
        assert argmax is None or (argmax[:50] == numbers[:, None]).all()


def test_nonfinite_finds_each_value_in_each_place_and_takes_every_finite_one(
    level: str,
) -> None:
    info = np.finfo(np.float32)
    row = [info.max, info.min, info.tiny, info.smallest_subnormal, 0.0, -0.0, 1.0, -1.0, 3.0]
    assert pooling.nonfinite(np.array([row, row], np.float32)).tolist() == [0, 0]
    for value in (np.nan, -np.nan, np.inf, -np.inf):
        for dim in (1, 3, 8, 17, 64):
            for j in range(dim):
                matrix = np.full((3, dim), info.max, np.float32)
                matrix[1, j] = value
                assert pooling.nonfinite(matrix).tolist() == [0, 1, 0]


@pytest.mark.parametrize("num_floats", [0, 15, 2047, 2064, 300_000])
def test_norms_are_exact_however_many_floats_there_are(num_floats: int, level: str) -> None:
    rng = np.random.default_rng(num_floats)
    feature, calls = make_feature(rng, None, num_floats, single=num_floats), PoolCalls()
    grad = normals(rng, num_floats, 1)
    sums = np.empty((feature.ids.num_distinct, 1), np.float32)
    calls.begin_sums(sums)
    calls.pool_grad("sum", grad, None, 1, feature.ids, None, None, sums)
    (norm,) = calls.run_with_norms(ALONE)
    assert norm == pytest.approx(np.linalg.norm(sums.astype(np.float64)), rel=1e-6)


def test_gradients_of_any_layout_are_taken(level: str) -> None:
    rng = np.random.default_rng(5)
    feature, grad = make_feature(rng, [2, 0, 3, 1], 4), normals(rng, 4, 8)
    start = np.zeros((feature.ids.num_distinct, 8), np.float32)
    for layout in (
        *(grad[::-1], grad[:, ::-1], np.asfortranarray(grad), grad[[0] * 4]),
        *(np.broadcast_to(grad[0], (4, 8)), np.broadcast_to(np.float32(2), (4, 8))),
    ):
        found = [
            pool_grad("sum", feature, one, None, None, start)
            for one in (layout, np.ascontiguousarray(layout))
        ]
        assert same(*found)


def test_index_add_adds_in_order(level: str) -> None:
    rng = np.random.default_rng(4)
    grad, index = normals(rng, 100, 13), rng.integers(0, 9, 100)
    out = normals(rng, 9, 13)
    want = out.copy()
    np.add.at(want, index, grad)
    pooling.index_add(grad, index, out)
    assert same(out, want)
    for wrong in (9, -1, 2**63 - 1, -(2**63)):
        with pytest.raises(DataError, match=rf"index must be in 0\.\.8, got {wrong}"):
            pooling.index_add(grad[:2], np.array([0, wrong]), out)
    assert same(out, want)


# --- calls made together --------------------------------------------------------------------

ROWS, DIM = 500, 8
CASES = [
    (mode, kind, num_ids)
    for mode, kind in [
        ("sum", "single"), ("sum", "bags"), ("sum", "weights"), ("sum", "stack"),
        ("mean", "bags"), ("sqrt", "stack"), ("max", "bags"), ("max", "single"),
    ]
    for num_ids in (0, 7, 40_000)
]  # fmt: skip


def some_feature(rng: np.random.Generator, num_ids: int, kind: str) -> Feature:
    edges = np.sort(rng.integers(0, num_ids + 1, num_ids // 3))
    lengths = None if kind == "single" else np.diff([0, *edges, num_ids]).tolist()
    rounds = 2 if kind == "stack" else 0
    return make_feature(rng, lengths, ROWS, rounds, kind == "weights", single=num_ids)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_all_calls_at_once_are_each_call_alone(num_threads: int) -> None:
    rng = np.random.default_rng(0)
    rows = normals(rng, ROWS, DIM)
    calls, expected, made = PoolCalls(), [], []
    for mode, kind, num_ids in CASES:
        feature = some_feature(rng, num_ids, kind)
        out = np.full((feature.ids.batch_size, DIM), 9, np.float32)
        expected.append(pool(mode, feature, rows))
        argmax = calls.pool(mode, rows, feature.places, feature.rounds, feature.ids, out)
        made.append((out, argmax))
    with closing(ThreadPool(num_threads)) as threads:
        assert calls.run(threads)
    for (wanted, maxima), (out, own) in zip(expected, made, strict=True):
        assert wanted.tobytes() == out.tobytes()
        assert maxima is own is None or np.array_equal(maxima, own)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("bad", [None, np.inf, np.nan])
def test_sums_are_set_to_zero_added_in_order_and_looked_at(
    num_threads: int, bad: float | None
) -> None:
    rng = np.random.default_rng(1)
    rows = normals(rng, ROWS, DIM)
    calls, expected, made = PoolCalls(), [], []
    for mode, kind, num_ids in CASES:
        wanted, sums = np.zeros((ROWS, DIM), np.float32), np.full((ROWS, DIM), np.nan, "f4")
        calls.begin_sums(sums)
        for _ in range(2):  # two features of a group, and one that is raw
            feature = some_feature(rng, num_ids, kind)
            grad = normals(rng, feature.ids.batch_size, DIM)
            skip = rng.integers(0, 2, len(grad)).astype(np.uint8)
            argmax = pool(mode, feature, rows)[1]
            wanted = pool_grad(mode, feature, grad, argmax, skip, wanted)
            ids, places, rounds = feature
            calls.pool_grad(mode, grad, places, rounds, ids, argmax, skip, sums)
        raw = normals(rng, ROWS, DIM)
        calls.scatter_add(raw, None, 1, sums)
        expected.append(wanted + raw)
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
    assert calls.run(ALONE)
    assert np.isinf(sums).all()
    assert PoolCalls().run(ALONE)


# --- what does not fit ------------------------------------------------------------------------

# Two samples, [0, 1] and [1]; with them come two rounds and four rows of dim 3.
IDS = FeatureBatch.from_csr("f", np.array([0, 1, 1], np.uint64), np.array([0, 2, 3]))
SHORT = FeatureBatch.from_single("f", np.array([0, 1, 2], np.uint64))
HEAVY = FeatureBatch.from_csr(
    "f", np.array([0, 1, 1], np.uint64), np.array([0, 2, 3]), np.ones(3, np.float32)
)


def u32(*numbers: int) -> Numbers:
    return np.array(numbers, np.uint32)


DAMAGED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"places": u32(0, 1, 2, 4)}, DataError, r"places must be below 4 \(the rows\), got 4"),
    (
        {"places": u32(0, 1, 2, 2**32 - 1)},
        DataError,
        r"places must be below 4 .*, got 4294967295",
    ),
    ({"places": u32(0, 1, 2)}, DataError, "places must hold 2 per distinct id, got 3"),
    ({"places": u32(0, 1)}, DataError, "expected rows of 2 distinct ids, got those of 1"),
    ({"places": None}, DataError, "places must be given for 2 rounds"),
    ({"places": u32(0, 1, 2, 3).astype(np.int32)}, DataTypeError, "places: expected .* uint32"),
    ({"rounds": 0}, DataError, "rounds must be at least 1, got 0"),
    ({"rounds": -1}, DataError, "rounds must be at least 1, got -1"),
    ({"ids": SHORT}, DataError, "expected rows of 3 distinct ids, got those of 2"),
    ({"mode": "mean", "ids": HEAVY}, DataError, "for pooling sum, got them for mean"),
    ({"mode": "max", "ids": HEAVY}, DataError, "for pooling sum, got them for max"),
    ({"mode": "SUM"}, ConfigError, "expected one of sum, mean, sqrt, max, got 'SUM'"),
    ({"mode": None}, ConfigError, "pooling: expected one of sum, mean, sqrt, max, got None"),
    ({"by_sample": np.ones((1, 3), np.float32)}, DataError, r"must have shape \(2, 3\)"),
    ({"by_sample": np.ones((2, 4), np.float32)}, DataError, r"must have shape \(2, 3\)"),
    ({"by_sample": np.ones((2, 3))}, DataTypeError, "matrix of float32.*, got float64"),
    ({"rows": np.ones((4, 0), np.float32)}, DataError, "dim must be at least 1, got 0"),
    ({"rows": [[1.0]]}, DataTypeError, "float32.*, got an object of type list"),
]


@pytest.mark.parametrize(("damage", "error", "message"), DAMAGED)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    damage: dict[str, Any], error: type[Exception], message: str
) -> None:
    good = {"mode": "sum", "places": u32(0, 1, 2, 3), "rounds": 2, "ids": IDS}
    good |= {"rows": np.ones((4, 3), np.float32), "by_sample": np.full((2, 3), 7, np.float32)}
    mode, places, rounds, ids, rows, by_sample = ({**good, **damage}[name] for name in good)
    before = np.array(rows), np.array(by_sample)
    calls = PoolCalls()
    with pytest.raises(error, match=message):
        calls.pool(mode, rows, places, rounds, ids, by_sample)
    calls.begin_sums(None)
    with pytest.raises(error, match=message):
        calls.pool_grad(mode, by_sample, places, rounds, ids, None, None, rows)
    assert calls.run(ALONE)
    assert np.array_equal(rows, before[0])
    assert np.array_equal(by_sample, before[1])


def test_gradients_that_do_not_fit_are_refused() -> None:
    places, rows = u32(0, 1, 2, 3), np.ones((4, 3), np.float32)
    grad, calls = np.ones((2, 3), np.float32), PoolCalls()
    with pytest.raises(DataError, match="begin_sums"):
        calls.pool_grad("sum", grad, places, 2, IDS, None, None, rows)
    with pytest.raises(DataError, match="begin_sums"):
        calls.scatter_add(grad, places, 2, rows)
    calls.begin_sums(None)

    def ask(mode: str, argmax: Any, skip: Any = None) -> None:
        calls.pool_grad(mode, grad, places, 2, IDS, argmax, skip, rows)

    requests: list[tuple[str, Any]] = [
        ("skip must have 2 entries", lambda: ask("sum", None, np.zeros(1, np.uint8))),
        ("argmax must be given for max", lambda: ask("max", None)),
        ("argmax must have shape", lambda: ask("max", np.zeros((1, 3), np.int32))),
        ("grad must have shape", lambda: calls.scatter_add(rows, places, 2, rows)),
        ("out must have shape", lambda: pooling.gather(rows, places, 2, rows)),
    ]
    for message, request in requests:
        with pytest.raises(DataError, match=message):
            request()
    for wrong in (2, -2, 2**31 - 1, -(2**31)):
        argmax = np.full((2, 3), -1, np.int32)
        argmax[1, 2] = wrong
        with pytest.raises(DataError, match=rf"argmax must be in -1\.\.1, got {wrong}"):
            ask("max", argmax)
    frozen = rows.copy()
    frozen.flags.writeable = False
    with pytest.raises(DataTypeError, match="to write"):
        calls.scatter_add(grad, places, 2, frozen)
    assert calls.run(ALONE)
    assert (rows == 1.0).all()
