"""The forward pipeline, over the fake embedding-worker."""

from __future__ import annotations

import gc
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from persia._training import forward
from persia._training.batch import PersiaTrainingBatch
from persia._training.forward import ForwardPipeline
from persia._training.staleness import WINDOW
from persia.ctx import TrainCtx, eval_ctx
from persia.data import DataLoader, IterableDataset, StreamingDataset
from persia.embedding import EmbeddingConfig, Zeros
from persia.embedding.data import (
    IDTypeFeatureWithSingleID,
    Label,
    NonIDTypeFeature,
    PersiaBatch,
)
from persia.embedding.optim import SGD
from persia.errors import (
    ConfigError,
    DataError,
    DataTypeError,
    ServiceTimeout,
    ServiceUnavailable,
)
from tests.support.fixtures import Log, Monkey
from tests.support.waiting import PATIENCE_S, until

from .conftest import LOCKSTEP, MakeCtx, embeddings_of, fail_at, loss_of, step, wait
from .fakes import SpyRanks, SpyWorker, make_batch, u64


class Batches(IterableDataset):
    def __init__(self, count: int, buffer_size: int = 10, **options: Any) -> None:
        super().__init__(buffer_size)
        self.count = count
        self.options = options
        self.closed = threading.Event()
        self.read = 0

    def __iter__(self) -> Iterator[PersiaBatch]:
        try:
            for number in range(self.count):
                self.read += 1
                yield make_batch(number, meta=b"%d" % number, **self.options)
        finally:
            self.closed.set()


def train_all(ctx: TrainCtx, loader: DataLoader) -> list[int]:
    seen = []
    for batch in loader:
        step(ctx, batch)
        seen.append(int(batch.meta or b""))
    return seen


def set_when_closing(ctx: TrainCtx, event: threading.Event) -> None:
    """Set the event as soon as the open epoch is being closed."""
    epoch = ctx._connected()._passes[0]()
    assert epoch is not None
    close = epoch._source.close

    def close_and_set() -> list[threading.Thread]:
        event.set()
        return close()

    epoch._source.close = close_and_set  # type: ignore[method-assign]


@pytest.mark.parametrize("num_workers", [1, 4])
@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("staleness", [None, 1, 3])
def test_every_batch_comes_exactly_once(
    worker: SpyWorker,
    make_ctx: MakeCtx,
    num_workers: int,
    reproducible: bool,
    staleness: int | None,
) -> None:
    loader = DataLoader(
        Batches(30),
        num_workers=num_workers,
        reproducible=reproducible,
        embedding_staleness=staleness,
    )
    with make_ctx() as ctx:
        first = train_all(ctx, loader)
        second = train_all(ctx, loader)
        stats = ctx.stats()
    for seen in (first, second):
        assert seen == list(range(30))
    for kind in ("lookup", "update"):
        numbers = worker.of(kind)
        assert (numbers if reproducible else sorted(numbers)) == list(range(60))
    in_flight = 0
    for kind, _ in worker.events:
        in_flight += {"lookup": 1, "update": -1}[kind]
        assert in_flight <= (staleness or 60)
    assert in_flight == 0
    assert worker.refs == {}
    assert stats["abandoned"] == stats["unused"] == 0
    assert ctx.stats()["batches"] == 60
    assert ctx.stats()["staleness"] == 0


def wait_when(monkeypatch: Monkey, is_time: Callable[[Any], Any]) -> None:
    """The time for a batch begins when that is so of a pass."""
    wait_for_batch = ForwardPipeline._wait_for_batch

    def wait_then(epoch: ForwardPipeline) -> PersiaTrainingBatch:
        until(lambda: is_time(epoch))
        return wait_for_batch(epoch)

    monkeypatch.setattr(ForwardPipeline, "_wait_for_batch", wait_then)


def has_first_batch(epoch: Any) -> bool:
    return epoch._has_begun or len(epoch._looked_up) > 0


