"""Tensors of the Open Inference Protocol: JSON numbers, raw bytes, and what bounds them.

A request is checked before memory is taken for it: the number of tensors, the rank, every
dimension and the number of elements, then the size of the data against both. What does not fit
raises ``DataError`` with one sentence that names the tensor.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from persia._serving.request import DecodedRequest
from persia.errors import DataError

Array = NDArray[Any]

# Little-endian, as the protocol's raw data is.
DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    **{f"UINT{bits}": np.dtype(f"<u{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"INT{bits}": np.dtype(f"<i{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"FP{bits}": np.dtype(f"<f{bits // 8}") for bits in (16, 32, 64)},
}
BYTES, BF16 = "BYTES", "BF16"
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# Parameters that mean something here, and what has them.
_PLACES = {
    "pad": "input",
    "binary_data_size": "input",
    "binary_data": "output",
    "binary_data_output": "request",
    "timeout": "request",
}
_LENGTH = struct.Struct("<I")
# Types of JSON values that an element may have, by the kind of its dtype.
_JSON_TYPES: dict[str, set[type]] = {
    "b": {bool},
    "u": {int},
    "i": {int},
    "f": {int, float},
    "O": {str},
}


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What one request may ask for; beyond it is a ``DataError``."""

    body_bytes: int = 64 << 20
    tensors: int = 1024
    elements: int = 16 << 20  # of one tensor
    rank: int = 8


def datatype_of(values: Array) -> str:
    """Return the protocol's name of an array's dtype."""
    if values.dtype.kind in "OSU":
        return BYTES
    name = _NAMES.get(values.dtype.newbyteorder("<"))
    if name is None:
        raise DataError(f"expected a dtype of the protocol, got an output of {values.dtype}")
    return name


def checked_shape(
    name: str, shape: object, limits: RequestLimits
) -> tuple[tuple[int, ...], int]:
    """Return a shape and its number of elements; nothing has been allocated for it yet."""
    if type(shape) is not list:
        raise DataError(f"input {name!r}: expected a list of numbers as shape, got {shape!r}")
    if len(shape) > limits.rank:
        raise DataError(
            f"input {name!r}: expected a rank of at most {limits.rank}, got {len(shape)}"
        )
    held = 1
    for dim in shape:
        if type(dim) is not int or dim < 0:
            raise DataError(f"input {name!r}: expected dimensions from 0, got {dim!r}")
        # A dimension of zero must not hide a huge one beside it: models allocate by either.
        held *= dim or 1
    if held > limits.elements:
        raise DataError(
            f"input {name!r}: expected at most {limits.elements} elements, got shape {shape}"
        )
    return tuple(shape), math.prod(shape)


def from_raw(
    name: str, datatype: object, shape: tuple[int, ...], raw: bytes | memoryview
) -> Array:
    """Return an own, writable array of raw little-endian data in row-major order."""
    dtype = DTYPES.get(datatype) if isinstance(datatype, str) else None
    count = math.prod(shape)
    view = memoryview(raw)
    if dtype is not None:
        if view.nbytes != count * dtype.itemsize:
            raise DataError(
                f"input {name!r}: expected {count * dtype.itemsize} bytes of {datatype} for "
                f"shape {list(shape)}, got {view.nbytes}"
            )
        if dtype.kind == "b" and view.nbytes:
            # Any other byte would be a bool that is neither True nor False.
            bits: Array = np.frombuffer(view, np.uint8) != 0
            return bits.reshape(shape)
        values: Array = np.frombuffer(view, dtype).copy()
        return values.reshape(shape)
    if datatype == BYTES:
        return _read_bytes(name, count, view).reshape(shape)
    if datatype == BF16:
        if view.nbytes != 2 * count:
            raise DataError(
                f"input {name!r}: expected {2 * count} bytes of BF16, got {view.nbytes}"
            )
        wide: Array = np.frombuffer(view, "<u2").astype(np.uint32) << np.uint32(16)
        return wide.view(np.float32).reshape(shape)
    raise _unknown(name, datatype)


def to_raw(values: Array) -> bytes:
    """Return an array's elements as raw data, row-major."""
    if values.dtype.kind not in "OSU":
        return values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes()
    parts = []
    for element in values.ravel().tolist():
        data = element.encode() if isinstance(element, str) else bytes(element)
        parts += [_LENGTH.pack(len(data)), data]
    return b"".join(parts)


def from_json(name: str, datatype: object, shape: tuple[int, ...], data: object) -> Array:
    """Return an array of nested or flat JSON values; none is rounded or cut to fit."""
    if datatype == BYTES:
        dtype = np.dtype(object)
    elif isinstance(datatype, str) and datatype in DTYPES:
        dtype = DTYPES[datatype]
    elif datatype == BF16:
        raise DataError(f"input {name!r}: expected raw data for BF16, got JSON")
    else:
        raise _unknown(name, datatype)
    flat = _flatten(name, shape, data)
    types = set(map(type, flat))
    if not types <= _JSON_TYPES[dtype.kind]:
        wrong = next(value for value in flat if type(value) not in _JSON_TYPES[dtype.kind])
        raise DataError(
            f"input {name!r}: expected values of {datatype}, got {str(wrong)[:40]!r} of type "
            f"{type(wrong).__name__}"
        )
    if dtype.kind == "O":
        return strings(flat).reshape(shape)
    try:
        with np.errstate(over="ignore"):
            values = np.array(flat, dtype)
    except OverflowError:
        raise DataError(f"input {name!r}: expected values of {datatype}, got larger") from None
    if dtype.kind == "f" and not np.isfinite(values).all():
        raise DataError(f"input {name!r}: expected values of {datatype}, got larger")
    return values.reshape(shape)


