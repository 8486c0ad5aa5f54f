"""Criteo's layout and CSV: every line once, whatever the blocks, separators and newlines."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from persia.errors import ConfigError, DataError, DataTypeError
from persia.readers import Columns, CriteoReader, CsvReader
from persia.readers._text import NULLS
from tests.readers.support import bytes_of, check_exact, ids_of, rows_of

NUM_LINES = 60


def line(number: int, delimiter: str = "\t") -> str:
    """A line whose label is its number; some of its fields are empty."""
    dense = [str(number + i) if (number + i) % 5 else "" for i in range(13)]
    ids = [f"{(number * 31 + i) % 2**32:08x}" if (number + i) % 7 else "" for i in range(26)]
    return delimiter.join([str(number), *dense, *ids])


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("criteo") / "train.txt"
    path.write_text("".join(line(number) + "\n" for number in range(NUM_LINES)))
    return path


def test_fields_become_features(log: Path) -> None:
    batch = next(iter(CriteoReader(log, 8, shard=(0, 1))))
    assert len(batch.features) == 26
    assert ids_of(batch, "C3") == [[n * 31 + 2] if (n + 2) % 7 else [] for n in range(8)]
    want = [[float(n + i) if (n + i) % 5 else 0.0 for i in range(13)] for n in range(8)]
    assert batch.non_id_type_features[0].data.tolist() == want
    assert batch.labels[0].data.dtype == np.float32


@pytest.mark.parametrize("size", [1, 2])
def test_a_run_that_continues_gets_exactly_the_rest(log: Path, size: int) -> None:
    seen: list[int] = []
    for index in range(size):
        reader = CriteoReader(log, 7, block_bytes=500, shuffle_seed=2, shard=(index, size))
        check_exact(reader)
        seen += rows_of(reader)
    assert seen != sorted(seen)
    assert sorted(seen) == list(range(NUM_LINES))


@pytest.mark.parametrize("block", [7, 500, 10**6])
@pytest.mark.parametrize("size", [2, 3, 7])
@pytest.mark.parametrize("seed", [None, 3])
def test_one_block_serves_any_number_of_shards(
    log: Path, block: int, size: int, seed: int | None
) -> None:
    seen: list[list[int]] = []
    for index in range(size):
        options: dict[str, Any] = {"shuffle_seed": seed, "shard": (index, size)}
        if seed is not None:
            options["shuffle_buffer"] = 15
        reader = CriteoReader(log, 7, block_bytes=block, **options)
        assert len(check_exact(reader)) == reader.num_batches()
        seen.append(rows_of(reader))
    assert sorted(row for rows in seen for row in rows) == list(range(NUM_LINES))
    if seed is None:
        # Equal by bytes, and so about equal in lines.
        assert [row for rows in seen for row in rows] == list(range(NUM_LINES))
        assert max(map(len, seen)) - min(map(len, seen)) <= 3


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("seed", [None, 3])
def test_one_packed_file_serves_any_number_of_shards(
    tmp_path: Path, size: int, seed: int | None
) -> None:
    path = tmp_path / "day.gz"
    path.write_bytes(gzip.compress("\n".join(map(line, range(600))).encode()))
    seen: list[list[int]] = []
    for index in range(size):
        reader = CriteoReader(path, 32, shuffle_seed=seed, shard=(index, size))
        check_exact(reader)
        seen.append(rows_of(reader))
    assert sorted(row for rows in seen for row in rows) == list(range(600))
    assert max(map(len, seen)) - min(map(len, seen)) <= 64
    path.write_bytes(gzip.compress(line(1).encode()))
    with pytest.raises(ConfigError, match=r"shard 1 of 20 has no .* there are too few rows"):
        list(CriteoReader(path, 32, shard=(1, 20)))


def test_lines_are_not_counted_for_a_len(log: Path) -> None:
    reader = CriteoReader(log, 7, shard=(0, 1))
    assert reader.num_batches() == len(list(reader)) == 9
    assert reader
    with pytest.raises(TypeError, match=r"CriteoReader has no len: .* num_batches\(\) does so"):
        len(reader)


def test_a_shard_of_no_lines(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(line(1))
    shards = [CriteoReader(tmp_path, 8, shard=(index, 3)) for index in range(3)]
    assert rows_of(shards[0]) == [1]
    for reader in shards[1:]:
        with pytest.raises(ConfigError, match="has no rows; there are 1 in all"):
            list(reader)


def test_packed_files_and_folders(log: Path, tmp_path: Path) -> None:
    text = log.read_bytes()
    half = text.index(b"\n", len(text) // 2) + 1
    (tmp_path / "a.txt").write_bytes(text[:half].removesuffix(b"\n"))  # the last line has none
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(text[half:]))
    (tmp_path / ".hidden").write_text("no line")
    reader = CriteoReader(tmp_path, 7, shard=(0, 1))
    whole = bytes_of(reader)
    assert whole == bytes_of(CriteoReader(log, 7, shard=(0, 1)))
    assert bytes_of(reader.iter_from(6)) == whole[6:]
    with pytest.raises(ConfigError, match="the number of its rows is not known"):
        reader.num_batches()


def test_lines_without_a_label(tmp_path: Path) -> None:
    path = tmp_path / "day.txt"
    path.write_text(line(3).partition("\t")[2] + "\n")
    (batch,) = CriteoReader(path, 8, has_label=False, shard=(0, 1))
    assert (batch.labels, batch.requires_grad) == ([], False)
    columns = Columns(["C1", "C26"], ["I2"], requires_grad=False, strings="hex")
    (batch,) = CriteoReader(path, 8, columns, has_label=False, shard=(0, 1))
    assert [feature.name for feature in batch.features] == ["C1", "C26"]


def test_a_list_of_files(log: Path, tmp_path: Path) -> None:
    lines = log.read_text().splitlines(keepends=True)
    for name, part in (("b", lines[:7]), ("a", lines[7:])):
        (tmp_path / name).write_text("".join(part))
    both = [tmp_path / "b", tmp_path / "a"]
    rows = rows_of(CriteoReader(both, 8, shuffle_seed=1, shard=(0, 1)))
    assert sorted(rows) == list(range(NUM_LINES))
    assert rows == rows_of(CriteoReader(tmp_path, 8, shuffle_seed=1, shard=(0, 1)))


def test_what_is_no_such_text_is_named(log: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a file or a folder of files, got none"):
        CriteoReader(tmp_path, 8)
    with pytest.raises(ConfigError, match=r"\*\.txt: no such file or folder; a pattern is not"):
        CriteoReader(tmp_path / "*.txt", 8)
    with pytest.raises(ConfigError, match="expected a column 'label'"):
        CriteoReader(log, 8, Columns(["C1"], labels=["label"]), has_label=False)
    for text, error in (
        ("1\t2\t3\n", r"bad\.txt.*Criteo's layout.*Expected 40 columns, got 3"),
        (line(3) + "\n\n" + line(4) + "\n", r"column 'label': expected a number, got a null"),
        (line(3).replace("\t", "\tx", 1), r"bad\.txt.*Criteo's layout"),
        (line(3) + "x", r"expected 1 to 16 hexadecimal digits, got 'x'"),
    ):
        (tmp_path / "bad.txt").write_text(text)
        with pytest.raises(DataError, match=error):
            list(CriteoReader(tmp_path / "bad.txt", 8, shard=(0, 1)))


# --- CSV -------------------------------------------------------------------------------------

COLUMNS = Columns(ids=["user", "city"], dense=["age"], labels=["row"])
NUM_ROWS = 40


def text(
    first: int = 0, count: int = NUM_ROWS, delimiter: str = ",", newline: str = "\n"
) -> bytes:
    """Lines with quotes, with a column that is not read, and with fields that are empty."""
    lines = [delimiter.join(["user", "age", '"city"', "note", "row"])]
    for row in range(first, first + count):
        city = "" if row % 4 == 1 else f'"{delimiter} {row % 3}"'
        user = "" if row % 5 == 1 else str(row * 3)
        age = "" if row % 7 == 1 else f"{row}.5"
        lines.append(delimiter.join([user, age, city, "x", str(row)]))
    return newline.join(lines).encode()


def read(path: Path, **options: Any) -> CsvReader:
    return CsvReader(path, COLUMNS, 8, shard=(0, 1), **options)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "clicks.csv"
    path.write_bytes(text() + b"\n")
    return path


def test_csv_fields_become_features(path: Path) -> None:
    first, *_ = read(path)
    assert ids_of(first, "user") == [[0], [], [6], [9], [12], [15], [], [21]]
    cities = ids_of(first, "city")
    assert cities[1] == cities[5] == []
    assert cities[0] == cities[3] == cities[6] != cities[2]
    assert first.non_id_type_features[0].data[:3, 0].tolist() == [0.5, 0.0, 2.5]
    assert first.labels[0].data[:, 0].tolist() == list(range(8))


@pytest.mark.parametrize("block", [1, 19, 100, 10**6])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("end", [True, False])
def test_csv_each_line_is_in_one_block(path: Path, block: int, newline: str, end: bool) -> None:
    whole = bytes_of(read(path))
    path.write_bytes(text(newline=newline) + newline.encode() * end)
    reader = read(path, block_bytes=block)
    assert bytes_of(reader) == whole
    assert reader.num_batches() == len(whole) == NUM_ROWS / 8
    assert bytes_of(reader.iter_from(3)) == whole[3:]


def test_tabs_marks_and_packed_files(path: Path, tmp_path: Path) -> None:
    whole = rows_of(read(path))
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.tsv").write_bytes(b"\xef\xbb\xbf" + text(0, 10, "\t"))
    (folder / "b.tsv.gz").write_bytes(gzip.compress(text(10, 30, "\t", "\r\n")))
    with pytest.raises(DataError, match=r"b\.tsv\.gz: expected the header of .*a\.tsv"):
        read(folder, delimiter="\t")
    (folder / "a.tsv").write_bytes(text(0, 10, "\t"))
    reader = read(folder, delimiter="\t")
    assert rows_of(reader) == whole
    assert rows_of(reader.iter_from(3)) == whole[24:]
    (folder / "b.tsv.gz").unlink()
    (folder / "a.tsv").write_bytes(b"\xef\xbb\xbf" + text(0, 40, "\t"))
    assert rows_of(read(folder, delimiter="\t")) == whole


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("block", [1, 7, 10**6])
def test_lines_without_anything_are_no_samples(path: Path, newline: str, block: int) -> None:
    whole = bytes_of(read(path))
    lines = text().decode().split("\n")
    blank = newline + newline.join(f"{each}{newline * 3}" for each in lines[1:])
    path.write_bytes((lines[0] + newline + blank).encode())
    reader = read(path, block_bytes=block)
    assert bytes_of(reader) == whole
    assert reader.num_batches() == len(whole)
    assert bytes_of(reader.iter_from(3)) == whole[3:]
    packed = path.with_suffix(".gz")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert bytes_of(read(packed)) == whole
    path.write_bytes(f"{lines[0]}{newline * 4}".encode())
    said = {"user": "int64", "age": "double", "city": "string", "row": "int64"}
    none = read(path, types=said, block_bytes=block)
    with pytest.raises(ConfigError, match="CsvReader: expected data, got none"):
        list(none)
    none.allow_empty = True
    assert list(none) == []


def test_ids_are_said_and_asked_for(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "persia.readers"):
        read(path)
        assert "from its first lines: user int64, city string; types= overrides" in caplog.text
        caplog.clear()
        read(path, types={"user": "uint64", "city": "string"})
        assert not caplog.text
    for field in ("1.5", ""):
        path.write_text(f"user,click\n{field},1\n")
        with pytest.raises(DataTypeError, match=r"'user' for ids: .*; types= says what"):
            CsvReader(path, Columns(["user"], labels=["click"]), 8)
    path.write_text("user,click\n" + "".join(f"{null},1\n" for null in NULLS) + "7,0\n")
    (batch,) = CsvReader(path, Columns(["user"], labels=["click"]), 99)
    assert ids_of(batch, "user") == [[]] * len(NULLS) + [[7]]
    assert {"N/A", "NA", "None", r"\N"} <= {*NULLS}


def test_types_that_are_said(path: Path) -> None:
    (said, *_), (found, *_) = read(path, types={"user": "string"}), read(path)
    assert ids_of(said, "user") != ids_of(found, "user")
    path.write_bytes(text(count=2) + b"\nA7,1,,x,3")
    # The first lines that are read may be all there are; the number of a user is no text.
    assert len(ids_of(next(iter(read(path))), "user")) == 3


def test_csv_what_is_no_such_text_is_named(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"clicks\.csv: expected a column 'users' for ids"):
        CsvReader(path, Columns(["users"]), 8)
    with pytest.raises(DataTypeError, match="column 'city' for dense: expected integers"):
        CsvReader(path, Columns(["user"], ["city"]), 8)
    with pytest.raises(ConfigError, match=r"'user': expected an Arrow type .* got 'text16'"):
        read(path, types={"user": "text16"})
    with pytest.raises(ConfigError, match=r"a column 'usr' for types=.*did you mean 'user'"):
        read(path, types={"usr": "string"})
    for options, message in (
        ({"types": ["user"]}, r"types: expected a mapping .* got \['user'\]"),
        ({"types": {3: "string"}}, "types: expected a mapping from a column to its type"),
        ({"types": {"user": int}}, "'user': expected an Arrow type .* got <class 'int'>"),
        ({"delimiter": ";;"}, "delimiter: expected one character, got ';;'"),
        ({"delimiter": 9}, "delimiter: expected one character, got 9"),
        ({"block_bytes": 0}, "block_bytes must be a whole number, at least 1, got 0"),
        ({"block_bytes": "1"}, "block_bytes must be a whole number, at least 1, got '1'"),
    ):
        with pytest.raises(ConfigError, match=message):
            read(path, **options)
    with pytest.raises(ConfigError, match="has_label must be True or False, got 'no'"):
        CriteoReader(path, 8, has_label="no")  # type: ignore[arg-type]
    path.write_bytes(text(count=60_000) + b"\nA7,1,,x,3")  # behind the first MiB
    reader = read(path)
    with pytest.raises(DataError, match=r"clicks\.csv.*types= gives, got: .*'A7'"):
        list(reader.iter_from(reader.num_batches() - 2))
    for wrong, message in (
        (b"", "expected a header and lines, got"),
        (b"user,age\n1,2,3\n", "expected a header and lines, got"),
        (b"user,age,user\n1,2,3\n", "each column once in the header, got 'user' twice"),
    ):
        path.write_bytes(wrong)
        with pytest.raises(DataError, match=rf"clicks\.csv: .*{message}"):
            read(path)


@pytest.mark.parametrize("delimiter", ["\t", ","])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("block", [0, 1, 100, 173, 174, 175, 999, 10**6])  # 0: in a gzip
def test_every_line_is_in_one_block(
    log: Path, tmp_path: Path, delimiter: str, newline: str, block: int
) -> None:
    lines = newline.join(line(number, delimiter) for number in range(NUM_LINES)).encode()
    path = tmp_path / ("day" if block else "day.gz")
    path.write_bytes(lines if block else gzip.compress(lines))  # the last line has no newline
    reader = CriteoReader(path, 8, delimiter=delimiter, block_bytes=block or 700, shard=(0, 1))
    assert bytes_of(reader) == bytes_of(CriteoReader(log, 8, shard=(0, 1)))
    assert not block or reader.num_batches() == 8
