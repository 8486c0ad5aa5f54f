"""Recorded requests: bounded, written whole, and read without trust."""

from __future__ import annotations

import json
import struct
import threading
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from persia._serving.warmup import FILE_NAME, WarmupRecorder, read_requests, write_requests
from persia.errors import CheckpointError, DataTypeError

_DTYPES = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(endianness="<"),
    hnp.unsigned_integer_dtypes(endianness="<"),
    hnp.floating_dtypes(endianness="<", sizes=(16, 32, 64)),
)
_ARRAYS = st.one_of(
    hnp.arrays(_DTYPES, hnp.array_shapes(min_dims=0, min_side=0, max_side=4)),
    st.lists(st.binary(max_size=5), min_size=1, max_size=4).map(lambda x: np.array(x, object)),
    st.lists(st.text(max_size=5), min_size=1, max_size=4).map(lambda x: np.array(x, object)),
)


@given(requests=st.lists(st.dictionaries(st.text(max_size=4), _ARRAYS, max_size=3), max_size=3))
def test_what_was_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, requests: list[dict[str, Any]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "requests.bin"
    write_requests(path, requests)
    got = read_requests(path)
    assert len(got) == len(requests)
    for one, other in zip(got, requests, strict=True):
        assert list(one) == list(other)
        for name, array in other.items():
            assert one[name].dtype == array.dtype
            np.testing.assert_array_equal(one[name], array)
    assert [file.name for file in path.parent.glob(f".{path.name}*")] == []


def test_numpy_texts_are_read_as_objects(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    write_requests(path, [{"a": np.array(["x", "äß"]), "b": np.array([b"x", b"yz"])}])
    (request,) = read_requests(path)
    assert request["a"].tolist() == ["x", "äß"]
    assert request["b"].tolist() == [b"x", b"yz"]


@pytest.mark.parametrize("array", [np.array([1, None], object), np.array(["2020"], "M8[Y]")])
def test_what_no_request_has_is_refused(tmp_path: Path, array: Any) -> None:
    with pytest.raises(DataTypeError, match="input x"):
        write_requests(tmp_path / FILE_NAME, [{"x": array}])
    assert not list(tmp_path.iterdir())


def _file(header: object, content: bytes = b"", *, crc: int | None = None) -> bytes:
    head = json.dumps(header).encode()
    crc = zlib.crc32(head + content) if crc is None else crc
    return struct.pack("<8sII", b"PERSIAWU", len(head), crc) + head + content


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"PERSIAWU",
        b"x" * 100,
        struct.pack("<8sII", b"PERSIAWU", 1 << 31, 0),
        _file([], crc=1),
        _file({}),
        _file([1]),
        _file([[1]]),
        _file([[]] * 5000),
        _file([[["x", "int64", [1]]]]),
        _file([[["x", "int64", [1], 8]]]),
        _file([[["x", "int64", [2], 8]]], b"\0" * 8),
        _file([[["x", "int64", [1], 8]]], b"\0" * 9),
        _file([[["x", "int64", [-1], 8]]], b"\0" * 8),
        _file([[["x", "int64", [True], 8]]], b"\0" * 8),
        _file([[["x", "int64", [1] * 9, 8]]], b"\0" * 8),
        _file([[["x", "object", [1], 8]]], b"\0" * 8),
        _file([[["x", ["int64"], [1], 8]]], b"\0" * 8),
        _file([[["x", "int64", [1], -8]]], b"\0" * 8),
        _file([[[1, "int64", [1], 8]]], b"\0" * 8),
        _file([[["x", "bytes", [1 << 60], 4]]], b"\0" * 4),
        _file([[["x", "bytes", [1], 4]]], struct.pack("<I", 1)),
        _file([[["x", "bytes", [1], 8]]], struct.pack("<I", 0) + b"\0" * 4),
        _file([[["x", "str", [1], 5]]], struct.pack("<I", 1) + b"\xff"),
        _file([[["x", "bytes", [0, 1 << 40, 1 << 40], 4]]], b"\0" * 4),
    ],
    ids=range(25),
)
def test_damaged_files_are_one_typed_error(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / FILE_NAME
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=FILE_NAME):
        read_requests(path)


@given(position=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_no_flipped_bit_goes_unnoticed(
    tmp_path_factory: pytest.TempPathFactory, position: int, bit: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "flipped.bin"
    write_requests(path, [{"x": np.arange(9), "y": np.array([b"ab"], object)}])
    data = bytearray(path.read_bytes())
    data[position % len(data)] ^= 1 << bit
    path.write_bytes(data)
    with pytest.raises(CheckpointError):
        read_requests(path)


def test_a_file_that_is_missing_or_too_large(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    with pytest.raises(CheckpointError, match="No such file"):
        read_requests(path)
    write_requests(path, [{"x": np.arange(100)}])
    with pytest.raises(CheckpointError, match="expected at most 100 bytes"):
        read_requests(path, max_bytes=100)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_requests(path)


def test_the_recorder_keeps_one_of_n_copies_and_its_bounds(tmp_path: Path) -> None:
    recorder = WarmupRecorder(tmp_path, every=3, max_requests=4, max_bytes=200)
    buffer = np.zeros(2, np.int64)
    for number in range(30):
        buffer[:] = number
        recorder.record("m", {"x": buffer})
    recorder.record("large", {"x": np.zeros(1000)})
    assert [int(one["x"][0]) for one in recorder.requests("m")] == [18, 21, 24, 27]
    assert recorder.requests("large") == recorder.requests("none") == []
    recorder.flush()
    (path,) = tmp_path.rglob("*.bin")
    assert [int(one["x"][0]) for one in read_requests(path)] == [18, 21, 24, 27]
    path.unlink()
    recorder.flush()  # nothing is new
    assert not path.exists()
    for size in (10, 20):
        for _ in range(3):
            recorder.record("b", {"x": np.zeros(size)})
    assert [len(one["x"]) for one in recorder.requests("b")] == [20]


def test_a_folder_that_cannot_be_written_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    recorder = WarmupRecorder(tmp_path / "file", every=1)
    for _ in range(3):
        recorder.record("m", {"x": np.zeros(1)})
        recorder.flush()
    assert len(caplog.records) == 1
    assert "recorded requests of m" in caplog.text


def test_many_threads_record(tmp_path: Path) -> None:
    recorder = WarmupRecorder(tmp_path, every=10, max_requests=1000)

    def record() -> None:
        for _ in range(200):
            recorder.record("m", {"x": np.zeros(1)})

    threads = [threading.Thread(target=record) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(recorder.requests("m")) == 80
