"""Start and stop, over and over in one process: nothing is left, and nothing grows.

Also a short run of ``make soak-load``.
"""

from __future__ import annotations

import gc
import math
import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from persia import _context_stack, env
from persia._cluster.connect import connect_embedding_workers
from persia._rpc import client
from persia._rpc.messages import IDFeatures
from persia._rpc.zmq_transport import ZmqTransport
from persia._training import receiver
from persia.config import EmbeddingWorkerConfig
from persia.ctx import DataCtx, TrainCtx, eval_ctx
from persia.data import DataLoader, StreamingDataset
from persia.errors import RemoteError, ServiceBusy
from persia.helper import PersiaServiceCtx
from tests.benchmarks.interleaved import libc_call, settled
from tests.faults.batches import SLOTS, make_batch, occurrences
from tests.faults.job import assert_trained, make_ctx, step, trained
from tests.load.soak import soak
from tests.support.fixtures import Record
from tests.support.local_job import local_job
from tests.support.streams import Background
from tests.support.waiting import PATIENCE_S

# What lies between blocks that are in use, in arenas that threads before have made.
SLACK_BYTES = 24 << 20
M_ARENA_MAX = -8  # of glibc's mallopt
# Of Python's allocator, a round: torch keeps some for each step. One context has thousands.
SLACK_BLOCKS = 200
COUNT = 6


def resources() -> dict[str, Any]:
    """Return what this process holds that it has to give back."""
    gc.collect()
    task = Path("/proc/self/task")
    return {
        "children": (task / str(os.getpid()) / "children").read_text(),
        "directories": sorted(Path(tempfile.gettempdir()).iterdir()),
        "threads": Counter(thread.name for thread in threading.enumerate()),
        "native threads": len(list(task.iterdir())),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
    }


def repeat(run: Callable[[], None], times: int) -> None:
    """Run it often, after a few rounds that fill caches; nothing may be left or grow."""
    # Else each round's threads spread over arenas, whose gaps take 80 MB until they are reused.
    libc_call("mallopt", M_ARENA_MAX, 1)
    for _ in range(5):
        run()
    before, memory, blocks = resources(), settled(), sys.getallocatedblocks()
    for _ in range(times):
        run()
    after = resources()
    for name in ("children", "directories"):
        assert after[name] == before[name]
    # Fewer, if something of before was just about to end.
    for name in ("threads", "native threads", "descriptors"):
        assert after[name] <= before[name], name
    assert sys.getallocatedblocks() - blocks < SLACK_BLOCKS * times
    assert settled() - memory < SLACK_BYTES


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name in ("RANK", "WORLD_SIZE", "REPLICA_INDEX", "REPLICA_SIZE"):
        monkeypatch.delenv(name, raising=False)
    # Of its own, so that what others leave there meanwhile is not counted, and short.
    with tempfile.TemporaryDirectory(prefix="long-", dir="/tmp") as directory:
        monkeypatch.setattr(tempfile, "tempdir", directory)
        env.reload_env()
        yield Path(directory)
        assert _context_stack.current() is None


def send(count: int, *, then: Exception | None = None) -> None:
    with DataCtx() as ctx:
        for number in range(count):
            ctx.send_data(make_batch(number))
        if then is not None:
            raise then


def open_pass() -> Iterator[Any]:
    """Begin a pass; later the data-loader's context would be the one entered last."""
    return iter(DataLoader(StreamingDataset(3), timeout_ms=int(PATIENCE_S * 1000)))


def train_streamed(ctx: TrainCtx) -> list[int]:
    batches = open_pass()
    sender = Background(lambda: send(COUNT))
    seen = [step(ctx, batch) for batch in batches]
    sender.result()
    return seen


def train_once(place: Path, *, is_streamed: bool) -> None:
    with local_job(place) as worker, make_ctx() as ctx:
        if is_streamed:
            train_streamed(ctx)
        else:
            for batch in DataLoader([make_batch(number) for number in range(COUNT)]):
                step(ctx, batch)
        assert_trained(ctx, occurrences(COUNT))
        assert worker.stats()["in_flight"] == 0


@pytest.mark.slow
def test_w65_fifty_loaders_and_eight_ranks_at_one_worker(record_property: Record) -> None:
    record_property("measured", soak(25.0).partition("\n")[0])


@pytest.mark.slow
def test_w52_servers_start_and_stop_a_hundred_times(place: Path) -> None:
    def serve_once() -> None:
        with local_job(place), closing(ZmqTransport()) as transport:
            (worker,) = connect_embedding_workers(transport, timeout_s=PATIENCE_S)
            with closing(worker):
                assert worker.get_embedding_size() == [0]

    repeat(serve_once, 100)


