"""Notes with the shapes of a batch, on errors that the model or the loss raise of it.

torch's own errors speak of ``mat1`` and ``target`` and name no tensor of the batch.
"""

from __future__ import annotations

import logging
import os
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from persia.errors import PersiaError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from persia._training.batch import PersiaTrainingBatch

logger = logging.getLogger(__name__)

_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_MAX_NAMES = 4  # of features in one text; more are counted


def explain_model(
    error: BaseException, batch: PersiaTrainingBatch, slots: Callable[[], Iterable[str]]
) -> None:
    """Add the shapes that the model received to an error that it raised.

    ``slots`` returns the names of the embedding config, of which the batch may lack some.
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


def explain_loss(
    error: BaseException, batch: PersiaTrainingBatch, dtype: object, shape: Any
) -> None:
    """Add the shapes of output and labels to an error that torch raised after the model.

    ``dtype`` and ``shape`` are the output's, None if it is no tensor.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    # Any error of the loop comes here; one of shapes is raised in torch's Python code.
    is_torchs = trace is not None and trace.tb_frame.f_code.co_filename.startswith(_TORCH)
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


def _join(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= _MAX_NAMES else f"{len(names)} features"


def _add_note(error: BaseException, text: str) -> None:
    add = getattr(error, "add_note", None)
    if add is None:  # before Python 3.11
        logger.error("%s", text)
    else:
        add(text)
