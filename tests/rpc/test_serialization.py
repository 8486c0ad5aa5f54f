"""Blocks of a header and arrays: their layout, and refused headers."""

from __future__ import annotations

import contextlib
import struct
import zlib
from typing import Any

import msgpack  # type: ignore[import-untyped]  # it ships none
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia._rpc import serialization
from persia.errors import ProtocolError

KIND = b"TESTKIND"


def forged(head: bytes, body: bytes = b"", *, head_bytes: int | None = None) -> bytes:
    """Bytes with a right checksum around anything."""
    rest = head + bytes(-(16 + len(head)) % 8) + body
    length = len(head) if head_bytes is None else head_bytes
    return struct.pack("<8sII", KIND, length, zlib.crc32(rest)) + rest


def with_specs(specs: object, body: bytes = b"") -> bytes:
    return forged(msgpack.packb({"h": {}, "a": specs}), body)


def test_golden_bytes() -> None:
    data = serialization.pack(
        KIND, {"n": 1}, [np.array([1, 2], np.uint16), np.array([[3.0]], np.float32)]
    )
    head = b"\x82\xa1h\x81\xa1n\x01\xa1a\x92\x92\xa3<u2\x91\x02\x92\xa3<f4\x92\x01\x01"
    body = bytes.fromhex("0100020000000000 0000404000000000")
    assert data == forged(head, body)
    assert data[16 : 16 + len(head)] == head


def test_arrays_begin_at_multiples_of_8_and_are_owned() -> None:
    arrays = [np.arange(n, dtype=np.uint8) for n in range(10)]
    header, back = serialization.unpack(KIND, serialization.pack(KIND, {}, arrays))
    assert header == {}
    assert [array.tolist() for array in back] == [array.tolist() for array in arrays]
    assert all(array.flags.owndata and array.flags.writeable for array in back)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (with_specs([["<u8", [1]]]), r"array 0: \(1,\) of uint64 needs 8 bytes, 0 are left"),
        (with_specs([["<u8", [2**47]]]), "needs 1125899906842624 bytes"),
        (with_specs([["<u8", [2**48]]]), "expected the shape of an array of uint64"),
        (with_specs([["<u8", [-1]]]), "expected the shape"),
        (with_specs([["<u8", [-1, -1]]], bytes(8)), "expected the shape"),
        (with_specs([["<u8", [True]]], bytes(8)), "expected the shape"),
        (with_specs([["<u8", [1.0]]], bytes(8)), "expected the shape"),
        (with_specs([["<u8", [1] * 33]], bytes(8)), "expected the shape"),
        (with_specs([["<u8", 1]], bytes(8)), "unreadable header"),
        (with_specs([["|O", [1]]], bytes(8)), "unreadable header"),
        (with_specs([["object", [1]]], bytes(8)), "unreadable header"),
        (with_specs([[["<u8"], [1]]], bytes(8)), "unreadable header"),
        (with_specs([["<u8"]]), "unreadable header"),
        (with_specs(7), "unreadable header"),
        (with_specs([], bytes(8)), "by the header, got"),
        (forged(b"\xc1"), "unreadable header"),
        (forged(msgpack.packb([1])), "unreadable header"),
        (forged(msgpack.packb({"h": [], "a": []})), "expected a map as header, got list"),
        (forged(b"\x80", head_bytes=2**32 - 1), "unreadable header of 8 bytes"),
        (forged(b"\x91" * 5000), "unreadable header"),
    ],
)
def test_headers_that_lie(data: bytes, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        serialization.unpack(KIND, data)


@given(st.binary(max_size=60), st.binary(max_size=20))
def test_any_header_is_read_or_refused(head: bytes, body: bytes) -> None:
    # Anything but a ProtocolError would escape and fail this.
    with contextlib.suppress(ProtocolError):
        serialization.unpack(KIND, forged(head, body))


def test_another_kind() -> None:
    data: Any = serialization.pack(KIND, {}, [])
    with pytest.raises(ProtocolError, match="begin with b'OTHERS!!', got b'TESTKIND'"):
        serialization.unpack(b"OTHERS!!", data)
