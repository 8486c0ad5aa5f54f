"""Ids of texts, for scripts and requests: the same as readers make of a column of texts."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from persia._core.ids.text_ids import hash_texts
from persia.errors import DataError, DataTypeError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

__all__ = ["hash_text"]

# Of a hash: as many bits as a sign leaves an id by default, so that none has to be cut.
KEPT_BITS = np.uint64((1 << 56) - 1)


@overload
def hash_text(texts: str | bytes) -> np.uint64: ...  # type: ignore[overload-overlap]
@overload
def hash_text(texts: Iterable[str | bytes]) -> NDArray[np.uint64]: ...
def hash_text(texts: Any) -> np.uint64 | NDArray[np.uint64]:
    """Return the id of a text, or of each of some: what ``persia.readers`` make of texts.

    It is the lowest 56 bits of a hash of the text's bytes, which never changes
    (``docs/readers.md`` has its formula), so that training and serving agree.

    Args:
        texts: A str, which counts by its bytes in UTF-8, or bytes; or n of them in a list, an
            array, a column of pandas or of Arrow.

    Returns:
        u64, or u64 [n].

    Raises:
        DataTypeError: If one is no text; names its place.

    Example:
        >>> hex(hash_text("red"))
        '0x56f8d37693659a'
        >>> hash_text(["red", b"red"]).dtype
        dtype('uint64')
    """
    is_one = isinstance(texts, str | bytes)
    if hasattr(texts, "to_pylist"):  # of Arrow
        texts = texts.to_pylist()
    ids: NDArray[np.uint64] = hash_texts(*bytes_of([texts] if is_one else texts)) & KEPT_BITS
    return np.uint64(ids[0]) if is_one else ids


def bytes_of(texts: Iterable[str | bytes]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return texts as ``hash_texts`` takes them: bytes u8, and offsets i64 [n + 1]."""
    parts: list[bytes] = []
    text: object = texts  # what is no list of texts is named as what it is
    try:
        for text in texts:
            parts.append(text if isinstance(text, bytes) else str.encode(text))
    except TypeError as exc:
        raise DataTypeError(
            f"text {len(parts)}: expected a str or bytes, got {text!r:.80}; leave out what is "
            "missing, which has no id"
        ) from exc
    except UnicodeEncodeError as exc:
        raise DataError(f"text {len(parts)}: expected text of Unicode, got: {exc}") from exc
    lengths = itertools.accumulate(map(len, parts), initial=0)
    return np.frombuffer(b"".join(parts), np.uint8), np.fromiter(
        lengths, np.int64, len(parts) + 1
    )
