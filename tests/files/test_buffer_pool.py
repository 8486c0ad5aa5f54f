"""Memory goes back once no array has a part of it, and never before."""

from __future__ import annotations

import errno
import gc
import mmap
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from persia._files import buffer_pool as module
from persia._files.buffer_pool import BLOCK_BYTES, BufferPool
from persia.errors import CheckpointError


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


def test_memory_outlives_where_it_came_from() -> None:
    memory = BufferPool()
    array = memory.take(1000)
    array[:] = 3
    del memory
    gc.collect()
    assert (array == 3).all()


class _SmallPages(mmap.mmap):
    """Of a system without huge ones."""

    def madvise(self, *_: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")


def test_memory_of_a_system_without_huge_pages_and_of_one_that_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stands_for: Any = SimpleNamespace(
        **{**vars(mmap), "mmap": _SmallPages, "MADV_HUGEPAGE": 14}
    )
    monkeypatch.setattr(module, "mmap", stands_for)
    assert len(BufferPool().take(10)) == 10

    def fail(*_: int, **__: int) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    stands_for.mmap = fail
    with pytest.raises(CheckpointError, match=r"expected 2097152 bytes .*Cannot allocate"):
        BufferPool().take(10)
