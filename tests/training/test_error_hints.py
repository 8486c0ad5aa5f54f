"""Notes on errors of shapes and dtypes that came from a batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from persia.ctx import EmbeddingCtx, TrainCtx, eval_ctx
from persia.data import DataLoader
from persia.embedding.data import (
    IDTypeFeatureWithSingleID,
    Label,
    NonIDTypeFeature,
    PersiaBatch,
)
from persia.embedding.optim import SGD
from persia.errors import DataError

from .conftest import MakeCtx, Net
from .fakes import DIM, u64

SIZE = 4


def batch_of(dense: Any, label: Any) -> PersiaBatch:
    ids = [IDTypeFeatureWithSingleID(name, u64(*range(SIZE))) for name in ("user", "tags")]
    return PersiaBatch(ids, [NonIDTypeFeature(dense)], [Label(label)])


def said(error: BaseException, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what stands below an error; above it before Python 3.11."""
    return list(getattr(error, "__notes__", caplog.messages))


DENSE = np.zeros((SIZE, 2), np.float32)
ZEROS = np.zeros((SIZE, 1), np.float32)


@pytest.mark.parametrize(
    ("dense", "form"),
    [
        (np.zeros((SIZE, 3), np.float32), "float32 [4, 3]"),
        (np.zeros(SIZE, np.float32), "float32 [4]"),
        (np.zeros((SIZE, 2)), "float64 [4, 2]"),
        (np.zeros((SIZE, 2), np.int64), ""),  # torch.cat makes floats of it
    ],
)
def test_a_model_that_fails_says_what_it_was_given(
    make_ctx: MakeCtx, caplog: pytest.LogCaptureFixture, dense: Any, form: str
) -> None:
    with make_ctx() as ctx:
        batch = ctx.get_embedding_from_data(batch_of(dense, ZEROS))
        if not form:
            ctx.forward(batch)
            return
        with pytest.raises((RuntimeError, IndexError)) as raised:
            ctx.forward(batch)
    assert said(raised.value, caplog)[-1:] == [
        f"the model was given a batch of 4 samples: non_id_type_tensors {form}; "
        f"embedding_tensors float32 [4, {DIM}] (user, tags)"
    ]


def test_a_feature_of_the_config_that_the_batch_has_not_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Net(num_features=3)
    ctx = TrainCtx(
        model=model,
        embedding_optimizer=SGD(lr=0.1),
        dense_optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        embedding_config={"slots_config": {k: {"dim": DIM} for k in ("user", "city", "tags")}},
    )
    with ctx:
        batch = ctx.get_embedding_from_data(batch_of(DENSE, ZEROS))
        with pytest.raises(RuntimeError) as raised:
            ctx.forward(batch)
    (note,) = said(raised.value, caplog)
    assert "(user, tags); the batch has no city of the embedding config" in note


class Refusing(Net):
    """Raises an error of its own."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def forward(self, dense: list[torch.Tensor], embeddings: list[Any]) -> torch.Tensor:
        raise self.error


@pytest.mark.parametrize(
    ("error", "num_notes"),
    [
        (ValueError("expected two columns"), 1),
        (DataError("a sample"), 0),
        (KeyError("user"), 0),
        (torch.OutOfMemoryError("CUDA out of memory"), 0),
        (RuntimeError("can't allocate memory"), 0),
    ],
)
def test_shapes_are_added_to_errors_that_can_be_of_shapes(
    make_ctx: MakeCtx, caplog: pytest.LogCaptureFixture, error: Exception, num_notes: int
) -> None:
    with make_ctx(model=Refusing(error)) as ctx:
        batch = ctx.get_embedding_from_data(batch_of(DENSE, ZEROS))
        with pytest.raises(type(error)) as raised:
            ctx.forward(batch)
    assert len(said(raised.value, caplog)) == num_notes


def test_servers_that_fail_do_not_hide_the_models_error(
    make_ctx: MakeCtx, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("transport closed")

    with make_ctx(num_features=3) as ctx:
        batch = ctx.get_embedding_from_data(batch_of(DENSE, ZEROS))
        monkeypatch.setattr(ctx.embedding_worker, "feature_stats", fail, raising=False)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            ctx.forward(batch)


class Classes(Net):
    """Three numbers for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2 + 2 * DIM, 3)


