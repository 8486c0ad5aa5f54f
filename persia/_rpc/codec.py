"""Messages and exceptions as scalars and arrays; no pickle.

Messages are written by the types that their fields declare; ``docs/protocol.md`` has the forms.
The writer is lenient where nothing is lost (a numpy scalar, an int where a float is declared)
and refuses another dtype with a DataTypeError, as the services do. The reader accepts exactly
what a writer sends, and names the field that differs in a ProtocolError. Coders are built once
per type, as closures over the coders of its parts: per message they look at no type hints.

An exception is ``[class, text, role, replica, address, method, detail]``. The class is a name
in ``persia/errors.py``; any other exception travels as a RemoteError with its type and text. A
ServiceError keeps its origin: one that an embedding-worker passes on from a parameter server
names the parameter server. ``detail`` is the server's traceback.
"""

from __future__ import annotations

import dataclasses
import functools
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from persia import errors
from persia._core.base import halves
from persia._core.ids.feature_batch import FeatureBatch
from persia._core.kernels.pooling import gather
from persia._rpc.frame import BFLOAT16, DTYPES, LIMITS, Array, unexpected
from persia._rpc.messages import PooledOutput, WireDtypes
from persia.errors import (
    DataError,
    DataTypeError,
    InternalError,
    PersiaError,
    ProtocolError,
    RemoteError,
    ServiceError,
)

# Axes of each array field. A field name has one meaning in all messages, as the type hints of
# numpy have no place for a number of axes. A dense feature or a label is the user's.
_AXES: dict[str, int | None] = {
    **dict.fromkeys(("signs", "hints", "index", "offsets", "registers", "meta"), 1),
    **dict.fromkeys(("ids", "found", "places"), 1),
    **dict.fromkeys(("rows", "values", "states", "gradients", "gradient"), 2),
    "array": None,
}

FLOAT32 = WireDtypes()

# Share of distinct vectors up to which pooled outputs are sent by number.
_MOST_DISTINCT = 0.75

# Of numbers below a known maximum.
_NARROW = (np.dtype("<u1"), np.dtype("<u2"), np.dtype("<u4"))


class ArrayWriter(list[Array]):
    """The arrays of a message in order, and how floats of rows and gradients are to travel."""

    def __init__(self, dtypes: WireDtypes = FLOAT32) -> None:
        super().__init__()
        self.dtypes = {"rows": dtypes.rows, "gradients": dtypes.gradients}


class ArrayReader:
    """Hands out a message's arrays in order, each exactly once."""

    def __init__(self, arrays: Sequence[Array]) -> None:
        self._arrays = arrays
        self._next = 0

    def take(self, number: Any, where: str) -> Array:
        """Return array ``number``, which has to be the next one."""
        # In order and once each: two fields must not share one array's memory, as a service may
        # work in place.
        if type(number) is not int or number != self._next or number >= len(self._arrays):
            raise unexpected(where, f"array {self._next} of {len(self._arrays)}", number)
        self._next += 1
        return self._arrays[number]

    def check_all_taken(self, where: str) -> None:
        """Refuse arrays that no field refers to."""
        if self._next != len(self._arrays):
            raise unexpected(where, f"{self._next} arrays by its fields", len(self._arrays))


class Coder(NamedTuple):
    """Writes and reads values of one type. ``where`` names the field, for messages."""

    write: Callable[[Any, str, ArrayWriter], Any]
    read: Callable[[Any, str, ArrayReader], Any]


