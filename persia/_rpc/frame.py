"""One message on the wire, as a list of parts; ``docs/protocol.md`` has the layout.

    part 0    b"PERSIA/2"     protocol name and version
    part 1    msgpack map     which message of which call, and its scalars
    part 2..  raw bytes       one part per array, little-endian, C order

Arrays stay out of msgpack so that neither side copies them: ZeroMQ sends each part from the
array's own buffer, and the receiver's arrays view the received parts. Everything that a peer
wrote is checked here before it is used, and before memory is allocated for it.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgpack  # type: ignore[import-untyped]  # it ships none
import numpy as np
from numpy.typing import NDArray

from persia.errors import ProtocolError

Array = NDArray[Any]
Part = bytes | bytearray | memoryview

# Another number with each change of what a peer has to read, fields of messages included: then
# both ends know by the first call.
PROTOCOL = b"PERSIA/2"

# The dtypes that cross the wire, by the names that stand for them in a header. A closed list:
# np.dtype() on a peer's string would accept object arrays, whose bytes are pointers.
_DTYPE_NAMES = "|b1 |i1 |u1 <i2 <i4 <i8 <u2 <u4 <u8 <f2 <f4 <f8"
DTYPES: dict[str, np.dtype[Any]] = {name: np.dtype(name) for name in _DTYPE_NAMES.split()}
# NumPy has no bfloat16. Of rows and gradients alone, which ``codec`` makes f32 of.
BFLOAT16 = np.dtype([("bfloat16", "<u2")], align=True)
_WIRE_DTYPES = DTYPES | {"bf2": BFLOAT16}
# dtype.str builds its text at each access, which takes far longer than this lookup. Only native
# little-endian dtypes are keys: the arrays of these can be sent as they are.
NAMES = {dtype: name for name, dtype in _WIRE_DTYPES.items()}

_MAX_AXES = 8  # the messages use two; numpy before version 2 ends at 32
_MAX_EXTENT = 1 << 48
_MAX_METHOD = 64
_U32 = 1 << 32
_U64 = 1 << 64


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one message; the same numbers hold for sending and receiving."""

    header_bytes: int = 1 << 20  # bounds the objects msgpack makes, some 60 bytes for each
    num_arrays: int = 1 << 14  # 5,000 features of three arrays each
    array_bytes: int = 1 << 31  # also ZMQ_MAXMSGSIZE, which bounds a part
    message_bytes: int = 1 << 33


LIMITS = Limits()


# Not frozen: __init__ of a frozen class takes several times as long.
@dataclass(slots=True)
class Call:
    """A request."""

    call_id: int
    method: str
    timeout_ms: int  # that the caller will still wait: the clocks of two machines differ
    body: Any
    arrays: tuple[Array, ...] = ()
    replica: int | None = None  # index of the server that is called; with None any answers


@dataclass(slots=True)
class Reply:
    """The result of a call."""

    call_id: int
    incarnation: int
    body: Any
    arrays: tuple[Array, ...] = ()


@dataclass(slots=True)
class Failure:
    """The error of a call. ``call_id`` 0: of a message whose id could not be read."""

    call_id: int
    incarnation: int
    body: Any
    arrays: tuple[Array, ...] = ()


Message = Call | Reply | Failure


class UnreadableFrame(ProtocolError):
    """A message that breaks the layout: what was expected, and what the peer has sent."""

    def __init__(self, reason: str, expected: str, got: object, call_id: int = 0) -> None:
        super().__init__(f"expected {expected}, got {shown(got)}")
        self.reason = reason  # one of a few words, for counting
        self.call_id = call_id  # 0 if unreadable


def unexpected(where: str, expected: str, got: object) -> ProtocolError:
    """Return the error for a peer's value that does not fit the field ``where``."""
    return ProtocolError(f"{where}: expected {expected}, got {shown(got)}")


def shown(value: object) -> str:
    """Return a peer's value for an error, of bounded length, time and depth.

    ``repr`` recurses: a list nested a thousand times, which fits into any message, ends it.
    """
    return _REPR.repr(value)[:80]


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 80


# --- writing ------------------------------------------------------------------------------