class Halves(Net):
    """Every second sample."""

    def forward(self, dense: list[torch.Tensor], embeddings: list[Any]) -> torch.Tensor:
        return super().forward(dense, embeddings)[::2]


def train(ctx: TrainCtx, label: Any, loss_fn: Any, error: Exception | None = None) -> None:
    for batch in DataLoader([batch_of(DENSE, label)]):
        output, labels = ctx.forward(batch)
        assert labels is not None
        ctx.backward(loss_fn(output, labels[0]))
        if error is not None:
            raise error


def raises(error: Exception) -> Any:
    def loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        raise error

    return loss


def total(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return output.sum()


BCE = functional.binary_cross_entropy_with_logits
CLASSES = functional.cross_entropy


@pytest.mark.parametrize(
    ("model", "loss_fn", "label", "shapes"),
    [
        (Net, BCE, ZEROS[:, 0], "float32 [4, 1] and the labels are float32 [4]"),
        (Net, functional.binary_cross_entropy, ZEROS > 0, "the labels are bool [4, 1]"),
        (Classes, CLASSES, ZEROS[:, 0], "float32 [4, 3] and the labels are float32 [4]"),
        (Classes, CLASSES, ZEROS.astype(int), "float32 [4, 3] and the labels are int64 [4, 1]"),
        (Halves, BCE, ZEROS, "output is float32 [2, 1] and the labels are float32 [4, 1], for"),
    ],
)
def test_a_loss_that_fails_gets_the_shapes_of_output_and_labels(
    make_ctx: MakeCtx,
    caplog: pytest.LogCaptureFixture,
    model: type[Net],
    loss_fn: Any,
    label: Any,
    shapes: str,
) -> None:
    with (
        pytest.raises((RuntimeError, ValueError)) as raised,
        make_ctx(model=model()) as ctx,
    ):
        train(ctx, label, loss_fn)
    (note,) = said(raised.value, caplog)
    assert shapes in note


@pytest.mark.parametrize("inside", [True, False])
def test_nothing_is_said_of_errors_that_are_not_torchs(
    make_ctx: MakeCtx, caplog: pytest.LogCaptureFixture, inside: bool
) -> None:
    def evaluate(ctx: EmbeddingCtx) -> None:
        for batch in DataLoader([batch_of(DENSE, ZEROS[:, 0])]):
            ctx.forward(batch)
            if inside:
                int("many")
        assert ctx._output is None
        int("many")

    with (
        make_ctx() as ctx,
        pytest.raises(ValueError, match="many") as raised,
        eval_ctx(ctx.model) as other,
    ):
        evaluate(other)
    assert said(raised.value, caplog) == []


def test_nothing_is_said_of_memory_that_ran_out(
    make_ctx: MakeCtx, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(RuntimeError, match="memory") as raised, make_ctx() as ctx:
        # Whatever torch says of it, from within its package.
        train(ctx, ZEROS[:, 0], lambda output, label: torch.nn.Linear(1 << 30, 1 << 30))
    assert said(raised.value, caplog) == []


@pytest.mark.parametrize(
    "error", [KeyError("user"), DataError("a sample"), RuntimeError("after the backward")]
)
def test_nothing_is_said_of_errors_that_have_nothing_to_do_with_it(
    make_ctx: MakeCtx, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    loss_fn = total if "backward" in str(error) else raises(error)
    with pytest.raises(type(error)) as raised, make_ctx() as ctx:
        train(ctx, ZEROS[:, 0], loss_fn, error)
    assert said(raised.value, caplog) == []
