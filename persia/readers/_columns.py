"""Which columns of a table are what of a batch: ids and numbers, without a loop over rows.

column             ids of a sample
----------------   --------------------------------------------------------------
integers           one: signed ones keep their bits (-1 is 2**64 - 1)
texts, binary      one: the hash of ``persia._core.ids.text_ids``, or what they spell in hex
dictionary         one: by its values, each of which is hashed once
lists of these     any number
null               none, in a list too
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from persia._core.ids.text_ids import hash_texts, parse_hex
from persia.embedding.data import (
    IDTypeFeature,
    IDTypeFeatureWithSingleID,
    Label,
    NonIDTypeFeature,
    PersiaBatch,
    bits_of,
    edges_of,
    flat_list,
)
from persia.embedding.text_ids import KEPT_BITS, bytes_of
from persia.errors import ConfigError, DataError, DataTypeError, did_you_mean

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Names = Sequence[str] | Mapping[str, Sequence[str]]

try:
    import pyarrow as pa
except ImportError as exc:
    raise ImportError("persia.readers needs pyarrow: pip install pyarrow") from exc

from persia.readers._values import array_of

EXPECTED_IDS = "integers, texts, binary, a dictionary of these, or lists of these"
EXPECTED_NUMBERS = "integers, floats or bools, or lists of them of a fixed size"
_NO_FLOATS = (
    "; a float is no id; pandas makes floats of integers of which some are missing: "
    ".astype('Int64') makes them integers and nulls again (None in a list), which are no id"
)

# Types by number, which costs less than by question: those whose values are ids as they lie
# there, and lists.
_WORDS = frozenset((pa.uint64().id, pa.int64().id))
_LISTS = frozenset(
    kind.id for kind in (pa.list_(pa.null()), pa.large_list(pa.null()), pa.list_(pa.null(), 1))
)


def _is_text(kind: Any) -> bool:
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
    )


def is_list(kind: Any) -> bool:
    """Whether a sample has any number of values in a column of this type."""
    return kind.id in _LISTS


def are_ids(kind: Any) -> bool:
    """Whether ids can be had from a column of this type."""
    if is_list(kind):
        kind = kind.value_type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(pa.types.is_integer(kind)) or _is_text(kind)


def width_of(kind: Any) -> int:
    """How many numbers a sample has in a column of this type; 0 if it has none."""
    width = 1
    if pa.types.is_fixed_size_list(kind):
        kind, width = kind.value_type, kind.list_size
    is_number = (
        pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    )
    return width if is_number else 0


def _texts(array: Any) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the bytes and offsets of an array without nulls."""
    is_large = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
    _, offsets, data = array.buffers()
    if offsets is None or not len(array):
        return np.empty(0, np.uint8), np.zeros(len(array) + 1, np.int64)
    kind = np.dtype(np.int64 if is_large else np.int32)
    edges = np.frombuffer(offsets, kind, len(array) + 1, array.offset * kind.itemsize)
    texts = np.empty(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)
    return texts, edges.astype(np.int64)


def _plain_ids(array: Any, column: str, strings: str) -> NDArray[Any]:
    """Return one id for each entry of an array without nulls and lists, as u64 or i64."""
    kind = array.type
    if kind.id in _WORDS:
        words: NDArray[Any] = array.to_numpy()
        return words
    if pa.types.is_dictionary(kind):
        # Hashing entries without a reference costs less than finding them.
        # Unless most are, as in a small part of many rows.
        entries = array.dictionary
        if len(entries) > len(array) or (strings == "hex" and _is_text(kind.value_type)):
            return _plain_ids(array.dictionary_decode(), column, strings)
        ids = _plain_ids(entries, column, strings)
        picked: NDArray[Any] = ids[array.indices.to_numpy()]
        return picked
    if _is_text(kind):
        return _text_ids(*_texts(array), column, strings)
    if kind.bit_width < 64:
        array = array.cast(pa.int64() if pa.types.is_signed_integer(kind) else pa.uint64())
    plain: NDArray[Any] = array.to_numpy()
    return plain


