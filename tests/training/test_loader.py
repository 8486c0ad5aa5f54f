"""The forward pipeline, over the fake embedding-worker."""

from __future__ import annotations

import gc
import threading
import traceback
from collections.abc import Iterator

import numpy as np
import pytest

from persia.ctx import DataCtx, eval_ctx
from persia.data import DataLoader, IterableDataset, StreamingDataset
from persia.embedding.data import IDTypeFeatureWithSingleID, Label, NonIDTypeFeature, PersiaBatch
from persia.errors import ConfigError, DataError, DataTypeError, ServiceTimeout

from .conftest import loss_of
from .fakes import make_batch, u64

WAIT_S = 20.0


class Batches(IterableDataset):
    def __init__(self, count: int, buffer_size: int = 10, **options: object) -> None:
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


def train_all(ctx, loader) -> list[int]:
    seen = []
    for batch in loader:
        output, labels = ctx.forward(batch)
        ctx.backward(loss_of(output, labels))
        seen.append(int(batch.meta))
    return seen


@pytest.mark.parametrize("num_workers", [1, 4])
@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("staleness", [None, 1, 3])
def test_every_batch_comes_exactly_once(worker, make_ctx, num_workers, reproducible, staleness):
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
        assert sorted(seen) == list(range(30))
        if reproducible:
            assert seen == list(range(30))
    assert sorted(worker.of("update")) == list(range(60))
    assert worker.refs == {}
    assert stats["abandoned"] == stats["unused"] == 0
    assert ctx.stats()["batches"] == 60
    assert ctx.stats()["staleness"] == 0


def test_end_of_data_needs_no_timeout(make_ctx):
    # W-23: a loader that could not tell the end from a stall would wait for the time-out.
    with make_ctx() as ctx:
        assert train_all(ctx, DataLoader(Batches(0), timeout_ms=10**9)) == []
        assert train_all(ctx, DataLoader(Batches(1), timeout_ms=10**9)) == [0]


def test_w23_stall_of_the_dataset_is_a_timeout_that_names_it(make_ctx):
    release = threading.Event()

    class Stalls(IterableDataset):
        def __iter__(self):
            yield make_batch()
            release.wait(WAIT_S)

    with make_ctx() as ctx:
        iterator = iter(DataLoader(Stalls(), timeout_ms=50))
        next(iterator)
        with pytest.raises(TimeoutError, match=r"0\.05 s.*dataset \(Stalls\)") as caught:
            release_on_close(ctx, iterator, release)
        assert isinstance(caught.value, ServiceTimeout)


def release_on_close(ctx, iterator, release):
    # The generator joins its threads on the way out; let the dataset's go when it is asked.
    epoch = ctx._epochs[0]()
    close = epoch._input.close

    def close_and_release():
        release.set()
        return close()

    epoch._input.close = close_and_release
    next(iterator)


def test_stall_of_a_lookup_is_a_timeout_that_names_the_embedding_worker(worker, make_ctx):
    hold = threading.Event()
    worker.before_lookup = lambda batch_id: hold.wait(WAIT_S)
    with make_ctx() as ctx:
        iterator = iter(DataLoader(Batches(5), timeout_ms=50, num_workers=2))
        with pytest.raises(ServiceTimeout, match="lookups at the embedding-worker"):
            release_on_close_first(ctx, iterator, hold)


def release_on_close_first(ctx, iterator, release):
    epoch = ctx._epochs[0]()
    close = epoch._input.close

    def close_and_release():
        release.set()
        return close()

    epoch._input.close = close_and_release
    next(iterator)


def test_stall_of_an_update_is_a_timeout_that_names_the_staleness(worker, make_ctx):
    hold = threading.Event()
    worker.before_update = lambda batch_id: hold.wait(WAIT_S)
    with make_ctx() as ctx:
        loader = DataLoader(Batches(5), timeout_ms=50, embedding_staleness=1)
        iterator = iter(loader)
        batch = next(iterator)
        output, labels = ctx.forward(batch)
        ctx.backward(loss_of(output, labels))
        with pytest.raises(ServiceTimeout, match="embedding_staleness=1"):
            next(iterator)
        hold.set()


# --- staleness --------------------------------------------------------------------------------


def test_staleness_one_alternates_lookup_and_update(worker, make_ctx):
    with make_ctx() as ctx:
        loader = DataLoader(Batches(20), reproducible=True, embedding_staleness=1)
        assert train_all(ctx, loader) == list(range(20))
    wanted = [(kind, number) for number in range(20) for kind in ("lookup", "update")]
    assert worker.events == wanted


