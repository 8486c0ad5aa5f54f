"""What is given where something near to it was meant: the message says what to type."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from persia.data import DataLoader
from persia.embedding.optim import Adam
from persia.errors import ConfigError, DataError, DataTypeError

from .conftest import MakeCtx, Net, loss_of, step
from .fakes import make_batch


@pytest.mark.parametrize(
    ("given", "says"), [(Adam, r"Adam\(lr=0.1\)"), ("adam", r"'adam'; .*Adagrad\(lr=0.1\)")]
)
def test_an_optimizer_is_an_instance(make_ctx: MakeCtx, given: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=f"give an instance: .*{says}|{says}"):
        make_ctx(embedding_optimizer=given)


def test_a_loss_is_a_tensor(make_ctx: MakeCtx) -> None:
    loss: Any = 0.5
    with make_ctx() as ctx, pytest.raises(DataTypeError, match=r"got float; give the loss ten"):
        ctx.backward(loss)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda loss: loss.detach(), "that requires grad, got one without a graph: it was det"),
        (lambda loss: torch.tensor(loss.item()), "made anew from a number"),
        (lambda loss: loss.expand(4), r"got one of shape \[4\]; give its .mean\(\), or take"),
        (lambda loss: loss.expand(0), r"got one of shape \[0\]"),
    ],
)
def test_a_loss_is_one_number_with_a_graph(make_ctx: MakeCtx, wrong: Any, says: str) -> None:
    with make_ctx() as ctx:
        batch = ctx.get_embedding_from_data(make_batch(0))
        loss = loss_of(*ctx.forward(batch))
        with pytest.raises(DataError, match=says):
            ctx.backward(wrong(loss))
        ctx.backward(loss)  # nothing had changed
        assert ctx.update_times == 1


def test_an_optimizer_of_another_model_is_told(
    make_ctx: MakeCtx, caplog: pytest.LogCaptureFixture
) -> None:
    model = Net()
    part, whole = [model.layer.bias], model.parameters()
    make_ctx(model=model, dense_optimizer=torch.optim.SGD(part, lr=0.1))
    make_ctx(model=torch.nn.Sequential(model), dense_optimizer=torch.optim.SGD(whole, lr=0.1))
    assert not caplog.messages
    make_ctx(model=model, dense_optimizer=torch.optim.SGD(Net().parameters(), lr=0.1))
    assert "dense_optimizer has none of the model's 2 parameters" in caplog.text


def test_a_backward_without_gradients_of_embeddings_is_told_once(
    make_ctx: MakeCtx, caplog: pytest.LogCaptureFixture
) -> None:
    with make_ctx() as ctx:
        for number in range(2):
            step(ctx, ctx.get_embedding_from_data(make_batch(number, requires_grad=False)))
            assert caplog.text.count("made with requires_grad=False") == 1


def test_a_dataset_can_be_iterated() -> None:
    cases: list[tuple[Any, str]]
    cases = [(len, "got len; call it"), (list, "got list; call it"), (3, "give a dataset")]
    for given, says in cases:
        with pytest.raises(DataTypeError, match=says):
            DataLoader(given)
