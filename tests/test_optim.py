"""``persia.optim``: steps, rates, clipping and scaling as torch's optimizers do them."""

from __future__ import annotations

import logging
from functools import partial

import pytest
import torch

import persia.nn
import persia.optim
from persia import env
from persia.errors import ConfigError
from tests.support.twins import ROWS, WAYS, Twins, batches, train_alike, twins


def _run(
    both: Twins,
    place: int,
    batch: tuple[torch.Tensor, ...],
    to_clear: torch.optim.Optimizer | None,
) -> float:
    if to_clear is not None:
        to_clear.zero_grad()
    loss = both.losses(batch)[place]
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item()


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_200_steps_equal_torchs(optimizer: str, mode: str) -> None:
    both = twins(optimizer, mode=mode)
    for batch in batches(200):
        ours, theirs = both.losses(batch)
        assert abs(ours.item() - theirs.item()) < 1e-5
        both.our_optimizer.zero_grad()
        both.torch_optimizer.zero_grad()
        ours.backward()  # type: ignore[no-untyped-call]
        theirs.backward()  # type: ignore[no-untyped-call]
        both.our_optimizer.step()
        both.torch_optimizer.step()
    both.assert_equal()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own, in inductor
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "sparse_adam"])
@pytest.mark.parametrize("backend", ["", "aot_eager", "inductor"])
def test_200_steps_of_every_way_equal_torchs(backend: str, optimizer: str, way: str) -> None:
    """Of a bag whose ids have weights, eager and compiled."""
    both = twins(optimizer, weighted=True)
    compiled = torch.compile(both.ours, backend=backend, fullgraph=True) if backend else None
    train_alike(both, way, compiled=compiled)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "sparse_adam"])
def test_200_steps_of_every_pooling_equal_torchs(optimizer: str, mode: str) -> None:
    train_alike(twins(optimizer, mode=mode, padding_idx=3), "plain")


@pytest.mark.parametrize("optimizer", ["momentum", "adam", "rmsprop"])
def test_where_every_row_is_met_moments_equal_torchs(optimizer: str) -> None:
    both = twins(optimizer)
    for users, _, labels in batches(50):
        # All rows of both tables, or torch's would step rows without a gradient.
        batch = torch.arange(ROWS).view(-1, 1), torch.arange(ROWS), labels.repeat(2)[:ROWS]
        ours, theirs = both.losses(batch)
        assert abs(ours.item() - theirs.item()) < 1e-5
        both.our_optimizer.zero_grad()
        both.torch_optimizer.zero_grad()
        ours.backward()  # type: ignore[no-untyped-call]
        theirs.backward()  # type: ignore[no-untyped-call]
        both.our_optimizer.step()
        both.torch_optimizer.step()
        assert users.shape[1] == 3
    both.assert_equal()


def test_gradients_of_four_backwards_are_one_step() -> None:
    both = twins("adagrad")
    for number, batch in enumerate(batches(40), start=1):
        ours, theirs = both.losses(batch)
        (ours / 4).backward()  # type: ignore[no-untyped-call]
        (theirs / 4).backward()  # type: ignore[no-untyped-call]
        if number % 4 == 0:
            both.our_optimizer.step()
            both.torch_optimizer.step()
            both.our_optimizer.zero_grad()
            both.torch_optimizer.zero_grad()
    both.assert_equal()


def test_closures_schedulers_and_forgotten_zero_grad_act_as_torchs() -> None:
    both = twins("sgd")
    schedules = [
        torch.optim.lr_scheduler.ExponentialLR(one, 0.8)
        for one in (both.our_optimizer, both.torch_optimizer)
    ]
    for number, batch in enumerate(batches(12)):
        values = []
        for place, optimizer in enumerate((both.our_optimizer, both.torch_optimizer)):
            # Every third time gradients of the last step stay.
            closure = partial(_run, both, place, batch, optimizer if number % 3 else None)
            values.append(optimizer.step(closure))
        assert values[0] == pytest.approx(values[1], abs=1e-5)
        for schedule in schedules:
            schedule.step()
    assert both.our_optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.8**12)
    both.assert_equal()


def test_global_norm_clipping_counts_rows_exactly() -> None:
    both = twins("sgd")
    for batch in batches(20):
        ours, theirs = both.losses(batch)
        both.our_optimizer.zero_grad()
        both.torch_optimizer.zero_grad()
        (ours * 50).backward()  # type: ignore[no-untyped-call]
        (theirs * 50).backward()  # type: ignore[no-untyped-call]
        norms = [
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            for net in (both.ours, both.torchs)
        ]
        assert norms[0] == pytest.approx(norms[1].item(), rel=1e-4)
        both.our_optimizer.step()
        both.torch_optimizer.step()
    both.assert_equal()