@pytest.mark.parametrize("staleness", [1, 2, 5])
@pytest.mark.parametrize("reproducible", [False, True])
def test_never_more_than_staleness_in_flight(worker, make_ctx, staleness, reproducible):
    with make_ctx() as ctx:
        loader = DataLoader(
            Batches(40), reproducible=reproducible, embedding_staleness=staleness
        )
        train_all(ctx, loader)
    in_flight = highest = 0
    for kind, _ in worker.events:
        in_flight += {"lookup": 1, "update": -1}[kind]
        highest = max(highest, in_flight)
    assert highest <= staleness
    assert in_flight == 0


def test_order_of_lookups_and_updates_is_the_datasets(worker, make_ctx):
    with make_ctx() as ctx:
        train_all(ctx, DataLoader(Batches(40), reproducible=True, embedding_staleness=4))
    assert worker.of("lookup") == list(range(40))
    assert worker.of("update") == list(range(40))


def test_loop_left_early_in_lockstep_has_looked_up_what_it_was_given(worker, make_ctx):
    with make_ctx() as ctx:
        loader = DataLoader(Batches(40), reproducible=True, embedding_staleness=1)
        for epoch in range(3):
            for number, batch in enumerate(loader):
                output, labels = ctx.forward(batch)
                ctx.backward(loss_of(output, labels))
                if number == 4:
                    break
            del batch
            assert worker.of("lookup") == list(range(5 * (epoch + 1)))
        assert ctx.stats()["unused"] == 0


def test_w25_batch_without_backward_is_released_and_counted(worker, make_ctx):
    with make_ctx() as ctx:
        loader = DataLoader(Batches(9), reproducible=True, embedding_staleness=1)
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


def test_batch_of_the_past_takes_no_backward(make_ctx):
    with make_ctx() as ctx:
        first, _second, *_ = DataLoader(Batches(4))
        output, labels = ctx.forward(first)
        with pytest.raises(DataError, match=r"batch \d .*abandoned.*ctx\.keep"):
            ctx.backward(loss_of(output, labels))


def test_second_backward_of_a_batch_is_an_error(make_ctx):
    with make_ctx() as ctx:
        for batch in DataLoader(Batches(1)):
            output, labels = ctx.forward(batch)
            ctx.backward(loss_of(output, labels))
            output, labels = ctx.forward(batch)
            with pytest.raises(DataError, match="sent already|trained already"):
                ctx.backward(loss_of(output, labels))


def test_evaluation_takes_no_permit(worker, make_ctx):
    with make_ctx() as ctx:
        with eval_ctx(model=ctx.model):
            assert len(list(DataLoader(Batches(12), embedding_staleness=1))) == 12
        assert ctx.stats()["abandoned"] == 0
    assert worker.of("lookup") == []
    assert len(worker.of("read")) == 12


def test_batches_without_gradients_take_no_permit(worker, make_ctx):
    with make_ctx() as ctx:
        loader = DataLoader(
            Batches(12, requires_grad=False), embedding_staleness=1, reproducible=True
        )
        for batch in loader:
            assert not batch.requires_grad
            assert not any(tensor.requires_grad for tensor in batch.embedding_tensors)
            output, labels = ctx.forward(batch)
            ctx.backward(loss_of(output, labels))  # the dense part trains alone
        assert ctx.stats()["batches"] == 0
    assert worker.of("read") == list(range(12))


# --- keep -------------------------------------------------------------------------------------


def test_keep_accumulates_gradients_over_batches(worker, make_ctx):
    with make_ctx() as ctx:
        losses = []
        loader = DataLoader(Batches(8), reproducible=True, embedding_staleness=4)
        for number, batch in enumerate(loader, start=1):
            output, labels = ctx.forward(batch)
            losses.append(loss_of(output, labels) / 4)
            if number % 4:
                ctx.keep(batch)
            else:
                ctx.backward(sum(losses))
                losses.clear()
        assert ctx.stats()["abandoned"] == 0
    assert worker.of("update") == list(range(8))
    assert worker.of("release") == []


def test_kept_batch_that_the_loss_did_not_reach_stays(worker, make_ctx):
    with make_ctx() as ctx:
        kept = None
        for batch in DataLoader(Batches(3), reproducible=True, embedding_staleness=3):
            if kept is None:
                kept = batch
                ctx.keep(batch)
                continue
            losses = [loss_of(*ctx.forward(batch))]
            if batch.batch_id == 2:
                losses.append(loss_of(*ctx.forward(kept)))
                ctx.prepare_features(batch)
            ctx.backward(sum(losses))
    assert worker.of("update")[0] == 1
    assert sorted(worker.of("update")) == [0, 1, 2]
    assert not any(
        slot.gradient is None for update in worker.gradients for slot in update.gradients
    )