def test_w23_stall_of_the_dataset_is_a_timeout_that_names_it(
    ctx: TrainCtx, monkeypatch: Monkey
) -> None:
    release = threading.Event()

    class Stalls(IterableDataset):
        def __iter__(self) -> Iterator[PersiaBatch]:
            yield make_batch()
            release.wait(PATIENCE_S)

    # The end of the data is none: this would wait for days.
    assert train_all(ctx, DataLoader(Batches(0), timeout_ms=10**9, allow_untrained=True)) == []
    wait_when(monkeypatch, has_first_batch)
    iterator = iter(DataLoader(Stalls(), timeout_ms=50))
    next(iterator)
    set_when_closing(ctx, release)
    with pytest.raises(TimeoutError, match=r"0\.05 s.*dataset \(Stalls\)") as caught:
        next(iterator)
    assert isinstance(caught.value, ServiceTimeout)


def test_stall_of_a_lookup_names_the_worker(
    worker: SpyWorker, ctx: TrainCtx, monkeypatch: Monkey
) -> None:
    wait_when(monkeypatch, lambda epoch: epoch._looking_up)
    hold = threading.Event()
    worker.before_lookup = lambda batch_id: wait(hold)
    iterator = iter(DataLoader(Batches(5), timeout_ms=50, num_workers=2))
    set_when_closing(ctx, hold)
    with pytest.raises(ServiceTimeout, match="lookups at the embedding-worker"):
        next(iterator)


def test_the_timeout_of_a_lookup_is_raised(worker: SpyWorker, ctx: TrainCtx) -> None:
    worker.before_lookup = fail_at(0, ServiceTimeout("batch 3 is lost"))
    with pytest.raises(ServiceTimeout, match=r"^batch 3 is lost$"):
        train_all(ctx, DataLoader(Batches(1)))


def test_a_log_line_while_it_waits(ctx: TrainCtx, monkeypatch: Monkey, caplog: Log) -> None:
    monkeypatch.setattr(forward, "LINE_S", 0.01)

    def generate() -> Iterator[PersiaBatch]:
        until(lambda: "no batch yet: waiting for the dataset (generator)" in caplog.text)
        yield make_batch(meta=b"0")

    assert train_all(ctx, DataLoader(generate(), timeout_ms=20_000)) == [0]


def test_a_stalled_update_is_a_timeout(
    worker: SpyWorker, ctx: TrainCtx, monkeypatch: Monkey
) -> None:
    wait_when(monkeypatch, has_first_batch)
    hold = threading.Event()
    worker.before_update = lambda batch_id: wait(hold)
    loader = DataLoader(Batches(5), timeout_ms=50, embedding_staleness=1)
    iterator = iter(loader)
    batch = next(iterator)
    step(ctx, batch)
    with pytest.raises(ServiceTimeout, match="embedding_staleness=1"):
        next(iterator)
    hold.set()


# --- staleness --------------------------------------------------------------------------------


def missed_updates(
    worker: SpyWorker, ctx: TrainCtx, loader: DataLoader, num_kept: int = 0
) -> list[int]:
    """Train one pass; returns how many updates of earlier batches each lookup missed.

    Earlier ones are those that the loop was given before.
    """
    seen: dict[int, set[int]] = {}  # by batch: whose updates are applied when its lookup begins
    given: list[int] = []
    worker.before_lookup = lambda number: seen.update({number: set(worker.of("update"))})
    losses: list[torch.Tensor] = []
    for batch in loader:
        given.append(batch.batch_id)
        losses.append(loss_of(*ctx.forward(batch)))
        if len(losses) <= num_kept:
            ctx.keep(batch)
        else:
            ctx.backward(torch.stack(losses).sum())
            losses.clear()
    return [len(set(given[:place]) - seen[number]) for place, number in enumerate(given)]