def encode(message: Message, limits: Limits = LIMITS) -> list[Part]:
    """Return the parts of a message; those of contiguous arrays are views of them.

    ProtocolError if the receiver would refuse it.
    """
    specs: list[list[Any]] = []
    parts: list[Part] = [PROTOCOL, b""]
    num_bytes = 0
    for array in message.arrays:
        little = array  # sent from its own buffer: the caller must not change it meanwhile
        if array.dtype not in NAMES or not array.flags.c_contiguous:
            little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        name = NAMES.get(little.dtype)
        if name is None:
            raise ProtocolError(f"array {len(specs)}: {array.dtype} cannot be sent")
        if little.nbytes > limits.array_bytes:
            most = f"{limits.array_bytes} bytes in an array"
            raise ProtocolError(f"a message may have {most}, this one has {little.nbytes}")
        # ascontiguousarray gives a scalar one axis: the shape is the original's.
        specs.append([name, list(array.shape)])
        # A memoryview of an empty array, or of bfloat16, refuses the cast to bytes.
        flat = little.view(np.uint16) if little.dtype is BFLOAT16 else little
        parts.append(flat.data.cast("B") if flat.size else b"")
        num_bytes += little.nbytes
    header = _header_of(message)
    header["a"] = specs
    header["b"] = message.body
    try:
        parts[1] = msgpack.packb(header)
    except (TypeError, ValueError, OverflowError, RecursionError) as exc:
        raise ProtocolError(f"msgpack cannot carry a value of a message: {exc}") from exc
    num_bytes += len(PROTOCOL) + len(parts[1])
    for what, got, limit in (
        ("bytes of header", len(parts[1]), limits.header_bytes),
        ("arrays", len(specs), limits.num_arrays),
        ("bytes", num_bytes, limits.message_bytes),
    ):
        if got > limit:
            raise ProtocolError(f"a message may have {limit} {what}, this one has {got}")
    return parts


def _header_of(message: Message) -> dict[str, Any]:
    if isinstance(message, Call):
        # Clipped rather than refused: the deadline passes on either side.
        timeout_ms = min(max(message.timeout_ms, 0), _U32 - 1)
        header = {"k": "call", "id": message.call_id, "m": message.method, "t": timeout_ms}
        return header if message.replica is None else header | {"r": message.replica}
    kind = "reply" if isinstance(message, Reply) else "error"
    return {"k": kind, "id": message.call_id, "i": message.incarnation}


# --- reading ------------------------------------------------------------------------------


def decode(parts: Sequence[Part], limits: Limits = LIMITS) -> Message:
    """Parse a message as it was received, routing id already removed.

    Its arrays view ``parts`` where those are aligned for their dtype. UnreadableFrame says
    nothing about the next message: the connection stays usable.
    """
    if len(parts) < 2:
        raise UnreadableFrame("parts", "a protocol and a header", len(parts))
    # By length first: a hostile part may have gigabytes.
    if len(parts[0]) != len(PROTOCOL) or bytes(parts[0]) != PROTOCOL:
        first = bytes(parts[0][:16])
        is_ours = len(first) == len(PROTOCOL) and first[:-1] == PROTOCOL[:-1]
        expected = f"protocol {PROTOCOL!r}, as both ends are of one version of PERSIA"
        raise UnreadableFrame("version" if is_ours else "protocol", expected, first)
    _check_limit("header_bytes", len(parts[1]), limits.header_bytes)
    header = _read_header(parts[1])
    call_id = _integer(header, "id", _U64)
    try:
        # After the header is read, so that the error can carry the id.
        _check_limit("num_arrays", len(parts) - 2, limits.num_arrays)
        _check_limit("message_bytes", sum(map(len, parts)), limits.message_bytes)
        arrays = _read_arrays(header["a"], parts[2:], limits)
        return _message(header, call_id, arrays)
    except UnreadableFrame as error:
        error.call_id = call_id
        raise


def _check_limit(name: str, got: int, limit: int) -> None:
    if got > limit:
        raise UnreadableFrame(name, f"{name} of at most {limit}", got)


# The keys of each kind, apart from k; a call may leave out r.
_KEYS = {
    "call": {"id", "m", "t", "a", "b"},
    "reply": {"id", "i", "a", "b"},
    "error": {"id", "i", "a", "b"},
}