@pytest.mark.parametrize("per_step", [1, 3])
@pytest.mark.parametrize("clip", [0.0005, 1e9])
def test_clipping_by_value_is_torchs(clip: float, per_step: int) -> None:
    """Behind each backward, of gradients that were scaled before and are scaled after."""
    both = twins("sgd")
    before = both.ours.item.weight.detach() + 0
    for number, batch in enumerate(batches(12)):
        losses = both.losses(batch)
        for loss, net in zip(losses, (both.ours, both.torchs), strict=True):
            loss.backward()  # type: ignore[no-untyped-call]
            for factor in (0.5, 2.0):
                for one in net.parameters():
                    one.grad *= factor
                torch.nn.utils.clip_grad_value_(net.parameters(), clip)
        if number % per_step == per_step - 1:
            for optimizer in (both.our_optimizer, both.torch_optimizer):
                optimizer.step()
                optimizer.zero_grad()
    both.assert_equal()
    most = (both.ours.item.weight.detach() - before).abs().max()
    assert 0.0 < most < 0.1 * 12 * 2 * clip  # a step is of the rate times the clip


def test_what_clips_no_rows_is_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env, "get_world_size", lambda: 2)
    module = persia.nn.Embedding("clipped by value", 2)
    optimizer = persia.optim.SGD(module.parameters(), lr=1.0)
    with caplog.at_level(logging.WARNING):
        for clip in (1e9, 1e-3, 1e-3):
            optimizer.zero_grad()
            module(torch.arange(4)).sum().backward()
            torch.nn.utils.clip_grad_value_(module.parameters(), clip)
            optimizer.step()
    (text,) = caplog.messages
    assert "'clipped by value': torch.nn.utils.clip_grad_value_ clips no rows" in text
    assert "max_row_norm=" in text


@pytest.mark.parametrize("power", [1, 2])
def test_a_penalty_over_parameters_is_said_once(
    power: int, caplog: pytest.LogCaptureFixture
) -> None:
    """It counts no rows, and changes no step of theirs."""
    name = f"penalty {power}"
    module, ids = persia.nn.Embedding(name, 2), torch.arange(4)
    optimizer = persia.optim.SGD(module.parameters(), lr=1.0)
    before = module(ids).detach().clone()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            optimizer.zero_grad()
            penalty = sum(one.abs().pow(power).sum() for one in module.parameters())
            (module(ids).sum() + 0.1 * penalty).backward()
            optimizer.step()
    assert torch.allclose(module(ids), before - 3.0)
    (text,) = caplog.messages
    assert f"'{name}': the loss uses its parameter" in text
    assert "weight_decay=" in text


def test_a_grad_scaler_unscales_and_skips() -> None:
    both = twins("adagrad")
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**12) for _ in range(2)]
    for number, batch in enumerate(batches(12)):
        losses = both.losses(batch)
        before = both.ours.item.weight.detach() + 0
        for scaler, loss, optimizer in zip(
            scalers, losses, (both.our_optimizer, both.torch_optimizer), strict=True
        ):
            optimizer.zero_grad()
            # A loss that is inf makes every gradient inf or NaN.
            scaler.scale(loss * (float("inf") if number == 5 else 1.0)).backward()  # type: ignore[no-untyped-call]
            if number % 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        if number == 5:
            assert torch.equal(both.ours.item.weight.detach() + 0, before)
        assert scalers[0].get_scale() == scalers[1].get_scale()
    both.assert_equal()


def test_fused_steps_in_backward() -> None:
    both = twins("sgd")
    fused = persia.optim.SGD(persia.nn.sparse_parameters(both.ours), lr=0.1, fused=True)
    dense = torch.optim.SGD(persia.nn.dense_parameters(both.ours), lr=0.1)
    for batch in batches(10):
        ours, theirs = both.losses(batch)
        both.torch_optimizer.zero_grad()
        dense.zero_grad()
        ours.backward()  # type: ignore[no-untyped-call]
        theirs.backward()  # type: ignore[no-untyped-call]
        dense.step()
        fused.step()
        both.torch_optimizer.step()
    both.assert_equal()


