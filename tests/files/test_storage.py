"""A storage keeps its promises: files of this machine, memory, a disk that fails."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from persia._files import storage as module
from persia._files.catalog import load
from persia._files.open import open_storage
from persia._files.storage import BLOCK_BYTES, BufferPool, LocalStorage, Storage
from persia.errors import CheckpointError
from tests.files.disk import Disk
from tests.files.support import check_catalog, check_large, check_promises


@pytest.fixture(params=["local", "file", "memory", "failing disk"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    if request.param == "failing disk":
        # The fake that other tests break keeps the same promises while it is whole.
        yield LocalStorage("/some/folder", Disk())
        return
    urls = {"local": f"{tmp_path}/x y", "file": f"file://{tmp_path}/x%20y"}
    made = open_storage(urls.get(request.param, f"memory://{uuid.uuid4()}/x"))
    yield made
    made.remove_folder("")


def test_promises(storage: Storage) -> None:
    check_promises(storage)


def test_a_writer_may_breathe_between_pieces(storage: Storage) -> None:
    breaths: list[bool] = []
    storage.on_progress = lambda: breaths.append(True)
    storage.write("a/b", [b"one", b"two", b"three"])
    assert len(breaths) == 3


def test_large_files(storage: Storage) -> None:
    check_large(storage)


def test_a_disk_that_refuses_what_it_let_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written and read through the page cache then, from where it is."""
    monkeypatch.setattr("tests.files.disk.BLOCK_BYTES", 1 << 30)
    check_large(LocalStorage("/some/folder", Disk()))


@pytest.mark.skipif(
    not (hasattr(os, "O_DIRECT") and hasattr(os, "RWF_NOWAIT")), reason="a system without"
)
@pytest.mark.parametrize("num_cached", [1, 65_536, 300_001, 1 << 20])
def test_what_is_in_the_cache_already_is_read_from_there(num_cached: int) -> None:
    """All of a file, or its beginning; the rest comes past the cache where that ends well."""
    disk = Disk()
    disk.num_cached = num_cached
    check_large(LocalStorage("/some/folder", disk))
    assert 0 < max(disk.from_cache) <= num_cached


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    """Opening a pipe would block until it has a writer."""
    os.mkfifo(tmp_path / "00000001-00000000.json")
    (tmp_path / "folder").mkdir()
    storage = LocalStorage(tmp_path)
    with pytest.raises(CheckpointError, match=r"00000001-00000000\.json: expected a file"):
        load(storage)
    with pytest.raises(CheckpointError, match="folder: expected a file, got a folder"):
        storage.size("folder")


def test_w20_a_catalog_is_the_same_everywhere(storage: Storage) -> None:
    check_catalog(storage)


def address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


def test_memory_is_used_again_once_no_array_has_it() -> None:
    memory = BufferPool()
    first = memory.take(100_000)
    assert (len(first), address(first) % BLOCK_BYTES) == (100_000, 0)
    first[:] = 1
    place = address(first)
    words = first[:800].view(np.uint64).reshape(10, 10)
    del first
    gc.collect()
    other = memory.take(100_000)
    assert address(other) != place  # an array still has it
    assert (words == 0x0101010101010101).all()
    del words
    again = memory.take(50_000)
    assert address(again) == place
    assert len(again) == 50_000


def test_memory_of_another_size_is_not_kept() -> None:
    memory = BufferPool()
    memory.take(64 << 20)
    for size in (10, 0):
        few = memory.take(size)
        assert len(few) == size
        assert isinstance(few.base, np.ndarray)
        assert few.base.nbytes == 2 << 20
    assert len(memory.take(64 << 20)) == 64 << 20


def test_memory_without_huge_pages_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    fails = Mock(side_effect=OSError(errno.ENOMEM, "Cannot allocate memory"))
    small = type("SmallPages", (mmap.mmap,), {"madvise": fails})
    stands_for: Any = SimpleNamespace(**{**vars(mmap), "mmap": small, "MADV_HUGEPAGE": 14})
    monkeypatch.setattr(module, "mmap", stands_for)
    assert len(BufferPool().take(10)) == 10
    stands_for.mmap = fails
    with pytest.raises(CheckpointError, match=r"expected 2097152 bytes .*Cannot allocate"):
        BufferPool().take(10)
