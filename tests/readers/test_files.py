"""Folders of files: whose rows, in which order, from which batch on, in how much memory."""

from __future__ import annotations

import itertools
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest

from persia import env
from persia.errors import ConfigError, DataError, DataTypeError
from persia.readers import ArrowReader, Columns, ParquetReader
from persia.readers._files import WHOLE_BYTES, _RowGroup
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


def test_columns_of_a_row_group_are_asked_for_at_once_from_afar(
    folder: Path, monkeypatch: Monkey
) -> None:
    asked: set[bool] = set()
    real = pq.ParquetFile

    def opened(*args: Any, pre_buffer: bool, **options: Any) -> Any:
        asked.add(pre_buffer)
        return real(*args, pre_buffer=pre_buffer, **options)

    monkeypatch.setattr(pq, "ParquetFile", opened)
    near = bytes_of(ParquetReader(folder, COLUMNS, 8, shard=(0, 1)))
    assert asked == {False}
    asked.clear()
    tree = pafs.SubTreeFileSystem(str(folder), pafs.LocalFileSystem())
    far = ParquetReader("", COLUMNS, 8, shard=(0, 1), filesystem=tree)
    assert bytes_of(far) == near
    assert asked == {True}


def test_files_may_differ_in_what_may_be_null(tmp_path: Path) -> None:
    made = table(0, 5)
    for number, is_nullable in enumerate((False, True)):
        fields = [field.with_nullable(is_nullable) for field in made.schema]
        pq.write_table(made.cast(pa.schema(fields)), tmp_path / f"{number}.parquet")
    batches = list(ParquetReader(tmp_path, COLUMNS, 4, shard=(0, 1)))
    assert [batch.batch_size for batch in batches] == [4, 4, 2]


@pytest.mark.parametrize("kind", [ParquetReader, ArrowReader])
def test_parts_by_chunks_give_the_same_bytes(
    folder: Path, arrow_folder: Path, kind: Any, monkeypatch: Monkey
) -> None:
    path = folder if kind is ParquetReader else arrow_folder
    reader = kind(path, COLUMNS, 3, shuffle_seed=3, shard=(0, 1))
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
        if seed is not None:
            options["shuffle_buffer"] = 10
        reader = ParquetReader(folder, COLUMNS, 4, **options)
        other = ArrowReader(arrow_folder, COLUMNS, 4, **options)
        whole = check_exact(reader)
        assert check_exact(other) == whole
        assert len(whole) == reader.num_batches() == len(reader) == len(other)
        seen += rows_of(reader)
    assert sorted(seen) == list(range(NUM_ROWS))


@pytest.mark.parametrize("buffer", [None, 1, 20, 1000])
def test_shuffled_otherwise_in_each_epoch(folder: Path, buffer: int | None) -> None:
    def read(seed: int, epoch: int = 0) -> list[int]:
        options: dict[str, Any] = {"shuffle_seed": seed, "shuffle_buffer": buffer}
        reader = ParquetReader(folder, COLUMNS, 7, shard=(0, 1), **options)
        reader.epoch = epoch
        return rows_of(reader)

    first = read(1)
    assert sorted(first) == list(range(NUM_ROWS))
    assert read(1) == first
    assert len({tuple(order) for order in (first, read(1, 1), read(2), range(NUM_ROWS))}) == 4
    # Rows of a row group stay together unless samples are shuffled too.
    together = sum(b - a == 1 for a, b in itertools.pairwise(first))
    assert (together > NUM_ROWS * 2 / 3) is (buffer in (None, 1))
    assert (together < NUM_ROWS / 4) is (buffer not in (None, 1))


