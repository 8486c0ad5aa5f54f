"""A model whose rows are in servers of other processes, which are killed while it scores."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from persia._serving import remote_rows
from persia._serving.remote_rows import RowServers
from persia.errors import ServiceBusy, ServiceError
from persia.serving import Predictor
from tests.serving.models import arrays, make_ctx, train
from tests.support.fixtures import Monkey
from tests.support.processes import Cluster
from tests.support.waiting import PATIENCE_S, answered, until

SERVER = "embedding-parameter-server"
NUM_KILLS, NUM_THREADS = 10, 2


@dataclass
class Copies:
    """Two copies of two servers, with the rows of a bundle."""

    bundle: Path
    jobs: list[Cluster]

    def settings(self, **options: Any) -> RowServers:
        replicas = list(zip(*(job.addresses[SERVER] for job in self.jobs), strict=True))
        return RowServers(replicas, connect_timeout_s=PATIENCE_S, **options)

    def await_all(self) -> None:
        """Wait until each copy alone can be scored with."""
        for job in self.jobs:
            alone = RowServers([[one] for one in job.addresses[SERVER]], timeout_s=PATIENCE_S)

            def is_ready(alone: RowServers = alone) -> bool:
                try:
                    Predictor(self.bundle, row_servers=alone).close()
                except ServiceError:
                    return False
                return True

            until(is_ready, details=job.logs)


@pytest.fixture
def copies(tmp_path: Path, no_job: None) -> Iterator[Copies]:
    with make_ctx() as ctx:
        train(ctx, np.random.default_rng(0), 8)
        bundle = tmp_path / "net" / str(ctx.export(tmp_path / "net"))
    infer = {
        "embedding_checkpoint": str(bundle / "rows"),
        "follow_interval_sec": 0.05,
        "servers": ["unused:1"],
    }
    settings = {"common_config": {"job_type": "Infer", "infer_config": infer}}
    with ExitStack() as stack:
        jobs = [
            stack.enter_context(
                Cluster(bundle / "embedding_config.yml", settings, num_servers=2)
            )
            for _ in range(2)
        ]
        for job in jobs:
            for number in range(2):
                job.start_replica(SERVER, number)
        yield Copies(bundle, jobs)


class Asking:
    """Threads that score the same requests again and again, and compare each answer."""

    def __init__(self, predictor: Predictor, requests: list[Any], expected: list[Any]) -> None:
        self.num_answers, self.failures = 0, list[BaseException]()
        self._predictor, self._requests, self._expected = predictor, requests, expected
        self._is_done, self._lock = threading.Event(), threading.Lock()
        self._threads = [
            threading.Thread(target=self._ask, args=(seed,)) for seed in range(NUM_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def _ask(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        while not self._is_done.is_set():
            which = int(rng.integers(len(self._requests)))
            try:
                found = self._predictor(self._requests[which])["output"]
                np.testing.assert_array_equal(found, self._expected[which])
            except BaseException as error:
                self.failures.append(error)
                return
            with self._lock:
                self.num_answers += 1

    def await_more(self, count: int) -> None:
        wanted = self.num_answers + count
        until(lambda: self.num_answers >= wanted or self.failures)

    def end(self) -> None:
        self._is_done.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)
        if self.failures:
            raise self.failures[0]


@pytest.mark.slow
@pytest.mark.parametrize("cache_ttl_ms", [0.0, 200.0])
def test_killed_copies_change_no_bit_and_fail_no_request(
    copies: Copies, cache_ttl_ms: float
) -> None:
    rng = np.random.default_rng(1)
    requests = [arrays(rng, int(size)) for size in rng.integers(1, 30, 20)]
    here = Predictor(copies.bundle)
    expected = [here(one)["output"] for one in requests]
    here.close()
    copies.await_all()
    settings = copies.settings(cache_ttl_ms=cache_ttl_ms, timeout_s=PATIENCE_S)
    predictor = Predictor(copies.bundle, row_servers=settings)
    asking = Asking(predictor, requests, expected)
    try:
        for _ in range(NUM_KILLS // 2):
            # A copy of each server, at any moment.
            killed = [(copies.jobs[int(rng.integers(2))], number) for number in range(2)]
            for job, number in killed:
                asking.await_more(int(rng.integers(1, 100)))
                job.kill(f"{SERVER}-{number}")
            asking.await_more(50)
            for job, number in killed:
                job.start_replica(SERVER, number)
            until(
                lambda: predictor.stats()["copies_used"] == 4 or asking.failures,
                details=copies.jobs[0].logs,
            )
        assert not asking.failures
    finally:
        asking.end()
        stats = predictor.stats()
        predictor.close()
    # Each id had a row in each answer, as in those of this process.
    assert stats["failed_over"] >= 1
    assert bool(stats.get("cache_hits")) == bool(cache_ttl_ms)


@pytest.mark.slow
def test_a_copy_that_stands_still_costs_few_requests(
    copies: Copies, monkeypatch: Monkey
) -> None:
    # Calls of the one that stands still; others may be slow on a busy machine.
    lost: list[Any] = []
    end_overtaken = remote_rows._CopiesClient.end_overtaken

    def noted(client: Any, copy: Any) -> None:
        end_overtaken(client, copy)
        if copy.client.address == copies.jobs[0].addresses[SERVER][0]:
            lost.append(copy)

    monkeypatch.setattr(remote_rows._CopiesClient, "end_overtaken", noted)
    given = arrays(np.random.default_rng(2), 8)
    copies.await_all()
    predictor = Predictor(copies.bundle, row_servers=copies.settings(timeout_s=PATIENCE_S))
    until(lambda: predictor(given) and predictor.stats()["copies_used"] == 4)
    expected = predictor(given)["output"]
    frozen = copies.jobs[0].processes[f"{SERVER}-0"]
    os.kill(frozen.pid, signal.SIGSTOP)
    try:
        until(
            lambda: (
                np.array_equal(predictor(given)["output"], expected)
                and lost
                and not lost[-1].is_used
            )
        )
        num_lost = len(lost)
        for _ in range(50):
            assert np.array_equal(predictor(given)["output"], expected)
        # It is not asked any more.
        assert len(lost) <= num_lost + 1
    finally:
        os.kill(frozen.pid, signal.SIGCONT)
    until(lambda: predictor(given) and predictor.stats()["copies_used"] == 4)
    predictor.close()


@pytest.mark.slow
def test_a_bundle_of_another_checkpoint_is_refused(copies: Copies, tmp_path: Path) -> None:
    with make_ctx() as ctx:
        train(ctx, np.random.default_rng(5), 3)
        other = tmp_path / "other" / str(ctx.export(tmp_path / "other"))
    copies.await_all()
    with pytest.raises(ServiceBusy, match="expected rows of checkpoint"):
        answered(lambda: Predictor(other, row_servers=copies.settings(timeout_s=1.0)))