def coder_of(hint: Any, where: str = "", travels_as: str = "") -> Coder:
    """Return the coder of a type; the field ``where`` says how many axes an array has.

    Floats of a field that ``travels_as`` one of ``WireDtypes`` are narrowed and widened.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    # Order matters: bool, int and str are types too, and FeatureBatch is no dataclass.
    if hint in _SCALARS:
        return _SCALARS[hint]
    if hint is FeatureBatch:
        return Coder(_write_feature, _read_feature)
    if hint is PooledOutput:
        return Coder(_write_pooled, _read_pooled)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _dataclass_coder(hint)
    if origin in (Union, types.UnionType):
        return _union_coder(arguments, where, travels_as)
    if origin is np.ndarray:
        return _array_coder([hint], where, travels_as)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return _tuple_coder([coder_of(part, where) for part in arguments])
    if origin in (tuple, list, Sequence):
        return _list_coder(coder_of(arguments[0], where), tuple if origin is tuple else list)
    if origin is Mapping and arguments[0] is str:
        return _mapping_coder(coder_of(arguments[1], where))
    raise InternalError(f"{where}: no form on the wire for {hint}")


# --- scalars ------------------------------------------------------------------------------


def _unfit(where: str, expected: str, value: Any) -> DataTypeError:
    """Return the error for a value of this process that cannot be written."""
    return DataTypeError(f"{where}: expected {expected}, got {_kind(value)}")


def _kind(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} with {value.ndim} dimension(s)"
    return type(value).__name__


def _scalar(kind: type, accepted: tuple[type, ...]) -> Coder:
    def write(value: Any, where: str, arrays: ArrayWriter) -> Any:
        # bool is a subclass of int: a number must not be a truth value.
        is_bool = isinstance(value, (bool, np.bool_))
        if not isinstance(value, accepted) or is_bool != (kind is bool):
            raise _unfit(where, kind.__name__, value)
        converted = kind(value)  # msgpack writes no numpy scalars
        if kind is int and not -(1 << 63) <= converted < 1 << 64:
            raise DataTypeError(f"{where}: {converted} does not fit 64 bits")
        return converted

    def read(value: Any, where: str, arrays: ArrayReader) -> Any:
        # Exactly: an int where a float is declared would change the arithmetic that follows.
        if type(value) is not kind:
            raise unexpected(where, kind.__name__, value)
        return value

    return Coder(write, read)


def _write_nothing(value: Any, where: str, arrays: ArrayWriter) -> None:
    if value is not None:
        raise _unfit(where, "None", value)


_SCALARS: dict[Any, Coder] = {
    bool: _scalar(bool, (bool, np.bool_)),
    int: _scalar(int, (int, np.integer)),
    float: _scalar(float, (int, float, np.integer, np.floating)),
    str: _scalar(str, (str,)),
    # Not by optional: a method that returns something by mistake must not seem to work.
    type(None): Coder(_write_nothing, _scalar(type(None), ()).read),
}


def _write_option(value: Any, where: str, arrays: ArrayWriter) -> Any:
    kind = bool if isinstance(value, (bool, np.bool_)) else float
    return _SCALARS[kind].write(value, where, arrays)


def _read_option(value: Any, where: str, arrays: ArrayReader) -> float | bool:
    if type(value) is not bool and type(value) is not float:
        raise unexpected(where, "float or bool", value)
    return value


# --- arrays -------------------------------------------------------------------------------


def _array_coder(hints: Sequence[Any], where: str, travels_as: str = "") -> Coder:
    """Return the coder of arrays of any of several types, as ``NDArray[np.float32]``."""
    name = where.rpartition(".")[2]
    if name not in _AXES:
        raise InternalError(f"no number of axes is known for array field {name!r}")
    axes = _AXES[name]
    dtypes: list[np.dtype[Any]] = []
    for hint in hints:
        (scalar,) = get_args(get_args(hint)[1])
        dtypes += DTYPES.values() if scalar is Any else [np.dtype(scalar)]
    expected = " or ".join(str(dtype) for dtype in dtypes)
    if axes is not None:
        expected = f"{expected} with {axes} dimension(s)"

    def fits(array: Any) -> bool:
        is_array = isinstance(array, np.ndarray)
        return is_array and array.dtype in dtypes and axes in (None, array.ndim)

    def write(value: Any, where: str, arrays: ArrayWriter) -> int:
        if not fits(value):
            raise _unfit(where, expected, value)
        # The array itself, not a copy: ZeroMQ sends from its memory, so it must not change
        # until the call has ended.
        arrays.append(_narrowed(value, arrays.dtypes[travels_as]) if travels_as else value)
        return len(arrays) - 1

    def read(value: Any, where: str, arrays: ArrayReader) -> Array:
        array = arrays.take(value, where)
        if travels_as and array.dtype in _SHORT and array.dtype not in dtypes:
            array = _widened(array)
        if not fits(array):
            raise unexpected(where, expected, _kind(array))
        return array

    return Coder(write, read)


# The dtypes of 2 bytes, by what the core calls them.
_SHORT = {np.dtype(np.float16): "float16", BFLOAT16: "bfloat16"}


def _narrowed(array: Array, dtype: str) -> Array:
    """Return floats as they travel: to nearest, finite ones to the largest at most.

    An f16 gradient of the user's stays as it is. A new array, which only the message has.
    """
    if dtype == "float32" or array.dtype != np.float32:
        return array
    short = halves.narrow(np.ascontiguousarray(array).reshape(-1), dtype)
    # Rows are contiguous, so that a view of 16 bits as another dtype of 16 copies nothing.
    return short.view(np.float16 if dtype == "float16" else BFLOAT16).reshape(array.shape)


def _widened(array: Array) -> Array:
    """Return floats of 2 bytes as f32, exactly."""
    wide = halves.widen(array.reshape(-1).view(np.uint16), _SHORT[array.dtype])
    return wide.reshape(array.shape)


def _narrowest(array: Array) -> Array:
    """Return the numbers in the narrowest of u8, u16 and u32 that holds the largest."""
    # initial: an empty array has no maximum.
    return array.astype(np.min_scalar_type(int(array.max(initial=0))))


def _write_feature(value: Any, where: str, arrays: ArrayWriter) -> list[Any]:
    if not isinstance(value, FeatureBatch):
        raise _unfit(where, "a FeatureBatch", value)
    # Three arrays, or four: the narrow dtypes exist on the wire only.
    number = len(arrays)
    arrays += [value.distinct, _narrowest(value.inverse)]
    fields = [value.name, number, number + 1, None]
    if value.offsets is not None:
        # Lengths, not offsets: most of them fit one byte.
        fields[3] = len(arrays)
        arrays.append(_narrowest(np.diff(value.offsets)))
    if value.weights is not None:
        # A fifth field only with weights: without them the form is that of older versions.
        fields.append(len(arrays))
        arrays.append(value.weights)
    return fields


def _read_feature(value: Any, where: str, arrays: ArrayReader) -> FeatureBatch:
    if type(value) is not list or len(value) not in (4, 5) or type(value[0]) is not str:
        raise unexpected(where, "[name, distinct, inverse, lengths] or one more", value)
    # Cut: the name is a peer's, and goes into a text of the log.
    where = f"{where} {value[0][:64]!r}"
    distinct = arrays.take(value[1], f"{where}, distinct")
    inverse = _numbers(arrays.take(value[2], f"{where}, inverse"), f"{where}, inverse")
    offsets = None
    if value[3] is not None:
        lengths = _numbers(arrays.take(value[3], f"{where}, lengths"), f"{where}, lengths")
        # In u64: a sum that wraps around in u32 could match the number of ids by chance.
        edges = np.zeros(len(lengths) + 1, np.uint64)
        np.cumsum(lengths, out=edges[1:])
        if edges[-1] != len(inverse):
            raise unexpected(where, f"lengths of {len(inverse)} ids", int(edges[-1]))
        offsets = edges.astype(np.uint32)
    weights = arrays.take(value[4], f"{where}, weights") if len(value) == 5 else None
    # The constructor checks the numbers against each other: bounds of inverse, for instance.
    try:
        return FeatureBatch(value[0], distinct, inverse, offsets, weights=weights)
    except DataError as exc:
        raise ProtocolError(f"{where}: {exc}") from exc


def _numbers(array: Array, where: str) -> Array:
    if array.dtype not in _NARROW or array.ndim != 1:
        raise unexpected(where, "u8, u16 or u32 with 1 dimension(s)", _kind(array))
    # The core takes u32 only; the narrow dtypes exist on the wire.
    return array.astype(np.uint32)


# --- pooled outputs -----------------------------------------------------------------------

_VALUES = _array_coder([NDArray[np.float32]], "PooledOutput.values", "rows")


def _write_pooled(value: Any, where: str, arrays: ArrayWriter) -> list[Any]:
    if type(value) is not PooledOutput:
        raise _unfit(where, "PooledOutput", value)
    name = _SCALARS[str].write(value.name, "PooledOutput.name", arrays)
    found = None if value.index is None else _without_repetition(value.values, value.index)
    rows, numbers = (value.values, None) if found is None else found
    fields = [name, _VALUES.write(rows, "PooledOutput.values", arrays), None]
    if numbers is not None:
        fields[2] = len(arrays)
        arrays.append(numbers)
    return fields


def _without_repetition(values: Array, index: Array) -> tuple[Array, Array] | None:
    """Return vectors by number, and the number of each sample; None if it saves too little."""
    num_samples = len(index)
    num_rows = int(index.max(initial=0)) + 1
    if num_rows > _MOST_DISTINCT * num_samples or values.shape[:1] != index.shape:
        return None
    any_sample = np.zeros(num_rows, np.uint32)
    any_sample[index] = np.arange(num_samples, dtype=np.uint32)
    rows = np.empty((num_rows, values.shape[1]), np.float32)
    gather(values, any_sample, 1, rows)
    return rows, _narrowest(index)


def _read_pooled(value: Any, where: str, arrays: ArrayReader) -> PooledOutput:
    if type(value) is not list or len(value) != 3:
        raise unexpected(where, "the 3 fields of PooledOutput", value)
    name = _SCALARS[str].read(value[0], "PooledOutput.name", arrays)
    rows = _VALUES.read(value[1], "PooledOutput.values", arrays)
    if value[2] is None:
        return PooledOutput(name, rows)
    where = "PooledOutput.index"
    index = _numbers(arrays.take(value[2], where), where)
    if len(index) and int(index.max()) >= len(rows):
        raise unexpected(where, f"numbers below {len(rows)}", int(index.max()))
    # As many bytes at most as the vectors themselves could have had.
    if 4 * len(index) * rows.shape[1] > LIMITS.array_bytes:
        most = f"vectors of {LIMITS.array_bytes} bytes"
        raise unexpected(where, most, f"{len(index)} numbers of {rows.shape[1]} values")
    values = np.empty((len(index), rows.shape[1]), np.float32)
    gather(rows, index, 1, values)
    return PooledOutput(name, values)


# --- what holds others --------------------------------------------------------------------


# Cached: messages nest the same classes, and a class has one coder.
@functools.cache
def _dataclass_coder(cls: type) -> Coder:
    # Annotations are strings in modules with postponed evaluation.
    hints = get_type_hints(cls)
    fields = [
        (field.name, f"{cls.__name__}.{field.name}", field.metadata.get("travels_as", ""))
        for field in dataclasses.fields(cls)
    ]
    plan = [
        (name, where, coder_of(hints[name], where, travels_as))
        for name, where, travels_as in fields
    ]

    def write(value: Any, where: str, arrays: ArrayWriter) -> list[Any]:
        # Not isinstance: a subclass has more fields, which the peer could not read.
        if type(value) is not cls:
            raise _unfit(where, cls.__name__, value)
        return [coder.write(getattr(value, name), at, arrays) for name, at, coder in plan]

    def read(value: Any, where: str, arrays: ArrayReader) -> Any:
        if type(value) is not list or len(value) != len(plan):
            raise unexpected(where, f"the {len(plan)} fields of {cls.__name__}", value)
        pairs = zip(value, plan, strict=True)
        return cls(*[coder.read(one, at, arrays) for one, (_, at, coder) in pairs])

    return Coder(write, read)


def _union_coder(options: tuple[Any, ...], where: str, travels_as: str) -> Coder:
    # Options of optimizers: msgpack itself distinguishes the two.
    if set(options) == {float, bool}:
        return Coder(_write_option, _read_option)
    # None is nil on the wire, and a class of several has its name in front.
    others = [option for option in options if option is not type(None)]
    if all(get_origin(option) is np.ndarray for option in others):
        inner = _array_coder(others, where, travels_as)
    elif len(others) == 1:
        inner = coder_of(others[0], where, travels_as)
    else:
        inner = _choice_coder(others)
    if len(others) == len(options):
        return inner

    def write(value: Any, where: str, arrays: ArrayWriter) -> Any:
        return None if value is None else inner.write(value, where, arrays)

    def read(value: Any, where: str, arrays: ArrayReader) -> Any:
        return None if value is None else inner.read(value, where, arrays)

    return Coder(write, read)


def _choice_coder(classes: Sequence[Any]) -> Coder:
    coders = {cls.__name__: coder_of(cls) for cls in classes}
    expected = f"one of {', '.join(coders)}"

    def write(value: Any, where: str, arrays: ArrayWriter) -> list[Any]:
        name = type(value).__name__
        if name not in coders:
            raise _unfit(where, expected, value)
        return [name, *coders[name].write(value, where, arrays)]

    def read(value: Any, where: str, arrays: ArrayReader) -> Any:
        # The name comes from a peer: it selects among known classes, and never imports one.
        name = value[0] if type(value) is list and value else None
        if type(name) is not str or name not in coders:
            raise unexpected(where, expected, value)
        return coders[name].read(value[1:], where, arrays)

    return Coder(write, read)


def _list_coder(inner: Coder, make: Callable[[list[Any]], Any]) -> Coder:
    def write(value: Any, where: str, arrays: ArrayWriter) -> list[Any]:
        # A str or an array is a sequence as well, but not a list of messages.
        if not isinstance(value, (list, tuple)):
            raise _unfit(where, "a list", value)
        return [inner.write(one, where, arrays) for one in value]

    def read(value: Any, where: str, arrays: ArrayReader) -> Any:
        if type(value) is not list:
            raise unexpected(where, "a list", value)
        return make([inner.read(one, where, arrays) for one in value])

    return Coder(write, read)


def _tuple_coder(inner: Sequence[Coder]) -> Coder:
    def write(value: Any, where: str, arrays: ArrayWriter) -> list[Any]:
        if not isinstance(value, tuple) or len(value) != len(inner):
            raise _unfit(where, f"a tuple of {len(inner)}", value)
        pairs = zip(inner, value, strict=True)
        return [coder.write(one, where, arrays) for coder, one in pairs]

    def read(value: Any, where: str, arrays: ArrayReader) -> Any:
        if type(value) is not list or len(value) != len(inner):
            raise unexpected(where, f"a list of {len(inner)}", value)
        pairs = zip(inner, value, strict=True)
        return tuple([coder.read(one, where, arrays) for coder, one in pairs])

    return Coder(write, read)


def _mapping_coder(inner: Coder) -> Coder:
    def write(value: Any, where: str, arrays: ArrayWriter) -> dict[str, Any]:
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise _unfit(where, "a map from str", value)
        return {key: inner.write(one, f"{where} {key}", arrays) for key, one in value.items()}

    def read(value: Any, where: str, arrays: ArrayReader) -> dict[str, Any]:
        if type(value) is not dict or not all(type(key) is str for key in value):
            raise unexpected(where, "a map from text", value)
        items = value.items()
        return {key: inner.read(one, f"{where} {key:.64}", arrays) for key, one in items}

    return Coder(write, read)


# --- exceptions ---------------------------------------------------------------------------

# Characters. A header has room for far more, but no reader for it.
_MAX_TEXT = 8192
_MAX_DETAIL = 16384

_CLASSES: dict[str, type[PersiaError]] = {
    name: value
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, PersiaError)
}
_BODY = coder_of(tuple[str, str, str, int | None, str, str, str])


@dataclasses.dataclass(frozen=True, slots=True)
class ErrorOrigin:
    """The server and method that an error comes from: a ServiceError's attributes."""

    role: str = ""
    replica: int | None = None
    address: str = ""
    method: str = ""

    def __str__(self) -> str:
        name = self.role or "service"
        name = name if self.replica is None else f"{name} {self.replica}"
        return f"{name} at {self.address}" if self.address else name

    def error(self, cls: type[ServiceError], text: str) -> ServiceError:
        """Return an error that comes from here."""
        return cls(text, **dataclasses.asdict(self))


