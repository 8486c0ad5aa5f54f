"""``persia._core.ids.feature_batch`` against its model."""

from __future__ import annotations

import contextlib
import copy
import itertools
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from persia._core.base.threads import ThreadPool
from persia._core.ids.feature_batch import FeatureBatch, number_all
from persia.errors import DataError, DataTypeError
from tests.reference import feature_batch as model
from tests.support import strategies as own


def build(samples: list[list[int]]) -> FeatureBatch:
    return FeatureBatch.from_list("clicks", [own.id_array(sample) for sample in samples])


def check(batch: FeatureBatch, samples: list[list[int]]) -> None:
    want = model.FeatureBatch(samples)
    offsets = None if batch.offsets is None else batch.offsets.tolist()
    assert batch.name == "clicks"
    assert (batch.distinct.tolist(), batch.inverse.tolist()) == (want.distinct, want.inverse)
    assert offsets == want.offsets
    assert batch.lengths().tolist() == want.lengths
    assert (batch.batch_size, batch.num_ids) == (len(samples), len(want.ids))
    assert batch.num_distinct == len(want.distinct)
    assert batch.num_empty == want.lengths.count(0)
    assert batch.distinct.dtype == np.uint64
    assert batch.inverse.dtype == np.uint32
    assert batch.lengths().dtype == np.int64
    for part in batch.parts():
        assert part.flags.owndata
        assert not part.flags.writeable


@given(own.csr_batches())
def test_from_csr(csr: own.CSR) -> None:
    before = csr.values.tolist(), csr.offsets.tolist()
    check(FeatureBatch.from_csr("clicks", csr.values, csr.offsets), csr.samples)
    assert (csr.values.tolist(), csr.offsets.tolist()) == before


@given(st.data(), own.samples())
@example(None, [])
@example(None, [[]])
@example(None, [[], [0, 2**64 - 1, 0], []])
def test_from_list(data: st.DataObject | None, samples: list[list[int]]) -> None:
    arrays = [
        own.id_array(one) if data is None else data.draw(own.layouts(one)) for one in samples
    ]
    check(FeatureBatch.from_list("clicks", arrays), samples)
    check(FeatureBatch.from_list("clicks", tuple(arrays)), samples)


@given(st.data(), own.id_lists())
def test_from_single(data: st.DataObject, ids: list[int]) -> None:
    batch = FeatureBatch.from_single("clicks", data.draw(own.layouts(ids)))
    check(batch, [[one] for one in ids])


@given(st.data(), own.id_lists(), st.integers(1, 7))
def test_from_rows(data: st.DataObject, ids: list[int], size: int) -> None:
    row = st.integers(0, max(len(ids) - 1, 0))
    rows = data.draw(st.lists(row, max_size=20 if ids else 0))
    # As bits: layouts are those of u64.
    array = data.draw(own.layouts(rows)).view(np.int64)
    batches = FeatureBatch.from_rows("clicks", data.draw(own.layouts(ids)), array, size)
    want = [rows[begin : begin + size] for begin in range(0, len(rows), size)]
    assert len(batches) == len(want)
    for batch, own_rows in zip(batches, want, strict=True):
        check(batch, [[ids[row]] for row in own_rows])


@pytest.mark.parametrize("row", [-1, 3, -(2**63)])
def test_from_rows_that_do_not_exist(row: int) -> None:
    ids, rows = np.arange(3, dtype=np.uint64), np.array([0, 2, 1, row])
    expected = f"feature 'clicks': expected rows of 3 ids, got {row} at position 3"
    for size in (1, 2, 9):
        with pytest.raises(DataError, match=expected):
            FeatureBatch.from_rows("clicks", ids, rows, size)
    with pytest.raises(DataTypeError, match=r"'clicks', rows: expected .* int64, got int32"):
        FeatureBatch.from_rows("clicks", ids, rows.astype(np.int32), 2)
    with pytest.raises(DataError, match="batch_size: expected at least 1 sample, got 0"):
        FeatureBatch.from_rows("clicks", ids, rows, 0)


@given(own.samples(), st.integers(0, 9), st.booleans())
@example([[1, 2], [3, 2]], 1, False)  # the first position of 2 is cut, a later one stays
@example([[2, 1], [2, 3, 4]], 2, True)  # as here, from the other side
@example([[1], [2]], 0, True)
@example([[1, 2], [3, 4]], 2**70, False)
def test_truncated(samples: list[list[int]], limit: int, last: bool) -> None:
    batch = build(samples)
    cut = batch.truncated(limit, last)
    check(cut, model.FeatureBatch(samples).truncated(limit, last).samples)
    check(batch, samples)
    assert (cut is batch) == all(len(sample) <= limit for sample in samples)


