"""A header and some arrays as one run of bytes, for files, queues and inference requests.

    bytes 0..7    kind of block and its version, such as b"PRSBAT01"
    bytes 8..11   u32 length of the header, little-endian like everything here
    bytes 12..15  u32 CRC-32 of all that follows
    header        msgpack map {"h": the caller's header, "a": [[dtype, shape], ...]}
    arrays        raw, C order; each begins at a multiple of 8, counted from byte 0

Arrays stay out of msgpack, which would copy them twice. There is a checksum because other
programs store and move such bytes: a damaged id would otherwise train a wrong row.
"""

from __future__ import annotations

import math
import struct
import zlib
from typing import TYPE_CHECKING, Any

import msgpack  # type: ignore[import-untyped]  # it ships none
import numpy as np

from persia._rpc.frame import DTYPES, unexpected
from persia.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

# Kind, bytes of the header, and CRC32 of all that follows; little-endian without gaps.
_PREFIX = struct.Struct("<8sII")


def _padding(length: int) -> int:
    return -length % 8  # each array may be viewed in place, whatever its dtype


def pack(kind: bytes, header: Mapping[str, Any], arrays: Sequence[NDArray[Any]]) -> bytes:
    """Return the block of a header that msgpack can write and arrays of ``frame.DTYPES``."""
    # A copy only for an array with gaps or of another byte order.
    little = [np.ascontiguousarray(one, one.dtype.newbyteorder("<")) for one in arrays]
    # ascontiguousarray gives a scalar one axis: the shape is the original's.
    specs = [[one.dtype.newbyteorder("<").str, list(one.shape)] for one in arrays]
    head: bytes = msgpack.packb({"h": dict(header), "a": specs})
    body: list[bytes | memoryview] = [head, bytes(_padding(_PREFIX.size + len(head)))]
    for array in little:
        # A memoryview of an empty array refuses the cast to bytes; bytes(n) is n zeros.
        part = array.reshape(-1).view(np.uint8).data if array.size else b""
        body += [part, bytes(_padding(len(part)))]
    # In order of the bytes, without joining them first.
    checksum = 0
    for part in body:
        checksum = zlib.crc32(part, checksum)
    return b"".join([_PREFIX.pack(kind, len(head), checksum), *body])


def unpack(kind: bytes, data: bytes) -> tuple[dict[str, Any], list[NDArray[Any]]]:
    """Return header and copied arrays of a block; ProtocolError if damaged or another kind."""
    if len(data) < _PREFIX.size:
        raise ProtocolError(
            f"expected at least {_PREFIX.size} bytes that begin with {kind!r}, got {len(data)}"
        )
    got, head_bytes, checksum = _PREFIX.unpack_from(data)
    if got != kind:
        raise ProtocolError(f"expected bytes that begin with {kind!r}, got {got!r}")
    # Before the header is parsed: damage is reported as damage.
    actual = zlib.crc32(memoryview(data)[_PREFIX.size :])
    if actual != checksum:
        raise ProtocolError(
            f"expected checksum {checksum:#010x} over {len(data) - _PREFIX.size} bytes, "
            f"got {actual:#010x}: they are damaged or cut off"
        )
    place = _PREFIX.size + head_bytes
    header, specs = _read_header(data[_PREFIX.size : place])
    place += _padding(place)
    arrays: list[NDArray[Any]] = []
    for dtype, shape in specs:
        count = math.prod(shape)
        # Python integers do not overflow, so a huge shape cannot pass the test below.
        needed = count * dtype.itemsize
        if place + needed > len(data):
            raise ProtocolError(
                f"array {len(arrays)}: {shape} of {dtype} needs {needed} bytes, "
                f"{max(len(data) - place, 0)} are left"
            )
        # copy=True below: the result must not keep the whole block alive, or be read-only.
        view = np.frombuffer(data, dtype, count, place) if count else np.empty(0, dtype)
        arrays.append(view.reshape(shape).astype(dtype.newbyteorder("="), copy=True))
        place += needed + _padding(needed)
    # Bytes behind the last array would survive a round trip unseen.
    if place != len(data):
        raise ProtocolError(f"expected {place} bytes by the header, got {len(data)}")
    return header, arrays


def _read_header(raw: bytes) -> tuple[dict[str, Any], list[tuple[np.dtype[Any], Any]]]:
    try:
        content = msgpack.unpackb(raw)
        header = content["h"]
        specs = [(DTYPES[name], tuple(shape)) for name, shape in content["a"]]
    except (ValueError, KeyError, TypeError, IndexError, msgpack.UnpackException) as exc:
        raise ProtocolError(f"unreadable header of {len(raw)} bytes") from exc
    if not isinstance(header, dict):
        raise ProtocolError(f"expected a map as header, got {type(header).__name__}")
    for dtype, shape in specs:
        # bool passes isinstance(int); two negative extents multiply to a plausible size; and
        # numpy takes 64 axes at most (32 before version 2).
        if len(shape) > 32 or any(type(n) is not int or not 0 <= n < 1 << 48 for n in shape):
            raise unexpected("header", f"the shape of an array of {dtype}", shape)
    return header, specs
