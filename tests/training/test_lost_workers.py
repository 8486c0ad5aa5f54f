"""Embedding-workers that die one after the other while one batch is looked up or updated."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from persia._rpc import deadlines
from persia._rpc.deadlines import Tries
from persia._rpc.messages import BatchGradients
from persia._training.backward import BackwardPipeline
from persia._training.lookups import Item, Lookups
from persia.errors import PersiaError, ServiceUnavailable, UnknownRef

GONE: list[PersiaError] = [UnknownRef("it was started anew"), ServiceUnavailable("it is gone")]


class Dying:
    """Workers that fail so many calls, each call at another ref, before one answers."""

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
    book: Any = None
    engine = BackwardPipeline(
        workers, book, client=1, num_workers=1, capacity=1, device=torch.device("cpu")
    )
    ticket: Any = SimpleNamespace(ref=0, origin=workers)
    return engine._update(ticket, BatchGradients(0, (1, 7), ()))


def look_up(workers: Any) -> Any:
    nothing: Any = None
    lookups = Lookups(workers, nothing, True, lambda: None)
    return lookups._ask(Item(nothing, ref=0, origin=workers), True)


@pytest.fixture
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "_FIRST_PAUSE_S", 0.001)


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


def test_the_second_try_is_at_once() -> None:
    assert Tries(0.05).another()
    tries = Tries(0.05)
    tries.another()
    assert not tries.another()
