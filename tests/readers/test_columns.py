"""Which columns are read as what."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from persia.embedding import data as embedding_data
from persia.errors import ConfigError, DataError, DataTypeError
from persia.readers import Columns, TableReader
from tests.readers.support import ids_of
from tests.reference.ids import hash_text


def test_a_feature_is_named_once() -> None:
    with pytest.raises(ConfigError, match="ids: expected each feature once, got 'user' twice"):
        Columns(["user", "user"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"fill": "0"}, "fill must be a number, or None, got '0'"),
        ({"requires_grad": "no"}, "requires_grad must be True or False, got 'no'"),
        ({"dense": {1: ["a"]}}, r"dense: expected lists of names, got a dict, \{1: \['a'\]\}"),
    ],
)
def test_what_cannot_be_an_argument(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Columns(["user"], **given)


def test_a_feature_may_have_another_name_and_two_may_share_a_column() -> None:
    batch = batch_of(
        Columns({"viewer": "user", "owner": "user"}, requires_grad=False), user=[5]
    )
    assert [feature.name for feature in batch.features] == ["viewer", "owner"]
    assert ids_of(batch, "owner") == [[5]]


def test_columns_that_say_nothing() -> None:
    with pytest.raises(ConfigError, match="at least one column, got none"):
        Columns([])
    for given in ("user", {"user"}, [1], {"user": ["user"]}):
        with pytest.raises(ConfigError, match="ids: expected lists of names, got a "):
            Columns(given)  # type: ignore[arg-type]
    for dense in ("age", {"age": "age"}):
        with pytest.raises(
            ConfigError, match="dense: expected lists of names, got a str, 'age'"
        ):
            Columns(["user"], dense)
    with pytest.raises(ConfigError, match="labels: expected lists of names, got a str, 'y'"):
        Columns(["user"], [], "y")
    assert Columns({"a": 1, "b": 2}.keys(), None).names == ["a", "b"]  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="expected 'hash' or 'hex', got 'md5'"):
        Columns(["user"], strings="md5")


TOP = 2**64


def batch_of(columns: Columns, **arrays: Any) -> Any:
    made = pa.table({name: pa.array(array) for name, array in arrays.items()})
    (batch,) = TableReader(made, columns, 100, shard=(0, 1))
    return batch


def hashes(*texts: str) -> list[int]:
    return [hash_text(text.encode()) % (1 << 56) for text in texts]


DICTIONARY = pa.array(["a", "b", "a", None]).dictionary_encode()
WITH_NULL_ENTRY = pa.DictionaryArray.from_arrays(pa.array([0, 1, 0]), pa.array(["a", None]))
IDS: list[tuple[Any, list[list[int]]]] = [
    (pa.array([1, TOP - 1], pa.uint64()), [[1], [TOP - 1]]),
    (pa.array([1, -1], pa.int64()), [[1], [TOP - 1]]),
    (pa.array([1, -1], pa.int8()), [[1], [TOP - 1]]),
    (pa.array([1, 255], pa.uint8()), [[1], [255]]),
    (pa.array([7, None, 8], pa.int32()), [[7], [], [8]]),
    (pa.array(["a", "", None]), [*([each] for each in hashes("a", "")), []]),
    (pa.array([b"a", b"\0"], pa.large_binary()), [[each] for each in hashes("a", "\0")]),
    (pa.array(["x", "a"]).slice(1), [hashes("a")]),
    (DICTIONARY, [hashes("a"), hashes("b"), hashes("a"), []]),
    (DICTIONARY.slice(1), [hashes("b"), hashes("a"), []]),
    (WITH_NULL_ENTRY, [hashes("a"), [], hashes("a")]),
    (
        pa.ListArray.from_arrays(pa.array([0, 1, 3]), WITH_NULL_ENTRY),
        [hashes("a"), hashes("a")],
    ),
    (pa.array([[1, 2], [], None, [3, None]]), [[1, 2], [], [], [3]]),
    (pa.array([[1, 2], [], None, [3, None]]).slice(1), [[], [], [3]]),
    (pa.array([[1], [2]], pa.large_list(pa.uint64())), [[1], [2]]),
    (pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int64(), 2)), [[1, 2], [], [3, 4]]),
    (pa.array([["a", "bb"], []]), [hashes("a", "bb"), []]),
    (pa.array([None, None], pa.int64()), [[], []]),
]


@pytest.mark.parametrize(("array", "want"), IDS, ids=lambda x: str(getattr(x, "type", ""))[:40])
def test_ids(array: Any, want: list[list[int]]) -> None:
    assert ids_of(batch_of(Columns(["x"], requires_grad=False), x=array), "x") == want


@pytest.mark.parametrize(
    "values",
    [
        pa.array([-1, 2]),
        pa.array([-1, None], pa.int32()),
        pa.array([[1, -1], []]),
        pa.array([[1, 2], [-1, None]], pa.list_(pa.int16())),
        pa.array([3, -1, 3]).dictionary_encode(),
        np.array([-1, 2]),
        np.array([[-1, 2]], np.int8),
        torch.tensor([-1]),
        [4, -1],
    ],
    ids=lambda values: f"{type(values).__name__} {getattr(values, 'dtype', '')}",
)
def test_minus_one_is_named_once(
    values: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding_data, "_warned_of_minus_one", set())
    columns = Columns({"viewer": "x"}, requires_grad=False)
    for _ in range(2):
        batch = columns.batch({"x": values})
        if isinstance(values, pa.Array):
            batch = batch_of(columns, x=values)
    assert TOP - 1 in np.concatenate(ids_of(batch, "viewer"))
    (line,) = caplog.messages
    assert line.startswith("feature 'viewer': -1 is taken as an id like any other, 2**64 - 1")


def test_hexadecimal_ids() -> None:
    columns = Columns(["x"], strings="hex", requires_grad=False)
    texts = ["68fd1e64", "FF", None, "f" * 16]
    want = [[0x68FD1E64], [0xFF], [], [TOP - 1]]
    assert ids_of(batch_of(columns, x=texts), "x") == want
    assert ids_of(batch_of(columns, x=pa.array(texts).dictionary_encode()), "x") == want
    # An entry of a dictionary that no row has may be anything.
    unused = pa.DictionaryArray.from_arrays(pa.array([0, 0]), pa.array(["ff", "red"]))
    assert ids_of(batch_of(columns, x=unused), "x") == [[255], [255]]
    with pytest.raises(DataError, match=r"column 'x': expected 1 to 16 hex.* got 'red'"):
        batch_of(columns, x=["1", "red"])


def test_numbers() -> None:
    columns = Columns(["x"], {"dense": ["a", "b", "c"], "more": ["d"]}, ["y"])
    batch = batch_of(
        columns,
        x=[1, 2, 3],
        a=[1, None, 3],
        b=[True, False, None],
        c=pa.array([[1.5, 2.5], None, [3.5, None]], pa.list_(pa.float64(), 2)),
        d=pa.array([0.5, None, float("nan")], pa.float32()),
        y=[0, 1, 1],
    )
    dense, more = (item.data for item in batch.non_id_type_features)
    assert dense.tolist() == [[1, 1, 1.5, 2.5], [0, 0, 0, 0], [3, 0, 3.5, 0]]
    assert np.array_equal(more, np.array([[0.5], [0], [np.nan]]), equal_nan=True)
    assert [item.name for item in batch.non_id_type_features] == ["dense", "more"]
    assert batch.labels[0].name == "y"
    assert batch.labels[0].data.tolist() == [[0], [1], [1]]
    assert {dense.dtype, more.dtype, batch.labels[0].data.dtype} == {np.dtype(np.float32)}


def test_a_loss_may_need_no_label() -> None:
    batch = batch_of(Columns(["x"], labels=[]), x=[1, 2])
    assert (batch.labels, batch.requires_grad) == ([], True)
    assert not batch_of(Columns(["x"], requires_grad=False), x=[1]).requires_grad
    with pytest.raises(
        DataError, match=r"expected a label.*labels=\[\] if the loss needs none"
    ):
        batch_of(Columns(["x"]), x=[1, 2])


def test_nulls_where_none_may_be() -> None:
    with pytest.raises(DataError, match="column 'y': expected a number, got a null in row 1"):
        batch_of(Columns(["x"], labels=["y"]), x=[1, 2], y=[1, None])
    vectors = pa.array([[1.0], None], pa.list_(pa.float32(), 1))
    with pytest.raises(DataError, match="column 'd': expected a number, got a null in row 1"):
        batch_of(Columns(["x"], ["d"], ["x"], fill=None), x=[1, 2], d=vectors)
    filled = batch_of(Columns(["x"], ["d"], ["x"], fill=-1.0), x=[1, 2], d=[None, 2**25 + 1])
    assert filled.non_id_type_features[0].data.tolist() == [[-1], [2**25]]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (Columns(["z"]), r"expected a column 'z' for ids, got x, y"),
        (Columns(["y"]), r"column 'y' for ids: expected integers, texts.*; got double"),
        (Columns(["x"], ["t"]), r"column 't' for dense: expected .*; got string"),
        (Columns(["x"], labels=["t"]), r"column 't' for labels: expected .*; got string"),
        (Columns(["l"]), r"column 'l' for ids: expected .*; got list<.*double>"),
    ],
)
def test_a_column_of_a_wrong_type_is_named(columns: Columns, message: str) -> None:
    made = pa.table({"x": [1], "y": [0.5], "t": ["a"], "l": [[0.5]]})
    with pytest.raises((ConfigError, DataTypeError), match=message):
        TableReader(made, columns, 1)
