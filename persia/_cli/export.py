"""Export of a checkpoint's rows: tables, or the vectors of a feature for a search index."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from persia._files.manifest import Manifest
from persia._files.parts import take
from persia._files.rows import Progress, rows_of
from persia._files.storage import LocalStorage, Storage
from persia._files.summary import groups_and_ids, values_of
from persia._files.tensors import Column, encode
from persia._files.vectors import arrow, check_suffix, write_vectors
from persia.errors import ConfigError, did_you_mean

FORMATS = ("parquet", "safetensors", "npz")

Arrays = dict[str, NDArray[Any]]


def export(
    storage: Storage,
    manifests: Sequence[Manifest],
    folder: Path,
    form: str,
    groups: Collection[str],
    progress: Progress,
) -> dict[str, int]:
    """Write the rows of a chain, of some feature groups or all; returns rows by file."""
    schema = manifests[-1].schema
    names = [group.name for group in schema.groups]
    unknown = sorted(set(groups) - set(names))
    if unknown:
        raise ConfigError(f"feature groups {', '.join(unknown)}: known are {', '.join(names)}")
    chosen = [number for number, name in enumerate(names) if not groups or name in groups]
    found: dict[str, int] = {}
    with _whole_or_none(folder), ExitStack() as stack:
        writer = (
            _Parquet(folder, names, stack) if form == "parquet" else _Files(folder, form, names)
        )
        for part, block in rows_of(storage, manifests, progress):
            numbers, ids = groups_and_ids(schema, block.signs)
            mine = np.isin(numbers, chosen)
            if not mine.any():
                continue
            held = take(block, mine)
            arrays: Arrays = {
                "id": ids[mine],
                "group": numbers[mine].astype(np.uint32),
                "values": values_of(held),
                "states": held.states,
            }
            name = writer.add(part.table, arrays)
            found[name] = found.get(name, 0) + len(held)
    return found


def export_vectors(
    storage: Storage,
    manifests: Sequence[Manifest],
    path: Path,
    feature: str,
    progress: Progress,
) -> tuple[int, int]:
    """Write ids u64 [n], ascending, and vectors f32 [n, dim] of one feature into one file.

    Returns:
        n and dim.

    Raises:
        ConfigError: The feature is unknown, or its rows are no vectors of ids (hash stacks, and
            ids that are hashed by a library).
        CheckpointError: The file cannot be written.
    """
    schema = manifests[-1].schema
    group = schema.features.get(feature)
    if group is None:
        raise ConfigError(
            f"feature {feature!r}: expected one of {', '.join(sorted(schema.features))}"
            f"{did_you_mean(feature, schema.features)}"
        )
    number = [each.name for each in schema.groups].index(group)
    rounds, _ = schema.groups[number].hash_stack
    if rounds:
        raise ConfigError(
            f"feature {feature!r}: expected rows of ids, got a hash stack of {rounds} rounds, "
            "whose rows many ids share; look the ids up instead"
        )
    if group in schema.hashes:
        raise ConfigError(
            f"feature {feature!r}: expected rows of ids, got rows of the hashes of "
            f"{schema.hashes[group]}, from which no id follows; look the ids up instead, or "
            f"write all vectors with their hashes by `convert --group {group}`"
        )
    check_suffix(path)
    ids: list[NDArray[np.uint64]] = []
    vectors: list[NDArray[np.float32]] = []
    for _, block in rows_of(storage, manifests, progress):
        numbers, found = groups_and_ids(schema, block.signs)
        mine = numbers == number
        if mine.any():
            ids.append(found[mine])
            vectors.append(values_of(take(block, mine)))
    dim = schema.tables[schema.groups[number].table].dim
    all_ids = np.concatenate([np.empty(0, np.uint64), *ids])
    order = np.argsort(all_ids)
    rows = np.concatenate([np.empty((0, dim), np.float32), *vectors])[order]
    return write_vectors(path, [(all_ids[order], rows)], dim), dim


@contextmanager
def _whole_or_none(folder: Path) -> Iterator[None]:
    """Make a folder, and remove it again if filling it fails."""
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_empty = not any(folder.iterdir())
    except OSError as exc:
        raise ConfigError(f"{folder}: cannot be made: {exc.strerror}") from exc
    if not is_empty:
        raise ConfigError(f"{folder}: expected an empty folder, or none")
    try:
        yield
    except BaseException:
        # A part of the rows could be taken for all of them.
        for path in folder.iterdir():
            path.unlink()
        if is_new:
            folder.rmdir()
        raise


class _Files:
    def __init__(self, folder: Path, form: str, names: Sequence[str]) -> None:
        self._folder = folder
        self._form = form
        self._names = list(names)
        self._number = 0

    def add(self, table: str, arrays: Arrays) -> str:
        name = f"{table}-{self._number:06}.{self._form}"
        self._number += 1
        if self._form == "npz":
            # ``groups[group]`` is the group's name of a row.
            groups = np.array(self._names)
            np.savez(self._folder / name, allow_pickle=False, **arrays, groups=groups)
        else:
            columns = {key: Column.of(array) for key, array in arrays.items()}
            content = encode(columns, {"groups": json.dumps(self._names)})
            LocalStorage(self._folder).write(name, content)
        return name


class _Parquet:
    """A file for each table, with names of groups and values as lists of one length."""

    def __init__(self, folder: Path, names: Sequence[str], stack: ExitStack) -> None:
        self._arrow, _ = arrow()
        self._folder = folder
        self._names = self._arrow.array(names)
        self._stack = stack
        self._writers: dict[str, Any] = {}

    def add(self, table: str, arrays: Arrays) -> str:
        arrow = self._arrow
        columns = {
            "id": arrow.array(arrays["id"]),
            "group": arrow.DictionaryArray.from_arrays(
                arrow.array(arrays["group"].astype(np.int32)), self._names
            ),
            "values": self._lists(arrays["values"]),
            "states": self._lists(arrays["states"]),
        }
        rows = arrow.table({key: array for key, array in columns.items() if array is not None})
        name = f"{table}.parquet"
        if table not in self._writers:
            self._writers[table] = self._stack.enter_context(
                arrow.parquet.ParquetWriter(str(self._folder / name), rows.schema)
            )
        self._writers[table].write_table(rows)
        return name

    def _lists(self, array: NDArray[Any]) -> Any:
        """Return rows as lists of one length; None where they are empty."""
        if not array.shape[1]:
            return None
        flat = self._arrow.array(np.ascontiguousarray(array).reshape(-1))
        return self._arrow.FixedSizeListArray.from_arrays(flat, array.shape[1])
