"""Arrow arrays as ids and as numbers, without a loop over rows.

column             ids of a sample
----------------   --------------------------------------------------------------
integers           one: signed ones keep their bits (-1 is 2**64 - 1)
texts, binary      one: the hash of ``persia._core.ids.text_ids``, or what they spell in hex
dictionary         one: by its values, each of which is hashed once
lists of these     any number
null               none, in a list too
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from persia._core.ids.text_ids import hash_texts, parse_hex
from persia.embedding.data import IDTypeFeature, IDTypeFeatureWithSingleID
from persia.errors import ConfigError, DataError, DataTypeError, did_you_mean

if TYPE_CHECKING:
    from numpy.typing import NDArray

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


def _edges(counts: NDArray[Any]) -> NDArray[np.int64]:
    """Return offsets for this number of ids per sample."""
    edges = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=edges[1:])
    return edges


def id_feature(
    name: str, column: str, array: Any, strings: str
) -> IDTypeFeature | IDTypeFeatureWithSingleID:
    """Return an id feature of what a column has in one batch.

    Args:
        name: The feature's name.
        column: The column's, for messages.
        array: Its entries; of a type for which ``are_ids``.
        strings: What texts mean: ``hash`` or ``hex``.

    Raises:
        DataError: If a text is no hexadecimal number.
    """
    if array.type.id in _WORDS and not array.null_count:
        return IDTypeFeatureWithSingleID(name, array.to_numpy().view(np.uint64))
    if not _is_list(array.type):
        array = _without_null_entries(array)
        if not array.null_count:
            return IDTypeFeatureWithSingleID(name, _plain_ids(array, column, strings))
        offsets = _edges(_known(array))
        ids = _plain_ids(array.drop_null(), column, strings)
        return IDTypeFeature.from_csr(name, ids, offsets)
    # ``flatten`` leaves out what may lie behind a null list, and knows of slices.
    inner = _without_null_entries(array.flatten())
    lengths = array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    offsets = _edges(lengths)
    if inner.null_count:
        offsets = _edges(_known(inner))[offsets]
        inner = inner.drop_null()
    return IDTypeFeature.from_csr(name, _plain_ids(inner, column, strings), offsets)


def numbers(column: str, array: Any, out: NDArray[np.float32], fill: float | None) -> None:
    """Write a column's numbers as f32 into ``out`` [B, width].

    Args:
        column: Its name, for messages.
        array: Its entries; of a type that has a ``width_of``.
        out: Where they go; may be a part of a larger matrix.
        fill: What a null is; None: an error.

    Raises:
        DataError: If there is a null, and ``fill`` is None.
    """
    width = out.shape[1]
    if pa.types.is_fixed_size_list(array.type):
        if array.null_count:
            if fill is None:
                _refuse(column, array)
            known = _known(array)
            out[~known] = fill
            inner = array.flatten()
            rows = np.empty((int(known.sum()), width), np.float32)
            numbers(column, inner, rows.reshape(-1, 1), fill)
            out[known] = rows
            return
        rows = np.empty((len(array), width), np.float32)
        numbers(column, array.flatten(), rows.reshape(-1, 1), fill)
        out[:] = rows
        return
    if array.null_count:
        if fill is None:
            _refuse(column, array)
        if not pa.types.is_floating(array.type):
            array = array.cast(pa.float32(), safe=False)
        array = array.fill_null(pa.scalar(fill, array.type))
    out[:, 0] = array.to_numpy(zero_copy_only=False)


def _refuse(column: str, array: Any) -> None:
    place = int(np.argmin(_known(array)))
    raise DataError(f"column {column!r}: expected a number, got a null in row {place}")


def check_types(
    where: str, schema: Any, ids: list[str], dense: list[str], labels: list[str]
) -> None:
    """Check that a table has the columns, and that they are of types that can be read.

    Raises:
        ConfigError: If a column is not there; says which are.
        DataTypeError: If one is of another type; names it, what was expected and what came.
    """
    for what, names in (("ids", ids), ("dense", dense), ("labels", labels)):
        for name in names:
            if name not in schema.names:
                raise ConfigError(
                    f"{where}: expected a column {name!r} for {what}, got "
                    f"{', '.join(schema.names) or 'none'}{did_you_mean(name, schema.names)}"
                )
            kind = schema.field(name).type
            is_right = are_ids(kind) if what == "ids" else width_of(kind) > 0
            if not is_right:
                expected = EXPECTED_IDS if what == "ids" else EXPECTED_NUMBERS
                raise DataTypeError(
                    f"{where}: column {name!r} for {what}: expected {expected}; got {kind}"
                )