def _refuse_extension(code: int, data: bytes) -> Any:
    raise ValueError(f"extension type {code} of {len(data)} bytes")


def _read_header(raw: Part) -> dict[str, Any]:
    # msgpack's own limits hold: none of its containers can be longer than the input.
    try:
        header: Any = msgpack.unpackb(raw, ext_hook=_refuse_extension)
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as exc:
        raise UnreadableFrame("header", "a header that can be read", str(exc)) from exc
    kind = header.get("k") if isinstance(header, dict) else None
    if not isinstance(kind, str) or kind not in _KEYS:
        raise UnreadableFrame("header", f"k of {', '.join(_KEYS)}", header)
    optional = {"k", "r"} if kind == "call" else {"k"}
    if header.keys() - optional != _KEYS[kind]:
        # With an id the caller can be answered.
        number = header.get("id")
        call_id = number if type(number) is int and 0 <= number < _U64 else 0
        keys = ", ".join(sorted(_KEYS[kind]))
        got = sorted(map(str, header.keys() - {"k"}))
        raise UnreadableFrame("header", f"the keys {keys} of a {kind}", got, call_id)
    return cast("dict[str, Any]", header)


def _integer(header: dict[str, Any], key: str, end: int) -> int:
    number = header[key]
    # bool passes isinstance(int).
    if type(number) is not int or not 0 <= number < end:
        raise UnreadableFrame("header", f"{key} as an integer in 0..{end - 1}", number)
    return number


def _message(header: dict[str, Any], call_id: int, arrays: tuple[Array, ...]) -> Message:
    if header["k"] == "call":
        method = header["m"]
        if not isinstance(method, str) or not 0 < len(method) <= _MAX_METHOD:
            raise UnreadableFrame("header", "a method's name", method)
        if call_id == 0:
            raise UnreadableFrame("header", "a call's id from 1 on", call_id)
        timeout_ms = _integer(header, "t", _U32)
        replica = _integer(header, "r", _U32) if "r" in header else None
        # The body is checked by the method's coders, which know its types.
        return Call(call_id, method, timeout_ms, header["b"], arrays, replica)
    make = Reply if header["k"] == "reply" else Failure
    return make(call_id, _integer(header, "i", _U64), header["b"], arrays)


def _read_arrays(specs: Any, parts: Sequence[Part], limits: Limits) -> tuple[Array, ...]:
    if not isinstance(specs, list) or len(specs) != len(parts):
        expected = f"the arrays {shown(specs)} of the header"
        raise UnreadableFrame("array_count", expected, len(parts))
    return tuple([_read_array(n, spec, parts[n], limits) for n, spec in enumerate(specs)])


def _read_array(number: int, spec: Any, part: Part, limits: Limits) -> Array:
    # One condition for all: this runs for every array of every message.
    if not (
        type(spec) is list
        and len(spec) == 2
        and isinstance(spec[0], str)
        and spec[0] in _WIRE_DTYPES
        and type(spec[1]) is list
        and len(spec[1]) <= _MAX_AXES
        # Two negative extents would multiply to a plausible size.
        and not [n for n in spec[1] if type(n) is not int or not 0 <= n < _MAX_EXTENT]
    ):
        raise UnreadableFrame("array_spec", f"[dtype, shape] of array {number}", spec)
    dtype, shape = _WIRE_DTYPES[spec[0]], tuple(spec[1])
    needed = math.prod(shape) * dtype.itemsize
    if needed != len(part):
        expected = f"{needed} bytes of array {number}, {shape} of {spec[0]}"
        raise UnreadableFrame("array_bytes", expected, len(part))
    if needed > limits.array_bytes:  # no call here: this runs for every array
        _check_limit("array_bytes", needed, limits.array_bytes)
    if not needed:
        return np.empty(shape, dtype)
    if dtype.kind == "b" and np.frombuffer(part, np.uint8).max() > 1:
        # numpy takes any byte for a bool, and then computes with more than two values.
        raise UnreadableFrame("array_bytes", f"bools of 0 or 1 in array {number}", "more")
    flat = np.frombuffer(part, dtype)  # keeps the part, and so libzmq's memory, alive
    if not flat.flags.aligned:
        # ZeroMQ delivers small parts from inside its receive buffer, at any address.
        flat = flat.copy()
    return flat.reshape(shape)
