"""``persia-launcher export``: a version to be served, of a checkpoint and a model's code."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from persia.errors import ConfigError


def export_checkpoint(
    checkpoint: str,
    factory: str,
    output: Path,
    sample: Path,
    embedding_config: Path | None,
    dense_filename: str,
    triton: Path | None,
    options: Mapping[str, Any],
) -> int:
    """Load a checkpoint into a new model and export both; return the version.

    Args:
        checkpoint: Folder or URL; its latest checkpoint.
        factory: ``module:function`` that returns the model.
        output: Folder of the model in a repository of models.
        sample: File of ``PersiaBatch.to_bytes``.
        embedding_config: File of the embedding config, or the default one.
        dense_filename: Name of the model's state dict in the checkpoint.
        triton: A model repository of Triton, to which the version is copied.
        options: Of ``ctx.export``.

    Raises:
        ConfigError: If the model or the sample cannot be made.
        CheckpointError: If the checkpoint does not fit, or a file cannot be written.
    """
    from persia.ctx import eval_ctx
    from persia.embedding.data import PersiaBatch

    model = make_model(factory)
    try:
        batch = PersiaBatch.from_bytes(sample.read_bytes())
    except OSError as exc:
        raise ConfigError(f"--sample: cannot read {sample}: {exc.strerror}") from exc
    with eval_ctx(model=model, embedding_config=embedding_config) as ctx:
        ctx.load_checkpoint(checkpoint, "cpu", dense_filename)
        version = ctx.export(output, batch, **options)
    if triton is not None:
        _write_triton(triton, output / str(version))
    return version


def _write_triton(repository: Path, folder: Path) -> None:
    from persia._serving.bundle import Bundle
    from persia._serving.predictor import describe
    from persia._serving.triton import write_triton

    model = Bundle.open(folder).model
    # Triton's Python finds what this one finds, if it is of the same release.
    places = [str(Path(one or ".").resolve()) for one in sys.path]
    write_triton(
        repository, describe(model), version=model.version, python_path=places, bundle=folder
    )


def make_model(factory: str) -> Any:
    """Call ``module:function`` without arguments, and return the model that it makes."""
    module_name, _, name = factory.partition(":")
    if not module_name or not name:
        raise ConfigError(f"--model: expected module:factory, got {factory!r:.200}")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as exc:
        raise ConfigError(f"--model: {factory}: {exc}") from exc
    return found()
