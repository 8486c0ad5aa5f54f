"""Dense data, labels and whole batches: what is taken, what is refused, and their bytes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from persia._core.ids.feature_batch import FeatureBatch
from persia._rpc import serialization
from persia.embedding.data import (
    IDTypeFeature,
    IDTypeFeatureWithSingleID,
    Label,
    NdarrayDataBase,
    NonIDTypeFeature,
    PersiaBatch,
)
from persia.embedding.text_ids import hash_text
from persia.errors import DataError, DataTypeError, ProtocolError
from tests.support.fixtures import Log, Monkey
from tests.support.profiles import tries

pytestmark = pytest.mark.usefixtures("no_job")

DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64"),
)


def users(size: int = 3) -> IDTypeFeatureWithSingleID:
    return IDTypeFeatureWithSingleID("user", np.arange(size, dtype=np.uint64))


def clicks(size: int = 3, name: str = "clicks") -> IDTypeFeature:
    return IDTypeFeature(name, [np.arange(n, dtype=np.uint64) for n in range(size)])


def label(size: int = 3) -> Label:
    return Label(np.ones((size, 1), np.float32))


def whole() -> PersiaBatch:
    return PersiaBatch(
        [users(), clicks()],
        [NonIDTypeFeature(np.ones((3, 2), np.float16), "size"), NonIDTypeFeature(np.ones(3))],
        [label(), Label(np.array([True, False, True]), "bought")],
        meta=b"\x00meta",
    )


# --- arrays -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [NdarrayDataBase, NonIDTypeFeature, Label])
def test_each_dtype_becomes_a_tensor(kind: type[NdarrayDataBase], dtype: str) -> None:
    data = np.arange(6).reshape(3, 2).astype(dtype)
    item = kind(data, "x")
    assert (item.batch_size, len(item), item.name) == (3, 3, "x")
    assert torch.from_numpy(item.data).numpy().dtype == data.dtype
    assert item.data is data


def test_w21_bool_stays_bool() -> None:
    batch = PersiaBatch.from_bytes(whole().to_bytes())
    assert batch.labels[1].data.dtype == np.bool_
    assert batch.labels[1].data.tolist() == [True, False, True]


def test_w39_data_with_gaps_is_copied() -> None:
    matrix = np.arange(6.0).reshape(2, 3)
    column = NonIDTypeFeature(matrix[:, 1])
    assert column.data.flags.c_contiguous
    assert column.data.tolist() == [1.0, 4.0]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([1.0], "label 'y': expected a numpy array, got list"),
        (np.ma.masked_array([1.0], [True]), "label 'y': .* got MaskedArray"),
        (np.array(1.0), "label 'y': expected at least 1 dimension, got 0"),
        (np.array(["a"]), "label 'y': expected a dtype of bool, .* 64 bits, got <U1"),
        (np.array([None]), "label 'y': expected a dtype.*, got object"),
        (np.array([1j]), "label 'y': expected a dtype.*, got complex128"),
        (np.array([1], "M8[s]"), "label 'y': expected a dtype"),
        (np.array([1.0], ">f4"), "label 'y': expected a dtype.*, got >f4"),
        (np.array([1.0], np.longdouble), "label 'y': expected a dtype"),
    ],
)
def test_w39_what_is_no_array_of_a_known_dtype(data: Any, message: str) -> None:
    with pytest.raises(DataTypeError, match=message):
        Label(data, "y")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_label_that_is_no_number_names_its_sample(value: float, dtype: str) -> None:
    data = np.zeros((4, 2), dtype)
    data[2, 1] = value
    message = f"label 'y': expected finite values, got {value} in sample 2"
    with pytest.raises(DataError, match=message):
        Label(data, "y")
    NonIDTypeFeature(data, "x")  # only labels must be finite


def test_a_dense_value_that_is_not_finite_is_told_once(caplog: Log) -> None:
    data = np.full((4, 2), 3e38, np.float32)
    NonIDTypeFeature(data, name="finite")
    data[2, 1] = np.nan
    for _ in range(3):
        NonIDTypeFeature(data, name="not finite")
    (record,) = caplog.records
    assert record.message.startswith("dense feature 'not finite': nan in sample 2 of a batch")


def test_skip_check_data(monkeypatch: Monkey) -> None:
    monkeypatch.setenv("PERSIA_SKIP_CHECK_DATA", "1")
    odd = Label(np.array([np.nan, 1j]))
    with pytest.raises(DataError, match="expected 3 samples as in feature 'user', got 2"):
        PersiaBatch([users()], labels=[odd])


# --- batches ----------------------------------------------------------------------------------


def test_a_batch_has_what_it_was_given() -> None:
    batch = whole()
    assert batch.batch_size == 3
    assert batch.requires_grad is True
    assert batch.meta == b"\x00meta"
    assert batch.batch_id is None
    assert [feature.name for feature in batch.features] == ["user", "clicks"]
    assert batch.id_type_features == list(batch.features)
    assert [item.name for item in batch.non_id_type_features] == [
        "size",
        "non_id_type_feature_anonymous",
    ]
    assert [item.name for item in batch.labels] == ["label_anonymous", "bought"]
    assert batch.data is batch


def test_w41_a_batch_is_the_same_after_it_was_sent() -> None:
    batch = whole()
    first = batch.to_bytes()
    batch.id_type_features.clear()
    batch.labels.clear()
    batch.non_id_type_features.clear()
    assert batch.to_bytes() == first
    for name in ("labels", "meta", "batch_size", "requires_grad", "id_type_features"):
        with pytest.raises(AttributeError):
            setattr(batch, name, None)


def test_w22_a_feature_given_twice() -> None:
    with pytest.raises(DataError, match="feature 'user': expected once in a batch, got twice"):
        PersiaBatch([users(), users()], labels=[label()])


def test_an_array_given_twice() -> None:
    dense = [NonIDTypeFeature(np.zeros((3, 1), np.float32), "price") for _ in range(2)]
    with pytest.raises(DataError, match=r"^dense feature 'price': expected once .* got twice"):
        PersiaBatch([users()], dense, [label()])
    with pytest.raises(DataError, match=r"^label 'click': expected once in a batch, got twice"):
        PersiaBatch([users()], None, [Label(np.zeros((3, 1)), "click") for _ in range(2)])
    # A label may have the name of a dense feature, and those without one share the default.
    unnamed = [NonIDTypeFeature(np.zeros((3, 1), np.float32)) for _ in range(2)]
    named = NonIDTypeFeature(unnamed[0].data, unnamed[0].name)
    labels = [label(), label(), Label(np.zeros((3, 1)), "price")]
    batch = PersiaBatch([users()], [*unnamed, named, named, dense[0]], labels)
    assert len(PersiaBatch.from_bytes(batch.to_bytes()).non_id_type_features) == 5


def test_gradients_need_a_label() -> None:
    with pytest.raises(RuntimeError, match="expected a label where gradients are asked"):
        PersiaBatch([users()])


def test_a_loss_may_need_no_label() -> None:
    batch = PersiaBatch([users()], labels=[])
    again = PersiaBatch.from_bytes(batch.to_bytes())
    assert (again.requires_grad, again.labels) == (True, [])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"id_type_features": []}, "id_type_features: expected at least one, got none"),
        ({"id_type_features": [users(0)], "labels": [label(0)]}, "'user': .*at least 1 sample"),
        ({"batch_size": 0}, "batch_size: expected at least 1 sample, got 0"),
        ({"batch_size": 4}, "feature 'user': expected 4 samples as in batch_size, got 3"),
        ({"id_type_features": [users(), clicks(2)]}, "'clicks': .* 3 .*'user', got 2"),
        ({"labels": [label(4)]}, "label 'label_anonymous': expected 3 samples as in feature"),
        ({"non_id_type_features": [NonIDTypeFeature(np.zeros(5), "x")]}, "'x': .*3 .*5"),
    ],
)
def test_parts_that_do_not_fit(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        PersiaBatch(**{"id_type_features": [users()], "labels": [label()], **arguments})


def test_a_batch_size_of_numpy_can_be_sent() -> None:
    batch = PersiaBatch([users()], labels=[label()], batch_size=np.int64(3))
    assert PersiaBatch.from_bytes(batch.to_bytes()).batch_size == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"id_type_features": [users(), label()]}, r"id_type_features\[1\]: .*, got Label"),
        ({"labels": [NonIDTypeFeature(np.zeros(3))]}, r"labels\[0\]: .* got NonIDTypeFeature"),
        ({"non_id_type_features": [np.zeros(3)]}, r"non_id_type_features\[0\]: .* got ndarray"),
        ({"meta": "text"}, "meta: expected bytes, got str; encode it first"),
        ({"id_type_features": users()}, "id_type_features: expected a list, got IDTypeFeature"),
        ({"non_id_type_features": NonIDTypeFeature(np.zeros(3))}, "features: expected a list"),
        ({"labels": label()}, "labels: expected a list, got Label"),
        ({"labels": np.zeros(3)}, r"labels\[0\]: expected Label, got float64"),
        ({"batch_size": "3"}, "batch_size: expected an integer, got str"),
        ({"batch_size": 3.0}, "batch_size: expected an integer, got float"),
        ({"batch_size": True}, "batch_size: expected an integer, got bool"),
    ],
)
def test_parts_of_another_type(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DataTypeError, match=message):
        PersiaBatch(**{"id_type_features": [users()], "labels": [label()], **arguments})


# --- bytes ------------------------------------------------------------------------------------


@given(
    st.lists(
        st.lists(st.lists(st.integers(0, 2**64 - 1), max_size=3), min_size=2, max_size=2),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 3), max_size=2),
    st.one_of(st.none(), st.binary(max_size=20)),
)
def test_any_batch_round_trips(
    columns: list[list[list[int]]], dtype: str, shape: list[int], meta: bytes | None
) -> None:
    features = [
        IDTypeFeature(f"f{number}", [np.array(ids, np.uint64) for ids in column])
        for number, column in enumerate(columns)
    ]
    dense = NonIDTypeFeature(np.ones((2, *shape), dtype), "\u00e9")
    batch = PersiaBatch(features, [dense], requires_grad=False, meta=meta)
    batch.batch_id = 2**40
    back = PersiaBatch.from_bytes(batch.to_bytes())
    assert back.to_bytes() == batch.to_bytes()
    assert [feature.name for feature in back.features] == [feature.name for feature in features]
    assert (back.meta, back.batch_id, back.requires_grad) == (meta, 2**40, False)
    (item,) = back.non_id_type_features
    assert (item.name, item.data.shape) == ("\u00e9", (2, *shape))
    assert item.data.dtype == np.dtype(dtype)
    assert all(item.data.flags.writeable for item in back.non_id_type_features)


WHOLE = whole().to_bytes()


@given(st.integers(0, len(WHOLE) - 1), st.integers(1, 255))
def test_one_changed_byte_is_found(place: int, change: int) -> None:
    data = bytearray(WHOLE)
    data[place] ^= change
    with pytest.raises(ProtocolError):
        PersiaBatch.from_bytes(bytes(data))


@given(st.integers(0, len(WHOLE) - 1))
def test_a_batch_cut_off_is_found(length: int) -> None:
    with pytest.raises(ProtocolError):
        PersiaBatch.from_bytes(WHOLE[:length])


@pytest.mark.parametrize("data", [b"", b"PRSBAT01", WHOLE + b"\0", WHOLE + bytes(8), bytes(64)])
def test_bytes_of_another_length(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="expected"):
        PersiaBatch.from_bytes(data)


GOOD_HEADER, GOOD_ARRAYS = serialization.unpack(b"PRSBAT01", WHOLE)
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.text(max_size=3), st.binary()
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=6,
)


@tries(25)
@given(st.sampled_from(sorted(GOOD_HEADER)), JSON)
@example("features", [["user", 10**9]])
@example("features", [["user", -1]])
@example("features", [["user", 2], ["user", 2]])
@example("dense", ["x"] * 99)
@example("labels", [])
@example("size", True)
@example("size", 4)
@example("id", 1.5)
def test_w39_a_header_that_says_something_else(key: str, value: Any) -> None:
    data = serialization.pack(b"PRSBAT01", {**GOOD_HEADER, key: value}, GOOD_ARRAYS)
    try:
        batch = PersiaBatch.from_bytes(data)
    except ProtocolError:
        return
    # What is taken must be a whole batch that says the same of itself.
    assert serialization.unpack(b"PRSBAT01", batch.to_bytes())[0][key] == value


@pytest.mark.parametrize("key", sorted(GOOD_HEADER))
def test_a_header_without_a_key(key: str) -> None:
    header = {name: value for name, value in GOOD_HEADER.items() if name != key}
    with pytest.raises(ProtocolError, match=key):
        PersiaBatch.from_bytes(serialization.pack(b"PRSBAT01", header, GOOD_ARRAYS))


def test_more_arrays_than_the_header_says() -> None:
    data = serialization.pack(b"PRSBAT01", GOOD_HEADER, [*GOOD_ARRAYS, np.zeros(1)])
    with pytest.raises(ProtocolError, match=f"expected {len(GOOD_ARRAYS)} arrays, got more"):
        PersiaBatch.from_bytes(data)


def test_an_inverse_beyond_the_distinct_ids() -> None:
    arrays = list(GOOD_ARRAYS)
    arrays[1] = arrays[1] + np.uint32(7)
    with pytest.raises(ProtocolError, match="'user'"):
        PersiaBatch.from_bytes(serialization.pack(b"PRSBAT01", GOOD_HEADER, arrays))


LISTS = [[3, 7], [], [7, 3, 7], [2**64 - 1], [0]]
SAMPLES = [np.array(ids, np.uint64) for ids in LISTS]
VALUES = np.concatenate(SAMPLES)
OFFSETS = np.cumsum([0, *map(len, LISTS)])
csr, jagged = IDTypeFeature.from_csr, IDTypeFeature.from_jagged
of_arrow = IDTypeFeature.from_arrow


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
        lambda: csr("f", VALUES, OFFSETS),
        lambda: csr("f", VALUES, OFFSETS.astype(np.int32)),
        lambda: csr("f", VALUES, OFFSETS.astype(np.uint32)),
        lambda: csr("f", np.repeat(VALUES, 2)[::2], OFFSETS),
        lambda: jagged("f", signed(VALUES), torch.from_numpy(OFFSETS)),
        lambda: jagged(
            "f", torch.from_numpy(VALUES), torch.from_numpy(OFFSETS).to(torch.int32)
        ),
        lambda: jagged("f", signed(VALUES), lengths=torch.tensor([len(ids) for ids in LISTS])),
        lambda: jagged("f", VALUES, lengths=np.diff(OFFSETS)),
        lambda: of_arrow("f", arrow()),
        lambda: of_arrow("f", arrow(kind=pa.large_list(pa.uint64()))),
        lambda: of_arrow("f", arrow([[9], None, *LISTS, [8]]).slice(2, 5)),
        lambda: of_arrow("f", arrow([LISTS[0], None, *LISTS[2:]])),
        lambda: of_arrow("f", pa.chunked_array([arrow()])),
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
        lambda: csr("f", VALUES, OFFSETS, WEIGHTS),
        lambda: jagged("f", VALUES, OFFSETS, weights=WEIGHTS),
        lambda: jagged(
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


def test_weights_that_are_refused() -> None:
    wrong: list[tuple[Any, type[Exception], str]] = [
        (torch.ones(7, requires_grad=True), DataError, "'f'.*no gradient.*detach"),
        (torch.ones(7, dtype=torch.bfloat16), DataTypeError, "weights.*float32, got torch.bf"),
        (torch.ones(7, dtype=torch.float64), DataTypeError, "weights: .*float32, got float64"),
        (WEIGHTS[:5], DataError, "weights: expected 7, one for each id, got 5"),
    ]
    for weights, kind, message in wrong:
        with pytest.raises(kind, match=message):
            jagged("f", VALUES, OFFSETS, weights=weights)


BUFFER = pa.py_buffer(np.array([1, 2], np.uint64).tobytes() + b"\xff\xff\xff")
LONGER_THAN_ITS_IDS = pa.Array.from_buffers(pa.uint64(), 2, [None, BUFFER])
FIXED = pa.array([[1, 2], None, [3, 4], [5, 6]], pa.list_(pa.uint64(), 2))
WITH_NULL_BEHIND = pa.ListArray.from_arrays(
    pa.array([0, 2, 4, 5], pa.int32()),
    pa.array([1, 2, None, 4, 5], pa.uint64()),
    mask=pa.array([False, True, False]),
)


@pytest.mark.parametrize(
    ("array", "want"),
    [
        (pa.array([[-1, 2], []], pa.list_(pa.int64())), [[2**64 - 1, 2], []]),
        (FIXED, [[1, 2], [], [3, 4], [5, 6]]),
        (FIXED.slice(2), [[3, 4], [5, 6]]),
        (WITH_NULL_BEHIND, [[1, 2], [], [5]]),
        (pa.ListArray.from_arrays(pa.array([0, 2], pa.int32()), LONGER_THAN_ITS_IDS), [[1, 2]]),
        (arrow([]), []),
        (arrow([[], None]), [[], []]),
    ],
)
def test_arrow_arrays(array: Any, want: list[list[int]]) -> None:
    assert ids_of(of_arrow("f", array).feature_batch) == want


@given(
    st.lists(st.one_of(st.none(), st.lists(st.integers(0, 2**64 - 1), max_size=4)), max_size=8),
    st.integers(0, 8),
    st.integers(0, 8),
)
def test_slices_of_arrow(lists: list[list[int] | None], start: int, length: int) -> None:
    array = arrow(lists).slice(min(start, len(lists)), length)
    feature = of_arrow("f", array)
    assert ids_of(feature.feature_batch) == [ids or [] for ids in array.to_pylist()]


U64 = np.array([1, 2], np.uint64)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: IDTypeFeature("f", [U64, np.array([1.0])]), "'f'.*sample 1.*uint64.*float64"),
        (lambda: IDTypeFeature("f", np.array(3, np.uint64)), "'f'.*uint64"),
        (lambda: IDTypeFeatureWithSingleID("f", np.array([1, 2]) > 1), "'f'.*uint64.*bool"),
        (lambda: IDTypeFeatureWithSingleID(3, U64), "str as feature name, got int"),  # type: ignore[arg-type]
        (lambda: csr("f", np.array([1.0, 2]), OFFSETS), "'f'.*values"),
        (lambda: jagged("f", torch.ones(2), OFFSETS), "'f'.*values.*float32"),
        (lambda: jagged("f", VALUES, lengths=np.diff(OFFSETS) * 1.0), "'f'.*lengths.*float64"),
        (lambda: jagged("f", VALUES, lengths=[1]), "lengths.*got list"),
        (lambda: jagged("f", VALUES, lengths=memoryview(b"\x01")), "lengths.*got memoryview"),
        (lambda: jagged("f", torch.empty(2, device="meta"), OFFSETS), "'f'.*in CPU.*meta"),
        (lambda: jagged("f", torch.ones(2, dtype=torch.bfloat16), OFFSETS), "'f'.*bfloat16"),
        (lambda: jagged("f", U64, lengths=torch.ones(1).long().to_sparse()), "lengths.*layout"),
        (lambda: jagged("f", torch.Size([1]), OFFSETS), "'f'.*values.*object of type Size"),
        (lambda: of_arrow("f", [U64]), "'f'.*Arrow list array.*got list"),
        (lambda: of_arrow("f", pa.array([1, 2])), "'f'.*Arrow.*got int64"),
        (lambda: of_arrow("f", pa.array([[1]], pa.list_(pa.int32()))), "'f'.*item: int32"),
    ],
)
def test_w05_ids_of_another_type_are_refused(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(DataTypeError, match=message):
        build()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: IDTypeFeature("", SAMPLES), "expected a feature name, got ''"),
        (lambda: csr("f", VALUES, OFFSETS + 1), "'f'.*offsets"),
        (lambda: jagged("f", VALUES), "expected offsets, or lengths .*, got neither"),
        (
            lambda: jagged("f", VALUES, OFFSETS, lengths=np.diff(OFFSETS)),
            "or lengths .*, got both",
        ),
        (lambda: jagged("f", VALUES, lengths=np.array([8, -1])), "'f'.*offsets"),
        (lambda: jagged("f", VALUES, lengths=np.array([6])), "'f'.*sum to 7, the ids.*got 6"),
        (lambda: jagged("f", VALUES, OFFSETS[:-1]), "'f'.*offsets.*nn.EmbeddingBag leaves out"),
        (lambda: of_arrow("f", arrow([[1], [], [2, None]])), "'f'.*got a null in sample 2"),
        (lambda: of_arrow("f", pa.chunked_array([arrow(), arrow()])), "'f'.*one chunk, got 2"),
    ],
)
def test_w05_ids_of_another_form_are_refused(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        build()


def test_w05_checks_that_memory_hangs_on_cannot_be_skipped(monkeypatch: Monkey) -> None:
    monkeypatch.setenv("PERSIA_SKIP_CHECK_DATA", "1")
    with pytest.raises(DataTypeError, match="sample 1"):
        IDTypeFeature("f", [U64, np.array([1.0])])
    with pytest.raises(DataTypeError, match="'f'"):
        IDTypeFeatureWithSingleID("f", np.array([1.0]))


def test_ids_of_floats_are_not_rounded_by_advice() -> None:
    with pytest.raises(DataTypeError, match=r"float64 of 1 dimension; floats lose ids"):
        IDTypeFeatureWithSingleID("clicks", np.array([1.5]))
    with pytest.raises(DataTypeError, match=r"NaN is no id: leave missing ids out"):
        IDTypeFeatureWithSingleID("clicks", np.array([1.0, np.nan]))


SINGLE = IDTypeFeatureWithSingleID

# By their bits as int64 they are the ids 1, 2**64 - 1 and 3.
SIGNED = [np.array([1, -1]), np.array([], np.int64), np.array([3])]


@pytest.mark.parametrize(
    "samples",
    [
        SIGNED,
        tuple(SIGNED),
        [one.astype(np.int8) for one in SIGNED],
        [one.astype(np.int32) for one in SIGNED],
        [one.astype(">i8") for one in SIGNED],
        [SIGNED[0], SIGNED[1].astype(np.uint64), SIGNED[2].astype(np.uint16)],
        [torch.from_numpy(one) for one in SIGNED],
        [torch.from_numpy(one).int() for one in SIGNED],
        [torch.from_numpy(SIGNED[0]), SIGNED[1], SIGNED[2]],
    ],
)
def test_other_integers_are_ids(samples: Any) -> None:
    feature = IDTypeFeature("f", samples)
    assert ids_of(feature.feature_batch) == [[1, 2**64 - 1], [], [3]]
    assert [one.tolist() for one in feature.data] == [[1, 2**64 - 1], [], [3]]
    weights = [np.ones(len(one), np.float32) for one in samples]
    weighted = IDTypeFeature("f", samples, weights)
    assert ids_of(weighted.feature_batch) == [[1, 2**64 - 1], [], [3]]


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8, "torch"])
def test_other_integers_are_single_ids(kind: Any) -> None:
    ids = torch.tensor([3, 1]) if kind == "torch" else np.array([3, 1], kind)
    feature = IDTypeFeatureWithSingleID("f", ids)
    assert ids_of(feature.feature_batch) == [[3], [1]]
    assert feature.data.dtype == np.uint64
    rows: Any = (
        torch.tensor([[3, 1], [3, 3]]) if kind == "torch" else np.array([[3, 1], [3, 3]])
    )
    assert ids_of(IDTypeFeature("f", rows).feature_batch) == [[3, 1], [3, 3]]


def test_minus_one_is_an_id_and_named_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        IDTypeFeatureWithSingleID("padded", np.array([1, -2]))
        assert "padded" not in caplog.text
    for _ in range(2):
        IDTypeFeatureWithSingleID("padded", np.array([1, -1]))
        jagged("padded", torch.tensor([-1]), lengths=torch.tensor([1]))
    (line,) = caplog.messages
    assert line.startswith("feature 'padded': -1 is taken as an id like any other, 2**64 - 1")


def test_minus_one_of_arrow_is_named(caplog: pytest.LogCaptureFixture) -> None:
    feature = IDTypeFeature.from_arrow("of_arrow", pa.array([[1, -1], []]))
    assert ids_of(feature.feature_batch) == [[1, 2**64 - 1], []]
    assert [line.split(";")[0] for line in caplog.messages] == [
        "feature 'of_arrow': -1 is taken as an id like any other, 2**64 - 1"
    ]


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([torch.tensor([1, 2]), [3]], "sample 1: expected .*, got an object of type list"),
        ([[3], torch.tensor([1, 2])], "sample 0: expected .*, got an object of type list"),
        ([torch.tensor([1]), np.array([1.5])], "sample 1: .* got float64 .*; floats lose ids"),
        ([np.array([1]), torch.tensor([1.5])], "sample 1: .* type Tensor; .*floats lose ids"),
        ([np.array([1]), torch.tensor([1]), "x"], "sample 2: .* got an object of type str"),
        ([torch.tensor([1]), np.array([[1]])], "sample 1: .* got int64 of 2 dimensions"),
    ],
)
def test_of_a_mix_the_odd_sample_is_named(samples: list[Any], message: str) -> None:
    with pytest.raises(DataTypeError, match=f"feature 'f', {message}"):
        IDTypeFeature("f", samples)


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.int64, torch.bool])
def test_tensors_are_dense_features_and_labels(kind: torch.dtype) -> None:
    tensor = torch.ones(3, 2, dtype=kind)
    for item in (NonIDTypeFeature(tensor), Label(tensor)):
        assert item.batch_size == 3
        assert np.shares_memory(item.data, tensor.numpy())
    gaps = NonIDTypeFeature(tensor.t())
    assert gaps.data.shape == (2, 3)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (
            torch.ones(3, 1, requires_grad=True),
            r"'y': expected data that need no grad.*detach",
        ),
        (
            torch.ones(3, 1, dtype=torch.bfloat16),
            r"'y': .*dtype that numpy has, got torch.bf",
        ),
        (
            torch.ones(3, 1, device="meta"),
            r"'y': .* in CPU memory, got meta; call .cpu",
        ),
        ([1.0], r"'y': expected a numpy array, got list; np.asarray\(data, np.float32\) makes"),
        (pd.Series([1.0]), r"'y': expected a numpy array, got Series; .to_numpy\(\) makes"),
        (pa.array([True]), r"'y': expected a numpy array, got BooleanArray; .to_numpy\(zero"),
    ],
)
def test_what_is_no_dense_data(tensor: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Label(tensor, "y")


TO_IDS = "; np.asarray(ids).astype(np.uint64) makes one of it"
ONE_D = "sample 0: expected a 1-D numpy array of uint64, got an object of type int"
HASH = "; ids are numbers: persia.readers.hash_text(texts) makes them of texts"


@pytest.mark.parametrize(
    ("kind", "ids", "hint"),
    [
        (SINGLE, ["a", "b"], HASH),
        (SINGLE, np.array(["a", "b"]), HASH),
        (SINGLE, np.array(["a", "b"], object), HASH),
        (SINGLE, pd.Series(["a", "b"]), HASH),
        (SINGLE, pd.Series(["a", "b"], dtype="category"), HASH),
        (SINGLE, pd.Categorical(["a", "b"]), HASH),
        (SINGLE, pd.Series([1, 2]), TO_IDS),
        (SINGLE, [1, 2], TO_IDS),
        (IDTypeFeature, [3, 4], ONE_D),
        (IDTypeFeature, ["a", "b"], HASH),
        (
            IDTypeFeature,
            [torch.tensor([1.0])],
            "Tensor; floats lose ids above 2**53: read",
        ),
    ],
)
def test_w05_ids_of_other_types_are_told_what_to_type(kind: Any, ids: Any, hint: str) -> None:
    with pytest.raises(DataTypeError) as raised:
        kind("clicks", ids)
    assert hint in str(raised.value)
    assert "\n" not in str(raised.value)


def test_w05_what_is_typed_after_the_advice_is_taken() -> None:
    column = pd.Series(["a", "b", "a"], dtype="category")
    (a, b, again) = SINGLE("clicks", hash_text(column)).data
    assert a == again != b
    assert max(a, b) < 1 << 56
    for ids in (torch.tensor([1, 2]), pd.Series([1, 2]), [1, 2]):
        assert SINGLE("clicks", np.asarray(ids).astype(np.uint64)).data.tolist() == [1, 2]
