"""Id features: four ways in, one FeatureBatch, and what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from persia._core.ids.feature_batch import FeatureBatch
from persia.embedding.data import IDTypeFeature, IDTypeFeatureWithSingleID, PersiaBatch
from persia.errors import DataError, DataTypeError

LISTS = [[3, 7], [], [7, 3, 7], [2**64 - 1], [0]]
SAMPLES = [np.array(ids, np.uint64) for ids in LISTS]
VALUES = np.concatenate(SAMPLES)
OFFSETS = np.cumsum([0, *map(len, LISTS)])


def ids_of(batch: FeatureBatch) -> list[list[int]]:
    """Give the ids of each sample back."""
    ids = batch.distinct[batch.inverse]
    edges = np.cumsum([0, *batch.lengths()])
    return [ids[i:j].tolist() for i, j in itertools.pairwise(edges)]


def arrow(lists: Any = LISTS, kind: Any = None) -> Any:
    return pa.array(lists, pa.list_(pa.uint64()) if kind is None else kind)


def signed(ids: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(ids.view(np.int64))


@pytest.mark.parametrize(
    "build",
    [
        lambda: IDTypeFeature("f", SAMPLES),
        lambda: IDTypeFeature("f", tuple(SAMPLES)),
        lambda: IDTypeFeature("f", np.array([*SAMPLES, None], object)[:-1]),
        lambda: IDTypeFeature.from_csr("f", VALUES, OFFSETS),
        lambda: IDTypeFeature.from_csr("f", VALUES, OFFSETS.astype(np.int32)),
        lambda: IDTypeFeature.from_csr("f", VALUES, OFFSETS.astype(np.uint32)),
        lambda: IDTypeFeature.from_csr("f", np.repeat(VALUES, 2)[::2], OFFSETS),
        lambda: IDTypeFeature.from_jagged("f", signed(VALUES), torch.from_numpy(OFFSETS)),
        lambda: IDTypeFeature.from_jagged(
            "f", torch.from_numpy(VALUES), torch.from_numpy(OFFSETS).to(torch.int32)
        ),
        lambda: IDTypeFeature.from_jagged(
            "f", signed(VALUES), lengths=torch.tensor([len(ids) for ids in LISTS])
        ),
        lambda: IDTypeFeature.from_jagged("f", VALUES, lengths=np.diff(OFFSETS)),
        lambda: IDTypeFeature.from_arrow("f", arrow()),
        lambda: IDTypeFeature.from_arrow("f", arrow(kind=pa.large_list(pa.uint64()))),
        lambda: IDTypeFeature.from_arrow("f", arrow([[9], None, *LISTS, [8]]).slice(2, 5)),
        lambda: IDTypeFeature.from_arrow("f", arrow([LISTS[0], None, *LISTS[2:]])),
        lambda: IDTypeFeature.from_arrow("f", pa.chunked_array([arrow()])),
    ],
)
def test_every_way_in_gives_the_same_batch(build: Callable[[], IDTypeFeature]) -> None:
    feature = build()
    assert feature.name == feature.feature_batch.name == "f"
    assert feature.batch_size == 5
    assert ids_of(feature.feature_batch) == LISTS
    assert feature.feature_batch.distinct.tolist() == [3, 7, 2**64 - 1, 0]
    assert [ids.tolist() for ids in feature.data] == LISTS


WEIGHTS = np.array([0.5, 1, 2, -1, 0, 3, 0.25], np.float32)


@pytest.mark.parametrize(
    "build",
    [
        lambda: IDTypeFeature("f", SAMPLES, np.split(WEIGHTS, OFFSETS[1:-1])),
        lambda: IDTypeFeature("f", SAMPLES, weights=tuple(np.split(WEIGHTS, OFFSETS[1:-1]))),
        lambda: IDTypeFeature.from_csr("f", VALUES, OFFSETS, WEIGHTS),
        lambda: IDTypeFeature.from_jagged("f", VALUES, OFFSETS, weights=WEIGHTS),
        lambda: IDTypeFeature.from_jagged(
            "f", VALUES, lengths=np.diff(OFFSETS), weights=torch.from_numpy(WEIGHTS)
        ),
    ],
)
def test_weights(build: Callable[[], IDTypeFeature]) -> None:
    batch = build().feature_batch
    assert ids_of(batch) == LISTS
    assert batch.weights is not None
    assert batch.weights.tolist() == WEIGHTS.tolist()
    back = PersiaBatch.from_bytes(PersiaBatch([build()], requires_grad=False).to_bytes())
    assert back.features[0].weights is not None
    assert back.features[0].weights.tolist() == WEIGHTS.tolist()


def test_a_matrix_of_weights() -> None:
    matrix = np.arange(6, dtype=np.uint64).reshape(2, 3)
    batch = IDTypeFeature("f", matrix, matrix.astype(np.float32)).feature_batch
    assert batch.weights is not None
    assert batch.weights.tolist() == [0, 1, 2, 3, 4, 5]


def test_weights_that_are_refused() -> None:
    wrong: list[tuple[Any, type[Exception], str]] = [
        (torch.ones(7, requires_grad=True), DataError, "'f'.*no gradient.*detach"),
        (torch.ones(7, dtype=torch.bfloat16), DataTypeError, "weights.*float32, got torch.bf"),
        (torch.ones(7, dtype=torch.float64), DataTypeError, "weights: .*float32, got float64"),
        (WEIGHTS[:5], DataError, "weights: expected 7, one for each id, got 5"),
        (
            np.where(WEIGHTS == 0.5, np.float32(np.inf), WEIGHTS),
            DataError,
            "weights: .*finite values, got inf in sample 0",
        ),
    ]
    for weights, kind, message in wrong:
        with pytest.raises(kind, match=message):
            IDTypeFeature.from_jagged("f", VALUES, OFFSETS, weights=weights)


def test_single() -> None:
    matrix = np.arange(12, dtype=np.uint64).reshape(4, 3)
    feature = IDTypeFeatureWithSingleID("f", matrix[:, 1])
    assert feature.batch_size == 4
    assert ids_of(feature.feature_batch) == [[1], [4], [7], [10]]


def test_a_matrix_has_a_sample_per_line() -> None:
    matrix = np.arange(6, dtype=np.uint64).reshape(2, 3)
    assert ids_of(IDTypeFeature("f", matrix).feature_batch) == [[0, 1, 2], [3, 4, 5]]


def test_signed_arrow_ids_keep_their_bits() -> None:
    feature = IDTypeFeature.from_arrow("f", pa.array([[-1, 2], []], pa.list_(pa.int64())))
    assert ids_of(feature.feature_batch) == [[2**64 - 1, 2], []]


def test_arrow_lists_of_fixed_size() -> None:
    array = pa.array([[1, 2], None, [3, 4], [5, 6]], pa.list_(pa.uint64(), 2))
    feature = IDTypeFeature.from_arrow("f", array)
    assert ids_of(feature.feature_batch) == [[1, 2], [], [3, 4], [5, 6]]
    sliced = IDTypeFeature.from_arrow("f", array.slice(2))
    assert ids_of(sliced.feature_batch) == [[3, 4], [5, 6]]


def test_values_behind_an_absent_arrow_list_are_left_out() -> None:
    array = pa.ListArray.from_arrays(
        pa.array([0, 2, 4, 5], pa.int32()),
        pa.array([1, 2, None, 4, 5], pa.uint64()),
        mask=pa.array([False, True, False]),
    )
    assert ids_of(IDTypeFeature.from_arrow("f", array).feature_batch) == [[1, 2], [], [5]]


def test_an_arrow_buffer_may_be_longer_than_its_ids() -> None:
    buffer = pa.py_buffer(np.array([1, 2], np.uint64).tobytes() + b"\xff\xff\xff")
    values = pa.Array.from_buffers(pa.uint64(), 2, [None, buffer])
    array = pa.ListArray.from_arrays(pa.array([0, 2], pa.int32()), values)
    assert ids_of(IDTypeFeature.from_arrow("f", array).feature_batch) == [[1, 2]]


def test_arrow_without_samples_or_ids() -> None:
    assert IDTypeFeature.from_arrow("f", arrow([])).batch_size == 0
    assert ids_of(IDTypeFeature.from_arrow("f", arrow([[], None])).feature_batch) == [[], []]


@given(
    st.lists(st.one_of(st.none(), st.lists(st.integers(0, 2**64 - 1), max_size=4)), max_size=8),
    st.integers(0, 8),
    st.integers(0, 8),
)
def test_arrow_slices_agree_with_python(
    lists: list[list[int] | None], start: int, length: int
) -> None:
    array = arrow(lists).slice(min(start, len(lists)), length)
    feature = IDTypeFeature.from_arrow("f", array)
    assert ids_of(feature.feature_batch) == [ids or [] for ids in array.to_pylist()]


U64 = np.array([1, 2], np.uint64)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: IDTypeFeature("f", [U64, np.array([1])]), "'f'.*sample 1.*uint64.*int64"),
        (lambda: IDTypeFeature("f", [U64, np.array([1.0])]), "'f'.*sample 1.*float64"),
        (lambda: IDTypeFeature("f", [U64.reshape(1, 2)]), "'f'.*sample 0.*2 dimension"),
        (lambda: IDTypeFeature("f", [U64, [1, 2]]), "'f'.*sample 1.*list"),  # type: ignore[list-item]
        (lambda: IDTypeFeature("f", 3), "'f'.*int"),  # type: ignore[arg-type]
        (lambda: IDTypeFeature("f", "ab"), "'f'.*str"),  # type: ignore[arg-type]
        (lambda: IDTypeFeature("f", np.array(3, np.uint64)), "'f'.*uint64"),
        (lambda: IDTypeFeatureWithSingleID("f", np.array([1, 2])), "'f'.*uint64.*int64"),
        (lambda: IDTypeFeatureWithSingleID("f", U64.reshape(1, 2)), "'f'.*2 dimension"),
        (lambda: IDTypeFeatureWithSingleID("f", U64.astype(">u8")), "'f'.*uint64"),
        (lambda: IDTypeFeatureWithSingleID(3, U64), "str as feature name, got int"),  # type: ignore[arg-type]
        (lambda: IDTypeFeature.from_csr("f", np.array([1, 2]), OFFSETS), "'f'.*values"),
        (lambda: IDTypeFeature.from_csr("f", VALUES, OFFSETS * 1.0), "'f'.*offsets"),
        (
            lambda: IDTypeFeature.from_jagged(
                "f", torch.tensor([1, 2], dtype=torch.int32), OFFSETS
            ),
            "'f'.*values.*int32",
        ),
        (
            lambda: IDTypeFeature.from_jagged("f", VALUES, lengths=np.diff(OFFSETS) * 1.0),
            "'f': expected lengths as 1-D int32 or int64, got float64 of shape",
        ),
        (lambda: IDTypeFeature.from_jagged("f", VALUES, lengths=[1]), "lengths.*got list"),
        (
            lambda: IDTypeFeature.from_jagged("f", torch.empty(2, device="meta"), OFFSETS),
            "'f': expected values in CPU memory, got meta",
        ),
        (
            lambda: IDTypeFeature.from_jagged(
                "f", torch.ones(2, dtype=torch.bfloat16), OFFSETS
            ),
            "'f': expected values as a dense tensor of integers, got torch.bfloat16",
        ),
        (
            lambda: IDTypeFeature.from_jagged("f", U64, lengths=torch.tensor([2]).to_sparse()),
            "'f': expected lengths as a dense tensor .*, got torch.int64 with layout",
        ),
        (
            lambda: IDTypeFeature.from_jagged("f", torch.Size([1]), OFFSETS),
            "'f'.*values.*got an object of type Size",
        ),
        (lambda: IDTypeFeature.from_arrow("f", [U64]), "'f'.*Arrow list array.*got list"),
        (lambda: IDTypeFeature.from_arrow("f", pa.array([1, 2])), "'f'.*Arrow.*got int64"),
        (
            lambda: IDTypeFeature.from_arrow("f", pa.array([[1]], pa.list_(pa.int32()))),
            "'f'.*Arrow list array of uint64 or int64, got list<item: int32>",
        ),
    ],
)
def test_w05_ids_of_another_type_are_refused(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(DataTypeError, match=message):
        build()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: IDTypeFeature("", SAMPLES), "expected a feature name, got ''"),
        (lambda: IDTypeFeature.from_csr("f", VALUES, OFFSETS + 1), "'f'.*offsets"),
        (lambda: IDTypeFeature.from_csr("f", VALUES, OFFSETS[:-1]), "'f'.*offsets"),
        (lambda: IDTypeFeature.from_csr("f", VALUES, OFFSETS[::-1].copy()), "'f'.*offsets"),
        (lambda: IDTypeFeature.from_csr("f", VALUES, OFFSETS[:0]), "'f'.*offsets"),
        (
            lambda: IDTypeFeature.from_jagged("f", VALUES),
            "expected offsets or lengths, got neither",
        ),
        (
            lambda: IDTypeFeature.from_jagged("f", VALUES, OFFSETS, lengths=np.diff(OFFSETS)),
            "expected offsets or lengths, got both",
        ),
        (
            lambda: IDTypeFeature.from_jagged("f", VALUES, lengths=np.array([8, -1])),
            "'f': expected lengths of at least 0, got -1 in sample 1",
        ),
        (lambda: IDTypeFeature.from_jagged("f", VALUES, lengths=np.array([6])), "'f'.*offsets"),
        (
            lambda: IDTypeFeature.from_arrow("f", arrow([[1], [], [2, None]])),
            "'f': expected ids, got a null in sample 2",
        ),
        (
            lambda: IDTypeFeature.from_arrow("f", pa.chunked_array([arrow(), arrow()])),
            "'f': expected a chunked array of one chunk, got 2; call .combine_chunks",
        ),
    ],
)
def test_w05_ids_of_another_form_are_refused(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        build()


def test_w05_checks_that_memory_hangs_on_cannot_be_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PERSIA_SKIP_CHECK_DATA", "1")
    with pytest.raises(DataTypeError, match="sample 1"):
        IDTypeFeature("f", [U64, np.array([1])])
    with pytest.raises(DataTypeError, match="'f'"):
        IDTypeFeatureWithSingleID("f", np.array([1.0]))


def test_w39_ids_with_gaps_are_taken() -> None:
    matrix = np.arange(12, dtype=np.uint64).reshape(4, 3)
    feature = IDTypeFeature("f", [matrix[:, 0], matrix[::-1, 2]])
    assert ids_of(feature.feature_batch) == [[0, 3, 6, 9], [11, 8, 5, 2]]


@pytest.mark.parametrize("size", [65535, 65536, 70000])
def test_w39_there_is_no_limit_of_16_bits(size: int) -> None:
    ids = np.arange(size, dtype=np.uint64)
    assert IDTypeFeatureWithSingleID("f", ids).feature_batch.num_distinct == size
    assert IDTypeFeature("f", [ids]).feature_batch.num_ids == size


@pytest.mark.parametrize(
    ("build", "hint"),
    [
        (lambda: IDTypeFeature("clicks", [np.array([1])]), ".astype(np.uint64) makes it one"),
        (
            lambda: IDTypeFeatureWithSingleID("clicks", np.array([1], np.int32)),
            ".astype(np.uint64) makes it one",
        ),
        (lambda: IDTypeFeature("clicks", [[1, 2]]), "np.array(..., dtype=np.uint64) makes one"),  # type: ignore[list-item]
    ],
)
def test_ids_that_are_no_u64_are_told_how_to_become_it(
    build: Callable[[], object], hint: str
) -> None:
    with pytest.raises(
        DataTypeError, match=r"feature 'clicks'.* of uint64, got .*; "
    ) as raised:
        build()
    assert hint in str(raised.value)


def test_ids_of_floats_are_not_rounded_by_advice() -> None:
    with pytest.raises(DataTypeError, match=r"got float64 of 1 dimension$"):
        IDTypeFeatureWithSingleID("clicks", np.array([1.5]))


def single(ids: Any) -> IDTypeFeatureWithSingleID:
    return IDTypeFeatureWithSingleID("clicks", ids)


HASH = "; ids are numbers: hash texts, pandas.util.hash_array(np.asarray(ids, object)) >> 8"


@pytest.mark.parametrize(
    ("ids", "hint"),
    [
        (["a", "b"], HASH),
        (np.array(["a", "b"]), HASH),
        (np.array(["a", "b"], object), HASH),
        (pd.Series(["a", "b"]), HASH),
        (pd.Series(["a", "b"], dtype="category"), HASH),
        (pd.Categorical(["a", "b"]), HASH),
        (torch.tensor([1, 2]), "; .cpu().numpy().astype(np.uint64) makes one of it"),
        (pd.Series([1, 2]), "; .to_numpy().astype(np.uint64) makes one of it"),
        ([1, 2], "; np.array(..., dtype=np.uint64) makes one of it"),
        ([1, -2], "; np.array(..., np.int64).view(np.uint64) makes one, with 2**64 - 1 for -1"),
        (np.array([1, -2]), "; .astype(np.uint64) makes it one"),
        ([1.0, 2.0], ".astype(np.uint64) makes ids of whole numbers: no fractions, no NaN"),
        (pd.Series([1, None]), ".astype(np.uint64) makes ids of whole numbers: no fractions"),
    ],
)
def test_w05_ids_of_other_types_are_told_what_to_type(ids: Any, hint: str) -> None:
    with pytest.raises(DataTypeError) as raised:
        single(ids)
    assert hint in str(raised.value)
    assert "\n" not in str(raised.value)


def test_w05_what_is_typed_after_the_advice_is_taken() -> None:
    column = pd.Series(["a", "b", "a"], dtype="category")
    (a, b, again) = single(pd.util.hash_array(np.asarray(column, object)) >> 8).data
    assert a == again != b
    assert max(a, b) < 1 << 56
    negative = single(np.array([1, -2], np.int64).view(np.uint64))
    assert negative.data.tolist() == [1, 2**64 - 2]
    for ids in (torch.tensor([1, 2]).cpu(), pd.Series([1, 2]).to_numpy()):
        assert single(np.asarray(ids).astype(np.uint64)).data.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("samples", "hint"),
    [
        ([3, 4], "IDTypeFeatureWithSingleID(name, np.array(ids).astype(np.uint64)) takes one"),
        (np.array([3, 4], np.uint64), "IDTypeFeatureWithSingleID(name, "),
        (["a", "b"], HASH),
        ([torch.tensor([1])], ".cpu().numpy().astype(np.uint64)"),
        (torch.tensor([1, 2]), "IDTypeFeature.from_jagged takes tensors"),
        (arrow(), "IDTypeFeature.from_arrow takes list arrays"),
        (pd.Series([[1], [2]]), ".tolist() makes one of a column of arrays"),
    ],
)
def test_w05_samples_of_other_types_are_told_what_to_type(samples: Any, hint: str) -> None:
    with pytest.raises(DataTypeError) as raised:
        IDTypeFeature("clicks", samples)
    assert hint in str(raised.value)
