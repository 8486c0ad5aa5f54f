"""Criteo's layout: every line once, whatever the blocks."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from persia.errors import ConfigError, DataError
from persia.readers import Columns, CriteoReader
from tests.readers.support import bytes_of, ids_of, rows_of

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


@pytest.mark.parametrize("block", [1, 100, 173, 174, 175, 999, 10**6])
def test_every_line_is_in_one_block(log: Path, block: int) -> None:
    reader = CriteoReader(log, 8, block_bytes=block, shard=(0, 1))
    assert rows_of(reader) == list(range(NUM_LINES))
    assert reader.num_batches() == 8


@pytest.mark.parametrize("size", [1, 2])
def test_a_run_that_continues_gets_exactly_the_rest(log: Path, size: int) -> None:
    seen: list[int] = []
    for index in range(size):
        reader = CriteoReader(log, 7, block_bytes=500, shuffle_seed=2, shard=(index, size))
        whole = bytes_of(reader)
        for first in range(len(whole) + 1):
            assert bytes_of(reader.iter_from(first)) == whole[first:]
        seen += rows_of(reader)
    assert seen != sorted(seen)
    assert sorted(seen) == list(range(NUM_LINES))


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
    with pytest.raises(ConfigError, match="nobody knows how many rows"):
        reader.num_batches()


def test_other_separators_and_no_label(tmp_path: Path) -> None:
    path = tmp_path / "day.csv"
    path.write_text(line(3, ",") + "\r\n" + line(4, ",") + "\r\n")
    assert rows_of(CriteoReader(path, 8, delimiter=",", shard=(0, 1))) == [3, 4]
    path.write_text(line(3).partition("\t")[2] + "\n")
    (batch,) = CriteoReader(path, 8, has_label=False, shard=(0, 1))
    assert (batch.labels, batch.requires_grad) == ([], False)
    columns = Columns(["C1", "C26"], ["I2"], requires_grad=False, strings="hex")
    (batch,) = CriteoReader(path, 8, columns, has_label=False, shard=(0, 1))
    assert [feature.name for feature in batch.features] == ["C1", "C26"]


def test_what_is_no_such_text_is_named(log: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a file or a folder of files, got none"):
        CriteoReader(tmp_path, 8)
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
