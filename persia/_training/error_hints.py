"""Notes with the shapes of a batch, on errors that the model or the loss raise of it.

torch's own errors speak of ``mat1`` and ``target`` and name no tensor of the batch.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from traceback import walk_tb
from typing import TYPE_CHECKING, Any

import torch

from persia.errors import PersiaError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from persia._training.batch import PersiaTrainingBatch

logger = logging.getLogger(__name__)

_TORCH = f"{Path(torch.__file__).parent}{os.sep}"


def explain_model(error: BaseException, batch: PersiaTrainingBatch) -> None:
    """Add the shapes that the model received to an error that it raised."""
    if _may_be_of_shapes(error):
        pairs = zip(batch.feature_names, batch.embedding_tensors, strict=True)
        embeddings = [f"{name} {_describe(tensor)}" for name, tensor in pairs]
        _add_note(
            error,
            f"the model was given a batch of {batch.batch_size} samples: non_id_type_tensors "
            f"{', '.join(map(_describe, batch.non_id_type_tensors)) or 'none'}; "
            f"embedding_tensors {', '.join(embeddings) or 'none'}",
        )


def explain_loss(
    error: BaseException, batch: PersiaTrainingBatch, dtype: object, shape: Any
) -> None:
    """Add the shapes of output and labels to an error that torch raised after the model.

    ``dtype`` and ``shape`` are the output's, None if it is no tensor.
    """
    files = [frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__)]
    # Any error of the loop comes here; one of shapes is raised in torch's Python code.
    is_torchs = bool(files) and files[-1].startswith(_TORCH)
    if is_torchs and None not in (dtype, shape) and _may_be_of_shapes(error):
        labels = ", ".join(map(_describe, batch.labels or ())) or "none"
        _add_note(
            error,
            f"the model's output is {_form(dtype, shape)} and the labels are {labels}, for a "
            f"batch of {batch.batch_size} samples",
        )


def _may_be_of_shapes(error: BaseException) -> bool:
    return (
        isinstance(error, (RuntimeError, ValueError, TypeError, IndexError))
        and not isinstance(error, (PersiaError, torch.OutOfMemoryError))
        and "allocate memory" not in str(error)
    )


def _form(dtype: object, shape: Iterable[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def _describe(tensor: Any) -> str:
    if isinstance(tensor, tuple):
        return f"Jagged with values {_describe(tensor[0])}"
    return _form(tensor.dtype, tensor.shape)


def _add_note(error: BaseException, text: str) -> None:
    add = getattr(error, "add_note", None)
    if add is None:  # before Python 3.11
        logger.error("%s", text)
    else:
        add(text)
