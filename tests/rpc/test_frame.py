"""The layout of one message: round trips, and bytes that are no message."""

from __future__ import annotations

from typing import Any

import msgpack  # type: ignore[import-untyped]
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from persia._rpc.frame import (
    DTYPES,
    PROTOCOL,
    Call,
    Failure,
    Limits,
    Message,
    Reply,
    UnreadableFrame,
    decode,
    encode,
)
from persia.errors import ProtocolError
from tests.rpc.support import BAD, header, same

SCALARS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)
ARRAYS = st.sampled_from(sorted(DTYPES)).flatmap(
    lambda name: hnp.arrays(name, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0))
)


@st.composite
def messages(draw: st.DrawFn) -> Message:
    number, body = draw(st.integers(1, 2**64 - 1)), draw(SCALARS)
    arrays = tuple(draw(st.lists(ARRAYS, max_size=4)))
    kind = draw(st.sampled_from(["call", "reply", "failure"]))
    if kind == "call":
        method = draw(st.text(min_size=1, max_size=64))
        return Call(number, method, draw(st.integers(0, 2**32 - 1)), body, arrays)
    make = Reply if kind == "reply" else Failure
    return make(number, draw(st.integers(0, 2**64 - 1)), body, arrays)


@given(messages())
def test_what_is_written_is_read(message: Message) -> None:
    # Bytes at odd places, as inside a receive buffer.
    parts = [memoryview(b"x" + bytes(part))[1:] for part in encode(message)]
    read = decode(parts)
    assert same(read, message)
    for array in read.arrays:
        assert array.flags.aligned


@pytest.mark.parametrize("layout", ["strided", "reversed", "fortran", "big-endian"])
def test_layouts_are_made_plain(layout: str) -> None:
    array: Any = np.arange(24, dtype=np.int32).reshape(4, 6)
    array = {
        "strided": array[:, ::2],
        "reversed": array[::-1],
        "fortran": np.asfortranarray(array),
        "big-endian": array.astype(">i4"),
    }[layout]
    (read,) = decode(encode(Reply(1, 1, None, (array,)))).arrays
    np.testing.assert_array_equal(read, array)
    assert read.dtype == np.dtype("<i4")


def test_neither_side_copies_an_aligned_array() -> None:
    array = np.arange(100, dtype=np.uint64)
    parts = encode(Reply(1, 1, None, (array,)))
    assert np.shares_memory(np.frombuffer(parts[2], np.uint64), array)
    (read,) = decode(parts).arrays
    assert np.shares_memory(read, array)


MORE: list[tuple[str, list[bytes], str]] = [
    ("nothing", [], "parts"),  # which no socket sends
    ("other version", [b"PERSIA/9", header()], "version"),
]


@pytest.mark.parametrize(
    ("parts", "reason"), [b[1:] for b in (*MORE, *BAD)], ids=[b[0] for b in (*MORE, *BAD)]
)
def test_bad_messages_say_what_is_wrong(parts: list[bytes], reason: str) -> None:
    with pytest.raises(UnreadableFrame) as caught:
        decode(parts)
    assert caught.value.reason == reason
    assert len(str(caught.value)) < 400


@given(messages(), st.data())
@example(Reply(1, 1, 0), None)
def test_damage_is_a_protocol_error_or_another_message(message: Message, data: Any) -> None:
    parts = [bytes(part) for part in encode(message)]
    for _ in range(0 if data is None else data.draw(st.integers(1, 3))):
        which = data.draw(st.integers(0, len(parts) - 1))
        part = parts[which]
        place = data.draw(st.integers(0, len(part)))
        some = data.draw(st.binary(min_size=1, max_size=8))
        damages = {
            "set": [part[:place] + some[:1] + part[place + 1 :]],
            "cut": [part[:place]],
            "insert": [part[:place] + some + part[place:]],
            "drop": [] if len(parts) > 1 else [b""],
            "double": [part, part],
        }
        parts[which : which + 1] = damages[data.draw(st.sampled_from(sorted(damages)))]
    try:
        read = decode(parts)
    except UnreadableFrame:
        return
    # What can be read can be written, and means the same.
    assert len(encode(read)) == len(parts)


@given(st.binary(max_size=200), st.lists(st.binary(max_size=20), max_size=3))
def test_any_bytes_as_header(content: bytes, rest: list[bytes]) -> None:
    with pytest.raises(UnreadableFrame):
        decode([PROTOCOL, content, *rest])


SMALL = Limits(header_bytes=120, num_arrays=2, array_bytes=64, message_bytes=150)


@pytest.mark.parametrize(
    ("fits", "exceeds", "reason"),
    [
        (("x" * 97,), ("x" * 98,), "header_bytes"),
        (("", 1, 1), ("", 1, 1, 1), "num_arrays"),
        (("", 64), ("", 65), "array_bytes"),
        (("", 50, 50), ("", 64, 64), "message_bytes"),
    ],
)
def test_limits_hold_on_both_sides(fits: Any, exceeds: Any, reason: str) -> None:
    def message(content: Any) -> Reply:
        body, *sizes = content
        return Reply(1, 1, body, tuple(np.zeros(size, np.uint8) for size in sizes))

    decode(encode(message(fits), SMALL), SMALL)
    with pytest.raises(ProtocolError, match="may have"):
        encode(message(exceeds), SMALL)
    with pytest.raises(UnreadableFrame) as caught:
        decode(encode(message(exceeds)), SMALL)
    assert caught.value.reason == reason


def test_what_cannot_be_sent_is_refused_by_the_writer() -> None:
    for body in (object(), 1 << 64, {1, 2}, "\udc80"):
        with pytest.raises(ProtocolError, match="msgpack"):
            encode(Reply(1, 1, body))
    for dtype in ("O", "M8[s]", "c8", "S3", "g"):
        with pytest.raises(ProtocolError, match="cannot be sent"):
            encode(Reply(1, 1, None, (np.zeros(1, dtype),)))


def test_the_number_is_in_the_header_if_it_is_known() -> None:
    for call in (Call(1, "add", 5, [1]), Call(1, "add", 5, [1], (), 7)):
        assert decode(encode(call)) == call
    headers = [msgpack.unpackb(encode(Call(1, "add", 5, [1], (), r))[1]) for r in (None, 0)]
    assert headers[1] == headers[0] | {"r": 0}
    assert "r" not in headers[0]
