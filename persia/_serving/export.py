"""A model and its rows, of one moment, as a version in a repository.

The caller takes a copy of the model in the same pause in which the servers begin their cut.
Tracing then runs in a process of its own, as torch.export changes settings of its process.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import torch

from persia import env
from persia._serving import program
from persia._serving.bundle import (
    DENSE,
    ROWS,
    SCHEMA,
    Missing,
    OnDelete,
    ServedFeature,
    ServedModel,
    ServedRows,
    ServedTensor,
    check_name,
    keep_versions,
    new_version,
    publish_version,
    schema_document,
    set_current,
)
from persia._serving.program import Format, Layout, Tensors, Traced, served_tensor
from persia._training.batch import Jagged, PersiaTrainingBatch
from persia.config import EmbeddingSchema
from persia.errors import ConfigError, DataError

logger = logging.getLogger("persia.serving")

# Seconds that tracing may take in its process.
TRACE_S = 900.0
_MISSING: tuple[Missing, ...] = ("zeros", "initial", "mean")
_ON_DELETE: tuple[OnDelete, ...] = ("drop", "keep")


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """What a version shall be, beside the model.

    Attributes:
        format: ``export`` for torch.export, ``torchscript``, or ``aot``: compiled for this
            processor by AOTInductor, which needs a C++ compiler here and ``--allow-native``
            where it is served.
        outputs: Names of the outputs, in their order; None keeps the model's own.
        missing: What an id without a row is, for all features or by name: ``zeros``, as in
            evaluation; ``initial``, as training would begin it; or ``mean`` of all rows.
        on_delete: Whether rows that training deletes are dropped or kept.
        keep_last: Versions that stay, at least.
        tolerance: Largest difference of the exported program to the model.
    """

    format: Format = "export"
    outputs: Sequence[str] | None = None
    missing: Missing | Mapping[str, Missing] = "zeros"
    on_delete: OnDelete | Mapping[str, OnDelete] = "drop"
    keep_last: int = 3
    tolerance: float = program.TOLERANCE

    def __post_init__(self) -> None:
        if self.format not in DENSE:
            raise ConfigError(f"format: expected one of {list(DENSE)}, got {self.format!r:.80}")
        if type(self.keep_last) is not int or self.keep_last < 1:
            raise ConfigError(
                f"keep_last: expected a whole number, at least 1, got {self.keep_last!r:.80}"
            )
        for name, given, known in (
            ("missing", self.missing, _MISSING),
            ("on_delete", self.on_delete, _ON_DELETE),
        ):
            values = given.values() if isinstance(given, Mapping) else [given]
            for one in values:
                if one not in known:
                    raise ConfigError(f"{name}: expected one of {list(known)}, got {one!r:.80}")

    def policies_of(self, name: str) -> tuple[Missing, OnDelete]:
        """Return ``missing`` and ``on_delete`` of one feature."""
        missing, on_delete = self.missing, self.on_delete
        return (
            missing.get(name, "zeros") if isinstance(missing, Mapping) else missing,
            on_delete.get(name, "drop") if isinstance(on_delete, Mapping) else on_delete,
        )

    def check_names(self, names: Sequence[str]) -> None:
        """Refuse policies of features that the model has not."""
        for what in ("missing", "on_delete"):
            given = getattr(self, what)
            for name in given if isinstance(given, Mapping) else ():
                if name not in names:
                    raise ConfigError(
                        f"{what}: expected features of the model, which are "
                        f"{', '.join(names)}, got {name!r:.80}"
                    )


@dataclass(frozen=True)
class DenseCut:
    """The dense side of one moment, and what its inputs are."""

    model: torch.nn.Module  # a copy, on the CPU
    samples: Tensors
    features: tuple[ServedFeature, ...]
    dense: tuple[ServedTensor, ...]
    layout: Layout
    tables: tuple[ServedFeature, ...] = ()  # that the model looks up in by itself

    @classmethod
    def of(
        cls,
        model: Any,
        batch: PersiaTrainingBatch,
        optional: frozenset[str],
        options: ExportOptions,
    ) -> DenseCut:
        """Copy a model, and take what it is called with from a batch that was looked up."""
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(
                f"export: expected model= to be a torch.nn.Module, got {type(model).__name__}"
            )
        dense = batch.non_id_type_tensors
        names = tuple(dense.names)
        given = names or ("dense",) * (len(dense) == 1)
        given = given or tuple(f"dense_{number}" for number in range(len(dense)))
        features = tuple(
            _feature(name, one, name in optional, name in batch.single, options)
            for name, one in zip(batch.feature_names, batch.embedding_tensors, strict=True)
        )
        options.check_names([one.name for one in features])
        layout = Layout(
            len(dense),
            names,
            tuple(one.name for one in features),
            tuple(one.kind for one in features),
        )
        tensors = layout.flatten(dense, batch.embedding_tensors)
        return cls(
            program.copy_model(model),
            tuple(one.detach().cpu().clone() for one in tensors),
            features,
            tuple(served_tensor(name, one) for name, one in zip(given, dense, strict=True)),
            layout,
        )


def _feature(
    name: str,
    embedding: torch.Tensor | Jagged,
    optional: bool,
    single: bool,
    options: ExportOptions,
) -> ServedFeature:
    if isinstance(embedding, Jagged):
        kind, dim = "jagged", embedding.values.shape[1]
    elif embedding.ndim == 3:
        kind, dim = "raw", embedding.shape[2] - 1
    else:
        kind, dim = "pooled", embedding.shape[1]
    return ServedFeature(
        name,
        kind,  # type: ignore[arg-type]
        dim,
        *options.policies_of(name),
        optional,
        single and kind == "pooled",
    )


def write_version(
    dst: str | os.PathLike[str],
    cut: DenseCut,
    schema: EmbeddingSchema,
    options: ExportOptions,
    write_rows: Callable[[Path], tuple[ServedRows, int]],
) -> int:
    """Write a version and serve it from now on; return its number.

    ``write_rows`` is given the folder for a checkpoint, and returns where rows are, and the
    step of their cut.

    Raises:
        ConfigError: If the model cannot be exported.
        CheckpointError: If a file cannot be written.
    """
    folder = model_folder(dst)
    with new_version(folder) as aside:
        rows, step = write_rows(aside / ROWS)
        traced = trace_apart(cut, options)
        model = ServedModel(
            name=folder.name,
            version=1,
            torch=torch.__version__,
            format=options.format,
            step=step,
            features=cut.features,
            dense=cut.dense,
            has_dense_names=bool(cut.layout.dense_names),
            tables=cut.tables,
            id_inputs=tuple(
                one.name for place, one in enumerate(cut.dense) if place in traced.id_places
            ),
            outputs=_named(traced.outputs, options.outputs),
            is_batch_independent=traced.is_batch_independent,
            min_samples=traced.min_samples,
            max_difference=traced.max_difference,
            processor=traced.processor,
            rows=rows,
            files={},
        )
        files = {
            DENSE[options.format]: traced.data,
            SCHEMA: schema_document(schema).encode(),
        }
        version = publish_version(folder, aside, files, model).version
    set_current(folder, version)
    keep_versions(folder, options.keep_last)
    logger.info(
        "version %d of %s is of step %d; its program differs from the model by %g at most",
        *(version, folder.name, step, traced.max_difference),
    )
    return version


def model_folder(dst: str | os.PathLike[str]) -> Path:
    """Return the folder of a model, whose name is the model's."""
    text = os.fspath(dst)
    if not isinstance(text, str) or not text or "://" in text:
        raise ConfigError(f"dst: expected the folder of a model, got {dst!r:.120}")
    folder = Path(text).absolute()
    check_name(folder.name)
    return folder