def _text_ids(
    texts: NDArray[np.uint8], offsets: NDArray[np.int64], column: str, strings: str
) -> NDArray[np.uint64]:
    """Return the id of each text, as ``strings`` says."""
    if strings == "hash":
        hashes: NDArray[np.uint64] = hash_texts(texts, offsets) & KEPT_BITS
        return hashes
    spelled, place = parse_hex(texts, offsets)
    if place < len(spelled):
        text = texts[offsets[place] : offsets[place + 1]].tobytes().decode(errors="replace")
        raise DataError(f"column {column!r}: expected 1 to 16 hexadecimal digits, got {text!r}")
    return spelled


def _without_null_entries(array: Any) -> Any:
    """Return an array whose nulls count as such: those of a dictionary's entries do not."""
    is_dictionary = pa.types.is_dictionary(array.type)
    return array.dictionary_decode() if is_dictionary and array.dictionary.null_count else array


def _known(array: Any) -> NDArray[np.bool_]:
    known: NDArray[np.bool_] = array.is_valid().to_numpy(zero_copy_only=False)
    return known


def single_ids(
    name: str, column: str, array: Any, strings: str
) -> tuple[NDArray[np.uint64], NDArray[np.bool_] | None]:
    """Return the ids of a column without lists, and which rows have one; None if all have."""
    known = None
    if array.null_count or array.type.id not in _WORDS:
        array = _without_null_entries(array)
        if array.null_count:
            known, array = _known(array), array.drop_null()
    return bits_of(name, _plain_ids(array, column, strings)), known


def feature_of(
    name: str, ids: NDArray[np.uint64], known: NDArray[np.bool_] | None
) -> IDTypeFeature | IDTypeFeatureWithSingleID:
    """Return an id feature of what ``single_ids`` returned."""
    if known is None:
        return IDTypeFeatureWithSingleID(name, ids)
    return IDTypeFeature.from_csr(name, ids, edges_of(known))


def id_feature(
    name: str, column: str, array: Any, strings: str
) -> IDTypeFeature | IDTypeFeatureWithSingleID:
    """Return an id feature of a column's entries, of a type for which ``are_ids``."""
    if not is_list(array.type):
        return feature_of(name, *single_ids(name, column, array, strings))
    flat, offsets = flat_list(array)
    inner = _without_null_entries(flat)
    if inner.null_count:
        offsets = edges_of(_known(inner))[offsets]
        inner = inner.drop_null()
    return IDTypeFeature.from_csr(name, _plain_ids(inner, column, strings), offsets)


def numbers(column: str, array: Any, out: NDArray[np.float32], fill: float | None) -> None:
    """Write a column's numbers as f32 into ``out`` [B, width]; ``fill`` is what a null is.

    Raises:
        DataError: If there is a null, and ``fill`` is None.
    """
    if array.null_count and fill is None:
        place = int(np.argmin(_known(array)))
        raise DataError(f"column {column!r}: expected a number, got a null in row {place}")
    if pa.types.is_fixed_size_list(array.type):
        # ``flatten`` leaves out what may lie behind a null list.
        rows = np.empty((len(array) - array.null_count, out.shape[1]), np.float32)
        numbers(column, array.flatten(), rows.reshape(-1, 1), fill)
        if array.null_count:
            known = _known(array)
            out[~known], out[known] = fill, rows
        else:
            out[:] = rows
        return
    if array.null_count:
        if not pa.types.is_floating(array.type):
            array = array.cast(pa.float32(), safe=False)
        array = array.fill_null(pa.scalar(fill, array.type))
    out[:, 0] = array.to_numpy(zero_copy_only=False)


def names_of(what: str, given: Any) -> list[str]:
    """Return names as a list; a set has none, for its order is another in each process."""
    if given is None:
        return []
    is_list = isinstance(given, Iterable) and not isinstance(given, str | bytes | set)
    names = list(given) if is_list else []
    if not is_list or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"{what}: expected lists of names, got a {type(given).__name__}, {given!r:.80}"
        )
    return names


