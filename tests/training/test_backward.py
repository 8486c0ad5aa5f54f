"""The backward pipeline, over the fake embedding-worker."""

from __future__ import annotations

import gc
import math
import threading
import traceback
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from persia._rpc.messages import BatchGradients, LearningRate, UpdateReport
from persia.ctx import EmbeddingCtx, PreprocessMode, TrainCtx, eval_ctx
from persia.data import DataLoader
from persia.distributed import BaguaDistributedOption
from persia.embedding import EmbeddingConfig
from persia.embedding.optim import SGD
from persia.errors import ConfigError, DataError, DataTypeError, ServiceTimeout, StoreError
from tests.support.fixtures import Log, Monkey
from tests.support.streams import Background
from tests.support.waiting import PATIENCE_S

from .conftest import LOCKSTEP, MakeCtx, Net, batches, fail_at, loss_of, step, train, wait
from .fakes import SpyRanks, SpyWorker, make_batch


def total(embeddings: list[Any]) -> torch.Tensor:
    return torch.stack([embedding.sum() for embedding in embeddings]).sum()


class SpoiltNet(Net):
    """Spoils the gradient of the first embedding at the given steps, not the dense one."""

    def __init__(self, at: set[int], value: float) -> None:
        super().__init__()
        self.at, self.value, self.calls = at, value, 0

    def forward(self, dense: list[torch.Tensor], embeddings: list[Any]) -> torch.Tensor:
        first, *rest = embeddings
        if self.calls in self.at:
            first = first.clone()
            first.register_hook(self.spoil)
        self.calls += 1
        return super().forward(dense, [first, *rest])

    def spoil(self, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient[0, 0] = self.value
        return gradient


def test_backward_returns_the_loss_and_counts(ctx: TrainCtx) -> None:
    for number, batch in enumerate(DataLoader(batches(3)), start=1):
        output, labels = ctx.forward(batch)
        loss = loss_of(output, labels)
        assert ctx.backward(loss) is loss
        assert ctx.update_times == number
        for parameter in ctx.model.parameters():
            assert parameter.grad is None
        # Or the next backward would add to what is being sent.
        assert all(leaf.tensor.grad is None for leaf in batch.leaves)


def test_w02_non_finite_rows_are_warned_of_again(make_ctx: MakeCtx, caplog: Log) -> None:
    model = SpoiltNet({0, 5, 7, 12}, float("nan"))
    with make_ctx(model=model) as ctx:
        warned = []
        for batch in DataLoader(batches(20), **LOCKSTEP):
            output, labels = ctx.forward(batch)
            caplog.clear()
            ctx.get_embedding_size()  # the last update is acknowledged
            ctx.backward(loss_of(output, labels), embedding_gradient_check_frequency=5)
            if "were not finite" in caplog.text:
                warned.append(ctx.update_times)
        assert warned == [5, 10, 15]
        ctx.get_embedding_size()
        assert ctx.stats()["nan_samples"] == {"user": 4}
        assert ctx.stats()["batches"] == 20


def test_a_loss_that_is_nan_is_told_at_1_10_100(make_ctx: MakeCtx, caplog: Log) -> None:
    model = Net()
    torch.nn.init.constant_(model.layer.bias, float("nan"))
    with make_ctx(model=model) as ctx:
        for batch in DataLoader(batches(14), **LOCKSTEP):
            output, labels = ctx.forward(batch)
            ctx.get_embedding_size()  # the last update is acknowledged
            ctx.backward(loss_of(output, labels), embedding_gradient_check_frequency=1)
    said = [text for text in caplog.messages if "finite" in text or "loss is" in text]
    first, tenth, last = said
    # The first step's rows are counted by another thread: by its end, or by that of the second.
    begun = 1 if "step 1:" in first else 2
    text = "the loss is nan at step %d: lower the learning rate, or look at the data"
    assert (first, tenth) == (text % begun, text % (begun + 9))
    assert "embedding gradients were not finite so far" in last


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_w04_one_non_finite_row(worker: SpyWorker, make_ctx: MakeCtx, value: float) -> None:
    with make_ctx(model=SpoiltNet({0}, value)) as ctx:
        batch = ctx.get_embedding_from_data(make_batch(0))
        before = worker.rows
        step(ctx, batch)
        ctx.get_embedding_size()
        assert ctx.stats()["nan_samples"] == {"user": 1}
    changed = [key for key, row in worker.rows.items() if not np.array_equal(row, before[key])]
    assert any(name == "user" for name, _ in changed)
    assert any(name == "tags" for name, _ in changed)
    assert all(np.isfinite(row).all() for row in worker.rows.values())


# --- mixed precision ----------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_w03_with_a_grad_scaler_a_non_finite_gradient_skips_dense_and_sparse(
    worker: SpyWorker, make_ctx: MakeCtx, value: float
) -> None:
    model = SpoiltNet({2, 3}, value)
    with make_ctx(model=model, mixed_precision=True, grad_scalar_update_factor=4) as ctx:
        assert ctx.grad_scaler is not None
        for number, batch in enumerate(DataLoader(batches(6), **LOCKSTEP)):
            scale = ctx.grad_scaler.get_scale()
            weights = [parameter.detach().clone() for parameter in model.parameters()]
            before = worker.rows
            step(ctx, batch)
            ctx.get_embedding_size()
            after = worker.rows
            is_same = all(map(torch.equal, weights, model.parameters()))
            rows_same = all(np.array_equal(after[key], row) for key, row in before.items())
            assert is_same == rows_same == (number in (2, 3))
            assert ctx.grad_scaler.get_scale() == (scale / 4 if number in (2, 3) else scale)
        assert ctx.stats()["skipped"] == 2
        assert ctx.stats()["batches"] == 4
    assert worker.of("release") == [2, 3]
    assert worker.refs == {}
    assert all(np.isfinite(row).all() for row in worker.rows.values())


