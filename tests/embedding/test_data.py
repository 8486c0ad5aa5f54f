"""Dense data, labels and whole batches: what is taken, what is refused, and their bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from persia._rpc import serialization
from persia.embedding.data import (
    IDTypeFeature,
    IDTypeFeatureWithSingleID,
    Label,
    NdarrayDataBase,
    NonIDTypeFeature,
    PersiaBatch,
)
from persia.errors import DataError, DataTypeError, ProtocolError
from tests.support.profiles import tries

DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64"),
)


def users(size: int = 3, name: str = "user") -> IDTypeFeatureWithSingleID:
    return IDTypeFeatureWithSingleID(name, np.arange(size, dtype=np.uint64))


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


def test_default_names() -> None:
    data = np.zeros(1)
    assert NdarrayDataBase(data).name == "ndarray_base"
    assert Label(data).name == "label_anonymous"
    assert NonIDTypeFeature(data).name == "non_id_type_feature_anonymous"


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
        (
            np.ma.masked_array([1.0], [True]),
            "label 'y': expected a numpy array, got MaskedArray",
        ),
        (np.array(1.0), "label 'y': expected at least 1 dimension, got 0"),
        (np.array(["a"]), "label 'y': expected a dtype of bool, float16.*; got <U1"),
        (np.array([None]), "label 'y': expected a dtype.*; got object"),
        (np.array([1j]), "label 'y': expected a dtype.*; got complex128"),
        (np.array([1], "M8[s]"), "label 'y': expected a dtype"),
        (np.array([1.0], ">f4"), "label 'y': expected a dtype.*; got >f4"),
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


def test_a_dense_value_that_is_not_finite_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    data = np.ones((4, 2), np.float32)
    NonIDTypeFeature(data, name="finite")
    data[2, 1] = np.nan
    for _ in range(3):
        NonIDTypeFeature(data, name="not finite")
    (record,) = caplog.records
    assert record.message.startswith("dense feature 'not finite': nan in sample 2 of a batch")


def test_large_dense_values_are_no_news(caplog: pytest.LogCaptureFixture) -> None:
    NonIDTypeFeature(np.full((4, 2), 3e38, np.float32), name="large")
    NonIDTypeFeature(np.full((4, 2), 1e308), name="larger")
    assert not caplog.records


def test_skip_check_data(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_labels_and_dense_features_are_optional() -> None:
    batch = PersiaBatch([users()], requires_grad=False)
    assert (batch.labels, batch.non_id_type_features, batch.meta) == ([], [], None)
    assert batch.requires_grad is False


def test_a_feature_without_any_id_is_legal() -> None:
    empty = IDTypeFeature("none", [np.array([], np.uint64)] * 3)
    batch = PersiaBatch([users(), empty], labels=[label()])
    assert batch.features[1].num_ids == 0


def test_batch_size_beyond_the_original_limit() -> None:
    size = 65536
    batch = PersiaBatch([users(size)], labels=[label(size)], batch_size=size)
    assert batch.batch_size == size


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


def test_gradients_need_a_label() -> None:
    with pytest.raises(RuntimeError, match="expected a label where gradients are asked"):
        PersiaBatch([users()])
    with pytest.raises(DataError, match="expected a label where gradients are asked"):
        PersiaBatch([users()], labels=[])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"id_type_features": []}, "id_type_features: expected at least one, got none"),
        (
            {"id_type_features": [users(0)], "labels": [label(0)]},
            "feature 'user': expected at least 1 sample, got 0",
        ),
        ({"batch_size": 0}, "batch_size: expected at least 1 sample, got 0"),
        ({"batch_size": 4}, "feature 'user': expected 4 samples as in batch_size, got 3"),
        (
            {"id_type_features": [users(), clicks(2)]},
            "feature 'clicks': expected 3 samples as in feature 'user', got 2",
        ),
        ({"labels": [label(4)]}, "label 'label_anonymous': expected 3 samples as in feature"),
        (
            {"non_id_type_features": [NonIDTypeFeature(np.zeros(5), "x")]},
            "dense feature 'x': expected 3 samples as in feature 'user', got 5",
        ),
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
        (
            {"id_type_features": [users(), label()]},
            r"id_type_features\[1\]: expected IDTypeFeature or .*, got Label",
        ),
        (
            {"labels": [NonIDTypeFeature(np.zeros(3))]},
            r"labels\[0\]: expected Label, got NonIDTypeFeature",
        ),
        (
            {"non_id_type_features": [np.zeros(3)]},
            r"non_id_type_features\[0\]: expected NdarrayDataBase, got ndarray",
        ),
        ({"meta": "text"}, "meta: expected bytes, got str; encode it first"),
        ({"id_type_features": users()}, "id_type_features: expected a list, got IDTypeFeature"),
        (
            {"non_id_type_features": NonIDTypeFeature(np.zeros(3))},
            "non_id_type_features: expected a list, got NonIDTypeFeature",
        ),
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


def same(left: PersiaBatch, right: PersiaBatch) -> bool:
    def parts(batch: PersiaBatch) -> list[Any]:
        arrays = [array for feature in batch.features for array in feature.parts()]
        arrays += [item.data for item in (*batch.non_id_type_features, *batch.labels)]
        return [(array.dtype.str, array.shape, array.tobytes()) for array in arrays]

    def rest(batch: PersiaBatch) -> tuple[Any, ...]:
        names = [feature.name for feature in batch.features]
        names += [item.name for item in (*batch.non_id_type_features, *batch.labels)]
        return names, batch.batch_size, batch.requires_grad, batch.meta, batch.batch_id

    return parts(left) == parts(right) and rest(left) == rest(right)


def test_bytes_round_trip() -> None:
    batch = whole()
    batch.batch_id = 2**40
    data = batch.to_bytes()
    assert isinstance(data, bytes)
    back = PersiaBatch.from_bytes(data)
    assert same(batch, back)
    assert back.to_bytes() == data
    assert all(item.data.flags.writeable for item in back.labels)


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
    assert same(batch, PersiaBatch.from_bytes(batch.to_bytes()))


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


@pytest.mark.parametrize(
    "data", [b"", b"PRSBAT01", WHOLE + b"\0", WHOLE + bytes(8), b"\0" * 64]
)
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
