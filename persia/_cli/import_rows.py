"""``persia-ckpt import``: rows that another program wrote, as a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from persia import env
from persia._cluster.embedded import build_embedding_worker
from persia._files.catalog import ids as ids_in
from persia._files.catalog import load as load_manifest
from persia._files.manifest import feature_order
from persia._files.open import open_storage
from persia._files.writer_lock import JobFolders
from persia._foreign.original import MARKER
from persia._rpc.messages import EmbeddingWorker, OptimizerSettings
from persia._server.row_settings import settings_from_json
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

if TYPE_CHECKING:
    from persia._files.manifest import Manifest

FORMS = ("numpy", "parquet", "state-dict", "dcp", "original")

_SUFFIXES = {
    ".npz": "numpy",
    ".npy": "numpy",
    ".parquet": "parquet",
    ".pt": "state-dict",
    ".pth": "state-dict",
    ".bin": "state-dict",
}

# Notes of a load that lose nothing of a row: a feature that is to be imported, and counts of
# ids that have no rows yet.
_HARMLESS = ("new", "counts")


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

    All of them are in this process's memory meanwhile, and no other process may write there.

    Returns:
        Id of the checkpoint, rows of the source, and rows in all.

    Raises:
        CheckpointError: The source has no rows, or the folder's checkpoint has more than rows,
            or another process writes there.
        ConfigError: The config or the optimizer would drop rows of the folder, or change them.
        StoreError: They do not fit into the memory, or the capacity.
        PersiaError: What reading the source and writing raise.
    """
    # Torch is loaded here, and by no other command.
    from persia._training.checkpoint import CheckpointWriter

    storage = open_storage(url)
    schema = EmbeddingSchema.load(config)
    global_config = env.global_config_path()
    worker = build_embedding_worker(
        schema, GlobalConfig.load({} if global_config is None else global_config)
    )
    with ExitStack() as stack:
        stack.callback(worker.close)
        job = JobFolders()
        stack.callback(job.release)
        job.acquire(storage)  # what is read now is still the latest when it is written
        known = ids_in(storage)
        step = 0
        if known:
            last = load_manifest(storage, known[-1])
            step = last.step
            _load(worker, url, last, optimizer)
        else:
            worker.configure(EmbeddingConfig().settings())
            worker.register_optimizer(optimizer)
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
        frozen = writer.begin(step, dict)
        identity = writer.finish(frozen, url, len(known) + 1, blocking=True, job=job)
        return identity, count, sum(worker.get_embedding_size())


def _load(
    worker: EmbeddingWorker, url: str, last: Manifest, optimizer: OptimizerSettings
) -> None:
    """Load a checkpoint's rows, with its settings and the order of its features."""
    from persia._training.checkpoint import CheckpointReader

    _check_rows_only(url, last.files)
    servers = last.extras.get("servers")
    hyper, _ = settings_from_json(dict(servers or {}).get("hyper_parameters"), None)
    worker.configure(EmbeddingConfig().settings() if hyper is None else hyper)
    worker.register_optimizer(optimizer)
    if (order := feature_order(last, url)) is not None:
        worker.fix_feature_order(order, None)
    reader = CheckpointReader(worker)
    reader.verify(last.id, url, None)
    notes = reader.commit(blocking=True)
    lost = [note.text for note in notes if note.kind not in _HARMLESS]
    if lost:
        raise ConfigError(
            f"{url}: expected the embedding config and the optimizer of the job that wrote its "
            f"rows, or another folder; nothing was written: {'; '.join(lost)}"
        )


def _check_rows_only(url: str, files: Mapping[str, object]) -> None:
    dense = [name for name in files if name.endswith(".pt")]
    if dense:
        raise CheckpointError(
            f"{url}: its checkpoint has {', '.join(sorted(dense))}, which one with imported "
            "rows would lack: write to another folder, or load there by ctx.table(...).load"
        )