def check_bool(name: str, value: object) -> None:
    """Check an argument that is true or false; a text such as "no" would be taken as true."""
    if not isinstance(value, bool | np.bool_ | int) or value not in (0, 1):
        raise ConfigError(f"{name} must be True or False, got {value!r:.80}")


class Columns:
    """Which columns of a table are what of a batch.

    Args:
        ids: Columns of ids, each a feature of its name; or a mapping from feature to column,
            so that two features may read one column.
        dense: Columns of numbers, side by side in one f32 array [B, n] of the name ``dense``,
            in this order wherever the model is used; or a mapping from a name to its columns,
            for several arrays.
        labels: Columns of numbers, each a label f32 [B, 1] of its name. ``[]`` is for a loss
            that needs none; not given, only batches without gradients can be made.
        strings: What texts in id columns mean: ``hash`` (a stable hash of 64 bits), or ``hex``
            (the number that 1 to 16 hexadecimal digits spell).
        fill: What a null is among dense numbers; None makes it an error, as it is in labels.
        requires_grad: Whether embeddings shall be trained; False for evaluation.

    Raises:
        ConfigError: If there are no ids, one is named twice, or an argument is of another kind.

    Example:
        >>> columns = Columns(ids=["user", "items"], dense=["age", "price"], labels=["click"])
        >>> columns.names
        ['user', 'items', 'age', 'price', 'click']
    """

    def __init__(
        self,
        ids: Sequence[str] | Mapping[str, str],
        dense: Names = (),
        labels: Sequence[str] | None = None,
        *,
        strings: str = "hash",
        fill: float | None = 0.0,
        requires_grad: bool = True,
    ) -> None:
        if strings not in ("hash", "hex"):
            raise ConfigError(f"strings: expected 'hash' or 'hex', got {strings!r:.80}")
        if fill is not None and not isinstance(fill, int | float | np.number):
            raise ConfigError(f"fill must be a number, or None, got {fill!r:.80}")
        check_bool("requires_grad", requires_grad)
        columns = names_of("ids", ids.values() if isinstance(ids, Mapping) else ids)
        features = names_of("ids", ids) if isinstance(ids, Mapping) else columns
        self.ids = dict(zip(features, columns, strict=True))
        if not self.ids:
            raise ConfigError("ids: expected at least one column, got none")
        if len(self.ids) != len(features):
            twice = next(name for name in features if features.count(name) > 1)
            raise ConfigError(f"ids: expected each feature once, got {twice!r} twice")
        groups = dense if isinstance(dense, Mapping) else {"dense": dense}
        names = names_of("dense", groups)
        named = {name: names_of("dense", groups[name]) for name in names}
        self.dense = {name: group for name, group in named.items() if group}
        self.labels = names_of("labels", labels)
        self._needs_none = labels is not None and not self.labels
        self.strings = strings
        self.fill = fill
        self.requires_grad = requires_grad

    @property
    def names(self) -> list[str]:
        """The columns that are read, each once."""
        dense = [name for group in self.dense.values() for name in group]
        return list(dict.fromkeys([*self.ids.values(), *dense, *self.labels]))

    def check(self, where: str, schema: Any) -> None:
        """Check that a table of this Arrow schema has the columns, in types that can be read.

        ``where`` is the table's name, for messages.

        Raises:
            ConfigError: If a column is not there; says which are.
            DataTypeError: If one is of another type; names it, what was expected and came.
        """
        dense = [name for group in self.dense.values() for name in group]
        for what, names in (
            ("ids", list(self.ids.values())),
            ("dense", dense),
            ("labels", self.labels),
        ):
            for name in names:
                if name not in schema.names:
                    raise missing(where, name, what, schema.names)
                kind = schema.field(name).type
                if not (are_ids(kind) if what == "ids" else width_of(kind)):
                    raise _wrong_type(where, name, what, kind)

    def batch_of(self, rows: Any) -> PersiaBatch:
        """Return the rows of a ``pyarrow.RecordBatch`` as a batch.

        Raises:
            DataError: If a number is null where none may be, or a text is no number.
        """
        arrays = dict(zip(rows.schema.names, rows.columns, strict=True))
        features = [
            id_feature(feature, column, arrays[column], self.strings)
            for feature, column in self.ids.items()
        ]
        matrices = [
            _side_by_side(names, [arrays[name] for name in names], rows.num_rows, fill)
            for names, fill in self.matrices
        ]
        return self.assembled(features, matrices)

    @property
    def matrices(self) -> list[tuple[list[str], float | None]]:
        """The columns of each array of numbers, and what a null is: dense ones, then labels."""
        dense = [(names, self.fill) for names in self.dense.values()]
        return [*dense, *(([name], None) for name in self.labels)]

    def assembled(
        self, features: list[Any], matrices: Sequence[NDArray[np.float32]]
    ) -> PersiaBatch:
        """Return id features and an array f32 [B, n] for each of ``matrices`` as a batch."""
        named = list(zip([*self.dense, *self.labels], matrices, strict=True))
        dense = [NonIDTypeFeature(matrix, name) for name, matrix in named[: len(self.dense)]]
        labels = [Label(matrix, name) for name, matrix in named[len(self.dense) :]]
        targets = labels if labels or self._needs_none else None
        return PersiaBatch(features, dense, targets, None, self.requires_grad)

    def batch(self, values: Mapping[str, Any], *, requires_grad: bool = False) -> PersiaBatch:
        """Return values that a script has, such as those of a request, as a batch.

        Ids, numbers and texts become what a reader makes of the same rows.

        Args:
            values: For each column a scalar (one sample), or one value for each of B samples:
                a list, an array of numpy or Arrow, a tensor, a column of pandas. A sample's
                value may be a list or a row of a matrix, and None where there is none. A
                label may be absent. A frame of pandas or a table of Arrow is such a mapping.
            requires_grad: Whether embeddings shall be trained.

        Raises:
            ConfigError: If a column is not there; says which are.
            DataTypeError: If one is of another type; names it, what was expected and came.
            DataError: If columns differ in their samples, or a number is null where none may
                be.

        Example:
            >>> columns = Columns(ids=["user", "items"], dense=["age"], labels=["click"])
            >>> columns.batch({"user": 7, "items": [[3, 5]], "age": 31.5}).batch_size
            1
        """
        if isinstance(values, pa.Table | pa.RecordBatch):
            values = dict(zip(values.column_names, values.columns, strict=True))
        if not hasattr(values, "keys"):  # a frame of pandas has them too
            raise DataTypeError(
                f"{_VALUES}: expected a mapping from a column to its values, got "
                f"{type(values).__name__}"
            )
        features = [
            _feature_of(feature, column, _value_of(values, column, "ids"), self.strings)
            for feature, column in self.ids.items()
        ]
        first, size = next(iter(self.ids.values())), features[0].batch_size
        for column, feature in zip(self.ids.values(), features, strict=True):
            _check_size(column, feature.batch_size, first, size)

        def matrix(what: str, names: Sequence[str], fill: float | None) -> NDArray[np.float32]:
            """Return columns of numbers side by side."""
            arrays = [_numbers_of(name, what, _value_of(values, name, what)) for name in names]
            for name, array in zip(names, arrays, strict=True):
                _check_size(name, len(array), first, size)
            return _side_by_side(names, arrays, size, fill)

        dense = [
            NonIDTypeFeature(matrix("dense", names, self.fill), name)
            for name, names in self.dense.items()
        ]
        given = [name for name in self.labels if name in values]
        labels = [Label(matrix("labels", [name], None), name) for name in given]
        targets = labels if labels or self._needs_none else None
        return PersiaBatch(features, dense, targets, size, requires_grad)


