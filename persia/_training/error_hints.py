"""Notes with the shapes of a batch, on errors that the model or the loss raise of it.

torch's own errors speak of ``mat1`` and ``target`` and name no tensor of the batch.
"""

from __future__ import annotations

import logging
import os
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from persia.errors import PersiaError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from persia._training.batch import Jagged, PersiaTrainingBatch

logger = logging.getLogger(__name__)

_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_MAX_NAMES = 4  # of features in one text; more are counted


class Form(NamedTuple):
    """Dtype and shape of a tensor, without its memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


def form_of(output: object) -> Form | None:
    """Return the form of a model's output; None if it is no tensor."""
    shape, dtype = getattr(output, "shape", None), getattr(output, "dtype", None)
    return None if shape is None or dtype is None else Form(dtype, tuple(shape))


def explain_model(
    error: BaseException, batch: PersiaTrainingBatch, slots: Callable[[], Iterable[str]]
) -> None:
    """Add the shapes that the model received to an error that it raised.

    Args:
        error: The error.
        batch: What the model received.
        slots: Returns the names of the embedding config, for features that the batch lacks.
    """
    if not _may_be_of_shapes(error):
        return
    pairs = zip(batch.feature_names, batch.embedding_tensors, strict=True)
    embeddings = [
        f"{text} ({_join([name for name, _ in group])})"
        for text, group in groupby(pairs, lambda pair: _describe(pair[1]))
    ]
    text = (
        f"the model was given a batch of {batch.batch_size} samples: non_id_type_tensors "
        f"{', '.join(map(_describe, batch.non_id_type_tensors)) or 'none'}; "
        f"embedding_tensors {', '.join(embeddings) or 'none'}"
    )
    missing = [name for name in slots() if name not in batch.feature_names]
    if missing:
        text += f"; the batch has no {_join(missing)} of the embedding config"
    _add_note(error, text)


def explain_loss(error: BaseException, batch: PersiaTrainingBatch, output: Form) -> None:
    """Add the shapes of output and labels to an error that torch raised after the model."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    # Any error of the loop comes here; one of shapes is raised in torch's Python code.
    is_torchs = trace is not None and trace.tb_frame.f_code.co_filename.startswith(_TORCH)
    if is_torchs and _may_be_of_shapes(error):
        labels = ", ".join(map(_describe, batch.labels or ())) or "none"
        _add_note(
            error,
            f"the model's output is {output} and the labels are {labels}, for a batch of "
            f"{batch.batch_size} samples",
        )


def _may_be_of_shapes(error: BaseException) -> bool:
    kinds = RuntimeError, ValueError, TypeError, IndexError
    return (
        isinstance(error, kinds)
        and not isinstance(error, (PersiaError, torch.OutOfMemoryError))
        and "allocate memory" not in str(error)
    )


def _describe(tensor: torch.Tensor | Jagged) -> str:
    if isinstance(tensor, tuple):
        return f"Jagged with values {form_of(tensor.values)}"
    return str(form_of(tensor))


def _join(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= _MAX_NAMES else f"{len(names)} features"


def _add_note(error: BaseException, text: str) -> None:
    add = getattr(error, "add_note", None)
    if add is None:  # before Python 3.11
        logger.error("%s", text)
    else:
        add(text)
