"""What a model and a loss were given, said with the error that they raise of it.

torch's own errors speak of ``mat1`` and ``target``. One line below such an error says which
shapes came from the batch, and what to type where they cannot have been meant. Nothing is said
of shapes that do no harm: a loss may do with them what it likes.
"""

from __future__ import annotations

import dis
import logging
import os
import re
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from persia.errors import PersiaError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import TracebackType

    import torch

    from persia._training.transfer import Jagged, PersiaTrainingBatch

logger = logging.getLogger(__name__)

# Names of features that are spelled out; more are counted.
_MOST_NAMES = 4
_SAYS_DTYPE = re.compile("dtype|scalar type|Double|float64")


class Form(NamedTuple):
    """Of a tensor, without its memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"

    @property
    def size(self) -> int:
        """Number of values."""
        size = 1
        for extent in self.shape:
            size *= extent
        return size


def form_of(output: object) -> Form | None:
    """Return the form of a model's output; None if it is no tensor."""
    shape, dtype = getattr(output, "shape", None), getattr(output, "dtype", None)
    return None if shape is None or dtype is None else Form(dtype, tuple(shape))


def explain_model(
    error: BaseException, batch: PersiaTrainingBatch, slots: Callable[[], Iterable[str]]
) -> None:
    """Add to an error of the model what it was given.

    Args:
        error: What it raised.
        batch: What it was given.
        slots: Asks for the names of the embedding config.
    """
    if not _is_of_shapes(error) or not _may_be_torchs(error):
        return
    dense = ", ".join(str(form_of(each)) for each in batch.non_id_type_tensors) or "none"
    embeddings = ", ".join(_embeddings(batch)) or "none"
    text = (
        f"the model was given a batch of {batch.batch_size} samples: non_id_type_tensors "
        f"{dense}; embedding_tensors {embeddings}"
    )
    if any(each.dim() == 1 for each in batch.non_id_type_tensors):
        text += "; give one number a sample as NonIDTypeFeature(x.reshape(-1, 1))"
    is_double = any(str(each.dtype) == "torch.float64" for each in batch.non_id_type_tensors)
    if is_double and _SAYS_DTYPE.search(str(error)):
        text += "; give float64 as NonIDTypeFeature(x.astype(np.float32))"
    lacking = [name for name in slots() if name not in batch.feature_names]
    if lacking:
        text += (
            f"; the batch has no {_listed(lacking)} of the embedding config: send it in every "
            "batch, with an empty array for a sample that has none, or take it out there"
        )
    _add(error, text)


def explain_loss(error: BaseException, batch: PersiaTrainingBatch, output: Form) -> None:
    """Add to an error after the model's output, and before its backward, what does not fit."""
    if _is_of_shapes(error) and _is_raised_by_torch(error):
        size = batch.batch_size
        if output.shape and output.shape[0] != size:
            _add(
                error,
                f"the model's output is {output}: expected {size} samples as in the batch; "
                "does the model drop or repeat some?",
            )
            return
        for number, label in enumerate(batch.labels or []):
            form = Form(label.dtype, tuple(label.shape))
            what = _for_label(form, output, size)
            if what:
                _add(
                    error,
                    f"labels[{number}] is {form}, and the model's output {output}: give the "
                    f"label as {what}",
                )


def _is_of_shapes(error: BaseException) -> bool:
    """Whether it can be one of shapes and dtypes: no error of ours, nor of memory."""
    kinds = RuntimeError, ValueError, TypeError, IndexError
    if not isinstance(error, kinds) or isinstance(error, PersiaError):
        return False
    text = str(error)
    return "out of memory" not in text and "allocate memory" not in text


def _is_raised_by_torch(error: BaseException) -> bool:
    """Whether it comes from within the torch package: a metric or ``int("x")`` raises alike."""
    import torch

    trace = _innermost(error)
    filename = "" if trace is None else trace.tb_frame.f_code.co_filename
    return filename.startswith(f"{Path(torch.__file__).parent}{os.sep}")


def _may_be_torchs(error: BaseException) -> bool:
    """Whether torch has raised it, or C that the model called: torch's C has no frame.

    Not what a ``raise`` says that is none of torch's, as it knows its matter better, nor what
    Python has for values and types, such as of ``int("x")``.
    """
    if _is_raised_by_torch(error):
        return True
    trace = _innermost(error)
    if trace is None or type(error) not in (RuntimeError, IndexError):
        return False
    raised = dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]]
    return raised != "RAISE_VARARGS"


def _innermost(error: BaseException) -> TracebackType | None:
    """Return where it was raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace


def _embeddings(batch: PersiaTrainingBatch) -> Iterator[str]:
    """Say names and forms of embeddings, of each run of the same form once."""

    def form(pair: tuple[str, torch.Tensor | Jagged]) -> str:
        tensor = pair[1]
        if isinstance(tensor, tuple):
            return f"Jagged with values {form_of(tensor.values)}"
        return str(form_of(tensor))

    pairs = zip(batch.feature_names, batch.embedding_tensors, strict=True)
    for text, group in groupby(pairs, form):
        yield f"{text} ({_listed([name for name, _ in group])})"


def _listed(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= _MOST_NAMES else f"{len(names)} features"


def _for_label(label: Form, output: Form, batch_size: int) -> str:
    """Say how to type a label that this output can be compared with; "" if it can be."""
    if label.size == output.size and output.dtype.is_floating_point:
        shape = "" if label.shape == output.shape else f".reshape{tuple(output.shape)}"
        shape = shape.replace(f"({batch_size}", "(-1", 1)
        dtype = "" if label.dtype.is_floating_point else ".astype(np.float32)"
        return f"Label(x{shape}{dtype})" if shape or dtype else ""
    is_class = len(output.shape) == 2 and label.size == batch_size
    if is_class and (len(label.shape) != 1 or str(label.dtype) != "torch.int64"):
        shape = "" if len(label.shape) == 1 else ".reshape(-1)"
        dtype = "" if str(label.dtype) == "torch.int64" else ".astype(np.int64)"
        return f"Label(x{shape}{dtype}), if its values are the numbers of classes"
    return ""


def _add(error: BaseException, text: str) -> None:
    add = getattr(error, "add_note", None)
    if add is None:  # before Python 3.11
        logger.error("%s", text)
    else:
        add(text)
