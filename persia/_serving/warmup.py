"""Recorded requests, with which a new version is warmed up before it is served.

A file of requests is::

    8 bytes   b"PERSIAWU"
    u32       length of the header
    u32       CRC-32 of all that follows
    header    JSON: for each request, for each input [name, dtype, shape, number of bytes]
    inputs    in the header's order: values in C order, little-endian; texts as u32 length and
              bytes each

Nothing in it is executed when it is read, and no size in it is believed before it is checked.
"""

from __future__ import annotations

import io
import json
import logging
import math
import struct
import threading
import zlib
from collections import Counter, deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from persia._files.storage import write_atomic
from persia._serving.bundle import read_plain
from persia._serving.servable import Inputs
from persia.errors import CheckpointError, DataTypeError

logger = logging.getLogger(__name__)

FILE_NAME = "warmup.bin"

_MAGIC = b"PERSIAWU"
_PREFIX = struct.Struct("<8sII")
_LENGTH = struct.Struct("<I")
_NUMBERS = {
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64"),
}
_TEXTS = {"bytes", "str"}
_MAX_DIMS = 8
_MAX_REQUESTS = 4096
_MAX_INPUTS = 4096  # of one request


class WarmupRecorder:
    """Keeps one of every ``every`` requests of each model: the last ``max_requests``.

    They take at most ``max_bytes`` for each model. With a folder, ``flush`` writes them to
    ``folder/<model>/warmup.bin``. Any thread may call any method.
    """

    def __init__(
        self,
        folder: Path | str | None = None,
        *,
        every: int = 100,
        max_requests: int = 32,
        max_bytes: int = 16 << 20,
    ) -> None:
        self._folder = None if folder is None else Path(folder)
        self._every = max(1, every)
        self._max_requests = min(max_requests, _MAX_REQUESTS)
        self._max_bytes = max_bytes
        self._lock = threading.Lock()  # guards all below
        self._counts: Counter[str] = Counter()
        self._kept: dict[str, deque[tuple[int, Inputs]]] = {}  # with the bytes of each
        self._dirty: set[str] = set()  # models with requests that were not written
        self._has_warned = False

    def record(self, model: str, inputs: Inputs) -> None:
        """Count a request that was answered, and copy it if it is one to be kept."""
        with self._lock:
            number = self._counts[model]
            self._counts[model] = number + 1
        if number % self._every:
            return
        size = sum(array.nbytes for array in inputs.values())
        if size > self._max_bytes:
            return
        # Copied outside the lock: other requests need not wait for it.
        copied = {name: np.array(array) for name, array in inputs.items()}
        with self._lock:
            kept = self._kept.setdefault(model, deque())
            kept.append((size, copied))
            total = sum(size for size, _ in kept)
            while len(kept) > self._max_requests or total > self._max_bytes:
                total -= kept.popleft()[0]
            self._dirty.add(model)

    def requests(self, model: str) -> list[Inputs]:
        """Return what is kept of a model, the oldest first."""
        with self._lock:
            return [inputs for _, inputs in self._kept.get(model, ())]

    def forget(self, model: str) -> None:
        """Drop what is kept of a model, as its inputs have changed."""
        with self._lock:
            self._kept.pop(model, None)
            self._dirty.discard(model)

    def flush(self) -> None:
        """Write the requests of models that have new ones; a failure is logged once."""
        if self._folder is None:
            return
        with self._lock:
            dirty, self._dirty = self._dirty, set()
        for model in sorted(dirty):
            try:
                write_requests(self._folder / model / FILE_NAME, self.requests(model))
            except (OSError, DataTypeError) as error:
                if not self._has_warned:
                    self._has_warned = True
                    logger.warning("recorded requests of %s are not written: %s", model, error)


def write_requests(path: Path, requests: Iterable[Inputs]) -> None:
    """Write a file of requests, whole or not at all.

    Raises:
        DataTypeError: If an input has a dtype that requests cannot have.
        CheckpointError: If it cannot be written.
    """
    header: list[list[list[Any]]] = []
    body = io.BytesIO()
    for inputs in requests:
        described: list[list[Any]] = []
        for name, array in inputs.items():
            kind, content = _encode(name, np.asarray(array))
            described.append([name, kind, list(array.shape), len(content)])
            body.write(content)
        header.append(described)
    head = json.dumps(header, separators=(",", ":")).encode()
    content = body.getvalue()
    prefix = _PREFIX.pack(_MAGIC, len(head), zlib.crc32(content, zlib.crc32(head)))
    write_atomic(path, lambda aside: aside.write_bytes(prefix + head + content))


