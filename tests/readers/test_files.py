"""Folders of files: whose rows, in which order, from which batch on, in how much memory."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from persia import env
from persia.errors import ConfigError, DataError
from persia.readers import ArrowReader, Columns, ParquetReader
from persia.readers._files import WHOLE_BYTES
from tests.readers.support import (
    COLUMNS,
    bytes_of,
    check_exact,
    ids_of,
    rows_of,
    table,
    write_folder,
)
from tests.support.fixtures import Monkey
from tests.support.waiting import until

SIZES = (20, 1, 33, 14)
NUM_ROWS = sum(SIZES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("parquet")
    write_folder(path, SIZES)
    return path


@pytest.fixture(scope="module")
def arrow_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("arrow")
    first = 0
    for number, size in enumerate(SIZES):
        made = table(first, size)
        with pa.ipc.new_file(str(path / f"{number}.arrow"), made.schema) as writer:
            writer.write_table(made, max_chunksize=7)
        first += size
    return path


def test_every_row_once_and_in_order(folder: Path, arrow_folder: Path) -> None:
    for reader in (
        ParquetReader(folder, COLUMNS, 8, shard=(0, 1)),
        ArrowReader(arrow_folder, COLUMNS, 8, shard=(0, 1)),
    ):
        batches = list(reader)
        assert rows_of(batches) == list(range(NUM_ROWS))
        assert [batch.batch_size for batch in batches] == [8] * 8 + [4]
        assert len(batches) == reader.num_batches()
        assert ids_of(batches[1], "user") == [[3 * row] for row in range(8, 16)]
        assert ids_of(batches[1], "items") == [[row] * (row % 4) for row in range(8, 16)]


def test_files_may_differ_in_what_may_be_null(tmp_path: Path) -> None:
    made = table(0, 5)
    for number, is_nullable in enumerate((False, True)):
        fields = [field.with_nullable(is_nullable) for field in made.schema]
        pq.write_table(made.cast(pa.schema(fields)), tmp_path / f"{number}.parquet")
    batches = list(ParquetReader(tmp_path, COLUMNS, 4, shard=(0, 1)))
    assert [batch.batch_size for batch in batches] == [4, 4, 2]


def test_row_groups_by_chunks_give_the_same_bytes(folder: Path, monkeypatch: Monkey) -> None:
    reader = ParquetReader(folder, COLUMNS, 3, shuffle_seed=3, shard=(0, 1))
    whole = bytes_of(reader)
    monkeypatch.setattr("persia.readers._files.WHOLE_BYTES", 0)
    monkeypatch.setattr("persia.readers._files.CHUNK_ROWS", 4)
    assert bytes_of(reader) == whole
    assert bytes_of(reader.iter_from(5)) == whole[5:]


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_run_that_continues_gets_exactly_the_rest(
    folder: Path, arrow_folder: Path, seed: int | None, size: int
) -> None:
    # From every batch, so at the beginning of a file, in the middle of one and of a row group,
    # and beyond the end; in every shard.
    seen: list[int] = []
    for index in range(size):
        options: dict[str, Any] = {"shuffle_seed": seed, "shard": (index, size)}
        reader = ParquetReader(folder, COLUMNS, 4, **options)
        other = ArrowReader(arrow_folder, COLUMNS, 4, **options)
        whole = check_exact(reader)
        assert check_exact(other) == whole
        assert len(whole) == reader.num_batches() == other.num_batches()
        seen += rows_of(reader)
    assert sorted(seen) == list(range(NUM_ROWS))


def test_shuffled_by_row_groups_otherwise_in_each_epoch(folder: Path) -> None:
    reader = ParquetReader(folder, COLUMNS, 7, shuffle_seed=1, shard=(0, 1))
    first = rows_of(reader)
    assert first != list(range(NUM_ROWS))
    assert rows_of(reader) == first
    assert sum(b - a == 1 for a, b in itertools.pairwise(first)) > NUM_ROWS * 2 / 3
    reader.epoch = 1
    second = rows_of(reader)
    assert second != first
    assert sorted(second) == sorted(first)
    other = ParquetReader(folder, COLUMNS, 7, shuffle_seed=2, shard=(0, 1))
    assert rows_of(other) != first


def test_the_last_batch_may_be_left_out(folder: Path) -> None:
    reader = ParquetReader(folder, COLUMNS, 8, drop_last=True, shard=(0, 1))
    assert rows_of(reader) == list(range(64))
    assert reader.num_batches() == 8


def test_the_names_of_folders_are_columns(folder: Path) -> None:
    columns = Columns(["user"], ["day"], ["row"])
    batches = list(ParquetReader(folder, columns, 100, shard=(0, 1)))
    days = [int(day) for batch in batches for day in batch.non_id_type_features[0].data[:, 0]]
    assert days == [day for day, size in enumerate(SIZES) for _ in range(size)]
    as_ids = next(iter(ParquetReader(folder, Columns(["day"], labels=["row"]), 3)))
    assert ids_of(as_ids, "day") == [[0], [0], [0]]


@pytest.mark.parametrize(
    "place",
    [{"replica_index": 1, "replica_size": 3}, {"rank": 1, "local_rank": 1, "world_size": 3}],
)
def test_a_shard_of_the_process(folder: Path, place: dict[str, int]) -> None:
    env.set_env(**place)
    got = bytes_of(ParquetReader(folder, COLUMNS, 8))
    assert got == bytes_of(ParquetReader(folder, COLUMNS, 8, shard=(1, 3)))


@pytest.mark.parametrize("whole_bytes", [0, WHOLE_BYTES])
def test_memory_of_a_few_chunks(tmp_path: Path, monkeypatch: Monkey, whole_bytes: int) -> None:
    monkeypatch.setattr("persia.readers._files.WHOLE_BYTES", whole_bytes)
    # 800,000 rows are 51 MB in Arrow, and a row group is 1.3 MB, of which a few are held: one
    # that is cut into batches, and one or two that are read ahead, packed and not.
    names = [f"c{number}" for number in range(8)]
    rows = pa.array(range(20_000))
    made = pa.table(dict.fromkeys(names, pa.concat_arrays([rows] * 40)))
    pq.write_table(made, tmp_path / "a.parquet", row_group_size=20_000)
    del made
    reader = ParquetReader(tmp_path, Columns(names, requires_grad=False), 1000, shard=(0, 1))
    before = pa.total_allocated_bytes()
    most = count = 0
    for batch in reader:
        count += batch.batch_size
        most = max(most, pa.total_allocated_bytes() - before)
    assert count == 800_000
    assert most < 15_000_000
    # Arrow's own threads let the last row group go a moment later.
    until(lambda: pa.total_allocated_bytes() - before < 1_000_000)


def test_what_cannot_be_read_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"no \.parquet files in .*empty"):
        ParquetReader(tmp_path / "empty", Columns(["user"]), 8)
    with pytest.raises(ConfigError, match="nowhere: no such file or folder"):
        ParquetReader(tmp_path / "nowhere", COLUMNS, 8)
    with pytest.raises(ConfigError, match=r"a column 'usr' for ids.*did you mean 'user'"):
        ParquetReader(folder, Columns(["usr"]), 8)
    write_folder(tmp_path, [3])
    pq.write_table(table(0, 3).drop_columns(["price"]), tmp_path / "day=0" / "z.parquet")
    with pytest.raises(DataError, match=r"z\.parquet: column 'price': expected float"):
        list(ParquetReader(tmp_path, COLUMNS, 8, shard=(0, 1)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"batch_size": "200"}, "batch_size must be at least 1, got '200'"),
        ({"batch_size": 1, "shuffle_seed": -1}, "shuffle_seed must be at least 0"),
        ({"batch_size": 1, "shard": (2, 2)}, "expected an index below the size"),
    ],
)
def test_numbers_that_cannot_be(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ParquetReader(folder, COLUMNS, **options)


class Ctx:
    """Stands in for a DataCtx of a run that continues."""

    def __init__(self, resume_position: int) -> None:
        self.resume_position = resume_position
        self.sought = -1
        self.sent: list[bytes] = []

    def seek(self, batch: int) -> None:
        self.sought = batch

    def send_data(self, batch: Any) -> None:
        self.sent.append(batch.to_bytes())


class Unknown(ParquetReader):
    """The number of its rows is not known before it was read."""

    def _num_batches(self) -> None:
        return None


@pytest.mark.parametrize("kind", [ParquetReader, Unknown])
def test_epochs_are_sent_from_where_it_stopped(folder: Path, kind: type[ParquetReader]) -> None:
    def reader() -> ParquetReader:
        return kind(folder, COLUMNS, 8, shuffle_seed=5, shard=(0, 1))

    whole, epochs = Ctx(0), reader()
    epochs.send(whole, epochs=3)  # type: ignore[arg-type]
    assert epochs.epoch == 2
    assert len(set(whole.sent)) > len(whole.sent) / 2  # of other orders
    expected: list[bytes] = []
    for epoch in range(3):
        one = reader()
        one.epoch = epoch
        expected += bytes_of(one)
    assert whole.sent == expected
    for first in range(len(expected) + 1):
        ctx = Ctx(first)
        reader().send(ctx, epochs=3)  # type: ignore[arg-type]
        assert (ctx.sought, ctx.sent) == (first, expected[first:])
    with pytest.raises(ConfigError, match="epochs must be at least 1, got 0"):
        reader().send(Ctx(0), epochs=0)  # type: ignore[arg-type]
