"""Memory that files are read into and written from, over and over.

New memory is cleared by the system page by page, which takes as long as a copy; a disk reads
past the page cache only into memory that begins with a block. So pieces of it begin with one,
and go back to where they were taken from once no array has a part of them any more.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from persia.errors import CheckpointError

# Of a disk that is written and read past the page cache: addresses, offsets and lengths are
# multiples of it.
BLOCK_BYTES = 4096
# Pages of this size spare most misses of the TLB.
_HUGE_BYTES = 2 << 20


class BufferPool:
    """Gives out memory; any thread may ask. What nobody asks for again is let go of with it."""

    def __init__(self) -> None:
        self._free: deque[mmap.mmap] = deque()

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return uninitialised bytes that begin with a block."""
        held = self._find(num_bytes)
        whole = np.frombuffer(held, np.uint8)
        # The views of an array have it as their base: it ends with the last of them. Appending
        # to a deque takes no lock, so that any thread may end one at any time.
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
            # Of another size than what is asked for now: a new piece takes its place.
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
