"""Notes on errors of shapes and dtypes that came from a batch."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from persia.ctx import InferCtx, TrainCtx, eval_ctx
from persia.data import DataLoader
from persia.embedding.data import (
    IDTypeFeatureWithSingleID,
    Label,
    NonIDTypeFeature,
    PersiaBatch,
)
from persia.errors import DataError
from tests.support.fixtures import Log, Monkey

from .conftest import MakeCtx, Net
from .fakes import DIM, u64

SIZE = 4
BCE = functional.binary_cross_entropy_with_logits
DENSE = np.zeros((SIZE, 2), np.float32)
ZEROS = np.zeros((SIZE, 1), np.float32)


def batch_of(dense: Any = DENSE, label: Any = ZEROS) -> PersiaBatch:
    ids = [IDTypeFeatureWithSingleID(name, u64(*range(SIZE))) for name in ("user", "tags")]
    return PersiaBatch(ids, [NonIDTypeFeature(dense)], [Label(label)])


def said(error: BaseException, caplog: Log) -> str:
    """Return what stands below an error; above it before Python 3.11."""
    logged = [one.getMessage() for one in caplog.records if one.levelno == logging.ERROR]
    return "\n".join(getattr(error, "__notes__", logged))


@pytest.mark.parametrize(
    ("dense", "form"),
    [
        (np.zeros((SIZE, 3), np.float32), "float32 [4, 3]"),
        (np.zeros(SIZE, np.float32), "float32 [4]"),
        (np.zeros((SIZE, 2)), "float64 [4, 2]"),
    ],
)
def test_a_model_that_fails(make_ctx: MakeCtx, caplog: Log, dense: Any, form: str) -> None:
    with make_ctx() as ctx:
        batch = ctx.get_embedding_from_data(batch_of(dense))
        with pytest.raises((RuntimeError, IndexError)) as raised:
            ctx.forward(batch)
    note = said(raised.value, caplog)
    assert f"non_id_type_tensors {form}; embedding_tensors float32 [4, {DIM}]" in note


@pytest.mark.parametrize(
    ("text", "dtype", "todo"),
    [
        ("mat1 and mat2 must have the same dtype, but got Double and Float", "f8", "float32"),
        ("Input type (double) and bias type (float) should be the same", "f8", "float32"),
        ("\"batch_norm\" not implemented for 'Long'", "i8", "float32"),
        ("one of the following scalar types: Long, Int; but got DoubleTensor", "f8", "int64"),
        ("mat1 and mat2 must have the same dtype, but got Float and Half", "f4", ""),
        ("mat1 and mat2 shapes cannot be multiplied (4x3 and 2x1)", "f8", ""),
    ],
)
def test_another_dtype_is_said_to_be_given(
    make_ctx: MakeCtx, caplog: Log, text: str, dtype: str, todo: str
) -> None:
    model = Altered()
    model.error = RuntimeError(text)
    with make_ctx(model=model) as ctx:
        batch = ctx.get_embedding_from_data(batch_of(DENSE.astype(dtype)))
        with pytest.raises(RuntimeError) as raised:
            ctx.forward(batch)
    note = said(raised.value, caplog)
    assert f"NonIDTypeFeature(data.astype(np.{todo}))" in note if todo else "astype" not in note


class Altered(Net):
    """Raises an error of its own, or returns every second sample."""

    error: Exception | None = None

    def forward(self, dense: list[torch.Tensor], embeddings: list[Any]) -> torch.Tensor:
        if self.error is not None:
            raise self.error
        return super().forward(dense, embeddings)[::2]


@pytest.mark.parametrize(
    ("error", "is_explained"),
    [
        (ValueError("expected two columns"), True),
        (DataError("a sample"), False),
        (KeyError("user"), False),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (RuntimeError("can't allocate memory"), False),
    ],
)
def test_shapes_are_added_to_errors_that_can_be_of_shapes(
    make_ctx: MakeCtx, caplog: Log, error: Exception, is_explained: bool
) -> None:
    model = Altered()
    model.error = error
    with make_ctx(model=model) as ctx:
        batch = ctx.get_embedding_from_data(batch_of())
        with pytest.raises(type(error)) as raised:
            ctx.forward(batch)
    assert bool(said(raised.value, caplog)) == is_explained


def test_servers_that_fail_hide_no_error(make_ctx: MakeCtx, monkeypatch: Monkey) -> None:
    def fail() -> None:
        raise RuntimeError("transport closed")

    with make_ctx(num_features=3) as ctx:
        batch = ctx.get_embedding_from_data(batch_of())
        monkeypatch.setattr(ctx.embedding_worker, "feature_stats", fail, raising=False)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            ctx.forward(batch)


@pytest.mark.parametrize(
    ("loss_fn", "label", "todo"),
    [
        (BCE, ZEROS.astype(np.int64), "float32"),
        (BCE, ZEROS > 0, "float32"),
        (lambda x, y: functional.binary_cross_entropy(x.sigmoid(), y), ZEROS > 0, "float32"),
        (lambda x, y: functional.cross_entropy(x, y[:, 0]), ZEROS, "int64"),
    ],
)
def test_another_dtype_of_labels_is_said_to_be_given(
    make_ctx: MakeCtx, caplog: Log, loss_fn: Any, label: Any, todo: str
) -> None:
    def train(ctx: TrainCtx) -> None:
        for batch in DataLoader([batch_of(label=label)]):
            output, labels = ctx.forward(batch)
            ctx.backward(loss_fn(output, (labels or [])[0]))

    with pytest.raises(RuntimeError) as raised, make_ctx() as ctx:
        train(ctx)
    assert f"; Label(data.astype(np.{todo})) gives {todo}" in said(raised.value, caplog)


def raises(error: Exception) -> Any:
    def loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        raise error

    return loss


def out_of_memory(output: torch.Tensor, label: torch.Tensor) -> Any:
    """Whatever torch says of it, from within its package."""
    return torch.nn.Linear(1 << 30, 1 << 30)


@pytest.mark.parametrize(
    ("model", "loss_fn", "label", "shapes"),
    [
        (Net, BCE, ZEROS[:, 0], "float32 [4, 1] and the labels are float32 [4]"),
        (Net, functional.binary_cross_entropy, ZEROS > 0, "the labels are bool [4, 1]"),
        (Altered, BCE, ZEROS, "output is float32 [2, 1] and the labels are float32 [4, 1]"),
        # What has nothing to do with shapes is not explained.
        (Net, raises(KeyError("user")), ZEROS[:, 0], ""),
        (Net, raises(DataError("a sample")), ZEROS[:, 0], ""),
        (Net, out_of_memory, ZEROS[:, 0], ""),
    ],
)
def test_a_loss_that_fails_gets_the_shapes_of_output_and_labels(
    make_ctx: MakeCtx, caplog: Log, model: type[Net], loss_fn: Any, label: Any, shapes: str
) -> None:
    def train(ctx: TrainCtx) -> None:
        for batch in DataLoader([batch_of(label=label)]):
            output, labels = ctx.forward(batch)
            ctx.backward(loss_fn(output, (labels or [])[0]))

    errors = (RuntimeError, ValueError, KeyError, DataError)
    with pytest.raises(errors) as raised, make_ctx(model=model()) as ctx:
        train(ctx)
    note = said(raised.value, caplog)
    assert shapes in note
    assert bool(shapes) == bool(note)


def first(labels: Any) -> Any:
    return labels[0]


def unpacked(labels: Any) -> Any:
    (label,) = labels
    return label


@pytest.mark.parametrize("use", [first, unpacked, lambda labels: labels])
@pytest.mark.parametrize(
    ("context", "has_labels", "why"),
    [
        (eval_ctx, False, r"the batch has none, make it with labels=[Label(...)]"),
        (InferCtx, True, r"an InferCtx gives none, evaluate in eval_ctx(model=...)"),
        (eval_ctx, True, None),
    ],
)
def test_labels_that_are_none_are_explained(
    make_ctx: MakeCtx, caplog: Log, context: Any, has_labels: bool, why: str | None, use: Any
) -> None:
    ids: Any = batch_of().id_type_features
    given = PersiaBatch(ids, [NonIDTypeFeature(DENSE)], [Label(ZEROS)] if has_labels else [])
    with make_ctx() as ctx:

        def evaluate() -> None:
            with context(model=ctx.model) as inner:
                output, labels = inner.forward(inner.get_embedding_from_data(given))
                BCE(output, use(labels))
                raise TypeError("something of a NoneType")  # has nothing to do with labels

        with pytest.raises((TypeError, AttributeError)) as raised:
            evaluate()
    assert said(raised.value, caplog) == ("" if why is None else f"the labels are None: {why}")


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("evaluates", [True, False])
def test_nothing_is_said_of_errors_that_are_not_torchs(
    make_ctx: MakeCtx, caplog: Log, inside: bool, evaluates: bool
) -> None:
    def loop(ctx: Any) -> None:
        if evaluates and isinstance(ctx, TrainCtx):
            with eval_ctx(ctx.model) as other:
                loop(other)
        for batch in DataLoader([batch_of(label=ZEROS[:, 0])]):
            output, _ = ctx.forward(batch)
            if not evaluates:
                ctx.backward(output.sum())
            if inside:
                int("many")
        assert ctx._output is None
        int("many")

    with pytest.raises(ValueError, match="many") as raised, make_ctx() as ctx:
        loop(ctx)
    assert said(raised.value, caplog) == ""
