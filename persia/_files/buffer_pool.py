"""Memory that files are read into and written from, reused.

The system clears new memory page by page, which takes as long as a copy, and O_DIRECT needs
memory that is aligned to a block. So buffers are aligned, and return to the pool with the last
array that is a view of them.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from persia.errors import CheckpointError

# Addresses, offsets and lengths of O_DIRECT are multiples of it.
BLOCK_BYTES = 4096
# Pages of this size spare most misses of the TLB.
_HUGE_BYTES = 2 << 20


class BufferPool:
    """Gives out buffers and keeps those that return; thread-safe."""

    def __init__(self) -> None:
        self._free: deque[mmap.mmap] = deque()

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return uninitialised bytes that begin with a block."""
        held = self._find(num_bytes)
        whole = np.frombuffer(held, np.uint8)
        # Views keep ``whole`` alive as their base. The finalizer may run in any thread at any
        # time, even inside ``_find``: deque.append takes no lock.
        end = weakref.finalize(whole, self._free.append, held)
        end.atexit = False
        return whole[:num_bytes]

    def _find(self, num_bytes: int) -> mmap.mmap:
        for _ in range(len(self._free)):
            try:
                held = self._free.popleft()
            except IndexError:  # another thread was faster
                break
            if num_bytes <= len(held) <= 2 * max(num_bytes, _HUGE_BYTES):
                return held
            # Of another size than is needed now: it is unmapped, and a new one replaces it.
        size = max(-(-num_bytes // _HUGE_BYTES), 1) * _HUGE_BYTES
        try:
            held = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as exc:
            raise CheckpointError(
                f"memory for files: expected {size} bytes of the system, got: {exc}"
            ) from exc
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a system without them says that it is invalid
                held.madvise(mmap.MADV_HUGEPAGE)
        return held
