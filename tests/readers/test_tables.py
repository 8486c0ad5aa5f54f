"""Tables in memory, Hugging Face data sets, torch's loaders."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from persia.errors import ConfigError, DataTypeError
from persia.readers import Columns, TableReader, TorchReader
from tests.readers.support import COLUMNS, bytes_of, check_exact, ids_of, rows_of, table

NUM_ROWS = 50


def test_a_table() -> None:
    chunked = pa.concat_tables([table(0, 20), table(20, 30)])
    reader = TableReader(chunked, COLUMNS, 8, piece_rows=6, shuffle_seed=1, shard=(0, 1))
    assert sorted(rows_of(reader)) == list(range(NUM_ROWS))
    assert len(check_exact(reader)) == len(reader) == 7
    with pytest.raises(DataTypeError, match=r"expected a pyarrow\.Table or a datasets"):
        TableReader([1, 2], COLUMNS, 8)
    with pytest.raises(DataTypeError, match=r"DataFrame; pa\.Table\.from_pandas\(frame\)"):
        TableReader(chunked.to_pandas(), COLUMNS, 8)
    with pytest.raises(ConfigError, match="expected data, got none"):
        list(TableReader(table(0, 0), COLUMNS, 8))
    with pytest.raises(ConfigError, match="piece_rows"):
        TableReader(chunked, COLUMNS, 8, piece_rows=0)


def test_hugging_face_data_sets() -> None:
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset(table(0, NUM_ROWS))
    reader = TableReader(whole, COLUMNS, 8, piece_rows=6, shard=(0, 1))
    assert bytes_of(reader) == bytes_of(TableReader(table(0, NUM_ROWS), COLUMNS, 8))
    check_exact(reader)
    # Its own order and selection hold.
    mixed = whole.shuffle(seed=4).select(range(30))
    reader = TableReader(mixed, COLUMNS, 8, piece_rows=6, shuffle_seed=2, shard=(0, 1))
    assert sorted(rows_of(reader)) == sorted(mixed["row"])
    check_exact(reader)
    with pytest.raises(ConfigError, match="expected a column 'usr'"):
        TableReader(whole, Columns(["usr"]), 8)
    # Streamed: its shards are the pieces.
    stream = whole.to_iterable_dataset(num_shards=5)
    seen: list[int] = []
    for index in range(2):
        part = TableReader(stream, COLUMNS, 8, shuffle_seed=2, shard=(index, 2))
        check_exact(part)
        seen += rows_of(part)
    assert sorted(seen) == list(range(NUM_ROWS))
    with pytest.raises(TypeError, match=r"TableReader has no len: .* known only once"):
        len(TableReader(stream, COLUMNS, 8))


def test_a_stream_of_fewer_shards_than_readers() -> None:
    datasets = pytest.importorskip("datasets")
    stream = datasets.Dataset(table(0, 500)).to_iterable_dataset(num_shards=2)
    seen = []
    for index in range(3):
        part = TableReader(stream, COLUMNS, 8, shuffle_seed=2, shard=(index, 3))
        check_exact(part)
        seen.append(rows_of(part))
    assert sorted(row for rows in seen for row in rows) == list(range(500))
    assert max(map(len, seen)) - min(map(len, seen)) <= 64


class Samples(Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {
            "row": number,
            "user": number * 3,
            "tags": torch.tensor([number, number + 1]),
            "city": "abc"[number % 3],
            "price": torch.tensor([number / 8, 1.0]),
        }


def test_a_loader_of_torch() -> None:
    columns = Columns(["user", "tags", "city"], ["price"], ["row"])
    reader = TorchReader(DataLoader(Samples(), batch_size=8), columns)
    assert rows_of(reader) == list(range(NUM_ROWS))
    assert len(check_exact(reader)) == len(reader) == 7
    with pytest.raises(TypeError, match=r"TorchReader has no len: .* once they were read"):
        len(TorchReader(iter([]), columns))
    batch = next(iter(reader))
    assert ids_of(batch, "user") == [[3 * number] for number in range(8)]
    assert ids_of(batch, "tags") == [[number, number + 1] for number in range(8)]
    assert len({one for (one,) in ids_of(batch, "city")}) == 3
    assert batch.non_id_type_features[0].data.tolist() == [[n / 8, 1.0] for n in range(8)]


def test_tuples_and_nested_tensors() -> None:
    data = TensorDataset(torch.arange(20), torch.arange(20.0))
    loader = DataLoader(data, batch_size=8)
    columns = Columns(["user"], labels=["row"])
    assert rows_of(TorchReader(loader, columns, names=["user", "row"])) == list(range(20))
    nested = torch.nested.nested_tensor_from_jagged(
        torch.tensor([4, 5, 6]), torch.tensor([0, 2, 2, 3])
    )
    (batch,) = TorchReader([{"user": nested, "row": np.arange(3)}], columns)
    assert ids_of(batch, "user") == [[4, 5], [], [6]]
    with pytest.raises(DataTypeError, match=r"TorchReader: columns: expected Columns"):
        TorchReader(loader, ["user"])  # type: ignore[arg-type]
    for wrong, got in ((Samples(), "Samples"), (3, "int"), ("clicks.pt", "str")):
        with pytest.raises(DataTypeError, match=rf"a loader of batches, got {got}; torch\."):
            TorchReader(wrong, columns)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="names: expected lists of names, got a str"):
        TorchReader(loader, columns, names="user")
    for given, error in (
        ([torch.zeros(2)], "expected the loader to yield mappings"),
        (
            [{"user": torch.zeros(2, 2, 2, dtype=torch.int64), "row": torch.zeros(2)}],
            "column 'user': expected 1 or 2 dimensions",
        ),
        ([{"user": ["a", 1], "row": torch.zeros(2)}], "column 'user': expected values of one"),
    ):
        with pytest.raises(DataTypeError, match=error):
            list(TorchReader(given, columns))
    with pytest.raises(DataTypeError, match=r"tuples of the columns in names=\['user'\], got"):
        list(TorchReader(loader, columns, names=["user"]))
    with pytest.raises(ConfigError, match="expected a column 'row' for labels"):
        list(TorchReader([{"user": torch.arange(3)}], columns))
