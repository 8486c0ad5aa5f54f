"""Parts hold what was added, by bucket range, and nothing else is ever read from them."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from persia._core.base.hashing import bucket
from persia._core.store.blocks import RowBlock
from persia._files.entries import Part
from persia._files.part_writer import PartWriter
from persia._files.parts import (
    check_part,
    filter_owned,
    parts_for,
    read_ahead,
    read_deleted,
    read_part,
    verify_part,
    write_columns,
    write_deleted,
    write_file,
)
from persia._files.storage import Buffer, LocalStorage, open_storage
from persia._files.tensors import Column
from persia.errors import CheckpointError, ConfigError
from tests.files.support import block, rows_of

safetensors = pytest.importorskip("safetensors.numpy")

NAMES = ("signs", "values", "states", "orders", "uses", "ages")


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path)


@pytest.mark.parametrize("budget_bytes", [1, 40_000, 1 << 30])
@pytest.mark.parametrize("part_bytes", [1, 5_000, 1 << 26])
def test_parts_hold_what_was_added(
    storage: LocalStorage, budget_bytes: int, part_bytes: int
) -> None:
    count = 60 if part_bytes == 1 else 2000
    blocks = [
        block(range(count)),
        block(range(count, 2 * count), seed=1),
        block(range(5000, 5100), policy=1),
        block(range(6000, 6100), dtype="bfloat16", dim=3, words=0),
        block([]),
    ]
    writer = PartWriter(storage, "id/server0", budget_bytes=budget_bytes, part_bytes=part_bytes)
    with writer:
        for number, each in enumerate(blocks):
            writer.add(f"table{int(number == 3)}", each)
        parts = writer.finish()
    assert rows_of(read_part(storage, part) for part in parts) == rows_of(blocks)
    for part in parts:
        held = read_part(storage, part)
        assert verify_part(storage, part).tolist() == held.signs.tolist()
        assert part.num_rows == len(held) > 0
        assert part.max_order == held.orders.max()
        assert part.file.num_bytes <= part_bytes + 1000 or part.num_rows == 1
        assert all(part.buckets[0] <= bucket(s) < part.buckets[1] for s in held.signs.tolist())
    if part_bytes == 1 << 26:
        # 64 ranges of a few rows are not 64 files.
        assert len(parts) <= 3 or budget_bytes < 1 << 20


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_others_read_them(storage: LocalStorage, dtype: str) -> None:
    rows = block(range(1000), dtype=dtype, policy=2)
    with PartWriter(storage, "id") as writer:
        writer.add("table0", rows)
        (part,) = writer.finish()
    held = read_part(storage, part)
    torch = pytest.importorskip("torch")
    from safetensors import safe_open
    from safetensors.torch import load_file

    path = Path(storage.url) / part.file.path
    theirs = load_file(path)
    assert theirs["values"].dtype == getattr(torch, dtype)
    assert set(theirs) == {"signs", "values", "states", "orders", "uses", "ages"}
    for name, own in theirs.items():
        np.testing.assert_array_equal(
            own.contiguous().view(torch.uint8).numpy().tobytes(),
            np.frombuffer(getattr(held, name).tobytes(), np.uint8).tobytes(),
        )
    with safe_open(path, "np") as opened:
        assert opened.metadata()["table"] == "table0"


def test_zeros_are_not_written(storage: LocalStorage) -> None:
    with PartWriter(storage, "id") as writer:
        writer.add("table0", block(range(10), words=0))
        (part,) = writer.finish()
    theirs = safetensors.load_file(Path(storage.url) / part.file.path)
    assert set(theirs) == {"signs", "values", "states", "orders"}
    assert theirs["states"].shape == (10, 0)


def test_w60_files_are_as_large_as_what_is_in_them(storage: LocalStorage) -> None:
    """Not as the capacity: nothing is known of it here. Beside the rows there is one header."""
    rows = block(range(1000))
    with PartWriter(storage, "id") as writer:
        writer.add("table0", rows)
        (part,) = writer.finish()
    assert part.file.num_bytes < rows.num_bytes + 1000
    with PartWriter(storage, "other") as writer:
        assert writer.finish() == ()
    assert storage.list("other") == []


@given(
    writers=st.integers(1, 5),
    readers=st.sampled_from([1, 2, 3, 5, 64, 100]),
    signs=st.sets(st.integers(0, 2**64 - 1), max_size=200),
)
def test_w33_any_number_of_servers_reads_what_any_other_wrote(
    writers: int, readers: int, signs: set[int]
) -> None:
    """Also where there are fewer files, or rows, than servers."""
    storage = open_storage(f"memory://{writers}-{readers}-{len(signs)}")
    rows = block(sorted(signs))
    parts: list[Part] = []
    for server in range(writers):
        with PartWriter(
            storage, f"id/server{server}", server=server, part_bytes=2000
        ) as writer:
            writer.add("table0", filter_owned(rows, server, writers))
            parts += writer.finish()
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


def test_a_part_that_cannot_be_written_is_an_error_at_once_or_at_the_end(
    storage: LocalStorage,
) -> None:
    (Path(storage.url) / "id").write_bytes(b"")
    with PartWriter(storage, "id/server0") as writer:
        writer.add("table0", block(range(10)))
        with pytest.raises(CheckpointError, match=r"id/server0/table0-07-000000.*cannot write"):
            writer.finish()
    with PartWriter(storage, "other") as writer, pytest.raises(ConfigError, match="table name"):
        writer.add("../table", block(range(10)))


READS = pytest.mark.parametrize("read", [read_part, check_part], ids=["read", "check"])


@pytest.mark.parametrize("num_rows", [0, 1, 500, 3000])
def test_signs_are_found_wherever_windows_end(storage: LocalStorage, num_rows: int) -> None:
    storage.read_bytes = 4096
    rows = block(range(max(num_rows, 1)))
    with PartWriter(storage, "id") as writer:
        writer.add("table0", rows)
        (part,) = writer.finish()
    if num_rows == 0:  # as others may write one
        empty = {key: np.zeros_like(a)[:0] for key, a in zip(NAMES, rows.arrays, strict=True)}
        columns = {key: Column.of(a) for key, a in empty.items()}
        file = write_columns(storage, "id/empty", columns, {})
        part = dataclasses.replace(part, file=file, num_rows=0)
    assert check_part(storage, part).tolist() == read_part(storage, part).signs.tolist()
    assert part.num_rows == num_rows


@READS
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"signs": None}, "signs: the array is missing"),
        ({"ages": None}, None),
        ({"more": np.zeros(3)}, "more: an array that this version does not know"),
        ({"signs": np.zeros(100, np.int64)}, r"signs: expected U64 \[100\], got I64 \[100\]"),
    ],
)
def test_w50_other_arrays_than_a_part_has_are_an_error(
    storage: LocalStorage,
    read: Callable[[LocalStorage, Part], object],
    change: dict[str, NDArray[Any] | None],
    message: str | None,
) -> None:
    rows = block(range(100))
    with PartWriter(storage, "id") as writer:
        writer.add("table0", rows)
        (part,) = writer.finish()
    arrays = dict(zip(NAMES, rows.arrays, strict=True)) | change
    columns = {key: Column.of(a) for key, a in arrays.items() if a is not None}
    part = dataclasses.replace(part, file=write_columns(storage, "id/other", columns, {}))
    if message is None:
        read(storage, part)
        return
    with pytest.raises(CheckpointError, match=f"id/other: {message}"):
        read(storage, part)


@READS
def test_w50_a_file_that_is_what_was_written_and_no_part_is_an_error(
    storage: LocalStorage, read: Callable[[LocalStorage, Part], object]
) -> None:
    with PartWriter(storage, "id") as writer:
        writer.add("table0", block(range(100)))
        (part,) = writer.finish()
    for number, data in enumerate((b"", b"\xff" * 9, b"\xff" * 7 + b"\0", bytes(100))):
        file = write_file(storage, f"id/foreign{number}", [memoryview(data)])
        with pytest.raises(CheckpointError, match=f"id/foreign{number}: safetensors header"):
            read(storage, dataclasses.replace(part, file=file))


@READS
def test_w50_a_damaged_file_is_an_error(
    storage: LocalStorage, read: Callable[[LocalStorage, Part], object]
) -> None:
    with PartWriter(storage, "id") as writer:
        writer.add("table0", block(range(100)))
        (part,) = writer.finish()
    path = Path(storage.url) / part.file.path
    whole = path.read_bytes()
    for place in (0, 9, 300, len(whole) - 1):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(CheckpointError, match=f"{path}: expected checksum .* damaged"):
            read(storage, part)
    for other in (whole[:-1], whole + b"x", b""):
        path.write_bytes(other)
        with pytest.raises(CheckpointError, match=f"{path}: expected {len(whole)} bytes, got"):
            read(storage, part)
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{path}: cannot read: No such file"):
        read(storage, part)


@READS
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
    storage: LocalStorage,
    read: Callable[[LocalStorage, Part], object],
    change: dict[str, object],
    message: str,
) -> None:
    with PartWriter(storage, "id") as writer:
        writer.add("table0", block(range(100)))
        (part,) = writer.finish()
    with pytest.raises(CheckpointError, match=f"{part.file.path}: {message}"):
        read(storage, dataclasses.replace(part, **change))  # type: ignore[arg-type]


def test_a_sign_that_comes_twice_is_found(storage: LocalStorage) -> None:
    with PartWriter(storage, "id") as writer:
        writer.add("table0", block([1, 2, 1]))
        (part,) = writer.finish()
    with pytest.raises(CheckpointError, match="signs: 1 comes twice"):
        verify_part(storage, part)


class StalledStorage(LocalStorage):
    """A disk that takes nothing until it is told to."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.go_on = threading.Event()

    def write(self, path: str, buffers: Iterable[Buffer]) -> None:
        assert self.go_on.wait(60)
        super().write(path, buffers)