def _named(
    outputs: tuple[ServedTensor, ...], names: Sequence[str] | None
) -> tuple[ServedTensor, ...]:
    if names is None:
        return outputs
    if isinstance(names, str) or len(names) != len(outputs) or len(set(names)) < len(names):
        what = "1 name" if len(outputs) == 1 else f"{len(outputs)} different names"
        raise ConfigError(f"outputs: expected a list of {what}, got {names!r:.200}")
    return tuple(replace(one, name=name) for one, name in zip(outputs, names, strict=True))


def sample_of(batch: PersiaTrainingBatch | None) -> PersiaTrainingBatch:
    """Return the batch that a model is traced with."""
    if batch is None or not len(batch.embedding_tensors):
        raise DataError(
            "export: expected inputs=, a PersiaBatch like those that will be scored: this "
            "context has no batch, before the first is prepared and after its `with` block"
        )
    return batch


# --- tracing, in a process of its own -------------------------------------------------------


def trace_apart(cut: DenseCut, options: ExportOptions) -> Traced:
    """Trace in a child process; in this one if the model cannot be sent."""
    task = cut.model, cut.layout, cut.samples, options.format, options.tolerance
    try:
        data = cloudpickle.dumps(task)
    except Exception as exc:
        logger.warning(
            "%s cannot be pickled (%s): it is traced in this process, whose settings of "
            "torch.export may change",
            *(type(cut.model).__name__, str(exc)[:200]),
        )
        return program.trace(*task)
    with tempfile.TemporaryDirectory(prefix="persia-export-") as name:
        folder = Path(name)
        (folder / "task").write_bytes(data)
        _run_child(folder)
        found = cloudpickle.loads((folder / "traced").read_bytes())
    if isinstance(found, Exception):
        raise found
    traced: Traced = found
    return traced


def _run_child(folder: Path) -> None:
    path = os.pathsep.join(one or str(Path.cwd()) for one in sys.path)
    environment = env.of_child(PYTHONPATH=path, CUDA_VISIBLE_DEVICES="")
    command = [sys.executable, "-m", "persia._serving.export_child", str(folder)]
    try:
        ran = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TRACE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"model: expected to be traced in {TRACE_S:g} s, and its process was still at it"
        ) from None
    if ran.returncode or not (folder / "traced").exists():
        raise ConfigError(
            f"model: the process that traces it ended with status {ran.returncode}: "
            f"{ran.stderr.strip()[-600:]}"
        )