@pytest.mark.parametrize(("is_mine", "num_ranks"), [(True, 1), (True, 2), (False, 2)])
def test_w03_a_non_finite_dense_gradient_of_any_rank_skips_both_steps(
    worker: SpyWorker, make_ctx: MakeCtx, is_mine: bool, num_ranks: int
) -> None:
    # Under the averaging algorithms one rank alone would skip its step, and with it an
    # average, or a turn to update, that the others wait for.
    model, ranks = Net(), SpyRanks(others_failed=True)
    if is_mine:
        bias: Any = model.layer.bias
        bias.register_hook(lambda gradient: gradient * float("inf"))
    with make_ctx(model=model, mixed_precision=True) as ctx:
        if num_ranks > 1:
            ctx._ranks = ranks
            ctx.distributed_option = BaguaDistributedOption("decentralized")
        assert ctx.grad_scaler is not None
        scale = ctx.grad_scaler.get_scale()
        weights = [parameter.detach().clone() for parameter in model.parameters()]
        step(ctx, ctx.get_embedding_from_data(make_batch(0)))
        assert ranks.flags == [is_mine] * (num_ranks - 1)
        assert all(map(torch.equal, weights, model.parameters()))
        assert ctx.grad_scaler.get_scale() < scale
        assert ctx.stats()["skipped"] == 1
    assert worker.of("update") == []


def test_mixed_precision_scales_and_casts(worker: SpyWorker, make_ctx: MakeCtx) -> None:
    seen = []

    class Looks(Net):
        def forward(self, dense: list[torch.Tensor], embeddings: list[Any]) -> torch.Tensor:
            seen.append(torch.is_autocast_enabled("cpu"))
            return super().forward(dense, embeddings).float()

    for mixed in (False, True):
        with make_ctx(model=Looks(), mixed_precision=mixed) as ctx:
            train(ctx, batches(1))
    assert seen == [False, True]
    assert [update.scale for update in worker.gradients] == [1.0, 65536.0]


# --- what has no gradient -----------------------------------------------------------------


def test_feature_without_a_gradient(worker: SpyWorker, ctx: TrainCtx, caplog: Log) -> None:
    for batch in DataLoader(batches(5)):
        _, embeddings, _ = ctx.prepare_features(batch)
        ctx.backward(total(embeddings[:1]))
    ctx.get_embedding_size()
    assert ctx.stats()["skipped_slots"] == {"tags": 5}
    assert caplog.text.count("did not reach these id features") == 1
    assert "tags" in caplog.text
    assert [slot.gradient is None for slot in worker.gradients[0].gradients] == [False, True]


def test_backward_needs_a_batch(make_ctx: MakeCtx) -> None:
    loss = torch.zeros((), requires_grad=True)
    ctx = make_ctx()
    with pytest.raises(ConfigError, match="inside"):
        ctx.backward(loss)
    with ctx, pytest.raises(DataError, match="no batch to take gradients of"):
        ctx.backward(loss)


