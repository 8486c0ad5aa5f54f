"""Rows from NumPy arrays and files, Parquet files, and tensors of a state dict."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from persia._files.vectors import arrow
from persia._foreign.source import (
    BLOCK_ROWS,
    IDBlock,
    IDSource,
    array_of_ids,
    as_ids,
    as_vectors,
    check_lengths,
)
from persia.errors import CheckpointError, ConfigError, DataError, DataTypeError, did_you_mean

_NPZ_NAMES = (("id", "vector"), ("ids", "vectors"))


def read_numpy(ids: Any, vectors: Any = None) -> IDSource:
    """Read arrays, or the .npy files that have them, or both from one .npz file.

    Args:
        ids: Integers [n]; the path of a .npy file; or, alone, that of a .npz file with arrays
            ``id`` and ``vector``, as ``Table.export`` and ``persia-ckpt export`` write it.
        vectors: Floats [n, dim], or the path of a .npy file. Files of .npy are mapped, not read
            at once.

    Raises:
        CheckpointError: A file cannot be read.
        DataError: Lengths differ; DataTypeError: of other dtypes or shapes.
    """
    name = str(ids) if _is_path(ids) else "arrays"
    if vectors is None:
        ids, vectors = _open_npz(ids)
    ids, vectors = array_of_ids(_opened(ids)), np.asarray(_opened(vectors))
    as_ids(name, ids[:0])
    as_vectors(name, vectors[:0])
    check_lengths(name, len(ids), len(vectors))

    def read() -> Iterator[IDBlock]:
        for start in range(0, len(ids), BLOCK_ROWS):
            part = slice(start, start + BLOCK_ROWS)
            yield IDBlock(as_ids(name, ids[part]), as_vectors(name, vectors[part]))

    return IDSource(name, int(vectors.shape[1]), len(ids), read)


def _is_path(given: Any) -> bool:
    return isinstance(given, str | os.PathLike)


def _opened(given: Any) -> Any:
    if not _is_path(given):
        return given
    try:
        array = np.load(given, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as exc:
        raise CheckpointError(f"{given}: cannot be read as a .npy file: {exc}") from exc
    if not isinstance(array, np.ndarray):
        raise CheckpointError(f"{given}: expected a .npy file, got one of several arrays")
    return array


def _open_npz(path: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    if not _is_path(path):
        raise ConfigError("read_numpy: expected ids and vectors, or the path of a .npz file")
    try:
        with np.load(path, allow_pickle=False) as file:
            for names in _NPZ_NAMES:
                if set(names) <= set(file):
                    return file[names[0]], file[names[1]]
            found = ", ".join(file)
    except (OSError, ValueError, TypeError, AttributeError) as exc:
        raise CheckpointError(f"{path}: cannot be read as a .npz file: {exc}") from exc
    raise CheckpointError(f"{path}: expected arrays id and vector, got {found or 'none'}")


# --- Parquet ---------------------------------------------------------------------------------


def read_parquet(
    path: str | os.PathLike[str], id_column: str = "id", vector_column: str = "vector"
) -> IDSource:
    """Read a Parquet file, or all of a folder, some thousand rows at a time.

    The columns are those of ``Table.export`` and ``persia-ckpt export``: integers, and lists of
    floats, all of one length.

    Raises:
        CheckpointError: A file cannot be read, or has not these columns.
        ConfigError: pyarrow is not there.
    """
    pa, parquet = arrow()
    files = _parquet_files(Path(path))
    dim, num_rows = 0, 0
    for file in files:
        try:
            opened = parquet.ParquetFile(file)
        except (OSError, pa.ArrowException) as exc:
            raise CheckpointError(f"{file}: cannot be read as Parquet: {exc}") from exc
        with opened:
            for column in (id_column, vector_column):
                if column not in opened.schema_arrow.names:
                    known = ", ".join(opened.schema_arrow.names)
                    raise CheckpointError(f"{file}: expected a column {column}, got {known}")
            num_rows += opened.metadata.num_rows
            dim = dim or _first_dim(opened, str(file), vector_column)

    def read() -> Iterator[IDBlock]:
        for file in files:
            with parquet.ParquetFile(file) as opened:
                batches = opened.iter_batches(BLOCK_ROWS, columns=[id_column, vector_column])
                for batch in batches:
                    if len(batch):
                        ids = _integers(batch.column(id_column), f"{file}: column {id_column}")
                        yield IDBlock(ids, _lists(batch.column(vector_column), str(file), dim))

    return IDSource(str(path), dim, num_rows, read)


def _parquet_files(path: Path) -> list[Path]:
    if path.is_dir():
        files = sorted(path.glob("*.parquet"))
        if not files:
            raise CheckpointError(f"{path}: expected files that end with .parquet, got none")
        return files
    return [path]


def _first_dim(opened: Any, file: str, column: str) -> int:
    for batch in opened.iter_batches(1, columns=[column]):
        if len(batch):
            return len(batch.column(0)[0].as_py() or ())
    kind = opened.schema_arrow.field(column).type
    return int(getattr(kind, "list_size", 0) or 0)


def _integers(array: Any, where: str) -> NDArray[np.uint64]:
    if array.null_count:
        raise DataError(f"{where}: expected an id in each row, got a null")
    return as_ids(where, array.to_numpy(zero_copy_only=False))


def _lists(array: Any, file: str, dim: int) -> NDArray[np.float32]:
    """Return lists of one length as a matrix."""
    lengths = array.value_lengths()
    wrong = [x for x in lengths.unique().to_pylist() if x != dim]
    if wrong or array.null_count:
        got = "a null" if array.null_count else f"one of {wrong[0]}"
        raise DataError(f"{file}: expected vectors of {dim} values, got {got}")
    flat = array.flatten()
    if flat.null_count:
        raise DataError(f"{file}: expected numbers in each vector, got a null")
    values = flat.to_numpy(zero_copy_only=False)
    return as_vectors(file, values.reshape(len(array), dim))


# --- state dicts -----------------------------------------------------------------------------


def read_state_dict(state: Any, key: str, ids: Any = None) -> IDSource:
    """Read the weight of an ``nn.Embedding`` or ``nn.EmbeddingBag``, row by row.

    Args:
        state: A state dict, or the path of a file that ``torch.save`` wrote of one, which is
            mapped, not read at once.
        key: Name of the tensor [num, dim] in it, such as ``"user.weight"``.
        ids: The id of each row, integers [num]; a mapping from ids to rows, for those rows
            alone; or None, if the number of a row is its id.

    Raises:
        CheckpointError: The file cannot be read.
        DataError: There is no such tensor, or the ids do not fit.
    """
    where = f"{state}: {key}" if _is_path(state) else key
    tensors = _torch_file(Path(state)) if _is_path(state) else state
    if not isinstance(tensors, Mapping):
        raise DataTypeError(f"{where}: expected a state dict, got {type(tensors).__name__}")
    if key not in tensors:
        known = [str(name) for name in tensors]
        listed = "" if did_you_mean(key, known) else f"; there are {', '.join(known)}"
        raise DataError(f"{where}: no such tensor{did_you_mean(key, known)}{listed:.300}")
    tensor = tensors[key]
    if not hasattr(tensor, "is_floating_point") or tensor.dim() != 2:
        got = list(tensor.shape) if hasattr(tensor, "shape") else type(tensor).__name__
        raise DataTypeError(f"{where}: expected a tensor [num, dim], got {got}")
    num, dim = map(int, tensor.shape)
    own, rows = rows_of_ids(where, ids, num)

    def read() -> Iterator[IDBlock]:
        for start in range(0, len(own), BLOCK_ROWS):
            part = slice(start, start + BLOCK_ROWS)
            chosen = tensor[part] if rows is None else tensor[rows[part].tolist()]
            vectors = as_vectors(where, chosen.detach().cpu().float().numpy())
            yield IDBlock(own[part], vectors)

    return IDSource(where, dim, len(own), read)


def rows_of_ids(
    where: str, ids: Any, num: int
) -> tuple[NDArray[np.uint64], NDArray[np.int64] | None]:
    """Return the ids of a tensor's rows, and which rows those are; None: each, in order."""
    if ids is None:
        return np.arange(num, dtype=np.uint64), None
    if not isinstance(ids, Mapping):
        array = as_ids(where, array_of_ids(ids))
        check_lengths(where, len(array), num)
        return array, None
    own = as_ids(where, array_of_ids(list(ids.keys())) if ids else np.empty(0, np.uint64))
    numbers = np.array(list(ids.values())) if ids else np.empty(0, np.int64)
    if numbers.dtype.kind not in "iu" or (len(numbers) and not numbers.min() >= 0):
        raise DataTypeError(f"{where}: expected numbers of rows, got {numbers.dtype}")
    if len(numbers) and numbers.max() >= num:
        one = int(numbers.argmax())
        raise DataError(
            f"{where}: expected rows in 0..{num - 1}, got {numbers[one]} for id {own[one]}"
        )
    # By row, so that a mapped file is read once and in order.
    order = np.argsort(numbers, kind="stable")
    return own[order], numbers[order].astype(np.int64)


def _torch_file(path: Path) -> Any:
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as exc:  # of torch's own kinds
        raise CheckpointError(f"{path}: cannot be read by torch.load: {exc}") from exc
