"""The embedding config against a sample of the data: are features there, both ways?

batch.npz            arrays by name; those named as features are ids
part.parquet         columns by name, the first row group
another file         ``PersiaBatch.to_bytes()``
data_loader.py       a script, which is run up to its first batch
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from persia import env
from persia._cli.checks.findings import Finding, error, ok, warning
from persia.config import EmbeddingSchema, nearest
from persia.embedding.data import PersiaBatch
from persia.errors import DataError, PersiaError

# Seconds in which a script has to send its first batch.
SCRIPT_S = 60.0


@dataclass(frozen=True, slots=True)
class Sample:
    """What a sample holds."""

    ids: Mapping[str, NDArray[np.uint64]]  # those of columns that can be ids
    others: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    is_batch: bool = False  # all its ids are features; of a file others may be anything
    # Of columns of texts, as ParquetReader hashes them: ids if they are features.
    texts: Mapping[str, NDArray[np.uint64]] = field(default_factory=dict)


def read_sample(path: Path) -> Sample:
    """Read a sample.

    Raises:
        DataError: If it cannot be read; says why.
    """
    try:
        if path.suffix == ".py":
            return _of_batch(_first_batch(path))
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                return _of_arrays({name: arrays[name] for name in arrays.files})
        if path.suffix in (".parquet", ".pq"):
            return _of_parquet(path)
        return _of_batch(PersiaBatch.from_bytes(path.read_bytes()))
    except (OSError, ValueError, zipfile.BadZipFile, PersiaError) as exc:
        raise DataError(f"{path}: {exc}") from exc


def _of_batch(batch: PersiaBatch) -> Sample:
    named = [*batch.non_id_type_features, *batch.labels]
    return Sample(
        {one.name: one.distinct for one in batch.id_type_features},
        {one.name: one.data for one in named},
        is_batch=True,
    )


def _of_arrays(arrays: Mapping[str, NDArray[Any]]) -> Sample:
    ids = {
        name: one.astype(np.uint64) for name, one in arrays.items() if one.dtype.kind in "iu"
    }
    return Sample(ids, {name: one for name, one in arrays.items() if name not in ids})


def _of_parquet(path: Path) -> Sample:
    try:
        from pyarrow import parquet
        from pyarrow.types import is_integer

        from persia.readers import _arrays
    except ImportError as exc:
        raise DataError("to read Parquet, pip install pyarrow") from exc
    table = parquet.ParquetFile(path).read_row_group(0)
    found, texts = {}, {}
    for name in table.column_names:
        column = table[name].combine_chunks()
        while hasattr(column, "flatten") and hasattr(column, "offsets"):  # lists, and of lists
            column = column.flatten()
        try:
            if _arrays.are_ids(column.type) and not is_integer(column.type):
                hashed = _arrays.id_feature(name, name, column, "hash")
                texts[name] = hashed.feature_batch.distinct
            else:
                found[name] = column.drop_null().to_numpy(zero_copy_only=False)
        except Exception as exc:  # pyarrow's own, of types that numpy has not
            raise DataError(f"column {name}: {exc}") from exc
    return replace(_of_arrays(found), texts=texts)


def _first_batch(script: Path) -> PersiaBatch:
    with tempfile.TemporaryDirectory(prefix="persia-") as directory:
        place = Path(directory) / "batch"
        module = "persia._cli.checks.first_batch"
        try:
            ran = subprocess.run(
                [sys.executable, "-m", module, str(place), str(script)],
                env=env.of_child(REPLICA_INDEX=0, REPLICA_SIZE=1, RANK=None),
                capture_output=True,
                text=True,
                check=False,
                timeout=SCRIPT_S,
            )
        except subprocess.TimeoutExpired as exc:
            raise DataError(f"it sent no batch within {SCRIPT_S:g} s") from exc
        if not place.exists():
            said = ran.stderr.strip().splitlines()
            why = said[-1] if ran.returncode and said else "it ended without sending a batch"
            raise DataError(why)
        return PersiaBatch.from_bytes(place.read_bytes())


def check_sample(schema: EmbeddingSchema, sample: Sample, name: str) -> Iterator[Finding]:
    """Yield what is found of a sample beside the config.

    Args:
        schema: The features.
        sample: The data.
        name: What messages call it.
    """
    texts = {one: ids for one, ids in sample.texts.items() if one in schema.slots}
    ids_of = {**texts, **sample.ids}
    missing = [slot for slot in schema.slots if slot not in ids_of]
    others = {*sample.ids, *sample.texts} - schema.slots.keys()
    for slot in missing:
        there = sample.others.get(slot)
        if there is not None and not sample.is_batch:
            text = f"{name}: {slot} is {there.dtype}, and ids are integers"
            yield error("data", text, "number them, or hash texts (docs/readers.md)")
        else:
            todo = f"send it, or take {slot} out of slots_config"
            text = f"{name}: feature {slot} of the config is not in the data"
            yield error("data", f"{text}{nearest(slot, sorted(others))}", todo)
    unknown = [one for one in sample.ids if one not in schema.slots]
    if unknown and sample.is_batch:
        for one in unknown:
            todo = f"add {one}: {{dim: 8}} to slots_config, or do not send it"
            yield error("data", f"{name}: feature {one} is not in the config", todo)
    limit = 1 << (64 - schema.prefix_bits)
    for one in schema.slots.keys() & ids_of.keys():
        ids = ids_of[one]
        if len(ids) and int(ids.max()) >= limit:
            text = (
                f"{name}: {one} has ids up to {int(ids.max())}, and {limit - 1} is the largest"
            )
            todo = "hash them to fewer bits, or lower feature_index_prefix_bit"
            yield (error if schema.strict_ids else warning)("data", text, todo)
    for other, values in sample.others.items():
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            todo = "fill what is missing: a loss of them is NaN"
            yield warning("data", f"{name}: {other} holds values that are not finite", todo)
    if not missing and not (unknown and sample.is_batch):
        yield ok("data", f"{name}: all {len(schema.slots)} features are there, and known")