@pytest.mark.parametrize("num_workers", [1, 4, 10])
@pytest.mark.parametrize("forward_buffer_size", [1, 2, 10])
@pytest.mark.parametrize("staleness", [2, 10])
def test_no_lookup_misses_as_many_updates_as_the_bound(
    worker: SpyWorker, ctx: TrainCtx, staleness: int, forward_buffer_size: int, num_workers: int
) -> None:
    loader = DataLoader(
        Batches(400),
        forward_buffer_size,
        num_workers=num_workers,
        embedding_staleness=staleness,
    )
    missed = missed_updates(worker, ctx, loader)
    assert len(missed) == 400
    assert 1 <= max(missed) <= staleness - 1


@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("num_kept", [0, 9])
@pytest.mark.parametrize("has_ranks", [False, True])
def test_the_default_is_a_bound(
    worker: SpyWorker, ctx: TrainCtx, reproducible: bool, num_kept: int, has_ranks: bool
) -> None:
    if has_ranks:
        ctx._ranks = SpyRanks()
    loader = DataLoader(Batches(200), 1, reproducible=reproducible)
    assert loader.embedding_staleness == "auto"
    missed = missed_updates(worker, ctx, loader, num_kept)
    assert len(missed) == 200
    assert max(missed) <= (num_kept if reproducible else 9)


