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

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from persia._core.ids.text_ids import hash_texts, parse_hex
from persia.embedding.data import (
    IDTypeFeature,
    IDTypeFeatureWithSingleID,
    Label,
    NonIDTypeFeature,
    PersiaBatch,
    edges_of,
    flat_list,
)
from persia.errors import ConfigError, DataError, DataTypeError, did_you_mean

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Names = Sequence[str] | Mapping[str, Sequence[str]]

try:
    import pyarrow as pa
except ImportError as exc:
    raise ImportError("persia.readers needs pyarrow: pip install pyarrow") from exc

EXPECTED_IDS = "integers, texts, binary, a dictionary of these, or lists of these"
EXPECTED_NUMBERS = "integers, floats or bools, or lists of them of a fixed size"

# Types whose values are ids as they lie there; by number, which costs less than by question.
_WORDS = frozenset((pa.uint64().id, pa.int64().id))

# Of a hash: as many bits as a sign leaves an id by default, so that none has to be cut.
_KEPT = np.uint64((1 << 56) - 1)


def _is_text(kind: Any) -> bool:
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
    )


def _is_list(kind: Any) -> bool:
    return bool(
        pa.types.is_list(kind)
        or pa.types.is_large_list(kind)
        or pa.types.is_fixed_size_list(kind)
    )


def are_ids(kind: Any) -> bool:
    """Whether ids can be had from a column of this type."""
    if _is_list(kind):
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


def _plain_ids(array: Any, column: str, strings: str) -> NDArray[np.uint64]:
    """Return one id for each entry of an array without nulls and lists."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        # Hashing entries without a reference costs less than finding them.
        entries = array.dictionary
        if strings == "hex" and _is_text(kind.value_type):
            return _plain_ids(array.dictionary_decode(), column, strings)
        ids = _plain_ids(entries, column, strings)
        picked: NDArray[np.uint64] = ids[array.indices.to_numpy()]
        return picked
    if _is_text(kind):
        texts, offsets = _texts(array)
        if strings == "hash":
            hashes: NDArray[np.uint64] = hash_texts(texts, offsets) & _KEPT
            return hashes
        spelled, place = parse_hex(texts, offsets)
        if place < len(array):
            raise DataError(
                f"column {column!r}: expected 1 to 16 hexadecimal digits, "
                f"got {array[place].as_py()!r}"
            )
        return spelled
    if kind.bit_width < 64:
        array = array.cast(pa.int64() if pa.types.is_signed_integer(kind) else pa.uint64())
    bits: NDArray[np.uint64] = array.to_numpy().view(np.uint64)
    return bits


def _without_null_entries(array: Any) -> Any:
    """Return an array whose nulls count as such: those of a dictionary's entries do not."""
    is_dictionary = pa.types.is_dictionary(array.type)
    return array.dictionary_decode() if is_dictionary and array.dictionary.null_count else array


def _known(array: Any) -> NDArray[np.bool_]:
    known: NDArray[np.bool_] = array.is_valid().to_numpy(zero_copy_only=False)
    return known


def id_feature(
    name: str, column: str, array: Any, strings: str
) -> IDTypeFeature | IDTypeFeatureWithSingleID:
    """Return an id feature of a column's entries, of a type for which ``are_ids``."""
    if array.type.id in _WORDS and not array.null_count:
        return IDTypeFeatureWithSingleID(name, array.to_numpy().view(np.uint64))
    if not _is_list(array.type):
        array = _without_null_entries(array)
        if not array.null_count:
            return IDTypeFeatureWithSingleID(name, _plain_ids(array, column, strings))
        offsets = edges_of(_known(array))
        ids = _plain_ids(array.drop_null(), column, strings)
        return IDTypeFeature.from_csr(name, ids, offsets)
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


class Columns:
    """Which columns of a table are what of a batch.

    Args:
        ids: Columns of ids, each a feature of its name; or a mapping from feature to column,
            so that two features may read one column.
        dense: Columns of numbers, side by side in one f32 array [B, n] of the name ``dense``;
            or a mapping from a name to its columns, for several arrays.
        labels: Columns of numbers, each a label f32 [B, 1] of its name.
        strings: What texts in id columns mean: ``hash`` (a stable hash of 64 bits), or ``hex``
            (the number that 1 to 16 hexadecimal digits spell).
        fill: What a null is among dense numbers; None makes it an error, as it is in labels.
        requires_grad: Whether embeddings shall be trained; False for evaluation.

    Raises:
        ConfigError: If there are no ids, one is named twice, or ``strings`` is another word.

    Example:
        >>> columns = Columns(ids=["user", "items"], dense=["age", "price"], labels=["click"])
        >>> columns.names
        ['user', 'items', 'age', 'price', 'click']
    """

    def __init__(
        self,
        ids: Sequence[str] | Mapping[str, str],
        dense: Names = (),
        labels: Sequence[str] = (),
        *,
        strings: str = "hash",
        fill: float | None = 0.0,
        requires_grad: bool = True,
    ) -> None:
        if isinstance(ids, str) or isinstance(dense, str) or isinstance(labels, str):
            raise ConfigError("Columns: expected lists of names, got a str")
        if strings not in ("hash", "hex"):
            raise ConfigError(f"strings: expected 'hash' or 'hex', got {strings!r}")
        self.ids: dict[str, str] = (
            dict(ids) if isinstance(ids, Mapping) else {name: name for name in ids}
        )
        if len(self.ids) != len(ids):
            names = list(ids)
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(f"ids: expected each feature once, got {twice!r} twice")
        if not self.ids:
            raise ConfigError("ids: expected at least one column, got none")
        groups = dense if isinstance(dense, Mapping) else {"dense": dense}
        self.dense = {name: list(group) for name, group in groups.items() if group}
        self.labels = list(labels)
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
                    raise ConfigError(
                        f"{where}: expected a column {name!r} for {what}, got "
                        f"{', '.join(schema.names) or 'none'}{did_you_mean(name, schema.names)}"
                    )
                kind = schema.field(name).type
                if not (are_ids(kind) if what == "ids" else width_of(kind)):
                    expected = EXPECTED_IDS if what == "ids" else EXPECTED_NUMBERS
                    raise DataTypeError(
                        f"{where}: column {name!r} for {what}: expected {expected}; got {kind}"
                    )

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
        dense = [
            NonIDTypeFeature(_matrix(arrays, group, self.fill), name)
            for name, group in self.dense.items()
        ]
        labels = [Label(_matrix(arrays, [name], None), name) for name in self.labels]
        return PersiaBatch(features, dense, labels, None, self.requires_grad)


def _matrix(
    arrays: Mapping[str, Any], names: Sequence[str], fill: float | None
) -> NDArray[np.float32]:
    """Return columns of numbers side by side."""
    widths = [width_of(arrays[name].type) for name in names]
    out = np.empty((len(arrays[names[0]]), sum(widths)), np.float32)
    begin = 0
    for name, width in zip(names, widths, strict=True):
        numbers(name, arrays[name], out[:, begin : begin + width], fill)
        begin += width
    return out