def test_keep_beyond_the_permits_is_an_error_and_no_hang(make_ctx):
    with make_ctx() as ctx:
        loader = DataLoader(Batches(8), embedding_staleness=2)
        with pytest.raises(ConfigError, match=r"embedding_staleness=2.*at least k"):
            for batch in loader:
                ctx.keep(batch)
    assert ctx.stats()["staleness"] == 0


def test_kept_batches_are_released_on_leaving(worker, make_ctx):
    with make_ctx() as ctx:
        for batch in DataLoader(Batches(3)):
            ctx.keep(batch)
    assert sorted(worker.of("release")) == [0, 1, 2]
    assert ctx.stats()["abandoned"] == 3


def test_keep_needs_gradients(make_ctx):
    with make_ctx() as ctx:
        for batch in DataLoader(Batches(1, requires_grad=False)):
            with pytest.raises(DataError, match="no gradients"):
                ctx.keep(batch)


# --- leaving early ----------------------------------------------------------------------------


@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("staleness", [None, 2])
def test_break_ends_the_threads_and_the_users_generator(
    worker, make_ctx, reproducible, staleness
):
    dataset = Batches(10**6)
    loader = DataLoader(dataset, reproducible=reproducible, embedding_staleness=staleness)
    with make_ctx() as ctx:
        for batch in loader:
            output, labels = ctx.forward(batch)
            ctx.backward(loss_of(output, labels))
            break
        assert dataset.closed.is_set()
        alive = [thread.name for thread in threading.enumerate()]
        assert not [name for name in alive if name.startswith(("persia-d", "persia-f"))]
        ctx.get_embedding_size()  # waits for the one update
        assert ctx.stats()["staleness"] == 0
        assert worker.refs == {}


def test_w42_nothing_of_an_aborted_epoch_leaks_into_the_next(make_ctx):
    with make_ctx() as ctx:
        dataset = Batches(30)
        loader = DataLoader(dataset, reproducible=True)
        for _ in loader:
            break
        assert train_all(ctx, loader) == list(range(30))


def test_second_iteration_ends_the_first(make_ctx):
    with make_ctx():
        loader = DataLoader(Batches(30), reproducible=True)
        first = iter(loader)
        next(first)
        second = iter(loader)
        assert int(next(second).meta) == 0
        assert [*first] == []
        assert len([*second]) == 29


def test_iterator_that_was_never_asked_has_no_threads(make_ctx):
    with make_ctx():
        iterator = iter(DataLoader(Batches(3)))
        assert not [t for t in threading.enumerate() if t.name.startswith("persia-f")]
        del iterator
        gc.collect()


def test_w48_leaving_the_context_ends_an_open_loop(worker, make_ctx):
    with make_ctx():
        iterator = iter(DataLoader(Batches(10**6)))
        next(iterator)
    # conftest finds no thread; every ref is gone
    assert worker.refs == {}
    assert [*iterator] == []


# --- errors -----------------------------------------------------------------------------------


def test_w42_exception_in_the_dataset_is_raised_after_the_batches_before_it(make_ctx):
    class Fails(IterableDataset):
        def __iter__(self):
            for number in range(5):
                yield make_batch(number, meta=b"%d" % number)
            raise KeyError("column 'price'")

    seen = []
    with make_ctx() as ctx:
        with pytest.raises(KeyError, match="column 'price'") as caught:
            for batch in DataLoader(Fails(), reproducible=True):
                output, labels = ctx.forward(batch)
                ctx.backward(loss_of(output, labels))
                seen.append(int(batch.meta))
        assert seen == [0, 1, 2, 3, 4]
        frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
        assert "__iter__" in frames
        # the context goes on
        assert train_all(ctx, DataLoader(Batches(2), reproducible=True)) == [0, 1]


@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("staleness", [None, 1])
def test_w10_exception_in_a_lookup_is_raised_in_the_loop(
    worker, make_ctx, reproducible, staleness
):
    def fail(batch_id):
        if batch_id == 3:
            raise DataError("slot 'nobody' is unknown")

    worker.before_lookup = fail
    with make_ctx() as ctx:
        loader = DataLoader(
            Batches(30), reproducible=reproducible, embedding_staleness=staleness
        )
        with pytest.raises(DataError, match="slot 'nobody'") as caught:
            train_all(ctx, loader)
        frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
        assert "_forward_one" in frames
        assert "fail" in frames
        worker.before_lookup = lambda batch_id: None
        del caught
        # the failed lookup gave its permit back, and a new epoch begins
        assert sorted(train_all(ctx, loader)) == list(range(30))
    assert worker.refs == {}


