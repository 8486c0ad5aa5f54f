"""Safetensors files are written as the format says, and read however they are damaged."""

from __future__ import annotations

import contextlib
import json
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from persia._files.tensors import Column, HeaderReader, decode, encode
from persia.errors import CheckpointError
from tests.support.profiles import tries

safetensors = pytest.importorskip("safetensors")
safetensors_numpy = pytest.importorskip("safetensors.numpy")

ARRAYS: dict[str, np.ndarray[Any, Any]] = {
    "bytes": np.arange(3, dtype=np.uint8),
    "wide": np.arange(6, dtype=np.float64).reshape(2, 3),
    "none": np.zeros((0, 4), np.float32),
    "words": np.arange(5, dtype=np.uint32),
}


def file_of(arrays: dict[str, np.ndarray[Any, Any]]) -> bytes:
    return b"".join(encode({k: Column.of(a) for k, a in arrays.items()}, {"k": "v"}))


def read(data: bytes) -> dict[str, Any]:
    arrays, _ = decode(np.frombuffer(data, np.uint8), "f")
    return {name: array for name, (_, array) in arrays.items()}


def test_both_read_what_either_writes() -> None:
    for data in (file_of(ARRAYS), safetensors_numpy.save(ARRAYS, {"k": "v"})):
        for found in (read(data), safetensors_numpy.load(data)):
            assert found.keys() == ARRAYS.keys()
            for name, array in ARRAYS.items():
                assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
                np.testing.assert_array_equal(found[name], array)
    assert decode(np.frombuffer(file_of(ARRAYS), np.uint8), "f")[1] == {"k": "v"}


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A file with some bytes, a number of its header, or its length changed."""
    data = bytearray(file_of(ARRAYS))
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(data) - 1))
        data[place] = draw(st.integers(0, 255))
    if draw(st.booleans()):
        data[:8] = draw(st.integers(0, 2**64 - 1)).to_bytes(8, "little")
    return bytes(data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data)


@tries(300)
@given(data=st.one_of(damaged(), st.binary(max_size=300)))
@example(data=b"\xff" * 8)
@example(data=(1 << 20).to_bytes(8, "little") + b"{}")
def test_w50_damaged_files_are_errors(data: bytes) -> None:
    """Or the same arrays, if it was the content that changed; never anything else."""
    found: dict[str, Any] = {}
    with contextlib.suppress(CheckpointError):
        found = read(data)
    assert sum(array.nbytes for array in found.values()) <= len(data)


def header(entries: object, size: int = 16) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + bytes(size)


def entry(**changes: object) -> dict[str, object]:
    return {"a": {"dtype": "U64", "shape": [2], "data_offsets": [0, 16], **changes}}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "expected a file of at least 8 bytes, got 0"),
        ((1 << 63).to_bytes(8, "little") + b"{}", "expected a length of at most 2 bytes"),
        (header([]), "expected a mapping, got"),
        (header(entry(dtype="F128")), "a.dtype: expected one of"),
        (header(entry(shape=[2, -1])), "a.shape.1.: expected an integer in"),
        (header(entry(shape=[True])), "a.shape.0.: expected an integer in"),
        (header(entry(shape=[1 << 62, 1 << 62])), "a.data_offsets: expected .* bytes for U64"),
        (header(entry(shape=[1 << 40, 1 << 40, 0], data_offsets=[0, 0]), 0), "a.shape: .*"),
        (header(entry(shape=[1 << 64])), "a.shape.0.: expected an integer in"),
        (header(entry(shape=[1] * 9)), "a.shape: expected at most 8 dimensions"),
        (header(entry(data_offsets=[0, 1 << 62])), "a.data_offsets: expected 16 bytes"),
        (header(entry(data_offsets=[16, 0])), "a.data_offsets: expected 16 bytes"),
        (header(entry(data_offsets=[8, 24]), 24), "a.data_offsets: expected to begin at 0"),
        (header(entry(), 8), "expected 16 bytes of arrays behind it, got 8"),
        (header(entry(), 17), "expected 16 bytes of arrays behind it, got 17"),
        (header({**entry(), "b": entry()["a"]}), "b.data_offsets: expected to begin at 16"),
        (header(entry(more=1)), "a.more: unknown key"),
        (header({"__metadata__": {"k": 1}}, 0), "__metadata__: k: expected a string"),
    ],
)
def test_w71_hostile_headers_take_no_memory(data: bytes, message: str) -> None:
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=rf"^f: safetensors header[.:] ?{message}"):
        read(data)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_a_header_that_the_first_piece_lacks_is_refused() -> None:
    data = np.frombuffer(file_of(ARRAYS), np.uint8)
    glance = HeaderReader("f", len(data), "words")
    glance.see(0, data[:100])
    glance.see(100, data[100:])
    with pytest.raises(CheckpointError, match="header: expected a length of at most 92 bytes"):
        glance.seen()