def test_windows_are_mixed_one_by_one_each_in_its_own_way(tmp_path: Path) -> None:
    pq.write_table(table(0, 100), tmp_path / "a.parquet")  # one row group, as pandas writes it
    options: dict[str, Any] = {"shuffle_seed": 1, "shard": (0, 1)}
    # Of 18 samples, which are 3 whole batches of 8.
    rows = rows_of(ParquetReader(tmp_path, COLUMNS, 8, shuffle_buffer=18, **options))
    windows = [rows[begin : begin + 24] for begin in range(0, 100, 24)]
    assert [sorted(window) for window in windows] == [
        list(range(begin, min(begin + 24, 100))) for begin in range(0, 100, 24)
    ]
    orders = {tuple(np.subtract(window, 24 * n)) for n, window in enumerate(windows[:-1])}
    assert len(orders) == 4
    # By default all of a small file.
    rows = rows_of(ParquetReader(tmp_path, COLUMNS, 8, **options))
    assert {row // 50 for row in rows[:24]} == {row // 50 for row in rows[-24:]} == {0, 1}


def test_an_order_that_comes_again_is_logged(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for seed, epochs, times in ((1, (0, 1, 2), 0), (1, (0, 0, 1, 1), 2), (None, (0, 0), 0)):
        caplog.clear()
        reader = ParquetReader(folder, COLUMNS, 8, shuffle_seed=seed, shard=(0, 1))
        for epoch in epochs:
            reader.epoch = epoch
            next(iter(reader))
        expected = "is read again, in the same order; write `reader.epoch = ...`"
        assert [expected in each.message for each in caplog.records] == [True] * times


def test_the_epoch_of_the_next_pass_may_be_set_in_this_one(folder: Path) -> None:
    reader = ParquetReader(folder, COLUMNS, 4, shuffle_seed=1, shuffle_buffer=8, shard=(0, 1))
    whole = bytes_of(reader)
    batches = iter(reader)
    first = next(batches)
    reader.epoch = 1
    assert [first.to_bytes(), *bytes_of(batches)] == whole


def test_a_file_as_pandas_writes_it_is_shuffled(tmp_path: Path) -> None:
    """One row group: nothing but the seed is asked for."""
    table(0, 200).to_pandas().to_parquet(tmp_path / "a.parquet")
    options: dict[str, Any] = {"shuffle_seed": 1, "shard": (0, 1)}
    rows = rows_of(ParquetReader(tmp_path, COLUMNS, 8, **options))
    assert rows != sorted(rows) == list(range(200))


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("size", [2, 3, 7])
def test_one_row_group_serves_any_number_of_shards(
    tmp_path: Path, seed: int | None, size: int
) -> None:
    pq.write_table(table(0, 101), tmp_path / "a.parquet")
    shards = [
        rows_of(ParquetReader(tmp_path, COLUMNS, 8, shuffle_seed=seed, shard=(index, size)))
        for index in range(size)
    ]
    assert sorted(itertools.chain(*shards)) == list(range(101))
    assert {len(rows) for rows in shards} == {101 // size, 101 // size + 1}


def test_what_lies_before_is_not_decoded(folder: Path, monkeypatch: Monkey) -> None:
    options: dict[str, Any] = {"shuffle_seed": 3, "shuffle_buffer": 8, "shard": (1, 2)}
    reader = ParquetReader(folder, COLUMNS, 4, **options)
    decode, decoded = _RowGroup._decoded, list[tuple[str, int]]()

    def counted(group: _RowGroup) -> Any:
        decoded.append((group.file.path, group.number))
        return decode(group)

    monkeypatch.setattr(_RowGroup, "_decoded", counted)
    list(reader)
    whole, decoded[:] = list(decoded), []
    list(reader.iter_from(6))  # behind 24 rows, which are 3 windows, and at least 3 row groups
    assert decoded == whole[-len(decoded) :]
    assert len(decoded) <= len(whole) - 3


@pytest.mark.parametrize(("end", "num_rows"), [(1, 2), (9, 12), (16, 16), (33, 40), (75, 100)])
def test_what_lies_behind_a_shard_is_not_decoded(
    tmp_path: Path, monkeypatch: Monkey, end: int, num_rows: int
) -> None:
    decode, decoded = _RowGroup._decoded, list[int]()

    def counted(group: _RowGroup) -> Any:
        for rows in decode(group):
            decoded.append(rows.num_rows)
            yield rows

    monkeypatch.setattr(_RowGroup, "_decoded", counted)
    monkeypatch.setattr("persia.readers._files.CHUNK_ROWS", 8)
    pq.write_table(table(0, 100), tmp_path / "a.parquet")
    (group,) = ParquetReader(tmp_path, COLUMNS, 2, shard=(0, 1))._pieces
    assert isinstance(group, _RowGroup)
    assert sum(rows.num_rows for rows in group.part(0, end).read()) == end
    # In chunks of as many whole batches, at most 4; from three quarters on in one go.
    assert sum(decoded) == num_rows


def test_a_shard_without_a_row_is_an_error(tmp_path: Path) -> None:
    pq.write_table(table(0, 2), tmp_path / "a.parquet")
    reader = ParquetReader(tmp_path, COLUMNS, 8, shard=(0, 3))
    expected = (
        r"ParquetReader: shard 0 of 3 has no rows; there are 2 in all; start fewer "
        r"data-loaders or ranks, or read all in each by shard=\(0, 1\); `reader.allow_empty"
    )
    for ask in (list, len, ParquetReader.num_batches):
        with pytest.raises(ConfigError, match=expected):
            ask(reader)
    reader.allow_empty = True
    assert (list(reader), len(reader), reader.num_batches(), bool(reader)) == ([], 0, 0, True)
    dropping = ParquetReader(tmp_path, COLUMNS, 8, drop_last=True, shard=(0, 1))
    with pytest.raises(ConfigError, match=r"has 2 rows, and drop_last=True .* fewer than 8"):
        list(dropping)


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


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """800,000 rows, which are 51 MB in Arrow; a row group is 1.3 MB."""
    path: Path = tmp_path_factory.mktemp("large") / "a.parquet"
    rows = pa.array(range(20_000))
    made = pa.table(dict.fromkeys(LARGE.names, pa.concat_arrays([rows] * 40)))
    pq.write_table(made, path, row_group_size=20_000)
    return path


LARGE = Columns([f"c{number}" for number in range(8)], requires_grad=False)


def most_held(reader: ParquetReader) -> int:
    """Read all of ``large``; return the most bytes that arrays held meanwhile."""

    def held() -> int:
        return int(pa.total_allocated_bytes()) + tracemalloc.get_traced_memory()[0]

    tracemalloc.start()  # knows numpy's arrays, as Arrow knows its own
    try:
        before = held()
        most = count = 0
        for batch in reader:
            count += batch.batch_size
            most = max(most, held() - before)
        assert count == 800_000
        # Arrow's own threads may give up what they decoded a moment later.
        until(lambda: held() - before < 1_000_000)
    finally:
        tracemalloc.stop()
    return most


@pytest.mark.parametrize("whole_bytes", [0, WHOLE_BYTES])
def test_memory_of_a_few_chunks(large: Path, monkeypatch: Monkey, whole_bytes: int) -> None:
    monkeypatch.setattr("persia.readers._files.WHOLE_BYTES", whole_bytes)
    # A few row groups are held: one that is cut into batches, and one or two that are read
    # ahead, packed and not.
    assert most_held(ParquetReader(large, LARGE, 1000, shard=(0, 1))) < 15_000_000


def test_memory_of_a_row_group_that_is_larger_than_it(
    tmp_path: Path, monkeypatch: Monkey
) -> None:
    rng = np.random.default_rng(1)
    made = pa.table({name: rng.integers(0, 2**40, 800_000) for name in LARGE.names})
    # As it lies in the file it takes 51 MB: neither unpacked nor packed is it held as a whole.
    options: dict[str, Any] = {"use_dictionary": False, "data_page_size": 1 << 16}
    pq.write_table(made, tmp_path / "a.parquet", row_group_size=800_000, **options)
    del made
    assert most_held(ParquetReader(tmp_path, LARGE, 1000, shard=(0, 1))) < 15_000_000
    monkeypatch.setattr("persia.readers._files.WHOLE_BYTES", 1 << 30)
    assert most_held(ParquetReader(tmp_path, LARGE, 1000, shard=(0, 1))) > 50_000_000


@pytest.mark.parametrize("buffer", [20_000, 100_000])
def test_memory_of_two_windows(large: Path, buffer: int) -> None:
    reader = ParquetReader(
        large, LARGE, 1000, shuffle_seed=1, shuffle_buffer=buffer, shard=(0, 1)
    )
    # A row is 64 bytes. Beyond the windows, what is decoded as in the test before.
    assert most_held(reader) < 2.3 * 64 * buffer + 15_000_000


@pytest.mark.parametrize(("kept", "times"), [(10_000, 4), (20, 4), (0, 11)])
def test_footers_of_the_files_read_last_are_kept(
    folder: Path, monkeypatch: Monkey, kept: int, times: int
) -> None:
    monkeypatch.setattr("persia.readers._files.KEPT_CHUNKS", kept)
    parsed: list[Any] = []
    real = pq.read_metadata

    def counted(file: Any) -> Any:
        parsed.append(file)
        return real(file)

    monkeypatch.setattr(pq, "read_metadata", counted)
    reader = ParquetReader(folder, COLUMNS, 8, shard=(0, 1))
    assert rows_of(reader) == list(range(NUM_ROWS))
    assert len(parsed) == times  # of 4 files, or of their 3 + 1 + 5 + 2 row groups


@pytest.mark.parametrize("seed", [None, 1])
def test_a_file_that_has_changed_is_named(tmp_path: Path, seed: int | None) -> None:
    path = tmp_path / "a.parquet"
    changes: dict[str, Any] = {
        "expected 20 rows in part 0 as when the reader was made, got 30; make a new": table(
            0, 40
        ),
        "expected 20 rows in part 1 as .* got 0; ": table(0, 20),
        "column 'user': expected uint64 as in the other files, got int64": table(
            0, 40
        ).set_column(1, "user", pa.array(range(40))),
        "expected to read part [01] of the file, got: .*footer": b"PAR1 no more",
        "expected to read part [01] of the file, got: .*No such file": None,
    }
    for expected, made in changes.items():
        pq.write_table(table(0, 40), path, row_group_size=20)
        reader = ParquetReader(path, COLUMNS, 4, shuffle_seed=seed, shard=(0, 1))
        assert len(rows_of(reader)) == 40
        path.unlink()
        reader.epoch = 1
        if isinstance(made, bytes):
            path.write_bytes(made)
        elif made is not None:
            pq.write_table(made, path, row_group_size=30 if "30" in expected else 20)
        with pytest.raises(DataError, match=rf"a\.parquet: {expected}"):
            list(reader)


def test_a_list_of_files(folder: Path, arrow_folder: Path) -> None:
    files = sorted(folder.glob("*/*.parquet"), reverse=True)
    whole = bytes_of(ParquetReader(folder, COLUMNS, 8, shard=(0, 1)))
    assert bytes_of(ParquetReader(files, COLUMNS, 8, shard=(0, 1))) == whole
    assert bytes_of(ArrowReader(list(arrow_folder.iterdir()), COLUMNS, 8)) == whole
    some = ParquetReader([str(file) for file in files[:2]], Columns(["day"], ["day"], []), 100)
    assert set(next(iter(some)).non_id_type_features[0].data[:, 0]) == {2, 3}
    for wrong, expected in (
        (
            folder / "*.parquet",
            r"\*\.parquet: no such file.*; a pattern is not expanded",
        ),
        ([files[0], "nowhere"], "nowhere: no such file or folder"),
        ([files[0], folder], "expected files in a list, got a folder"),
        ([], r"path: expected a file, a folder or a list of files, got \[\]"),
        (7, "path: expected a file, a folder or a list of files, got 7"),
    ):
        with pytest.raises(ConfigError, match=expected):
            ParquetReader(wrong, COLUMNS, 8)  # type: ignore[arg-type]


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
        ParquetReader(tmp_path, COLUMNS, 8, shard=(0, 1))  # before anything is read
    (tmp_path / "day=0" / "z.parquet").write_bytes(b"no parquet")
    with pytest.raises(ConfigError, match=r"z\.parquet: expected a file of parquet.*footer"):
        ParquetReader(tmp_path, COLUMNS, 8, shard=(0, 1))
    with pytest.raises(DataTypeError, match=r"expected Columns\(ids=\[.*got \['user'\]"):
        ParquetReader(folder, ["user"], 8)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be a whole number, at least 1"),
        ({"batch_size": "200"}, "must be a whole number, at least 1, got '200'"),
        (
            {"batch_size": 1, "shuffle_seed": -1},
            "shuffle_seed must .* at least 0",
        ),
        ({"batch_size": 1, "shuffle_buffer": 0}, "shuffle_buffer must .* at least 1, or None"),
        ({"batch_size": 1, "shuffle_buffer": 1e5}, "shuffle_buffer must .* got 100000.0"),
        ({"batch_size": 1, "shuffle_buffer": 50}, "expected shuffle_seed= beside it, got none"),
        ({"batch_size": 1, "shuffle_seed": 1.5}, "shuffle_seed must be .* or None, got 1.5"),
        ({"batch_size": 1, "shard": (2, 2)}, "expected an index below the size"),
        ({"batch_size": 1, "shard": "1/2"}, r"the size, \(index, size\), got '1/2'"),
        ({"batch_size": 1, "shard": (0, 1.5)}, r"got \(0, 1.5\)"),
        ({"batch_size": 1, "shard": (-1, 2)}, r"got \(-1, 2\)"),
        ({"batch_size": 1, "shard": (0, 1, 2)}, r"got \(0, 1, 2\)"),
        ({"batch_size": 1, "drop_last": "no"}, "drop_last must be True or False, got 'no'"),
        ({"batch_size": 1, "filesystem": 3}, "filesystem: expected one of pyarrow.fs .* got 3"),
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
        self.epoch = 0
        self.epochs: list[int] = []  # of what was sent

    def seek(self, batch: int) -> None:
        self.sought = batch

    def send_data(self, batch: Any) -> None:
        self.sent.append(batch.to_bytes())
        self.epochs.append(self.epoch)

    def end_epoch(self) -> None:
        self.epoch += 1


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
    assert set(whole.epochs) == {0}
    size = len(expected) // 3
    of_epochs = [epoch for epoch in range(3) for _ in range(size)]
    for first in range(len(expected) + 1):
        ctx = Ctx(first)
        reader().send(ctx, epochs=3, epoch_ends=True)  # type: ignore[arg-type]
        assert (ctx.sought, ctx.sent) == (first, expected[first:])
        assert (ctx.epoch, ctx.epochs) == (2, of_epochs[first:])  # those left out end, too
    for given in (0, "3"):
        with pytest.raises(ConfigError, match=f"whole number, at least 1, got {given!r}"):
            reader().send(Ctx(0), epochs=given)  # type: ignore[arg-type]