@pytest.mark.parametrize(
    ("is_streamed", "times"),
    [
        (False, 10),
        (True, 3),
        pytest.param(False, 100, marks=pytest.mark.slow),
        pytest.param(True, 100, marks=pytest.mark.slow),
    ],
)
def test_w48_contexts_leave_no_thread_socket_or_file(
    place: Path, is_streamed: bool, times: int
) -> None:
    repeat(lambda: train_once(place, is_streamed=is_streamed), times)


def rest() -> None:
    """A function for the process of a data-loader."""


@pytest.mark.slow
def test_w45_services_of_a_with_block_leave_nothing(place: Path) -> None:
    def train_in_service() -> None:
        with PersiaServiceCtx(rest, embedding_config=SLOTS), make_ctx() as ctx:
            for batch in DataLoader([make_batch(0)]):
                step(ctx, batch)

    repeat(train_in_service, 5)


def test_w52_two_jobs_train_at_a_time_in_one_process(place: Path) -> None:
    """A context belongs to the job that the environment names when it is entered."""
    with local_job(place, "one"), make_ctx() as one:
        first = iter(DataLoader([make_batch(number) for number in range(COUNT)]))
        with local_job(place, "two"), make_ctx() as two:
            second = iter(DataLoader([make_batch(COUNT + number) for number in range(COUNT)]))
            for batch, other in zip(first, second, strict=True):
                step(one, batch)
                step(two, other)
            in_two = trained(two)
        in_one = trained(one)
    expected, of_both = occurrences(COUNT), occurrences(2 * COUNT)
    for name in expected:
        np.testing.assert_array_equal(in_one[name], expected[name])
        np.testing.assert_array_equal(in_two[name], of_both[name] - expected[name])


def test_w24_w42_after_a_loader_that_failed_the_next_pass_is_whole(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So long the failed one, which is past, waits for news that do not come.
    monkeypatch.setattr(receiver, "POLL_S", 0.2)
    with local_job(place) as worker, make_ctx() as ctx:
        batches = open_pass()
        sender = Background(lambda: send(2, then=ValueError("no such column")))
        with pytest.raises(RemoteError, match=r"data-loader 0 failed(.|\n)*no such column"):
            [step(ctx, batch) for batch in batches]
        with pytest.raises(ValueError, match="no such column"):
            sender.result()
        for _ in range(2):
            assert sorted(train_streamed(ctx)) == list(range(COUNT))
        ctx.get_embedding_size()  # waits for the updates
        assert worker.stats()["in_flight"] == 0


def test_w25_nothing_stays_counted_as_in_flight(place: Path) -> None:
    with local_job(place) as worker, make_ctx() as ctx:
        for _ in range(20):
            for number, batch in enumerate(DataLoader([make_batch(n) for n in range(COUNT)])):
                if number % 2:
                    step(ctx, batch)
            step(ctx, ctx.get_embedding_from_data(make_batch(COUNT)))
            ctx.get_embedding_from_data(make_batch(COUNT))  # dropped
            with eval_ctx(model=ctx.model) as evaluation:
                for batch in DataLoader([make_batch(0)]):
                    evaluation.forward(batch)
            trained(ctx)
        stats = ctx.stats()
        assert stats["batches"] == 20 * (COUNT // 2 + 1)
        assert stats["abandoned"] == 20 * (COUNT // 2 + 1)
    assert ctx.stats()["staleness"] == 0
    assert worker.stats()["in_flight"] == 0


def test_w46_ids_that_are_never_delivered_are_bounded_expire_and_are_counted(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A refusal is an answer at once, whatever the deadline.
    monkeypatch.setattr(client, "_FIRST_PAUSE_S", math.inf)
    now = [0.0]
    settings = EmbeddingWorkerConfig(forward_buffer_size=3, buffered_data_expired_sec=60)
    with (
        local_job(place, settings=settings, clock=lambda: now[0]),
        closing(ZmqTransport()) as transport,
    ):
        (worker,) = connect_embedding_workers(transport, timeout_s=PATIENCE_S)
        with closing(worker):
            for start in range(0, 30, 3):
                for number in range(start, start + 3):
                    worker.register(IDFeatures(make_batch(number).features, number, True))
                late = IDFeatures(make_batch(99).features, 99, True)
                with pytest.raises(ServiceBusy, match="forward_buffer_size = 3"):
                    worker.register(late)
                now[0] += 60
            stats = worker.stats()
    assert (stats["in_flight"], stats["expired"]) == (0, 30)
    assert stats["refused_busy"] >= 10


def test_w48_gradients_in_flight_are_sent_when_the_context_is_left(place: Path) -> None:
    with local_job(place):
        with make_ctx() as ctx:
            batches = [make_batch(number) for number in range(COUNT)]
            for batch in DataLoader(batches, embedding_staleness=COUNT):
                step(ctx, batch)
        with make_ctx() as ctx:
            assert_trained(ctx, occurrences(COUNT))