@pytest.mark.parametrize("is_kept", [True, False])
def test_direct_batches_of_a_loss(worker: SpyWorker, make_ctx: MakeCtx, is_kept: bool) -> None:
    with make_ctx() as ctx:
        made = []
        for batch in batches(3):
            made.append(ctx.get_embedding_from_data(batch))
            if is_kept:
                ctx.keep(made[-1])
        ctx.backward(torch.stack([loss_of(*ctx.forward(batch)) for batch in made]).sum())
    assert sorted(worker.of("update")) == [0, 1, 2]


def test_w46_batches_without_a_step_are_freed(worker: SpyWorker, make_ctx: MakeCtx) -> None:
    with make_ctx() as ctx:
        seen = []
        for batch in DataLoader(batches(8), allow_untrained=True):
            ctx.forward(batch)
            seen.append(weakref.ref(batch))
        del batch
        assert sum(known() is not None for known in seen) <= 1  # ctx.current_batch
        for number in range(8):
            batch = ctx.get_embedding_from_data(make_batch(number))
            if number >= 4:
                ctx.forward(batch)
            seen.append(weakref.ref(batch))
        del batch
        gc.collect()
        assert sum(known() is not None for known in seen) <= 1
        assert len(worker.refs) <= 2
    assert worker.refs == {}
    assert ctx.stats()["abandoned"] == 16


def test_w46_a_context_without_backward_releases_all(worker: SpyWorker) -> None:
    worker.configure(EmbeddingConfig().settings())
    worker.register_optimizer(SGD(lr=1).settings())
    with EmbeddingCtx(PreprocessMode.TRAIN, Net(), embedding_worker=worker) as ctx:
        for number in range(3):
            ctx.forward(ctx.get_embedding_from_data(make_batch(number)))
    assert worker.refs == {}


def test_w25_failed_lookups_are_released(
    worker: SpyWorker, ctx: TrainCtx, monkeypatch: Monkey
) -> None:
    def refuse(*arguments: object) -> None:
        raise MemoryError("no room for the tensors")

    monkeypatch.setattr("persia._training.batch.DeviceTransfer.stage", refuse)
    with pytest.raises(MemoryError, match="no room"):
        ctx.get_embedding_from_data(make_batch(0))
    assert worker.refs == {}
    assert ctx.stats()["staleness"] == 0


# --- threads, waiting and errors ----------------------------------------------------------


@pytest.mark.parametrize("staleness", [None, 1])
def test_w48_exception_in_an_update_is_raised_at_the_next_backward(
    worker: SpyWorker, make_ctx: MakeCtx, staleness: int | None
) -> None:
    worker.before_update = fail_at(0, StoreError("disk on fire"))
    with make_ctx() as ctx:
        iterator = iter(
            DataLoader(batches(3), reproducible=True, embedding_staleness=staleness)
        )
        step(ctx, next(iterator))
        batch = next(iterator)
        output, labels = ctx.forward(batch)
        engine = ctx.backward_engine
        assert engine is not None
        with engine._changed:
            engine._changed.wait_for(lambda: not engine._pending, PATIENCE_S)
        with pytest.raises(StoreError, match="disk on fire") as caught:
            ctx.backward(loss_of(output, labels))
        frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
        assert "_send" in frames
        # It is raised once; the batch can still be trained.
        ctx.backward(loss_of(*ctx.forward(batch)))
        assert [batch.batch_id for batch in iterator] == [2]
        ctx.get_embedding_size()
        assert ctx.stats()["failed"] == 1
        # A user may hold a batch for long; its gradients do not stay with it.
        assert batch.ticket is not None
        assert batch.ticket.gradients == ()
    assert worker.of("update") == [1]
    assert worker.refs == {}


def test_w48_failed_last_update_is_raised(worker: SpyWorker, make_ctx: MakeCtx) -> None:
    worker.before_update = fail_at(2, StoreError("disk on fire"))
    with pytest.raises(StoreError, match="disk on fire"), make_ctx() as ctx:
        train(ctx, batches(3), **LOCKSTEP)
    assert ctx.stats()["batches"] == 2