def test_dataset_that_raises_while_it_is_closed_harms_nobody(make_ctx, caplog):
    class Fails(IterableDataset):
        def __iter__(self):
            try:
                while True:
                    yield make_batch()
            finally:
                raise KeyError("closing")

    with make_ctx():
        for _ in DataLoader(Fails()):
            break
    assert "the dataset raised while it was closed" in caplog.text


def test_dataset_must_yield_batches(make_ctx):
    with make_ctx(), pytest.raises(DataTypeError, match="PersiaBatch, got dict"):
        list(DataLoader([{}]))


def test_loader_needs_a_context():
    with pytest.raises(ConfigError, match="the current one is none"):
        iter(DataLoader(Batches(1)))


@pytest.mark.parametrize(
    "option", ["forward_buffer_size", "timeout_ms", "num_workers", "embedding_staleness"]
)
def test_loader_numbers_start_at_one(option):
    DataLoader(Batches(1), **{option: 1})
    with pytest.raises(ConfigError, match=f"{option} must be at least 1, got 0"):
        DataLoader(Batches(1), **{option: 0})


def test_buffer_size_starts_at_one():
    with pytest.raises(ConfigError, match="buffer_size"):
        Batches(1, buffer_size=0)


def test_streams_need_servers(monkeypatch):
    with pytest.raises(ConfigError, match=r"embedded mode.*IterableDataset"):
        StreamingDataset()
    with pytest.raises(ConfigError, match=r"embedded mode.*IterableDataset"), DataCtx():
        pass
    with pytest.raises(ConfigError, match=r"DataCtx\.send_data"):
        DataCtx().send_data(make_batch())
    monkeypatch.setenv("PERSIA_EMBEDDING_WORKERS", "localhost:1")
    with pytest.raises(ConfigError, match="has embedded mode only"):
        StreamingDataset()


# --- memory of the user -----------------------------------------------------------------------


def test_w41_the_same_batch_can_be_yielded_again(make_ctx):
    batch = make_batch(7, meta=b"7")
    with make_ctx() as ctx:
        assert train_all(ctx, DataLoader([batch] * 12)) == [7] * 12
    assert ctx.stats()["batches"] == 12
    assert batch.batch_id is None


def test_w37_a_generator_may_refill_its_arrays(make_ctx):
    ids, dense, label = u64(0, 0), np.zeros((2, 2), np.float32), np.zeros((2, 1), np.float32)

    class Refills(IterableDataset):
        def __iter__(self):
            for number in range(20):
                ids[:], dense[:], label[:] = number, number, number
                yield PersiaBatch(
                    [IDTypeFeatureWithSingleID("user", ids)],
                    [NonIDTypeFeature(dense)],
                    [Label(label)],
                )

    with make_ctx(num_features=1):
        batches = list(DataLoader(Refills(), reproducible=True))
    for number, batch in enumerate(batches):
        assert batch.non_id_type_tensors[0].eq(number).all()
        assert batch.labels[0].eq(number).all()


def test_reading_ahead_is_bounded(make_ctx):
    dataset = Batches(10**6, buffer_size=2)
    with make_ctx():
        iterator = iter(DataLoader(dataset, forward_buffer_size=3, num_workers=2))
        for _ in range(5):
            next(iterator)
        # 5 given, 3 ready, 2 in workers, 2 in the buffer, 1 in the dataset's hands
        assert dataset.read <= 5 + 3 + 2 + 2 + 1
        iterator.close()


def test_threads_that_outlive_the_deadline_are_named(monkeypatch, worker, make_ctx, caplog):
    monkeypatch.setattr("persia._training.prefetch.JOIN_S", 0.05)
    entered, hold = threading.Event(), threading.Event()

    class Stuck(IterableDataset):
        def __iter__(self):
            yield make_batch()
            entered.set()
            hold.wait(WAIT_S)

    with make_ctx():
        iterator = iter(DataLoader(Stuck()))
        next(iterator)
        assert entered.wait(WAIT_S)
        (thread,) = (t for t in threading.enumerate() if t.name == "persia-dataset")
        iterator.close()
    assert "persia-dataset has not ended" in caplog.text
    hold.set()
    thread.join(WAIT_S)
