"""Exports of a context: its model and its embeddings as a version that can be served."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from persia import env
from persia._serving.bundle import ROWS, ServedRows
from persia._serving.export import (
    DenseCut,
    ExportOptions,
    model_folder,
    sample_of,
    write_version,
)
from persia._training.checkpoint import Checkpoint, CheckpointWriter, unwrap
from persia.config import EmbeddingSchema, load_configs
from persia.embedding.data import PersiaBatch
from persia.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

    from persia._training.batch import PersiaTrainingBatch


def export(
    ctx: Any,
    dst: str | os.PathLike[str],
    inputs: PersiaBatch | None,
    given: Mapping[str, Any],
) -> int:
    """Write a version; see ``EmbeddingCtx.export``."""
    options = options_of(given)
    folder = model_folder(dst)
    if env.get_rank():
        return 0
    if ctx._publisher is not None:
        ctx._publisher.wait()  # servers write one cut at a time
    return begin_export(ctx, folder, inputs, options, follows_log=False)()


def begin_export(
    ctx: Any,
    folder: Path,
    inputs: PersiaBatch | None,
    options: ExportOptions,
    *,
    follows_log: bool,
) -> Callable[[], int]:
    """Take rows and model of one moment; return what writes the version."""
    model, schema = unwrap(ctx._own_model()), schema_of(ctx)
    session = ctx._connected()
    batch = _sample(ctx, inputs)
    optional = frozenset(ctx._allow_missing)
    frozen, cut = session.checkpoints.begin_cut(
        lambda: DenseCut.of(model, batch, optional, options)
    )
    writer = CheckpointWriter(session.connection.worker)

    def write_rows(target: Path) -> tuple[ServedRows, int]:
        writer.finish(frozen, str(target), 1, blocking=True)
        opened = Checkpoint(str(target))
        if not follows_log:
            return ServedRows(ROWS, opened.id), frozen.step
        log = opened.manifest.extras.get("change_log")
        if not log:
            raise ConfigError(
                "publish: rows='log' needs servers that write a change log: set "
                "enable_incremental_update and incremental_dir in the global config"
            )
        # What has happened since is in the log; a version is served at once from its own rows.
        return ServedRows(ROWS, opened.id, str(log["url"]), dict(log["packets"])), frozen.step

    return lambda: write_version(folder, cut, schema, options, write_rows)


def options_of(given: Mapping[str, Any]) -> ExportOptions:
    """Return options by their names."""
    known = [field.name for field in dataclasses.fields(ExportOptions)]
    for name in given:
        if name not in known:
            raise ConfigError(
                f"export: unknown option {name!r}{did_you_mean(name, known)}; expected one of "
                f"{', '.join(known)}"
            )
    return ExportOptions(**given)


def schema_of(ctx: Any) -> EmbeddingSchema:
    """Return the embedding config of a context's servers, as this process knows it."""
    own = getattr(ctx.embedding_worker, "schema", None)
    if isinstance(own, EmbeddingSchema):
        return own
    return load_configs(ctx._schema, None)[0]


def _sample(ctx: Any, inputs: PersiaBatch | None) -> PersiaTrainingBatch:
    if inputs is None:
        return sample_of(ctx.current_batch)
    batch = PersiaBatch(
        inputs.id_type_features,  # type: ignore[arg-type]
        inputs.non_id_type_features,  # type: ignore[arg-type]
        batch_size=inputs.batch_size,
        requires_grad=False,
    )
    batch.single = inputs.single  # which its features do not say
    found: PersiaTrainingBatch = ctx.get_embedding_from_data(batch)
    return found