# --- errors -----------------------------------------------------------------------------------


def missing(where: str, name: str, what: str, names: Sequence[str]) -> ConfigError:
    """Return the error that a column is not there; ``where`` is where, ``what`` what for."""
    return ConfigError(
        f"{where}: expected a column {name!r} for {what}, got {', '.join(names) or 'none'}"
        f"{did_you_mean(name, names)}"
    )


def _wrong_type(where: str, name: str, what: str, kind: Any) -> DataTypeError:
    expected = EXPECTED_IDS if what == "ids" else EXPECTED_NUMBERS
    is_float = what == "ids" and str(kind).startswith(("float", "double", "halffloat"))
    return DataTypeError(
        f"{where}: column {name!r} for {what}: expected {expected}; got {kind}"
        f"{_NO_FLOATS if is_float else ''}"
    )


# --- values of a script -----------------------------------------------------------------------


_VALUES = "the values"  # what they are in messages


def _value_of(values: Mapping[str, Any], name: str, what: str) -> Any:
    if name not in values:
        raise missing(_VALUES, name, what, list(values))
    return values[name]


def _check_size(name: str, got: int, first: str, size: int) -> None:
    """Check that a column has as many samples as the first one."""
    if not got:
        raise DataError(f"{_VALUES}: column {name!r}: expected at least 1 sample, got none")
    if got != size:
        raise DataError(
            f"{_VALUES}: column {name!r}: expected {size} samples as in column {first!r}, got "
            f"{got}; a list has an entry for each sample: several ids of one are [[7, 9]]"
        )