def error_to_body(error: BaseException) -> list[Any]:
    """Return the body for an exception that a method raised."""
    detail = "".join(traceback.format_exception(error))[-_MAX_DETAIL:]
    name, text = "RemoteError", f"{type(error).__name__}: {error}"
    place: list[Any] = ["", None, "", ""]
    # A subclass defined elsewhere travels as its nearest class in persia/errors.py.
    for cls in type(error).__mro__:
        # By identity: another package may have a class of the same name.
        if _CLASSES.get(cls.__name__) is cls:
            name, text = cls.__name__, str(error)
            break
    if isinstance(error, ServiceError):
        place = [error.role, error.replica, error.address, error.method]
    return [name, _printable(text[:_MAX_TEXT]), *place, _printable(detail)]


def _printable(text: str) -> str:
    """Escape lone surrogates: UTF-8 has none."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def error_from_body(body: Any, called: ErrorOrigin) -> PersiaError:
    """Return the exception to raise for a call of the server and method in ``called``.

    Its cause is a RemoteError with the server's traceback. An unreadable body gives a
    ProtocolError, and a class that this version does not know a RemoteError.
    """
    try:
        fields = _BODY.read(body, f"error in answer to {called.method}", ArrayReader(()))
    except ProtocolError as exc:
        return called.error(ProtocolError, f"{called}: {exc}")
    name, text, role, replica, address, method, detail = fields
    # Without a role the error is no ServiceError, or one raised by the method itself.
    origin = ErrorOrigin(role, replica, address, method) if role else called
    if origin.role == called.role and origin.replica in (None, called.replica):
        # The server's own error: it does not know the address that it was called by.
        address, method = origin.address or called.address, origin.method or called.method
        origin = ErrorOrigin(called.role, called.replica, address, method)
    # A closed table: a peer cannot have an arbitrary class constructed or imported.
    cls = _CLASSES.get(name)
    if cls is None:
        cls, text = RemoteError, f"{name}: {text}"
    if cls is RemoteError:
        text = f"{called} failed in {called.method}: {text}"
    error = origin.error(cls, text) if issubclass(cls, ServiceError) else cls(text)
    # As a cause, so that a log shows the server's traceback above the caller's.
    cause = f"raised by {called} in {called.method}; over there:\n{detail}"
    error.__cause__ = called.error(RemoteError, cause)
    return error
