"""The life of one batch: permits, and embedding-workers that die one after the other."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest
import torch

from persia._rpc.deadlines import Retry
from persia._rpc.messages import BatchGradients
from persia._training import inflight
from persia._training.backward import BackwardPipeline
from persia._training.forward import Lookups
from persia._training.inflight import InFlightBatch, InFlightTracker, StalenessLimiter
from persia._training.queues import Closed
from persia.errors import PersiaError, ServiceUnavailable, UnknownRef

from .test_queues import Runs

GONE: list[PersiaError] = [UnknownRef("it was restarted"), ServiceUnavailable("it is gone")]


class Dying:
    """Workers that fail a number of calls, each call at another ref, before one answers."""

    def __init__(self, num_failures: int) -> None:
        self.left = num_failures
        self.calls: list[tuple[str, int]] = []
        self.num_registered = 0

    def _answer(self, method: str, ref: int) -> str:
        self.calls.append((method, ref))
        if self.left:
            self.left -= 1
            raise GONE[self.left % 2]
        return method

    def lookup(self, ref: int, is_training: bool) -> str:
        return self._answer("lookup", ref)

    def update(self, gradients: BatchGradients) -> str:
        return self._answer("update", gradients.ref)

    def register_again(self, why: Exception) -> int:
        self.num_registered += 1
        return self.num_registered


def update(workers: Any) -> Any:
    engine = BackwardPipeline(
        workers,
        InFlightTracker(workers),
        client=1,
        num_workers=1,
        capacity=1,
        device=torch.device("cpu"),
    )
    ticket = InFlightBatch(0, 0, 7, register_again=workers.register_again)
    return engine._update(ticket, BatchGradients(0, (1, 7), ()))


def look_up(workers: Any) -> Any:
    lookups = Lookups(workers, InFlightTracker(workers), True, lambda: None)
    ticket = InFlightBatch(0, register_again=workers.register_again)
    return lookups._ask(ticket, True, time.perf_counter())


@pytest.fixture
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inflight, "Retry", partial(Retry, first_s=0.001))


@pytest.mark.usefixtures("_short_pauses")
def test_an_update_survives_as_many_deaths_as_there_is_time_for() -> None:
    workers = Dying(5)
    assert update(workers) == "update"
    assert workers.num_registered == 5
    # Where its ids are new it is looked up first, and that may fail as well.
    assert workers.calls[-2:] == [("lookup", 5), ("update", 5)]


@pytest.mark.usefixtures("_short_pauses")
def test_a_lookup_survives_as_many_deaths_as_there_is_time_for() -> None:
    workers = Dying(5)
    assert look_up(workers) == "lookup"
    assert workers.calls == [("lookup", ref) for ref in range(6)]


@pytest.mark.parametrize("what", [update, look_up])
def test_no_time_is_left_for_another_try(what: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERSIA_RPC_TIMEOUT", "0.2")
    workers = Dying(1000)
    with pytest.raises((UnknownRef, ServiceUnavailable)):
        what(workers)
    assert 2 <= workers.num_registered < 10


def test_limiter_gives_permits_up_to_its_bound_and_wakes_on_return_and_close() -> None:
    limiter = StalenessLimiter(2, on_demand=False)
    limiter.acquire(True)
    limiter.acquire(True)
    assert limiter.is_exhausted()
    limiter.acquire(False)  # a batch without gradients needs none
    waiting = Runs(lambda: limiter.acquire(True))
    limiter.return_permit()
    assert waiting.end().error is None
    waiting = Runs(lambda: limiter.acquire(True))
    limiter.close()
    assert isinstance(waiting.end().error, Closed)


def test_limiter_on_demand_stays_staleness_behind_the_user() -> None:
    limiter = StalenessLimiter(1, on_demand=True)
    waiting = Runs(lambda: limiter.acquire(True))
    assert waiting.thread.is_alive()
    limiter.request()
    assert waiting.end().error is None
    limiter.return_permit()
    waiting = Runs(lambda: limiter.acquire(True))  # returned, but not requested yet
    limiter.close()
    assert isinstance(waiting.end().error, Closed)