def test_truncated_refuses_a_negative_limit() -> None:
    with pytest.raises(DataError, match="at least 0, got -1"):
        build([[1]]).truncated(-1)


@given(own.samples())
def test_parts_survive_the_wire(samples: list[list[int]]) -> None:
    sent = [np.frombuffer(part.tobytes(), part.dtype) for part in build(samples).parts()]
    check(FeatureBatch.from_parts("clicks", sent), samples)


def weights_of(samples: list[list[int]]) -> list[NDArray[np.float32]]:
    """Different from id to id."""
    counter = itertools.count(1)
    return [np.array([next(counter) / 8 for _ in sample], np.float32) for sample in samples]


def check_weighted(batch: FeatureBatch, want: model.FeatureBatch) -> None:
    assert batch.weights is not None
    assert want.weights is not None
    check(batch, want.samples)
    assert batch.weights.dtype == np.float32
    assert batch.weights.tolist() == [one for some in want.weights for one in some]


@given(own.samples(), st.integers(0, 9), st.booleans())
@example([], 0, False)
@example([[1], [2]], 0, True)
@example([[1, 2], [3, 2]], 1, True)
def test_weights_stay_with_their_ids(samples: list[list[int]], limit: int, last: bool) -> None:
    weights = weights_of(samples)
    want = model.FeatureBatch(samples, [some.tolist() for some in weights])
    batch = FeatureBatch.from_list("clicks", [own.id_array(one) for one in samples], weights)
    check_weighted(batch, want)
    check_weighted(batch.truncated(limit, last), want.truncated(limit, last))
    flat = np.concatenate([*weights, np.empty(0, np.float32)])
    values = own.id_array([one for sample in samples for one in sample])
    edges = own.offsets_of(samples)
    strided = np.repeat(flat, 2)[::2]
    check_weighted(FeatureBatch.from_csr("clicks", values, edges, strided), want)
    sent = [np.frombuffer(part.tobytes(), part.dtype) for part in batch.parts()]
    assert len(sent) == 4
    check_weighted(FeatureBatch.from_parts("clicks", sent), want)
    check_weighted(pickle.loads(pickle.dumps(batch)), want)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_weights_that_are_not_finite(bad: float, place: int) -> None:
    weights = np.ones(3, np.float32)
    weights[place] = bad
    values = own.id_array([5, 6, 7])
    for edges, sample in ((np.array([0, 1, 1, 3]), 2 if place else 0), (np.arange(4), place)):
        with pytest.raises(
            DataError, match=f"'clicks', weights: .*finite.*in sample {sample}$"
        ):
            FeatureBatch.from_csr("clicks", values, edges, weights)


def test_weights_that_do_not_fit_the_ids() -> None:
    ids = [own.id_array([5, 6]), own.id_array([]), own.id_array([7])]
    ones = [np.ones(n, np.float32) for n in (2, 0, 1)]
    wrong: list[tuple[Any, type[Exception], str]] = [
        (ones[:2], DataError, "expected 3 samples, got 2"),
        ([ones[0], ones[2], ones[2]], DataError, "sample 1: expected 0, .* got 1"),
        ([ones[2], ones[1], ones[2]], DataError, "sample 0: expected 2, .* got 1"),
        ([*ones[:2], np.ones(1)], DataTypeError, "sample 2: .* float32, got float64"),
        ([*ones[:2], None], DataTypeError, "sample 2: .* of type NoneType"),
        (np.ones(3, np.float32), DataTypeError, "expected a list"),
    ]
    for weights, kind, message in wrong:
        with pytest.raises(kind, match=f"'clicks', weights.*{message}"):
            FeatureBatch.from_list("clicks", ids, weights)
    values, edges = own.id_array([5, 6, 7]), np.array([0, 2, 3])
    with pytest.raises(DataError, match="weights: expected 3, one for each id, got 2"):
        FeatureBatch.from_csr("clicks", values, edges, np.ones(2, np.float32))
    with pytest.raises(DataTypeError, match=r"weights: .* float32, got float64"):
        FeatureBatch.from_csr("clicks", values, edges, np.ones(3))  # type: ignore[arg-type]