def test_w63_rows_are_taken_while_files_are_written_up_to_a_budget(tmp_path: Path) -> None:
    storage = StalledStorage(tmp_path)
    rows = [block(range(n, n + 100), seed=n) for n in range(0, 2000, 100)]
    with PartWriter(storage, "id", budget_bytes=100_000, part_bytes=500) as writer:
        for each in rows[:5]:
            writer.add("table0", each)  # nothing waits for the disk yet
        assert 0 < writer.held_bytes < 100_000
        assert writer.bytes_written == 0
        storage.go_on.set()
        for each in rows[5:]:
            writer.add("table0", each)
            assert writer.held_bytes <= 100_000
        parts = writer.finish()
    assert writer.held_bytes == 0
    assert rows_of(held for _, held in read_ahead(storage, parts)) == rows_of(rows)


def test_reading_ahead_tells_what_is_damaged(storage: LocalStorage) -> None:
    with PartWriter(storage, "id", part_bytes=500) as writer:
        writer.add("table0", block(range(100)))
        parts = writer.finish()
    (Path(storage.url) / parts[2].file.path).write_bytes(b"")
    reading = read_ahead(storage, parts)
    assert [next(reading)[0], next(reading)[0]] == list(parts[:2])
    with pytest.raises(CheckpointError, match=parts[2].file.path):
        next(reading)
