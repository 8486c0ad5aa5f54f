"""Nothing is read from a file of rows or signs but what was written."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from persia._core.store.blocks import RowBlock
from persia._files.manifest import Part
from persia._files.open import open_storage
from persia._files.parts import (
    check_part,
    filter_owned,
    parts_for,
    read_ahead,
    read_deleted,
    read_part,
    write_deleted,
    write_file,
)
from persia._files.storage import LocalStorage
from persia._files.tensors import Column, encode
from persia.errors import CheckpointError
from tests.files.support import block, parts_of, rows_of

NAMES = ("signs", "values", "states", "orders", "uses", "ages")


@given(
    writers=st.integers(1, 5),
    readers=st.sampled_from([1, 2, 3, 5, 64, 100]),
    signs=st.sets(st.integers(0, 2**64 - 1), max_size=200),
)
def test_w33_any_number_of_servers_reads_them(
    writers: int, readers: int, signs: set[int]
) -> None:
    """Also where there are fewer files, or rows, than servers."""
    storage = open_storage(f"memory://{writers}-{readers}-{len(signs)}")
    rows = block(sorted(signs))
    parts: list[Part] = []
    for server in range(writers):
        mine = filter_owned(rows, server, writers)
        parts += parts_of(storage, mine, f"id/server{server}", server=server, part_bytes=2000)
    found: list[RowBlock] = []
    for server in range(readers):
        needed = parts_for(parts, server, readers)
        found += [filter_owned(read_part(storage, part), server, readers) for part in needed]
    assert rows_of(found) == rows_of([rows])
    storage.remove_folder("")


def test_deleted_signs_come_back(storage: LocalStorage) -> None:
    signs = np.arange(1000, dtype=np.uint64) * np.uint64(2**54)
    (entry,) = write_deleted(storage, "id", signs, server=1)
    np.testing.assert_array_equal(read_deleted(storage, entry), signs)
    assert write_deleted(storage, "id", signs[:0]) == ()


@pytest.mark.parametrize("num_rows", [0, 1, 500, 3000])
def test_signs_are_found_wherever_windows_end(storage: LocalStorage, num_rows: int) -> None:
    storage.read_bytes = 4096
    rows = block(range(max(num_rows, 1)))
    (part,) = parts_of(storage, rows)
    if num_rows == 0:  # as others may write one
        empty = {key: np.zeros_like(a)[:0] for key, a in zip(NAMES, rows.arrays, strict=True)}
        columns = {key: Column.of(a) for key, a in empty.items()}
        file = write_file(storage, "id/empty", encode(columns, {}))
        part = dataclasses.replace(part, **dataclasses.asdict(file), num_rows=0)
    assert check_part(storage, part).tolist() == read_part(storage, part).signs.tolist()
    assert part.num_rows == num_rows


@pytest.fixture(params=[read_part, check_part])
def fails(request: pytest.FixtureRequest, storage: LocalStorage) -> Callable[[Part, str], None]:
    """Reads a part, or checks it, which fails with these words."""

    def fails(part: Part, words: str) -> None:
        with pytest.raises(CheckpointError, match=f"{part.path}: {words}"):
            request.param(storage, part)

    return fails


Fails = Callable[[Part, str], None]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"signs": None}, "signs: the array is missing"),
        ({"more": np.zeros(3)}, "more: an array that this version does not know"),
        ({"signs": np.zeros(100, np.int64)}, r"signs: expected U64 \[100\], got I64 \[100\]"),
    ],
)
def test_w50_other_arrays_than_a_part_has_are_an_error(
    storage: LocalStorage, fails: Fails, change: dict[str, NDArray[Any] | None], message: str
) -> None:
    rows = block(range(100))
    (part,) = parts_of(storage, rows)
    arrays = dict(zip(NAMES, rows.arrays, strict=True)) | change
    columns = {key: Column.of(a) for key, a in arrays.items() if a is not None}
    file = write_file(storage, "id/other", encode(columns, {}))
    fails(dataclasses.replace(part, **dataclasses.asdict(file)), message)


def test_w50_damaged_and_foreign_files_are_errors(storage: LocalStorage, fails: Fails) -> None:
    (part,) = parts_of(storage, block(range(100)))
    for number, data in enumerate((b"", b"\xff" * 9, b"\xff" * 7 + b"\0", bytes(100))):
        file = write_file(storage, f"id/foreign{number}", [memoryview(data)])
        fails(dataclasses.replace(part, **dataclasses.asdict(file)), "safetensors header")
    path = Path(storage.url) / part.path
    whole = path.read_bytes()
    for place in (0, 9, 300, len(whole) - 1):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        fails(part, "expected checksum .* damaged")
    for other in (whole[:-1], whole + b"x", b""):
        path.write_bytes(other)
        fails(part, f"expected {len(whole)} bytes, got")
    reading = read_ahead(storage, (*parts_of(storage, block(range(9)), "other"), part))
    next(reading)
    with pytest.raises(CheckpointError, match=part.path):
        next(reading)
    path.unlink()
    fails(part, "cannot read: No such file")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_rows": 99}, r"signs: expected U64 \[99\], got U64 \[100\]"),
        ({"dim": 5}, r"values: expected F32 \[100, 5\], got F32 \[100, 4\]"),
        ({"state_words": 0}, r"states: expected U32 \[100, 0\], got"),
        ({"dtype": "float16"}, r"values: expected F16 \[100, 4\], got F32"),
        ({"buckets": (0, 300)}, r"signs\[\d+\]: expected buckets 0..300, got \d+ of bucket"),
    ],
)
def test_a_part_that_is_not_as_the_manifest_says_is_an_error(
    storage: LocalStorage, fails: Fails, change: dict[str, Any], message: str
) -> None:
    (part,) = parts_of(storage, block(range(100)))
    fails(dataclasses.replace(part, **change), message)