def _encode(name: str, array: NDArray[Any]) -> tuple[str, bytes]:
    """Return the name of a dtype in the file, and the values."""
    if array.dtype.name in _NUMBERS:
        little = array.astype(array.dtype.newbyteorder("<"), copy=False)
        return array.dtype.name, little.tobytes()
    if array.dtype.kind in "OSU":
        values = array.ravel().tolist()
        is_text = bool(values) and all(isinstance(value, str) for value in values)
        texts = [value.encode() if isinstance(value, str) else value for value in values]
        if all(isinstance(text, bytes) for text in texts):
            content = b"".join(_LENGTH.pack(len(text)) + text for text in texts)
            return "str" if is_text else "bytes", content
    raise DataTypeError(
        f"input {name}: expected numbers or texts to record, got dtype {array.dtype}"
    )


def read_requests(path: Path, *, max_bytes: int = 64 << 20) -> list[Inputs]:
    """Read a file of requests; its arrays are read-only.

    Raises:
        CheckpointError: If there is none, it is larger than ``max_bytes``, or damaged.
    """
    # Through no link: a bundle is others' work.
    data = read_plain(path, max_bytes)
    try:
        return _decode(data, max_bytes)
    # What json, numpy and unpacking raise for bytes that are not what they should be.
    except (ValueError, TypeError, struct.error, RecursionError) as error:
        raise CheckpointError(f"{path}: expected recorded requests, got: {error}") from error


def _decode(data: bytes, max_bytes: int) -> list[Inputs]:
    if len(data) > max_bytes:
        raise ValueError(f"more than {max_bytes} bytes")
    magic, num_head, crc = _PREFIX.unpack_from(data)
    if magic != _MAGIC:
        raise ValueError("a file of another kind")
    rest = memoryview(data)[_PREFIX.size :]
    if num_head > len(rest) or zlib.crc32(rest) != crc:
        raise ValueError("a damaged file")
    header = json.loads(bytes(rest[:num_head]))
    if not isinstance(header, list) or len(header) > _MAX_REQUESTS:
        raise ValueError(f"a header that is no list of at most {_MAX_REQUESTS} requests")
    offset = num_head
    requests: list[Inputs] = []
    for described in header:
        if not isinstance(described, list) or len(described) > _MAX_INPUTS:
            raise ValueError(f"a request that is no list of at most {_MAX_INPUTS} inputs")
        inputs: dict[str, NDArray[Any]] = {}
        for name, kind, shape, num_bytes in described:
            if not isinstance(name, str) or not _is_count(num_bytes):
                raise ValueError("an input without a name or a size")
            content = rest[offset : offset + num_bytes]
            if len(content) != num_bytes:
                raise ValueError(
                    f"input {name} of {num_bytes} bytes, of which some are missing"
                )
            inputs[name] = _decode_array(kind, shape, content)
            offset += num_bytes
        requests.append(inputs)
    if offset != len(rest):
        raise ValueError(f"{len(rest) - offset} bytes too many")
    return requests


def _is_count(value: object) -> bool:
    # A bool is an int in Python, and none in JSON.
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _decode_array(kind: object, shape: object, content: memoryview) -> NDArray[Any]:
    if not isinstance(shape, list) or len(shape) > _MAX_DIMS or not all(map(_is_count, shape)):
        raise ValueError(f"a shape {shape!r}")
    if kind in _NUMBERS:
        array = np.frombuffer(content, np.dtype(str(kind)).newbyteorder("<")).reshape(shape)
        return array.astype(np.dtype(str(kind)), copy=False)
    if kind not in _TEXTS:
        raise ValueError(f"a dtype {kind!r}")
    # Each text takes 4 bytes at least, so this bounds what is allocated below.
    num = math.prod(shape)
    if num * _LENGTH.size > len(content):
        raise ValueError(f"{num} texts in {len(content)} bytes")
    texts = np.empty(num, object)
    offset = 0
    for index in range(num):
        (length,) = _LENGTH.unpack_from(content, offset)
        offset += _LENGTH.size
        text = bytes(content[offset : offset + length])
        if len(text) != length:
            raise ValueError("a text that is cut off")
        texts[index] = text.decode() if kind == "str" else text
        offset += length
    if offset != len(content):
        raise ValueError("bytes behind the last text")
    return texts.reshape(shape)