def test_exception_of_the_body_wins(worker: SpyWorker, make_ctx: MakeCtx, caplog: Log) -> None:
    worker.before_update = fail_at(0, StoreError("disk on fire"))

    def body(ctx: TrainCtx) -> None:
        train(ctx, batches(1))
        raise KeyError("the body's")

    with pytest.raises(KeyError, match="the body's"), make_ctx() as ctx:
        body(ctx)
    assert "disk on fire" in caplog.text


def test_a_read_swallows_no_failed_update(worker: SpyWorker, ctx: TrainCtx) -> None:
    worker.before_update = fail_at(0, StoreError("disk on fire"))
    batch = ctx.get_embedding_from_data(make_batch(0))
    with eval_ctx(model=ctx.model):
        reading = iter(DataLoader([make_batch(1)]))
        step(ctx, batch)
        # Its thread waits for the update; had it raised, a loop left early would
        # have taken the exception with it.
        next(reading)
    with pytest.raises(StoreError, match="disk on fire"):
        ctx.get_embedding_size()


def test_w40_failed_update_ends_no_worker(worker: SpyWorker, make_ctx: MakeCtx) -> None:
    worker.before_update = fail_at(0, StoreError("disk on fire"))
    with make_ctx(backward_workers_size=1) as ctx:
        step(ctx, ctx.get_embedding_from_data(make_batch(0)))
        with pytest.raises(StoreError, match="disk on fire"):
            ctx.get_embedding_size()
        for number in range(1, 4):
            step(ctx, ctx.get_embedding_from_data(make_batch(number)))
    assert worker.of("update") == [1, 2, 3]


def test_w48_leaving_waits_for_every_update(worker: SpyWorker, make_ctx: MakeCtx) -> None:
    go = threading.Event()
    worker.before_update = lambda batch_id: wait(go)
    with make_ctx() as ctx:
        train(ctx, batches(6), embedding_staleness=10)
        assert worker.of("update") == []
        go.set()
    assert sorted(worker.of("update")) == list(range(6))
    assert ctx.backward_engine is None


@pytest.mark.parametrize("is_given_the_worker", [False, True])
def test_reads_see_own_writes(
    worker: SpyWorker, ctx: TrainCtx, is_given_the_worker: bool
) -> None:
    release = threading.Event()
    order: list[str] = []

    def hold(batch_id: int) -> None:
        release.wait(PATIENCE_S)
        order.append("update")

    train(ctx, batches(1))
    ctx.get_embedding_size()
    worker.before_update = hold
    worker.before_lookup = lambda batch_id: order.append("read")
    batch = ctx.get_embedding_from_data(make_batch(0))
    order.clear()
    step(ctx, batch)
    given = worker if is_given_the_worker else None
    with eval_ctx(model=ctx.model, embedding_worker=given) as inner:
        reader = Background(lambda: inner.get_embedding_from_data(make_batch(0)))
        release.set()
        reader.result()
    assert order == ["update", "read"]


def test_full_queue_waits(worker: SpyWorker, make_ctx: MakeCtx, monkeypatch: Monkey) -> None:
    monkeypatch.setattr("persia._training.backward.WAIT_S", 0.05)
    go = threading.Event()
    worker.before_update = lambda batch_id: wait(go)
    with make_ctx(backward_buffer_size=1, backward_workers_size=1) as ctx:
        with pytest.raises(ServiceTimeout, match="embedding-worker to take one of 1 queued"):
            train(ctx, batches(4), embedding_staleness=10)
        assert len(worker.refs) == ctx.stats()["staleness"]  # that of the refused is back
        with pytest.raises(ServiceTimeout, match="acknowledge"):
            ctx.get_embedding_size()
        go.set()
        monkeypatch.setattr("persia._training.backward.WAIT_S", PATIENCE_S)
    assert ctx.stats()["staleness"] == 0
    assert worker.refs == {}


def test_worker_that_outlives_the_deadline_is_named(
    worker: SpyWorker, make_ctx: MakeCtx, monkeypatch: Monkey, caplog: Log
) -> None:
    monkeypatch.setattr("persia._training.backward.WAIT_S", 0.05)
    monkeypatch.setattr("persia._training.backward.JOIN_S", 0.05)
    go = threading.Event()
    worker.before_update = lambda batch_id: wait(go)
    with (
        pytest.raises(ServiceTimeout, match="1 updates"),
        make_ctx(backward_workers_size=1) as ctx,
    ):
        train(ctx, batches(1))
    assert "persia-backward-0" in caplog.text
    go.set()
    for thread in threading.enumerate():
        if thread.name == "persia-backward-0":
            thread.join(PATIENCE_S)


