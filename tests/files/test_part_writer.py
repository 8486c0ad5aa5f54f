"""Parts hold what was added, by ranges of buckets, within a budget."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from persia._core.base.hashing import bucket
from persia._files.part_writer import PartWriter
from persia._files.parts import check_part, read_ahead, read_part
from persia._files.storage import Buffer, LocalStorage
from persia.errors import CheckpointError, ConfigError
from tests.files.support import block, parts_of, rows_of

safetensors = pytest.importorskip("safetensors.numpy")


@pytest.mark.parametrize("budget_bytes", [1, 40_000, 1 << 30])
@pytest.mark.parametrize("part_bytes", [1, 5_000, 1 << 26])
def test_parts_hold_all_rows(storage: LocalStorage, budget_bytes: int, part_bytes: int) -> None:
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
        assert check_part(storage, part).tolist() == held.signs.tolist()
        assert part.num_rows == len(held) > 0
        assert part.max_order == held.orders.max()
        assert part.num_bytes <= part_bytes + 1000 or part.num_rows == 1
        assert all(part.buckets[0] <= bucket(s) < part.buckets[1] for s in held.signs.tolist())
    if part_bytes == 1 << 26:
        # 64 ranges of a few rows are not 64 files.
        assert len(parts) <= 3 or budget_bytes < 1 << 20


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_others_read_them(storage: LocalStorage, dtype: str) -> None:
    rows = block(range(1000), dtype=dtype, policy=2)
    (part,) = parts_of(storage, rows)
    held = read_part(storage, part)
    torch = pytest.importorskip("torch")
    from safetensors import safe_open
    from safetensors.torch import load_file

    path = Path(storage.url) / part.path
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


def test_w60_files_are_as_large_as_what_is_in_them(storage: LocalStorage) -> None:
    """Beside the rows there is one header, and zeros are not written."""
    rows = block(range(1000))
    (part,) = parts_of(storage, rows, "full")
    assert part.num_bytes < rows.num_bytes + 1000
    with PartWriter(storage, "other") as writer:
        assert writer.finish() == ()
    assert storage.list("other") == []
    (part,) = parts_of(storage, block(range(10), words=0))
    theirs = safetensors.load_file(Path(storage.url) / part.path)
    assert set(theirs) == {"signs", "values", "states", "orders"}
    assert theirs["states"].shape == (10, 0)


def test_a_part_that_cannot_be_written_is_an_error(storage: LocalStorage) -> None:
    (Path(storage.url) / "id").write_bytes(b"")
    with PartWriter(storage, "id/server0") as writer:
        writer.add("table0", block(range(10)))
        with pytest.raises(CheckpointError, match=r"id/server0/table0-07-000000.*cannot write"):
            writer.finish()
    with PartWriter(storage, "other") as writer, pytest.raises(ConfigError, match="table name"):
        writer.add("../table", block(range(10)))


class StalledStorage(LocalStorage):
    """A disk that takes nothing until ``go_on`` is set."""

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
        storage.go_on.set()
        for each in rows[5:]:
            writer.add("table0", each)
            assert writer.held_bytes <= 100_000
        parts = writer.finish()
    assert writer.held_bytes == 0
    assert rows_of(held for _, held in read_ahead(storage, parts)) == rows_of(rows)
