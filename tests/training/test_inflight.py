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
from persia._training.inflight import InFlightBatch, InFlightTracker
from persia.errors import PersiaError, ServiceUnavailable, UnknownRef

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


ANY_ORDER: Any = None  # a call that fails has no outputs to arrange


def look_up(workers: Any) -> Any:
    lookups = Lookups(workers, InFlightTracker(workers), True, lambda: None, ANY_ORDER)
    ticket = InFlightBatch(0, register_again=workers.register_again)
    return lookups._ask(ticket, True, time.perf_counter())


@pytest.mark.parametrize(
    ("what", "method", "last_calls"),
    [
        # Where its ids are new it is looked up first, and that may fail as well.
        (update, "update", [("lookup", 5), ("update", 5)]),
        (look_up, "lookup", [("lookup", 4), ("lookup", 5)]),
    ],
)
def test_a_call_survives_as_many_deaths_as_there_is_time_for(
    what: Any, method: str, last_calls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inflight, "Retry", partial(Retry, first_s=0.001))
    workers = Dying(5)
    assert what(workers) == method
    assert workers.num_registered == 5
    assert workers.calls[-2:] == last_calls


@pytest.mark.parametrize("what", [update, look_up])
def test_no_time_is_left_for_another_try(what: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERSIA_RPC_TIMEOUT", "0.2")
    workers = Dying(1000)
    with pytest.raises((UnknownRef, ServiceUnavailable)):
        what(workers)
    assert 2 <= workers.num_registered < 10


def test_a_batch_that_is_given_up_meanwhile_is_not_registered_again() -> None:
    workers: Any = Dying(2)

    def register_and_give_up(why: Exception) -> int:
        ticket.register_again = None
        return int(workers.register_again(why))

    ticket = InFlightBatch(0, register_again=register_and_give_up)
    lookups = Lookups(workers, InFlightTracker(workers), True, lambda: None, ANY_ORDER)
    found: Any = lookups._ask(ticket, True, time.perf_counter())
    assert found == "lookup"


def test_sums_of_a_raw_feature_are_of_f32_whatever_torch_makes_by_default() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        gradient, index = torch.ones(3, 2, dtype=torch.float32), torch.tensor([1, 0, 1])
        summed = inflight._sum_per_row(gradient, index, 2)
    finally:
        torch.set_default_dtype(before)
    assert summed.dtype == torch.float32
    assert summed.tolist() == [[1, 1], [2, 2]]
