"""Trainers that are killed and go on by themselves: bit-equal to one that was not."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from persia._loader.sender import BatchSender
from persia._training import receiver as receiver_module
from persia._training.progress import BEGINNING
from persia._training.queues import Finished
from persia._training.receiver import BatchReceiver
from persia.errors import ServiceUnavailable, StreamRewound
from tests.faults.batches import SLOTS, occurrences
from tests.faults.job import assert_trained, make_ctx
from tests.faults.resumed import draw_kills, run_embedded, run_services
from tests.rpc.proxies import MessageProxy
from tests.support.fixtures import Monkey
from tests.support.processes import LISTS, Cluster, Process
from tests.support.streams import Background, FakeWorker, send
from tests.support.waiting import PATIENCE_S, until

if TYPE_CHECKING:
    import zmq

STEPS, KILLS = 20, 5
LATE = Path(__file__).parent / "scripts" / "late_update.py"


class Address:
    """Where a rank is found, the last of ``processes``; until it is cut."""

    def __init__(self, processes: list[BatchReceiver], is_cut: threading.Event) -> None:
        self._processes, self._is_cut = processes, is_cut

    @property
    def incarnation(self) -> int:
        return len(self._processes)

    def __getattr__(self, method: str) -> Any:
        def call(*arguments: Any) -> Any:
            if self._is_cut.is_set():
                raise ServiceUnavailable("the way was cut")
            return getattr(self._processes[-1], method)(*arguments)

        return call


def send_again_and_again(
    processes: list[BatchReceiver], count: int, senders: list[BatchSender]
) -> None:
    """Run the script of a data-loader as its launcher does."""
    is_over = False
    while not is_over:
        is_cut = threading.Event()
        ranks: list[Any] = [Address(processes, is_cut)]
        workers: list[Any] = [FakeWorker()]
        senders.append(
            BatchSender(workers, ranks, disconnect=is_cut.set, deadline_s=PATIENCE_S)
        )
        senders[-1].start()
        try:
            for number in range(count):
                send(senders[-1], number)
            senders[-1].finish()
            is_over = True
        except StreamRewound as rewound:
            senders[-1].fail(rewound)
        finally:
            senders[-1].close()


def test_what_a_rank_gave_back_as_it_ended_is_trained_by_the_next(monkeypatch: Monkey) -> None:
    """It ends a batch that it has looked up ahead, and those before are still in flight."""
    monkeypatch.setattr(receiver_module, "POLL_S", 0.05)
    count = 4
    processes = [BatchReceiver(0, 1, count, PATIENCE_S, resumed=BEGINNING)]
    senders: list[BatchSender] = []
    loader = Background(lambda: send_again_and_again(processes, count, senders))
    processes[0].begin_pass()
    for _ in range(3):
        stream, batch = processes[0].take(True, lambda: False)
    until(lambda: senders[0].stats().get("kept") == count)
    processes[0].end(stream, batch.batch_id)
    until(lambda: senders[0].stats().get("kept") == count - 1)

    after = BatchReceiver(0, 1, count, PATIENCE_S, resumed=BEGINNING)
    processes.append(after)
    processes[0].close(is_back=True)
    after.begin_pass()
    trained: list[int] = []
    with contextlib.suppress(Finished):
        while True:
            stream, batch = after.take(True, lambda: False)
            trained.append(batch.batch_id)
            after.mark_done(stream, batch.batch_id)
            after.end(stream, batch.batch_id)
    assert trained == list(range(count))
    loader.result()


class LateUpdates(MessageProxy):
    """Passes the first update, and later ones only once they may come.

    A client repeats what it has no answer to.
    """

    def __init__(self, front: str, upstream: str) -> None:
        self.may_come = threading.Event()
        self._num_updates = 0
        super().__init__(front, upstream, lambda number: 1)

    def _deal(self, number: int, socket: zmq.Socket[bytes], parts: list[bytes]) -> None:
        if number > 0 and b"\xa1m\xa6update" in parts[1]:  # of the header, in msgpack
            self._num_updates += 1
            if self._num_updates > 1 and not self.may_come.is_set():
                self.num_dropped += 1
                return
        super()._deal(number, socket, parts)


@pytest.mark.slow
def test_an_update_of_a_trainer_that_was_killed_does_not_reach_rows_loaded_since(
    tmp_path: Path,
) -> None:
    """Its embedding-worker sends it again when another trainer has loaded the checkpoint."""
    server, worker = "embedding-parameter-server", "embedding-worker"
    with Cluster(SLOTS) as cluster, contextlib.ExitStack() as stack:
        front = f"ipc://{cluster.place}/proxy"
        proxy = LateUpdates(front, cluster.addresses[server][0])
        stack.callback(proxy.close)
        cluster.start_replica(server)
        cluster.start_replica(worker, 0, **{LISTS[server]: front})
        words = [sys.executable, str(LATE), str(tmp_path)]
        killed = Process(words, cluster.environment, cluster.place / "killed.log")
        cluster.processes["killed"] = killed
        until(lambda: proxy.num_dropped or killed.poll() is not None, details=killed.printed)
        cluster.kill("killed")
        os.environ.update(cluster.variables)
        with make_ctx() as ctx:
            ctx.load_checkpoint(tmp_path)
            assert_trained(ctx, occurrences(1))
            proxy.may_come.set()
            until(lambda: ctx.server_stats()[0]["replaced_updates"], details=ctx.server_stats)
            assert_trained(ctx, occurrences(1))
        cluster.stop()  # through the proxy


@pytest.mark.slow
def test_a_trainer_that_is_killed_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    whole = run_embedded(tmp_path / "whole", STEPS, [])
    killed = run_embedded(tmp_path / "killed", STEPS, draw_kills(KILLS, STEPS, 1))
    assert whole["rank 0"]["steps"] == STEPS
    assert killed == whole


@pytest.mark.slow
def test_ranks_that_data_loaders_feed_end_as_if_none_had_been_killed(tmp_path: Path) -> None:
    steps, kills = 9, 2
    whole = run_services(tmp_path / "whole", steps, [])
    killed = run_services(tmp_path / "killed", steps, draw_kills(kills, steps, 5))
    assert whole["rank 1"]["steps"] == steps
    assert killed == whole