def test_an_optimizer_of_torch_that_is_none_of_rows_is_an_error_that_names_those() -> None:
    with pytest.raises(AttributeError, match=r"NAdam: there is none .* there are FTRL, "):
        getattr(persia.optim, "NAdam")  # noqa: B009
    with pytest.raises(AttributeError, match="has no attribute 'Adan'"):
        getattr(persia.optim, "Adan")  # noqa: B009
    assert not hasattr(persia.optim, "NAdam")


def test_a_fused_optimizer_says_once_that_it_adds_nothing_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    module = persia.nn.Embedding("fused twice", 2)
    optimizer = persia.optim.SGD(module.parameters(), lr=1.0, fused=True)
    with caplog.at_level(logging.WARNING):
        for count in (1, 1, 2, 2):
            for _ in range(count):
                module(torch.arange(4)).sum().backward()
            optimizer.step()
    (text,) = caplog.messages
    assert "'fused twice': fused=True has stepped its rows 2 times" in text


def test_clipping_by_row_and_table() -> None:
    module = persia.nn.Embedding("clipped", 4, num_embeddings=2)
    module.weight.data.zero_()
    optimizer = persia.optim.SGD(
        persia.nn.sparse_parameters(module), lr=1.0, max_row_norm=1.0, max_norm=1.0
    )
    out = module(torch.tensor([0, 1]))
    (out * torch.tensor([[30.0], [0.1]])).sum().backward()
    optimizer.step()
    rows = module.weight.detach() + 0
    # Row 0 is cut from 60 to 1, row 1 stays at 0.2; then both by the norm of the two.
    whole = (1.0 + 0.2**2) ** 0.5
    assert rows[0].norm() == pytest.approx(1.0 / whole, rel=1e-4)
    assert rows[1].norm() == pytest.approx(0.2 / whole, rel=1e-4)


def test_weight_bound_and_freeze() -> None:
    module = persia.nn.Embedding("bounded", 4, num_embeddings=1)
    module.weight.data.zero_()
    optimizer = persia.optim.SGD(persia.nn.sparse_parameters(module), lr=1.0, weight_bound=0.5)
    module(torch.tensor([0])).sum().backward()
    optimizer.step()
    assert (module.weight.detach() + 0).tolist() == [[-0.5] * 4]
    module.requires_grad_(False)
    out = module(torch.tensor([0, 7]))
    assert not out.requires_grad
    assert out[1].tolist() == [0.0] * 4  # no row, and none is made


def test_zero_grad_of_the_model_clears_rows_too() -> None:
    module = persia.nn.Embedding("cleared", 2, num_embeddings=1)
    module.weight.data.zero_()
    optimizer = persia.optim.SGD(persia.nn.sparse_parameters(module), lr=1.0)
    module(torch.tensor([0])).sum().backward()
    module.zero_grad()
    optimizer.step()
    assert (module.weight.detach() + 0).tolist() == [[0.0, 0.0]]
    module(torch.tensor([0])).sum().backward()
    optimizer.step()
    assert (module.weight.detach() + 0).tolist() == [[-1.0, -1.0]]


def test_another_optimizer_takes_the_rows_over() -> None:
    module = persia.nn.Embedding("moved", 2, num_embeddings=3)
    persia.optim.SGD(persia.nn.sparse_parameters(module), lr=1.0)
    before = module(torch.arange(3)).detach()
    optimizer = persia.optim.Adam(persia.nn.sparse_parameters(module), lr=0.5)
    assert torch.equal(module(torch.arange(3)).detach(), before)
    module(torch.tensor([1])).sum().backward()
    optimizer.step()
    after = module(torch.arange(3)).detach()
    assert torch.equal(after[0], before[0])
    assert torch.allclose(after[1], before[1] - 0.5, atol=1e-4)


def test_forgetting_the_optimizer_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    module = persia.nn.Embedding("forgotten", 2)
    with caplog.at_level(logging.WARNING):
        for _ in range(8):
            module(torch.tensor([0])).sum().backward()
    (record,) = caplog.records
    assert "'forgotten'" in record.message
    assert "persia.optim.Adagrad(persia.nn.sparse_parameters(model)" in record.message


def test_detached_outputs_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    module = persia.nn.Embedding("detached", 2)
    persia.optim.SGD(persia.nn.sparse_parameters(module), lr=1.0)
    with caplog.at_level(logging.WARNING):
        for _ in range(120):
            module(torch.tensor([0])).detach()
    (record,) = caplog.records
    assert "detached" in record.message
    assert "torch.no_grad()" in record.message