def test_a_second_loss_of_a_batch_is_refused(worker: SpyWorker, make_ctx: MakeCtx) -> None:
    with make_ctx() as ctx:
        for batch in DataLoader(batches(1)):
            _, embeddings, _ = ctx.prepare_features(batch)
            ctx.backward(total(embeddings))
            weights = [parameter.detach().clone() for parameter in ctx.model.parameters()]
            # Another graph over the same embeddings, so that torch has nothing against it.
            second = ctx.model(batch.non_id_type_tensors, embeddings).sum()
            with pytest.raises(DataError, match=r"sent already|trained already"):
                ctx.backward(second)
            assert all(parameter.grad is None for parameter in ctx.model.parameters())
            assert all(map(torch.equal, weights, ctx.model.parameters()))
    assert worker.of("update") == [0]


def test_a_failed_dense_step_frees_the_batch(
    worker: SpyWorker, make_ctx: MakeCtx, monkeypatch: Monkey
) -> None:
    with make_ctx(mixed_precision=True) as ctx:
        iterator = iter(DataLoader(batches(3), reproducible=True, embedding_staleness=1))
        batch = next(iterator)

        def refuse(optimizer: object) -> None:
            raise MemoryError("no room for the moments")

        with monkeypatch.context() as patch:
            patch.setattr(ctx.grad_scaler, "step", refuse)
            with pytest.raises(MemoryError, match="no room"):
                ctx.backward(loss_of(*ctx.forward(batch)))
        assert (ctx.stats()["failed"], ctx.stats()["staleness"]) == (1, 0)
        ctx.dense_optimizer.zero_grad()
        # The only permit is back, and the scaler goes on.
        assert [step(ctx, batch).isfinite().item() for batch in iterator] == [True, True]
    assert worker.refs == {}
    assert worker.of("update") == [1, 2]


def test_backward_that_is_interrupted_while_it_waits_leaves_nothing_behind(
    worker: SpyWorker, ctx: TrainCtx, monkeypatch: Monkey
) -> None:
    monkeypatch.setattr("persia._training.backward.WAIT_S", 1.0)
    batch = ctx.get_embedding_from_data(make_batch(0))
    output, labels = ctx.forward(batch)
    engine = ctx.backward_engine
    assert engine is not None

    def interrupt(item: object, timeout_s: float) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.queue, "put", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ctx.backward(loss_of(output, labels))
    assert ctx.stats()["failed"] == 1
    assert worker.refs == {}
    # leaving waited for no update that was never sent, or it would be a ServiceTimeout


def test_many_workers_update_at_the_same_time(worker: SpyWorker, make_ctx: MakeCtx) -> None:
    meet = threading.Barrier(3)

    worker.before_update = lambda batch_id: wait(meet)
    with make_ctx(backward_workers_size=3) as ctx:
        train(ctx, batches(6), embedding_staleness=10)
    assert len(worker.of("update")) == 6


def test_report_is_added_up(make_ctx: MakeCtx) -> None:
    class Reports(SpyWorker):
        def update(self, gradients: BatchGradients) -> UpdateReport:
            super().update(gradients)
            return UpdateReport(2, {"user": 1}, {"user": 3, "tags": 1}, ("seq",))

    with make_ctx(embedding_worker=Reports()) as ctx:
        train(ctx, batches(3))
    assert ctx.stats() == {
        "batches": 3,
        "abandoned": 0,
        "unused": 0,
        "incomplete": 0,
        "skipped": 0,
        "failed": 0,
        "missing": 6,
        "skipped_slots": {"seq": 3},
        "nan_samples": {"user": 3},
        "nan_rows": {"user": 9, "tags": 3},
        "staleness": 0,
    }


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda loss: 0.5, "float"),
        (lambda loss: loss.detach(), r"without a graph: .*, or under torch\.no_grad\(\)"),
        (lambda loss: torch.tensor(loss.item()), "made from a number"),
        (lambda loss: loss.expand(4), r"\[4\]; give its .mean\(\), or take reduction="),
        (lambda loss: loss.expand(0), r"\[0\]"),
    ],
)
def test_a_loss_is_one_number_with_a_graph(ctx: TrainCtx, wrong: Any, says: str) -> None:
    batch = ctx.get_embedding_from_data(make_batch(0))
    loss = loss_of(*ctx.forward(batch))
    with pytest.raises((DataError, DataTypeError), match=says):
        ctx.backward(wrong(loss))
    ctx.backward(loss)  # nothing had changed
    assert ctx.update_times == 1