class Constant(torch.nn.Module):
    """Its gradient of each embedding is 1, so that a row of SGD counts its updates."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(1))

    def forward(self, dense: Any, embeddings: Any) -> torch.Tensor:
        output: torch.Tensor = embeddings[0].sum() + self.bias.sum()
        return output


def seen_updates(loader: DataLoader, **options: Any) -> list[int]:
    """Train one row; return how many updates of it each lookup has seen."""
    model = Constant()
    seen = []
    with TrainCtx(
        model=model,
        embedding_optimizer=SGD(lr=1.0),
        dense_optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        embedding_config=EmbeddingConfig(
            Zeros(), weight_bound=0, schema={"slots_config": {"user": {"dim": 1}}}
        ),
        mixed_precision=False,
        **options,
    ) as ctx:
        for batch in loader:
            seen.append(round(-embeddings_of(batch)[0].item()))
            ctx.backward(ctx.forward(batch)[0])
    return seen


class OneRow(IterableDataset):
    def __init__(self, count: int, buffer_size: int = 10) -> None:
        super().__init__(buffer_size)
        self.count = count

    def __iter__(self) -> Iterator[PersiaBatch]:
        for _ in range(self.count):
            yield PersiaBatch([IDTypeFeatureWithSingleID("user", u64(7))], labels=[])


@pytest.mark.parametrize("staleness", [1, 2, 3, 10, "auto"])
@pytest.mark.parametrize("buffers", [1, 2, 10])
@pytest.mark.parametrize("workers", [1, 2, 10])
def test_a_row_that_counts_its_updates_misses_fewer_than_the_bound(
    staleness: Any, buffers: int, workers: int
) -> None:
    seen = seen_updates(
        DataLoader(
            OneRow(150, buffers),
            forward_buffer_size=buffers,
            num_workers=workers,
            embedding_staleness=staleness,
        ),
        backward_buffer_size=buffers,
        backward_workers_size=workers,
    )
    missed = [number - num for number, num in enumerate(seen)]
    assert len(missed) == 150
    assert 0 <= min(missed) <= max(missed) <= (10 if staleness == "auto" else staleness) - 1
    if staleness == "auto":
        assert max(missed[:WINDOW]) == 0  # it begins with one permit


@pytest.mark.parametrize("staleness", [1, 2, 3, 10])
@pytest.mark.parametrize(("buffers", "workers"), [(1, 1), (1, 4), (10, 10)])
def test_a_reproducible_schedule_is_exact(staleness: int, buffers: int, workers: int) -> None:
    seen = seen_updates(
        DataLoader(
            OneRow(60, buffers),
            forward_buffer_size=buffers,
            num_workers=workers,
            reproducible=True,
            embedding_staleness=staleness,
        ),
        backward_buffer_size=buffers,
        backward_workers_size=workers,
    )
    assert seen == [max(number - staleness + 1, 0) for number in range(60)]


def test_an_abandoned_batch_does_not_change_what_others_see(ctx: TrainCtx) -> None:
    """It ends before the updates of older batches, whose permits are not its."""
    worker = ctx._connected().connection.worker
    seen: dict[int, int] = {}
    worker.before_lookup = lambda number: seen.update({number: len(worker.of("update"))})  # type: ignore[attr-defined]
    loader = DataLoader(Batches(60), reproducible=True, embedding_staleness=4)
    for number, batch in enumerate(loader):
        if number % 3:
            step(ctx, batch)
    # Of those up to the fourth before it, two in three have an update.
    updated = [n for n in range(60) if n % 3]
    assert seen == {n: sum(of <= n - 4 for of in updated) for n in range(60)}


def test_a_flush_inside_a_fixed_schedule_waits_for_no_batch_that_the_loop_has_to_take(
    ctx: TrainCtx,
) -> None:
    loader = DataLoader(Batches(40), 1, num_workers=1, reproducible=True, embedding_staleness=6)
    for batch in loader:
        step(ctx, batch)
        assert ctx.get_embedding_size()
    assert ctx.stats()["batches"] == 40


def test_a_fixed_schedule_ends_with_the_loop(worker: SpyWorker, ctx: TrainCtx) -> None:
    for number, batch in enumerate(
        DataLoader(Batches(40), reproducible=True, embedding_staleness=4)
    ):
        step(ctx, batch)
        if number == 5:
            break
    ctx.get_embedding_size()
    assert worker.of("update") == list(range(6))


def test_a_lookup_that_fails_holds_no_update_of_a_fixed_schedule(
    worker: SpyWorker, ctx: TrainCtx
) -> None:
    worker.before_lookup = fail_at(6, DataError("slot 'nothing' is unknown"))
    loader = DataLoader(Batches(40), reproducible=True, embedding_staleness=4)
    with pytest.raises(DataError, match="slot 'nothing'"):
        train_all(ctx, loader)
    ctx.get_embedding_size()
    assert set(worker.of("update")) <= set(range(6))


def test_what_lookups_miss_is_counted(worker: SpyWorker, make_ctx: MakeCtx) -> None:
    with make_ctx() as ctx:
        train_all(ctx, DataLoader(Batches(20), reproducible=True, embedding_staleness=3))
        metrics = ctx.metrics()
        assert metrics.value("persia_missed_updates_count") == 20
        assert metrics.value("persia_missed_updates_sum") == 0 + 1 + 18 * 2
        assert metrics.value("persia_missed_updates_bucket", le="1.0") == 2
        assert metrics.value("persia_permits") == 3
        train_all(ctx, DataLoader(Batches(20)))
        assert metrics.value("persia_permits") in (1, 2)


def test_without_a_bound_buffers_are_one(worker: SpyWorker, make_ctx: MakeCtx) -> None:
    with make_ctx(backward_buffer_size=3, backward_workers_size=2) as ctx:
        loader = DataLoader(Batches(400), 5, num_workers=4, embedding_staleness=None)
        missed = missed_updates(worker, ctx, loader)
    assert max(missed) <= 5 + 4 + 1 + 3 + 2


def test_an_evaluation_is_in_the_order_of_the_dataset(ctx: TrainCtx) -> None:
    with eval_ctx(model=ctx.model):
        seen = [int(batch.meta or b"") for batch in DataLoader(Batches(200), 1)]
    assert seen == list(range(200))


def test_a_left_lockstep_loop_looks_nothing_up(worker: SpyWorker, ctx: TrainCtx) -> None:
    loader = DataLoader(Batches(40), **LOCKSTEP)
    for epoch in range(3):
        for number, batch in enumerate(loader):
            step(ctx, batch)
            if number == 4:
                break
        del batch
        assert worker.of("lookup") == list(range(5 * (epoch + 1)))
    assert ctx.stats()["unused"] == 0


def test_w25_batch_without_backward_is_counted(worker: SpyWorker, make_ctx: MakeCtx) -> None:
    with make_ctx() as ctx:
        loader = DataLoader(Batches(9), **LOCKSTEP)
        for number, batch in enumerate(loader):
            output, labels = ctx.forward(batch)
            assert ctx.stats()["staleness"] == 1
            if number % 3 == 0:
                ctx.backward(loss_of(output, labels))
        stats = ctx.stats()
        assert stats["abandoned"] == 6
        assert worker.of("release") == [1, 2, 4, 5, 7, 8]
    assert worker.of("update") == [0, 3, 6]
    assert ctx.stats()["staleness"] == 0
    assert worker.refs == {}


def test_batch_of_the_past_takes_no_backward(ctx: TrainCtx) -> None:
    first, _second, *_ = DataLoader(Batches(4), allow_untrained=True)
    output, labels = ctx.forward(first)
    with pytest.raises(DataError, match=r"batch \d .*abandoned.*ctx\.keep"):
        ctx.backward(loss_of(output, labels))


def test_evaluation_takes_no_permit(worker: SpyWorker, ctx: TrainCtx) -> None:
    with eval_ctx(model=ctx.model):
        assert len(list(DataLoader(Batches(12), embedding_staleness=1))) == 12
    assert ctx.stats()["abandoned"] == 0
    assert worker.of("lookup") == []
    assert len(worker.of("read")) == 12


def test_batch_without_gradient_takes_no_permit(worker: SpyWorker, ctx: TrainCtx) -> None:
    for batch in DataLoader(Batches(12, requires_grad=False), **LOCKSTEP):
        assert not batch.requires_grad
        with pytest.raises(DataError, match="no gradients"):
            ctx.keep(batch)
        assert not any(tensor.requires_grad for tensor in embeddings_of(batch))
        step(ctx, batch)  # the dense part trains alone
    assert ctx.stats()["batches"] == 0
    assert worker.of("read") == list(range(12))


# --- keep -------------------------------------------------------------------------------------


def test_keep_accumulates_gradients_over_batches(worker: SpyWorker, make_ctx: MakeCtx) -> None:
    with make_ctx() as ctx:
        losses = []
        loader = DataLoader(Batches(8), reproducible=True, embedding_staleness=4)
        for number, batch in enumerate(loader, start=1):
            output, labels = ctx.forward(batch)
            losses.append(loss_of(output, labels) / 4)
            if number % 4:
                ctx.keep(batch)
            else:
                ctx.backward(torch.stack(losses).sum())
                losses.clear()
        assert ctx.stats()["abandoned"] == 0
    assert worker.of("update") == list(range(8))
    assert worker.of("release") == []


def test_kept_batch_beyond_the_loss_is_released_by_its_name(
    worker: SpyWorker, make_ctx: MakeCtx, caplog: pytest.LogCaptureFixture
) -> None:
    with make_ctx() as ctx:
        # Twice as many as there are permits: none is held for ever.
        for batch in DataLoader(Batches(8), reproducible=True, embedding_staleness=2):
            if batch.batch_id % 2 == 0:
                ctx.forward(batch)
                ctx.keep(batch)
            else:
                step(ctx, batch)
        assert ctx.stats()["abandoned"] == 4
        assert ctx._kept == []
    assert worker.of("update") == [1, 3, 5, 7]
    assert worker.of("release") == [0, 2, 4, 6]
    (line,) = [one for one in caplog.messages if "ctx.keep" in one]
    assert line.startswith("batch 0 was held by ctx.keep and the loss did not reach it")


def test_keep_beyond_the_permits_is_an_error(worker: SpyWorker, make_ctx: MakeCtx) -> None:
    with make_ctx() as ctx:
        iterator = iter(DataLoader(Batches(12)))
        for _ in range(10):
            ctx.keep(next(iterator))
        said = r"=10 allows no batch beside the 10 .* DataLoader\(.*embedding_staleness=11\) or"
        with pytest.raises(ConfigError, match=said):
            next(iterator)
    # Leaving releases what is kept.
    assert sorted(worker.of("release")) == list(range(10))
    assert (ctx.stats()["staleness"], ctx.stats()["abandoned"]) == (0, 10)


# --- leaving early ----------------------------------------------------------------------------


@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("staleness", [None, 2])
def test_break_ends_the_threads_and_the_users_generator(
    worker: SpyWorker, ctx: TrainCtx, reproducible: bool, staleness: int | None
) -> None:
    dataset = Batches(10**6)
    loader = DataLoader(dataset, reproducible=reproducible, embedding_staleness=staleness)
    for batch in loader:
        step(ctx, batch)
        break
    assert dataset.closed.is_set()
    alive = [thread.name for thread in threading.enumerate()]
    assert not [name for name in alive if name.startswith(("persia-d", "persia-f"))]
    ctx.get_embedding_size()  # waits for the one update
    assert ctx.stats()["staleness"] == 0
    assert worker.refs == {}


def test_w42_nothing_of_an_aborted_epoch_leaks_into_the_next(ctx: TrainCtx) -> None:
    dataset = Batches(30)
    loader = DataLoader(dataset, reproducible=True)
    for _ in loader:
        break
    assert train_all(ctx, loader) == list(range(30))


def test_second_iteration_ends_the_first(ctx: TrainCtx) -> None:
    loader = DataLoader(Batches(30), reproducible=True, allow_untrained=True)
    first = iter(loader)
    next(first)
    second = iter(loader)
    assert next(second).meta == b"0"
    # Silence would look like the end of the data.
    with pytest.raises(ConfigError, match="the same DataLoader was iterated again"):
        next(first)
    assert len([*second]) == 29


def test_a_loader_that_outlives_its_context_keeps_no_rows(make_ctx: MakeCtx) -> None:
    loader = DataLoader(Batches(4))
    fake = SpyWorker()
    with make_ctx(embedding_worker=fake) as ctx:
        train_all(ctx, loader)
    known = weakref.ref(fake)
    del ctx, fake
    gc.collect()
    assert known() is None


def test_w48_leaving_ends_an_open_loop(worker: SpyWorker, make_ctx: MakeCtx) -> None:
    with make_ctx():
        iterator = iter(DataLoader(Batches(10**6)))
        next(iterator)
    # conftest finds no thread; every ref is gone
    assert worker.refs == {}
    with pytest.raises(ConfigError, match="the context was left"):
        next(iterator)


# --- errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("staleness", [None, 1])
def test_w10_exception_in_a_lookup_is_raised_in_the_loop(
    worker: SpyWorker, make_ctx: MakeCtx, reproducible: bool, staleness: int | None
) -> None:
    worker.before_lookup = fail_at(3, DataError("slot 'nothing' is unknown"))
    with make_ctx() as ctx:
        loader = DataLoader(
            Batches(30), reproducible=reproducible, embedding_staleness=staleness
        )
        with pytest.raises(DataError, match="slot 'nothing'") as caught:
            train_all(ctx, loader)
        frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
        assert "_forward_one" in frames
        assert "fail" in frames
        worker.before_lookup = lambda batch_id: None
        del caught
        # the failed lookup gave its permit back, and a new epoch begins
        assert sorted(train_all(ctx, loader)) == list(range(30))
    assert worker.refs == {}


@pytest.mark.parametrize("refused", ["persia-backward-0", "persia-forward-0"])
def test_threads_do_not_start(make_ctx: MakeCtx, monkeypatch: Monkey, refused: str) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == refused:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start"), make_ctx() as ctx:
        train_all(ctx, DataLoader(Batches(4)))
    assert ctx.stats()["staleness"] == 0


@pytest.mark.parametrize(
    "option", ["forward_buffer_size", "timeout_ms", "num_workers", "embedding_staleness"]
)
def test_loader_numbers_start_at_one(option: str) -> None:
    settings: dict[str, Any] = {option: 1}
    DataLoader(Batches(1), **settings)
    settings[option] = 0
    with pytest.raises(ConfigError, match=f"{option} must be a whole number, .* got 0"):
        DataLoader(Batches(1), **settings)


def test_a_stream_in_embedded_mode_needs_a_script(monkeypatch: Monkey) -> None:
    with pytest.raises(ConfigError, match=r"embedded mode.*data_loader\.py.*IterableDataset"):
        StreamingDataset()
    monkeypatch.setenv("PERSIA_DATALOADER_ENTRY", "/nowhere/loader.py")
    with pytest.raises(ConfigError, match=r"PERSIA_DATALOADER_ENTRY /nowhere/loader\.py"):
        StreamingDataset()
    monkeypatch.setenv("PERSIA_DATALOADER_ENTRY", __file__)
    with pytest.raises(NotImplementedError):
        iter(StreamingDataset())


# --- memory of the user -----------------------------------------------------------------------


def test_threads_that_do_not_end(monkeypatch: Monkey, make_ctx: MakeCtx, caplog: Log) -> None:
    monkeypatch.setattr("persia._training.forward.JOIN_S", 0.05)
    entered, hold = threading.Event(), threading.Event()

    def generate() -> Iterator[PersiaBatch]:
        yield make_batch()
        entered.set()
        hold.wait(PATIENCE_S)

    with make_ctx():
        iterator = iter(DataLoader(generate()))
        next(iterator)
        assert entered.wait(PATIENCE_S)
        (thread,) = (t for t in threading.enumerate() if t.name == "persia-dataset")
        del iterator
    assert "persia-dataset has not ended" in caplog.text
    hold.set()
    thread.join(PATIENCE_S)


@pytest.mark.parametrize("rounds", [0, 2])
def test_w13_a_batch_of_disagreeing_ranks_is_released(
    worker: SpyWorker, make_ctx: MakeCtx, rounds: int
) -> None:
    with make_ctx() as ctx:
        ctx._ranks = SpyRanks(rounds=rounds)
        loader = DataLoader(Batches(10), reproducible=True, embedding_staleness=4)
        with pytest.raises(ServiceUnavailable, match="rank 1 has gone"):
            train_all(ctx, loader)
        del loader
    assert ctx.stats()["staleness"] == 0
    assert worker.refs == {}


def test_a_batch_without_gradients_has_a_turn_too(ctx: TrainCtx) -> None:
    # Another rank's batch of the same round may have gradients, and waits for this turn.
    ranks = ctx._ranks = SpyRanks()
    assert ctx.backward_engine is not None
    ctx.backward_engine._ranks = ranks
    batches = [make_batch(number, requires_grad=number != 1) for number in range(4)]
    for number, batch in enumerate(DataLoader(batches, **LOCKSTEP)):
        assert ranks.turns == number
        step(ctx, batch)
        ctx.get_embedding_size()  # waits for the update
    assert ranks.turns == len(batches)


# --- the dataset's thread --------------------------------------------------------------------


def test_w42_exception_in_the_dataset_comes_in_its_place(ctx: TrainCtx) -> None:
    def generate() -> Iterator[PersiaBatch]:
        for number in range(5):
            yield make_batch(number)
        raise KeyError("column 'price'")

    iterator = iter(DataLoader(generate(), reproducible=True))
    for number in range(5):
        batch = next(iterator)
        step(ctx, batch)
        assert batch.batch_id == number
    with pytest.raises(KeyError, match="column 'price'") as caught:
        next(iterator)
    files = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert files[0] == __file__  # the loop
    assert files[1:].count(__file__) == 1  # the dataset
    # the context goes on
    assert train_all(ctx, DataLoader(Batches(2), reproducible=True)) == [0, 1]


@pytest.mark.usefixtures("ctx")
def test_dataset_that_raises_as_it_is_closed(caplog: Log) -> None:
    def generate() -> Iterator[PersiaBatch]:
        try:
            while True:
                yield make_batch()
        finally:
            raise KeyError("closing")

    for _ in DataLoader(generate()):
        break
    assert "the dataset raised while it was closed" in caplog.text


def test_a_refused_batch_ends_the_users_generator(make_ctx: MakeCtx) -> None:
    closed = threading.Event()

    def generate() -> Iterator[Any]:
        try:
            yield {}
        finally:
            closed.set()

    with make_ctx(), pytest.raises(DataTypeError, match="PersiaBatch, got dict") as caught:
        list(DataLoader(generate()))
    assert closed.wait(PATIENCE_S)
    del caught


def test_an_iterator_that_is_no_generator_is_not_closed(ctx: TrainCtx) -> None:
    class Reader(Iterator[PersiaBatch]):
        is_closed = False

        def __next__(self) -> PersiaBatch:
            return make_batch()

        def close(self) -> None:
            self.is_closed = True

    reader = Reader()
    for batch in DataLoader(reader):
        step(ctx, batch)
        break
    assert not reader.is_closed


def test_w41_the_same_batch_can_be_yielded_again(ctx: TrainCtx) -> None:
    batch = make_batch(7, meta=b"7")
    assert train_all(ctx, DataLoader([batch] * 12)) == [7] * 12
    ctx.get_embedding_size()  # waits for the updates
    assert ctx.stats()["batches"] == 12
    assert batch.batch_id is None


def test_w37_a_generator_may_refill_its_arrays(ctx: TrainCtx) -> None:
    ids, dense, label = u64(0, 0), np.zeros((2, 2), np.float32), np.zeros((2, 1), np.float32)

    def generate() -> Iterator[PersiaBatch]:
        for number in range(20):
            ids[:], dense[:], label[:] = number, number, number
            user = IDTypeFeatureWithSingleID("user", ids)
            yield PersiaBatch([user], [NonIDTypeFeature(dense)], [Label(label)])

    loader = DataLoader(generate(), reproducible=True, allow_untrained=True)
    for number, batch in enumerate(list(loader)):
        assert batch.non_id_type_tensors[0].eq(number).all()
        assert batch.labels is not None
        assert batch.labels[0].eq(number).all()


def test_reading_ahead_is_bounded(ctx: TrainCtx) -> None:
    dataset = Batches(10**6, buffer_size=2)
    iterator = iter(DataLoader(dataset, forward_buffer_size=3, num_workers=2))
    for _ in range(5):
        next(iterator)
    # 5 given, 3 ready, 2 in workers, 2 in the buffer, 1 in the dataset's hands
    assert dataset.read <= 5 + 3 + 2 + 2 + 1
    del iterator


@pytest.mark.usefixtures("ctx")
def test_iterator_that_was_never_asked_has_no_threads() -> None:
    iterator = iter(DataLoader(Batches(3)))
    assert not [t for t in threading.enumerate() if t.name.startswith("persia-f")]
    del iterator
    gc.collect()


@pytest.mark.usefixtures("ctx")
def test_one_worker_is_one_thread_and_keeps_the_order() -> None:
    for _ in range(5):
        seen = []
        for batch in DataLoader(Batches(40), num_workers=1, allow_untrained=True):
            seen.append(int(batch.meta or b""))
            names = [one.name for one in threading.enumerate()]
            assert sum(name.startswith("persia-forward") for name in names) <= 1
        assert seen == list(range(40))
