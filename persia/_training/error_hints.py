"""Notes with the shapes of a batch, on errors that the model or the loss raise of it.

torch's own errors speak of ``mat1`` and ``target`` and name no tensor of the batch.
"""

from __future__ import annotations

import logging
import os
import re
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from persia.errors import PersiaError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from persia._training.batch import PersiaTrainingBatch

logger = logging.getLogger(__name__)

_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_OF_NONE = (TypeError, AttributeError)  # raised where None is used as what it is not
# What torch says of a dtype, and where it is one of integers that is expected.
_OF_DTYPE = re.compile(
    r"dtype|(scalar|[Rr]esult|Input|data) ?type|bool tensor|not implemented for '"
)
_WANTS_INTEGERS = re.compile(r"(dtype to be|scalar types?:?) Long")
_MAX_NAMES = 4  # of features in one text; more are counted


def explain_model(error: BaseException, batch: PersiaTrainingBatch) -> None:
    """Add the shapes that the model received to an error that it raised."""
    if not _may_be_of_shapes(error):
        return
    pairs = zip(batch.feature_names, batch.embedding_tensors, strict=True)
    embeddings = [
        f"{text} ({_join([name for name, _ in group])})"
        for text, group in groupby(pairs, lambda pair: _describe(pair[1]))
    ]
    _add_note(
        error,
        f"the model was given a batch of {batch.batch_size} samples: non_id_type_tensors "
        f"{', '.join(map(_describe, batch.non_id_type_tensors)) or 'none'}; "
        f"embedding_tensors {', '.join(embeddings) or 'none'}"
        f"{_conversion(error, 'NonIDTypeFeature', batch.non_id_type_tensors)}",
    )


def explain_loss(
    error: BaseException,
    batch: PersiaTrainingBatch,
    labels: Sequence[torch.Tensor] | None,
    dtype: object,
    shape: Any,
) -> None:
    """Add what there is of labels and output to an error that was raised after the model.

    ``labels`` are what the loop received; ``dtype`` and ``shape`` are the output's, None if it
    is no tensor.
    """
    if labels is None and isinstance(error, _OF_NONE) and "NoneType" in str(error):
        why = "an InferCtx gives none, evaluate in eval_ctx(model=...)"
        if batch.labels is None:
            why = "the batch has none, make it with labels=[Label(...)]"
        _add_note(error, f"the labels are None: {why}")
        return
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    # Any error of the loop comes here; one of shapes is raised in torch's Python code.
    is_torchs = trace is not None and trace.tb_frame.f_code.co_filename.startswith(_TORCH)
    if is_torchs and None not in (dtype, shape) and _may_be_of_shapes(error):
        target = ", ".join(map(_describe, labels or ())) or "none"
        _add_note(
            error,
            f"the model's output is {_form(dtype, shape)} and the labels are {target}, for a "
            f"batch of {batch.batch_size} samples{_conversion(error, 'Label', labels or ())}",
        )


def _may_be_of_shapes(error: BaseException) -> bool:
    return (
        isinstance(error, (RuntimeError, ValueError, TypeError, IndexError))
        and not isinstance(error, (PersiaError, torch.OutOfMemoryError))
        and "allocate memory" not in str(error)
    )


def _conversion(error: BaseException, kind: str, tensors: Iterable[torch.Tensor]) -> str:
    """Say how to give data as the dtype that torch expected, if that can be the cause."""
    text = str(error)
    wanted = "int64" if _WANTS_INTEGERS.search(text) else "float32"
    if not _OF_DTYPE.search(text) or all(str(x.dtype).endswith(f".{wanted}") for x in tensors):
        return ""
    return f"; {kind}(data.astype(np.{wanted})) gives {wanted}"


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