@given(own.damaged_offsets())
def test_damaged_offsets(damage: own.Damage) -> None:
    values = np.zeros(damage.num_values, dtype=np.uint64)
    with pytest.raises(DataError, match=rf"feature 'clicks': .* at position {damage.place}$"):
        FeatureBatch.from_csr("clicks", values, damage.offsets)


def parts(distinct: list[int], inverse: list[int], offsets: list[int] | None = None) -> Any:
    arrays: list[Any] = [own.id_array(distinct), np.array(inverse, dtype=np.uint32)]
    return arrays if offsets is None else [*arrays, np.array(offsets, dtype=np.uint32)]


@pytest.mark.parametrize(
    ("damaged", "message"),
    [
        (parts([7, 8], [0, 2]), "got 2 at position 1"),
        (parts([7, 8], [0, 2**32 - 1]), "got 4294967295 at position 1"),
        (parts([], [0]), "0 distinct ids in first-seen order, got 0 at position 0"),
        (parts([7, 8], [1, 0]), "got 1 at position 0"),
        (parts([7, 8], [0, 0]), "some never occur"),
        (parts([7, 7], [0, 1]), "2 with 1 values"),
        (parts([7], [0, 0], [0, 1]), "up to 2, the ids given, got 1 at position 1"),
        (parts([7], [0, 0], [1, 2]), "offsets from 0 .*, got 1 at position 0"),
        (parts([7], [0, 0], [0, 3, 2]), "got 3 at position 1"),
        (parts([7], [0, 0], [0, 2, 1, 2]), "that never decrease, .* got 1 at position 2"),
        (parts([7], [0, 0], []), "at least one item"),
        (parts([7], [0])[:1], "2 to 4 parts, got 1"),
        ([*parts([7], [0], [0, 1]), *parts([7], [0])], "2 to 4 parts, got 5"),
        ([*parts([7], [0], [0, 1]), parts([7], [0])[1]], "weights: .* float32, got uint32"),
        ([np.array([7]), parts([7], [0])[1]], "distinct: .* uint64, got int64"),
        ([own.id_array([7]), np.array([0])], "inverse: .* uint32, got int64"),
        ([*parts([7], [0]), np.array([0, 1])], "offsets: .* uint32, got int64"),
    ],
)
def test_damaged_parts(damaged: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        FeatureBatch.from_parts("clicks", damaged)


@pytest.mark.parametrize(("value", "message"), own.NOT_IDS)
def test_w05_wrong_types_are_found(value: Any, message: str) -> None:
    wrong = rf"feature 'clicks'.* expected a 1-D numpy array of uint64.*, got .*{message}"
    with pytest.raises(DataTypeError, match=wrong):
        FeatureBatch.from_single("clicks", value)
    with pytest.raises(DataTypeError, match=wrong):
        FeatureBatch.from_csr("clicks", value, np.array([0, 3]))
    good = own.id_array([1])
    with pytest.raises(DataTypeError, match=wrong) as raised:
        FeatureBatch.from_list("clicks", [good, good, value, good])
    assert "sample 2" in str(raised.value)
    assert isinstance(raised.value, DataError)


@pytest.mark.parametrize("dtype", [np.uint64, np.int16, np.float64, ">i8"])
def test_w05_offsets_of_another_dtype(dtype: Any) -> None:
    with pytest.raises(DataTypeError, match=r"offsets: .*int32, int64 or uint32, got"):
        FeatureBatch.from_csr("clicks", own.id_array([1]), np.array([0, 1]).astype(dtype))


@pytest.mark.parametrize("data", [None, 7, "ab", {1: 2}, np.zeros((2, 2), dtype=np.uint64)])
def test_w05_not_a_list(data: Any) -> None:
    with pytest.raises(DataTypeError, match="'clicks': expected a list"):
        FeatureBatch.from_list("clicks", data)


def test_a_name_is_a_str() -> None:
    name: Any = 7
    with pytest.raises(DataTypeError, match="expected a str, got an object of type int"):
        FeatureBatch.from_single(name, own.id_array([1]))
    assert FeatureBatch.from_single(np.str_("clicks"), own.id_array([1])).name == "clicks"


@pytest.mark.parametrize("batch_size", [65535, 65536, 70000])
def test_w39_no_limit_of_16_bits(batch_size: int) -> None:
    ids = np.arange(batch_size, dtype=np.uint64)
    batch = FeatureBatch.from_single("clicks", ids)
    assert batch.batch_size == batch.num_distinct == batch_size
    assert (batch.inverse == np.arange(batch_size)).all()
    wide = FeatureBatch.from_csr("clicks", ids, np.array([0, batch_size]))
    assert wide.lengths().tolist() == [batch_size]
    assert (wide.distinct == ids).all()


def test_w39_a_column_of_a_matrix() -> None:
    data = np.arange(12, dtype=np.uint64).reshape(4, 3)
    check(FeatureBatch.from_single("clicks", data[1:3, 1]), [[4], [7]])
    check(
        FeatureBatch.from_list("clicks", [data[:, 0], data[::-2, 2]]), [[0, 3, 6, 9], [11, 5]]
    )


def test_more_than_a_u32_can_number() -> None:
    endless = np.broadcast_to(np.uint64(1), 2**32 - 1)
    with pytest.raises(DataError, match="at most 4294967294"):
        FeatureBatch.from_single("clicks", endless)
    with pytest.raises(DataError, match="at most 4294967294 ids, got 4294967296"):
        FeatureBatch.from_list("clicks", [own.id_array([1]), endless])


def test_long_samples_in_a_list() -> None:
    # Across the growth of the buffer and the sizes that are copied in one piece.
    samples = [list(range(start, start + size)) for start, size in enumerate([1, 17, 0, 5000])]
    check(build(samples), samples)


def test_it_never_changes() -> None:
    batch = build([[1, 2], [1]])
    with pytest.raises(ValueError, match="read-only"):
        batch.distinct[0] = 3
    with pytest.raises(AttributeError):
        batch.name = "other"  # type: ignore[misc]
    with pytest.raises(TypeError, match="never changes"):
        batch.__init__("other", *parts([7], [0]))
    check(batch, [[1, 2], [1]])
    assert repr(batch) == "FeatureBatch('clicks': 2 samples, 3 ids, 2 distinct)"


@pytest.mark.parametrize(
    "duplicate", [lambda one: pickle.loads(pickle.dumps(one)), copy.copy, copy.deepcopy]
)
@pytest.mark.parametrize("samples", [[[7, 9], [], [9, 7, 9]], [[1], [2]], []])
def test_a_copy_is_read_only_and_checked_too(
    duplicate: Callable[[FeatureBatch], FeatureBatch], samples: list[list[int]]
) -> None:
    check(duplicate(build(samples)), samples)
    # What Cython generates for pickle would take any arrays, and write through them later.
    assert not hasattr(FeatureBatch, "__setstate_cython__")


# --- all features of a batch ----------------------------------------------------------------


@pytest.mark.parametrize("num_threads", [1, 3])
def test_features_numbered_together_are_each_numbered_alone(num_threads: int) -> None:
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, n + 1, n).astype(np.uint64) for n in (5, 0, 30_000, 1, 4096, 4096)]
    alone = [FeatureBatch.from_single("f", one) for one in ids]
    batches = [FeatureBatch.from_single("f", one) for one in ids]
    batches[3].inverse  # noqa: B018  (numbered already)
    for one in ids:
        one[:] = 7  # the batches have copies
    with contextlib.closing(ThreadPool(num_threads)) as threads:
        number_all(batches, threads)
        number_all(batches, threads)
    for batch, wanted in zip(batches, alone, strict=True):
        assert np.array_equal(batch.distinct, wanted.distinct)
        assert np.array_equal(batch.inverse, wanted.inverse)
        assert batch.num_distinct == wanted.num_distinct == len(batch.distinct)
        for array in (batch.distinct, batch.inverse):
            assert not array.flags.writeable


def test_threads_that_number_the_same_features_agree() -> None:
    callers = 4
    start = threading.Barrier(callers)
    ids = np.random.default_rng(0).integers(0, 5000, 20_000).astype(np.uint64)
    wanted = FeatureBatch.from_single("f", ids)
    with contextlib.closing(ThreadPool(2)) as threads, ThreadPoolExecutor(callers) as pool:
        for _ in range(10):
            batches = [FeatureBatch.from_single("f", ids) for _ in range(3)]

            def ask(caller: int, batches: list[FeatureBatch] = batches) -> None:
                start.wait(60)
                if caller % 2:
                    number_all(batches, threads)
                for batch in batches:
                    assert np.array_equal(batch.distinct, wanted.distinct)
                    assert np.array_equal(batch.inverse, wanted.inverse)

            list(pool.map(ask, range(callers)))
