"""Requests that are joined, their errors, statistics and the log of slow ones."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from persia._serving import batcher
from persia._serving.batcher import InferJob
from persia._serving.request import DecodedRequest, InferOutcome
from persia._serving.service import InferenceService, ServiceSettings
from persia.errors import DataError, ServiceUnavailable
from tests.serving.oip.serving_models import EchoModel, FakeRepository
from tests.support.waiting import PATIENCE_S, until


class Asked:
    """One request and what came of it."""

    def __init__(self, service: InferenceService, values: Any, model: str = "echo") -> None:
        self.done = threading.Event()
        self.job = InferJob(
            lambda job: DecodedRequest({"x": np.asarray(values, np.float32)}),
            lambda outcome: outcome,
            lambda job: self.done.set(),
            time.monotonic() + PATIENCE_S,
            10,
            model,
        )
        service.submit(self.job)

    def outcome(self) -> InferOutcome:
        assert self.done.wait(PATIENCE_S)
        if self.job.error is not None:
            raise self.job.error
        found: InferOutcome = self.job.answer
        return found

    def values(self) -> Any:
        return self.outcome().outputs[0][1].tolist()


class Gate:
    """Holds the first call of a model until it is opened."""

    def __init__(self) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()

    def __call__(self, inputs: Any) -> None:
        self.entered.set()
        assert self.opened.wait(PATIENCE_S)


@pytest.fixture
def model() -> EchoModel:
    return EchoModel()


@pytest.fixture
def service(model: EchoModel) -> Iterator[InferenceService]:
    made = InferenceService(
        FakeRepository(echo=model, other=EchoModel()),
        ServiceSettings(num_threads=1, max_batch_size=8, slow_s=0.0),
    )
    yield made
    assert made.close(PATIENCE_S)


def ask_behind_a_busy_thread(
    service: InferenceService, model: EchoModel, values: list[Any]
) -> list[Asked]:
    gate = Gate()
    model.before = gate
    first = Asked(service, [[0.0]])
    assert gate.entered.wait(PATIENCE_S)
    others = [Asked(service, one) for one in values]
    gate.opened.set()
    assert first.values() == [[0.0]]
    return others


def test_what_waits_is_joined_up_to_the_batch_size(
    service: InferenceService, model: EchoModel
) -> None:
    values = [[[float(n)], [n + 0.5]] for n in range(6)]
    asked = ask_behind_a_busy_thread(service, model, values)
    assert [one.values() for one in asked] == values
    assert model.calls == [1, 8, 4]
    assert service.drain(PATIENCE_S)
    (found, _) = service.read_statistics()
    assert (found["inference_count"], found["execution_count"]) == (13, 3)
    assert [one["batch_size"] for one in found["batch_stats"]] == [1, 4, 8]


def test_a_model_whose_rows_depend_on_each_other_gets_each_request_alone(
    service: InferenceService, model: EchoModel
) -> None:
    model.is_batch_independent = False
    asked = ask_behind_a_busy_thread(service, model, [[[1.0]], [[2.0]]])
    assert [one.values() for one in asked] == [[[1.0]], [[2.0]]]
    assert model.calls == [1, 1, 1]


def test_an_error_of_one_harms_no_other(service: InferenceService, model: EchoModel) -> None:
    def refuse(inputs: Any) -> None:
        if (inputs["x"] < 0).any():
            raise DataError("expected positive numbers")

    asked = ask_then_refuse(service, model, refuse)
    assert asked[0].values() == [[1.0]]
    with pytest.raises(DataError, match="positive"):
        asked[1].values()
    assert asked[2].values() == [[2.0]]


def ask_then_refuse(service: InferenceService, model: EchoModel, refuse: Any) -> list[Asked]:
    gate = Gate()

    def before(inputs: Any) -> None:
        gate(inputs)
        refuse(inputs)

    model.before = before
    first = Asked(service, [[0.0]])
    assert gate.entered.wait(PATIENCE_S)
    others = [Asked(service, [[value]]) for value in (1.0, -1.0, 2.0)]
    gate.opened.set()
    first.outcome()
    return others


def test_one_that_cannot_be_compared_harms_no_other(
    service: InferenceService, model: EchoModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare = batcher.batch_shape

    def fail(request: DecodedRequest) -> Any:
        if request.inputs["x"].max() == 2.0:
            raise TypeError("unforeseen")
        return compare(request)

    monkeypatch.setattr("persia._serving.service.batch_shape", fail)
    asked = ask_behind_a_busy_thread(service, model, [[[1.0]], [[2.0]], [[3.0]]])
    assert asked[0].values() == [[1.0]]
    with pytest.raises(TypeError):
        asked[1].values()
    assert asked[2].values() == [[3.0]]
    assert service.drain(PATIENCE_S)


def test_a_caller_that_has_gone_costs_no_call(
    service: InferenceService, model: EchoModel
) -> None:
    gate = Gate()
    model.before = gate
    Asked(service, [[0.0]])
    assert gate.entered.wait(PATIENCE_S)
    gone = Asked(service, [[1.0]])
    gone.job.is_cancelled = True
    gate.opened.set()
    assert gone.done.wait(PATIENCE_S)
    assert model.calls == [1]


def test_what_is_neither_lookup_nor_forward_is_of_the_stages_around_them() -> None:
    class Timed(EchoModel):
        spent_ns = 3, 5

    service = InferenceService(FakeRepository(echo=Timed()), ServiceSettings())
    asked = Asked(service, [[1.0]])
    asked.outcome()
    times = asked.job.times
    assert (times[3] - times[2], times[4] - times[3]) == Timed.spent_ns
    assert times == sorted(times)
    assert service.close(PATIENCE_S)


def test_metrics_and_the_log_of_slow_requests(
    service: InferenceService, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        Asked(service, [[1.0]]).outcome()
        assert service.drain(PATIENCE_S)
        assert service.close(PATIENCE_S)
    assert "slow request '' of model echo version 1, 1 rows" in caplog.text
    names = {sample.name for sample in service.samples()}
    assert {"persia_serving_stage_seconds", "persia_serving_requests"} <= names
    assert not service.is_ready


def test_a_slow_model_leaves_a_thread_to_the_others() -> None:
    slow = EchoModel()
    gate = slow.before = Gate()
    service = InferenceService(
        FakeRepository(echo=slow, other=EchoModel()), ServiceSettings(num_threads=3)
    )
    held = [Asked(service, [[float(n)]]) for n in range(8)]
    assert gate.entered.wait(PATIENCE_S)
    assert Asked(service, [[9.0]], "other").values() == [[9.0]]
    assert not any(one.done.is_set() for one in held)
    gate.opened.set()
    assert [one.values() for one in held] == [[[float(n)]] for n in range(8)]
    assert service.drain(PATIENCE_S)
    # What waited for the model is joined, although a thread was idle.
    assert len(slow.calls) < 8
    (found, _) = service.read_statistics()
    stats = found["inference_stats"]
    parts = ("queue", "compute_input", "compute_infer", "compute_output")
    assert sum(stats[name]["ns"] for name in parts) == stats["success"]["ns"]
    assert all(stats[name]["ns"] >= 0 for name in parts)
    assert service.close(PATIENCE_S)


def test_the_only_model_has_every_thread() -> None:
    model = EchoModel()
    both = threading.Barrier(2)
    model.before = lambda inputs: both.wait(PATIENCE_S)
    service = InferenceService(FakeRepository(echo=model), ServiceSettings(num_threads=2))
    until(lambda: service._threads._num_idle == 2)  # one alone would join the requests
    asked = [Asked(service, [[float(n)]]) for n in range(2)]
    assert [one.values() for one in asked] == [[[0.0]], [[1.0]]]
    assert service.close(PATIENCE_S)


def test_jobs_that_wait_for_their_model_are_answered_at_the_end() -> None:
    slow = EchoModel(is_batch_independent=False)
    gate = slow.before = Gate()
    repository = FakeRepository(echo=slow, other=EchoModel())
    service = InferenceService(repository, ServiceSettings(num_threads=2))
    first = Asked(service, [[0.0]])
    assert gate.entered.wait(PATIENCE_S)  # two threads would take them in any order
    waiting = [Asked(service, [[float(n)]]) for n in (1, 2)]
    Asked(service, [[9.0]], "other").values()
    assert not service.close(0.01)
    gate.opened.set()
    assert first.values() == [[0.0]]
    for one in waiting:
        with pytest.raises(ServiceUnavailable):
            one.values()