def _feature_of(
    feature: str, column: str, value: Any, strings: str
) -> IDTypeFeature | IDTypeFeatureWithSingleID:
    """Return an id feature of a column's values."""
    texts = value if type(value) is list else [value]
    if texts and type(texts[0]) in (str, bytes):
        try:
            data, offsets = bytes_of(texts)
        except DataError:
            pass  # there is something else, such as None, which Arrow knows
        else:
            ids = _text_ids(data, offsets, column, strings)
            return IDTypeFeatureWithSingleID(feature, ids)
    array = array_of(column, value)
    if not isinstance(array, np.ndarray):
        if not are_ids(array.type):
            raise _wrong_type(_VALUES, column, "ids", array.type)
        return id_feature(feature, column, array, strings)
    if array.dtype.kind not in "iu":
        kind = array.dtype.name
        is_nan = np.isnan(array) if array.dtype.kind == "f" else np.zeros(1, np.bool_)
        if is_nan.any():
            kind += f" with NaN in row {np.argwhere(is_nan)[0][0]}"
        raise _wrong_type(_VALUES, column, "ids", kind)
    ids = bits_of(feature, array.reshape(-1))
    if array.ndim == 1:
        return IDTypeFeatureWithSingleID(feature, ids)
    return IDTypeFeature.from_csr(feature, ids, np.arange(len(array) + 1) * array.shape[1])


def _numbers_of(column: str, what: str, value: Any) -> Any:
    """Return a column's values as an array of numbers: of numpy, or of Arrow."""
    array = array_of(column, value)
    if isinstance(array, np.ndarray):
        return array
    if pa.types.is_list(array.type) and len(array) > array.null_count:
        # Lists of one length are rows of a matrix.
        lengths = array.value_lengths().drop_null()
        if len(lengths.unique()) == 1:
            array = array.cast(pa.list_(array.type.value_type, lengths[0].as_py()))
    if not width_of(array.type):
        raise _wrong_type(_VALUES, column, what, array.type)
    return array


def _side_by_side(
    names: Sequence[str], arrays: Sequence[Any], size: int, fill: float | None
) -> NDArray[np.float32]:
    """Return columns of numbers, of numpy or of Arrow, side by side."""
    widths = [
        (1 if array.ndim == 1 else array.shape[1])
        if isinstance(array, np.ndarray)
        else width_of(array.type)
        for array in arrays
    ]
    out = np.empty((size, sum(widths)), np.float32)
    begin = 0
    for name, array, width in zip(names, arrays, widths, strict=True):
        part = out[:, begin : begin + width]
        if isinstance(array, np.ndarray):
            part[:] = array.reshape(size, width)
        else:
            numbers(name, array, part, fill)
        begin += width
    return out