def test_an_optimizer_of_another_model_is_told(make_ctx: MakeCtx, caplog: Log) -> None:
    model = Net()
    part, whole = [model.layer.bias], model.parameters()
    make_ctx(model=torch.nn.Sequential(model), dense_optimizer=torch.optim.SGD(whole, lr=0.1))
    assert not caplog.messages
    make_ctx(model=model, dense_optimizer=torch.optim.SGD(part, lr=0.1))
    assert "dense_optimizer has 1 of the model's 2 parameters" in caplog.text
    caplog.clear()
    model.layer.weight.requires_grad_(False)
    make_ctx(model=model, dense_optimizer=torch.optim.SGD(part, lr=0.1))
    assert not caplog.messages
    make_ctx(model=model, dense_optimizer=torch.optim.SGD(Net().parameters(), lr=0.1))
    assert "dense_optimizer has none of the model's 1 parameters" in caplog.text


def test_a_backward_without_embeddings_is_told_once(ctx: TrainCtx, caplog: Log) -> None:
    for number in range(2):
        step(ctx, ctx.get_embedding_from_data(make_batch(number, requires_grad=False)))
        assert caplog.text.count("made with requires_grad=False") == 1


# --- learning rates -------------------------------------------------------------------------


def test_a_rate_goes_with_its_gradients(worker: SpyWorker, make_ctx: MakeCtx) -> None:
    is_set = threading.Event()  # the first update is held until the last rate is, too
    worker.before_update = lambda batch_id: wait(is_set)
    with make_ctx() as ctx:
        loader = DataLoader(batches(5), embedding_staleness=5)
        want = {}
        for batch, lr in zip(loader, [None, 0.5, 0.25, 0.25, 0.125], strict=True):
            if lr is not None:
                ctx.set_lr(lr)
            step(ctx, batch)
            assert batch.ticket is not None
            want[batch.ticket.number] = () if lr is None else (LearningRate(0, lr),)
        ctx.set_lr(0.0)
        is_set.set()
    assert {given.update_id[1]: given.learning_rates for given in worker.gradients} == want


class Counting(SpyWorker):
    """Has a table for each group, and one for all others; notes who asks."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str | None] = []

    def tables_at_rate(self, group: str | None) -> tuple[int, ...]:
        self.asked.append(group)
        if group == "unknown":
            raise ConfigError("unknown group 'unknown'")
        return {None: (0, 2), "g": (1,), "h": (2,)}[group]


def test_groups_keep_the_rate_that_was_set_for_them(make_ctx: MakeCtx) -> None:
    worker = Counting()
    with make_ctx(embedding_worker=worker) as ctx:
        rates: Any = ctx.backward_engine.learning_rates  # type: ignore[union-attr]

        def current() -> dict[int, float]:
            return {rate.table: rate.lr for rate in rates.current}

        ctx.set_lr(0.5, "g")
        assert current() == {1: 0.5}
        ctx.set_lr(0.25)
        assert current() == {0: 0.25, 1: 0.5, 2: 0.25}
        ctx.set_lr(1, group="h")
        kept = rates.current
        assert kept == (LearningRate(0, 0.25), LearningRate(1, 0.5), LearningRate(2, 1.0))
        for _ in range(3):
            ctx.set_lr(0.25)
            ctx.set_lr(0.5, "g")
        assert rates.current is kept
        ctx.set_lr(0.125)
        assert current() == {0: 0.125, 1: 0.5, 2: 1.0}
        for lr, group, message in (
            *((lr, "g", "set_lr: lr must be") for lr in (None, -1.0, math.nan, "fast", True)),
            (0.5, "unknown", "unknown group"),
        ):
            with pytest.raises(ConfigError, match=message):
                ctx.set_lr(lr, group)  # type: ignore[arg-type]
        assert current() == {0: 0.125, 1: 0.5, 2: 1.0}
        assert worker.asked == ["g", None, "h", "unknown"]
        SGD(lr=0.5).apply()
        assert current() == {}
        ctx.set_lr(0.5)
    with pytest.raises(ConfigError):
        ctx.set_lr(0.5)
    with ctx:
        assert ctx.backward_engine.learning_rates.current == ()  # type: ignore[union-attr]
