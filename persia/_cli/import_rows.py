"""``persia-ckpt import``: rows that another program wrote, as a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from persia import env
from persia._cluster.embedded import build_embedding_worker
from persia._files.catalog import ids as ids_in
from persia._files.catalog import load as load_manifest
from persia._files.open import open_storage
from persia._foreign.original import MARKER
from persia._rpc.messages import OptimizerSettings
from persia.config import EmbeddingSchema, GlobalConfig, GroupOptimizer
from persia.embedding import EmbeddingConfig
from persia.errors import CheckpointError, ConfigError, StoreError
from persia.tables import (
    IDSource,
    Table,
    read_dcp,
    read_numpy,
    read_original,
    read_parquet,
    read_state_dict,
)

FORMS = ("numpy", "parquet", "state-dict", "dcp", "original")

_SUFFIXES = {
    ".npz": "numpy",
    ".npy": "numpy",
    ".parquet": "parquet",
    ".pt": "state-dict",
    ".pth": "state-dict",
    ".bin": "state-dict",
}


def source_of(
    path: Path,
    form: str | None,
    feature: str,
    *,
    key: str | None = None,
    ids: Path | None = None,
    columns: tuple[str, str] = ("id", "vector"),
    old_config: Path | None = None,
    old_optimizer: str | None = None,
) -> IDSource:
    """Open what another program wrote, by the function of ``persia.tables`` for its form.

    Raises:
        ConfigError: The form is not clear, or an option is missing.
        PersiaError: What the function raises.
    """
    form = form or _form_of(path)
    if form == "parquet":
        return read_parquet(path, *columns)
    if form == "original":
        if old_config is None:
            raise ConfigError(
                f"{path}: expected --old-config, the embedding config of the job that wrote it"
            )
        return read_original(path, old_config, feature, old_optimizer)
    if form == "numpy":
        if path.suffix == ".npz":
            return read_numpy(path)
        if ids is None:
            raise ConfigError(f"{path}: expected --ids, a .npy file with the id of each row")
        return read_numpy(ids, path)
    if key is None:
        raise ConfigError(
            f"{path}: expected --key, the name of the "
            f"{'tensor, as user.weight' if form == 'state-dict' else 'table'}"
        )
    read = read_state_dict if form == "state-dict" else read_dcp
    return read(path, key, None if ids is None else _id_map(ids))


def _form_of(path: Path) -> str:
    if path.is_dir():
        for name, form in ((MARKER, "original"), (".metadata", "dcp")):
            if (path / name).is_file():
                return form
        if any(path.glob("*.parquet")):
            return "parquet"
    elif path.suffix in _SUFFIXES:
        return _SUFFIXES[path.suffix]
    raise ConfigError(
        f"{path}: its name does not say what it is: write --from, one of {', '.join(FORMS)}"
    )


def _id_map(path: Path) -> Any:
    """Return the id of each row, of a .npy file, or rows by id, of a JSON object."""
    if path.suffix == ".npy":
        try:
            return np.load(path, allow_pickle=False)
        except (OSError, ValueError) as exc:
            raise CheckpointError(f"{path}: cannot be read as a .npy file: {exc}") from exc
    try:
        given = json.loads(path.read_text())
        if not isinstance(given, dict):
            raise ValueError(f"expected an object, got {type(given).__name__}")
        return {int(key): row for key, row in given.items()}
    except (OSError, ValueError) as exc:
        raise CheckpointError(
            f"{path}: expected a .npy file with the id of each row, or a JSON object with the "
            f"row of each id: {exc}"
        ) from exc


def optimizer_of(name: str, options: Sequence[str]) -> OptimizerSettings:
    """Return an optimizer by its name in an embedding config and options ``NAME=VALUE``.

    Raises:
        ConfigError: One of them is unknown or cannot be used.
    """
    given: dict[str, Any] = {"lr": 0.01}  # it is no part of a row
    for option in options:
        key, sign, text = option.partition("=")
        try:
            given[key] = json.loads(text)
        except ValueError:
            sign = ""
        if not sign:
            raise ConfigError(
                f"--optimizer-option: expected NAME=VALUE, as initial_accumulator_value=0.1, "
                f"got {option!r}"
            )
    chosen = GroupOptimizer(name, given)
    return OptimizerSettings(*chosen.resolve(name, {}))


def import_rows(
    url: str, source: IDSource, feature: str, config: Path, optimizer: OptimizerSettings
) -> tuple[str, int, int]:
    """Write a checkpoint with the rows of its folder, if there are any, and those of a source.

    All of them are in this process's memory meanwhile.

    Returns:
        Id of the checkpoint, rows of the source, and rows in all.

    Raises:
        CheckpointError: The source has no rows, or the folder's checkpoint has more than rows.
        StoreError: They do not fit into the memory, or the capacity.
        PersiaError: What reading the source and writing raise.
    """
    # Torch is loaded here, and by no other command.
    from persia._training.checkpoint import CheckpointReader, CheckpointWriter

    storage = open_storage(url)
    schema = EmbeddingSchema.load(config)
    global_config = env.global_config_path()
    worker = build_embedding_worker(
        schema, GlobalConfig.load({} if global_config is None else global_config)
    )
    with closing(worker):
        worker.configure(EmbeddingConfig().settings())
        worker.register_optimizer(optimizer)
        step = 0
        known = ids_in(storage)
        if known:
            last = load_manifest(storage, known[-1])
            _check_rows_only(url, last.files)
            step = last.step
            reader = CheckpointReader(worker)
            reader.verify(last.id, url, None)
            reader.commit(blocking=True)
        count = Table(worker, feature).load(source)
        if not count:
            raise CheckpointError(f"{source.name}: expected rows, got none")
        if num_evicted := sum(stats["evicted"] for stats in worker.server_stats()):
            raise StoreError(
                f"{num_evicted} rows do not fit into the capacity or the memory of this "
                "process, and nothing was written: raise capacity or memory_limit of "
                "embedding_parameter_server_config, or import on a larger machine"
            )
        writer = CheckpointWriter(worker)
        writer.finish(writer.begin(step, dict), url, len(known) + 1, blocking=True)
        return ids_in(storage)[-1], count, sum(worker.get_embedding_size())


def _check_rows_only(url: str, files: Mapping[str, object]) -> None:
    dense = [name for name in files if name.endswith(".pt")]
    if dense:
        raise CheckpointError(
            f"{url}: its checkpoint has {', '.join(sorted(dense))}, which one with imported "
            "rows would lack: write to another folder, or load there by ctx.table(...).load"
        )