def to_json(name: str, values: Array) -> Array | list[str]:
    """Return what orjson writes for an output: its elements, flat and row-major."""
    if values.dtype.kind not in "OSU":
        native = values.astype(values.dtype.newbyteorder("="), copy=False)
        return np.ascontiguousarray(native).ravel()
    try:
        return [
            element if isinstance(element, str) else bytes(element).decode()
            for element in values.ravel().tolist()
        ]
    except UnicodeDecodeError:
        raise DataError(
            f"output {name!r}: expected text for JSON, got other bytes: ask for binary data"
        ) from None


def strings(elements: Sequence[bytes | str]) -> Array:
    """Return a flat array of ``bytes`` objects."""
    values = np.empty(len(elements), object)
    values[:] = [one.encode() if isinstance(one, str) else one for one in elements]
    return values


def checked_name(names: Mapping[str, Any], name: object) -> str:
    """Return the name of an input that has not come yet."""
    if not isinstance(name, str) or not name:
        raise DataError(f"expected a name for each input, got {name!r}")
    if name in names:
        raise DataError(f"expected each input once, got {name!r} twice")
    return name


def check_parameters(place: str, name: str, given: Mapping[str, Any]) -> None:
    """Refuse parameters of this server in a wrong place, and ``pad`` by another name.

    The protocol leaves parameters to servers: others are ignored. But without ``pad``, ids that
    stand for none would count.

    Args:
        place: ``request``, ``input`` or ``output``.
        name: Of the input or output.
        given: Its parameters.
    """
    for one in given:
        right = _PLACES.get(one, place)
        if right != place:
            expected = f"it of {'the' if right == 'request' else 'an'} {right}"
        elif place == "input" and one != "pad" and one.lower().startswith("pad"):
            expected = "'pad', the id that stands for none"
        else:
            continue
        of = f"{place} {name!r:.120}" if name else f"the {place}"
        raise DataError(f"parameter {one!r:.120} of {of}: expected {expected}")


def add_pad(request: DecodedRequest, name: str, parameters: Mapping[str, Any]) -> None:
    """Hand an input's parameter ``pad`` on as the input ``<name>.pad``."""
    pad = parameters.get("pad")
    if pad is None:
        return
    if type(pad) is not int or not -(1 << 63) <= pad < 1 << 64:
        raise DataError(f"input {name!r}: expected an id as parameter pad, got {pad!r}")
    values = np.array([pad], np.int64 if pad < 1 << 63 else np.uint64)
    request.inputs[checked_name(request.inputs, f"{name}.pad")] = values


def _unknown(name: str, datatype: object) -> DataError:
    known = ", ".join([*DTYPES, BF16, BYTES])
    return DataError(f"input {name!r}: expected a datatype of {known}, got {datatype!r}")


def _read_bytes(name: str, count: int, view: memoryview) -> Array:
    if view.nbytes < _LENGTH.size * count:  # before memory is taken for that count
        raise DataError(
            f"input {name!r}: expected {count} elements of BYTES, got {view.nbytes} bytes"
        )
    elements: list[bytes] = []
    place = 0
    for number in range(count):
        end = place + _LENGTH.size
        if end <= view.nbytes:
            end += _LENGTH.unpack_from(view, place)[0]
        if end > view.nbytes:
            raise DataError(
                f"input {name!r}: expected {count} elements of BYTES, got the end of the data "
                f"in element {number}"
            )
        elements.append(bytes(view[place + _LENGTH.size : end]))
        place = end
    if place != view.nbytes:
        raise DataError(
            f"input {name!r}: expected {count} elements of BYTES, got {view.nbytes - place} "
            "bytes more"
        )
    return strings(elements)


def _flatten(name: str, shape: tuple[int, ...], data: object) -> list[Any]:
    if not isinstance(data, list):
        got = type(data).__name__
        raise DataError(f"input {name!r}: expected a list as data, got {got}")
    if data and isinstance(data[0], list):
        for depth, dim in enumerate(shape):
            is_last = depth + 1 == len(shape)
            if depth == 0:
                is_right = len(data) == dim
            else:
                is_right = all(type(row) is list and len(row) == dim for row in data)
                data = list(chain.from_iterable(data)) if is_right else data
            if not is_right:
                raise DataError(
                    f"input {name!r}: expected data of shape {list(shape)}, got other lists "
                    f"at depth {depth + 1}"
                )
            if is_last and not data:
                return data
    if len(data) != math.prod(shape):
        raise DataError(
            f"input {name!r}: expected {math.prod(shape)} values for shape {list(shape)}, got "
            f"{len(data)}"
        )
    return data
