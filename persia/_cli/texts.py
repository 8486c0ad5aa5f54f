"""The texts of ids that are hashes: a checkpoint has no text, so they are hashed again."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import numpy as np

from persia._core.ids.text_ids import hash_texts
from persia.embedding.text_ids import KEPT_BITS
from persia.errors import ConfigError

# Lines hashed at a time.
_BLOCK = 1 << 16


def texts_of(ids: Collection[int], files: Iterable[Path], id_bits: int) -> dict[int, list[str]]:
    """Return the lines of some files that become these ids, as ``persia.readers`` hash them.

    Args:
        ids: Which are wanted; only their lines are held.
        files: With a text a line, in UTF-8; the end of a line is none of its text.
        id_bits: How many lowest bits of an id the checkpoint's signs have room for.

    Raises:
        ConfigError: If a file cannot be read.
    """
    wanted = np.fromiter(ids, np.uint64, len(ids))
    mask = KEPT_BITS & np.uint64((1 << id_bits) - 1)
    found: dict[int, list[str]] = {}
    for path in files:
        for block in _blocks(path):
            ends = np.cumsum([0, *map(len, block)], dtype=np.int64)
            texts = np.frombuffer(b"".join(block), np.uint8)
            hashes = hash_texts(texts, ends) & mask
            for place in np.flatnonzero(np.isin(hashes, wanted)).tolist():
                text = block[place].decode("utf-8", "backslashreplace")
                known = found.setdefault(int(hashes[place]), [])
                if text not in known:
                    known.append(text)
    return found


def _blocks(path: Path) -> Iterator[list[bytes]]:
    try:
        with path.open("rb") as file:
            lines = (line.rstrip(b"\r\n") for line in file)
            while block := list(itertools.islice(lines, _BLOCK)):
                yield block
    except OSError as exc:
        raise ConfigError(f"--texts: cannot read {path}: {exc.strerror}") from exc