def test_a_step_of_torchs_optimizer_alone_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    module = persia.nn.Embedding("stepped by torch", 2)
    optimizer = torch.optim.Adam(module.parameters())
    with caplog.at_level(logging.WARNING):
        for _ in range(8):
            optimizer.zero_grad()
            module(torch.tensor([0])).sum().backward()
            optimizer.step()
    (record,) = caplog.records
    assert "persia.optim.Adagrad(persia.nn.sparse_parameters(model)" in record.message


def test_a_forgotten_step_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    module = persia.nn.Embedding("never stepped", 2)
    optimizer = persia.optim.SGD(persia.nn.sparse_parameters(module), lr=1.0)
    with caplog.at_level(logging.WARNING):
        for _ in range(120):
            optimizer.zero_grad()
            module(torch.tensor([0])).sum().backward()
    (record,) = caplog.records
    assert "call step() of its optimizer of persia.optim" in record.message
    # What is forgotten next is said as well.
    with caplog.at_level(logging.WARNING):
        for _ in range(60):
            module(torch.tensor([0])).detach()
    assert ["never stepped" in each.message for each in caplog.records] == [True, True]
    assert "detached" in caplog.records[1].message


def test_a_second_backward_without_retain_graph_is_torchs_error() -> None:
    module = persia.nn.Embedding("backward twice", 2, num_embeddings=1)
    module.weight.data.zero_()
    optimizer = persia.optim.SGD(persia.nn.sparse_parameters(module), lr=1.0)
    loss = module(torch.tensor([0])).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        loss.backward()
    optimizer.step()
    assert (module.weight.detach() + 0).tolist() == [[-1.0, -1.0]]


def test_parameters_without_a_table_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"persia\.nn\.sparse_parameters\(model\)"):
        persia.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    module = persia.nn.Embedding("mixed", 2)
    model = torch.nn.Sequential(module, torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=r"persia\.nn\.dense_parameters\(model\)"):
        persia.optim.Lion(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="max_norm must be above 0"):
        persia.optim.SGD(persia.nn.sparse_parameters(model), lr=0.1, max_norm=0)


@pytest.mark.parametrize("name", [each for each in persia.optim.__all__ if "Table" not in each])
def test_each_optimizer_is_made_and_steps(name: str) -> None:
    module = persia.nn.EmbeddingBag(f"stepped by {name}", 4, mode="sum")
    ids = torch.tensor([[1, 1 << 40]])
    optimizer = getattr(persia.optim, name)(persia.nn.sparse_parameters(module), lr=0.1)
    before = module(ids).detach()
    module(ids).square().sum().backward()
    optimizer.step()
    assert not torch.equal(module(ids), before)


def test_rowwise_adagrad_is_adagrad_with_one_sum_per_row() -> None:
    modules = [persia.nn.Embedding(f"rowwise {place}", 4) for place in range(2)]
    optimizers = [
        persia.optim.RowwiseAdagrad(modules[0].parameters(), lr=0.1),
        persia.optim.Adagrad(modules[1].parameters(), lr=0.1, vectorwise_shared=True),
    ]
    ids = torch.arange(5)
    for module, optimizer in zip(modules, optimizers, strict=True):
        module.table.write(ids, torch.arange(20.0).view(5, 4))
        for _ in range(3):
            optimizer.zero_grad()
            module(ids).square().sum().backward()
            optimizer.step()
    assert torch.equal(*(module(ids) for module in modules))


def test_what_scales_gradients_between_backwards_scales_those_so_far() -> None:
    """Clipping behind each of several backwards, and gradients set to zero in place."""
    both = twins("sgd")
    for number, batch in enumerate(batches(12)):
        losses = both.losses(batch)
        for loss, net in zip(losses, (both.ours, both.torchs), strict=True):
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        if number % 4 == 3:
            both.our_optimizer.step()
            both.torch_optimizer.step()
            both.ours.zero_grad(set_to_none=False)
            both.torchs.zero_grad(set_to_none=False)
    both.assert_equal()


def test_a_fused_optimizer_steps_at_the_rate_of_a_state_that_was_loaded() -> None:
    module = persia.nn.Embedding(4, 2)
    module.weight.data.zero_()
    optimizer = persia.optim.SGD(module.parameters(), lr=1.0, fused=True)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[0]["lr"] = 0.25
    module(torch.tensor([1])).sum().backward()
    assert module(torch.tensor([1])).tolist() == [[-0.25, -0.25]]


def test_torchs_words_for_how_it_computes_are_taken() -> None:
    module = persia.nn.Embedding("each word", 2)
    optimizer = persia.optim.Adam(module.parameters(), lr=1.0, foreach=True)
    assert "foreach" not in optimizer.defaults
