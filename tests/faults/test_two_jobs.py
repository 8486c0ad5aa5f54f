"""Two jobs on one machine at the same time: what one does or ends is nothing to the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

from persia import env
from persia._cluster.job import announce_job_end
from persia._rpc.zmq_transport import ZmqTransport
from persia.ctx import TrainCtx
from persia.data import DataLoader, StreamingDataset
from tests.faults.batches import SLOTS
from tests.faults.job import LOADER, assert_each_once, make_ctx, step
from tests.support.processes import PATIENT, Cluster
from tests.support.waiting import PATIENCE_S

FEWER, MORE = 30, 60


def enter(stack: ExitStack, cluster: Cluster) -> tuple[TrainCtx, Iterator[Any]]:
    """Enter the trainer of one of the jobs, and begin to read what its data-loader sends."""
    with env.changed(**cluster.variables):
        ctx = stack.enter_context(make_ctx())
        return ctx, iter(DataLoader(StreamingDataset(4), timeout_ms=60_000))


@pytest.mark.slow
def test_w52_w65_two_jobs_on_one_machine_do_not_disturb_each_other() -> None:
    with ExitStack() as stack:
        short = stack.enter_context(Cluster(SLOTS, transport="ipc"))
        long = stack.enter_context(Cluster(SLOTS, transport="tcp"))
        for cluster, count in ((short, FEWER), (long, MORE)):
            cluster.start_servers()
            cluster.start_loaders(LOADER, 1, str(count))
        leaving = ExitStack()
        with leaving:
            one, of_one = enter(leaving, short)
            two, of_two = enter(stack, long)
            seen_one, seen_two = [], []
            for batch in of_one:
                seen_one.append(step(one, batch))
                seen_two.append(step(two, next(of_two)))
            assert_each_once(one, seen_one, FEWER)
        with env.changed(**short.variables), closing(ZmqTransport()) as transport:
            assert announce_job_end(transport, 0, PATIENCE_S) == []
        assert set(short.wait().values()) == {0}
        assert all(process.poll() is None for process in long.processes.values())
        seen_two += [step(two, batch) for batch in of_two]
        assert_each_once(two, seen_two, MORE)


@pytest.mark.slow
def test_a_script_at_another_jobs_addresses_ends_nothing_of_that_job() -> None:
    """As a second ``honcho start`` does in another folder, whose servers cannot listen."""
    with ExitStack() as stack:
        cluster = stack.enter_context(Cluster(SLOTS))
        cluster.start_servers()
        cluster.start_loaders(LOADER, 1, str(FEWER))
        ctx, batches = enter(stack, cluster)
        seen = [step(ctx, next(batches))]
        stray = cluster.place / "stray.py"
        stray.write_text("print('hello')\n")
        words = ("stray", "nn-worker", str(stray))
        assert cluster.start(*words, launcher=PATIENT).wait(PATIENCE_S) == 0
        del cluster.processes["stray"]
        assert all(process.poll() is None for process in cluster.processes.values())
        for server in ("embedding-parameter-server-0", "embedding-worker-0"):
            assert "a job that never configured this server" in cluster.log(server)
        seen += [step(ctx, batch) for batch in batches]
        assert_each_once(ctx, seen, FEWER)
