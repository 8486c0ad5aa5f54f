"""Spans of requests, by a stand-in of the OpenTelemetry API."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from persia._serving import tracing
from persia._serving.batcher import InferJob
from persia._serving.request import DecodedRequest

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Span:
    def __init__(self, **given: Any) -> None:
        self.given, self.events, self.failures = given, [], []  # type: ignore[var-annotated]
        self.is_ended = False

    def add_event(self, name: str, timestamp: int) -> None:
        self.events.append((name, timestamp))

    def record_exception(self, error: BaseException) -> None:
        self.failures.append(error)

    def set_status(self, status: object) -> None:
        self.failures.append(status)

    def end(self) -> None:
        self.is_ended = True


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Span]]:
    found: list[Span] = []

    def start_span(name: str, **given: Any) -> Span:
        found.append(Span(name=name, **given))
        return found[-1]

    trace: Any = ModuleType("opentelemetry.trace")
    trace.get_tracer = lambda name: SimpleNamespace(start_span=start_span)
    trace.SpanKind = SimpleNamespace(SERVER="server")
    trace.StatusCode = SimpleNamespace(ERROR="error")
    trace.Status = lambda code: code
    w3c: Any = ModuleType("opentelemetry.trace.propagation.tracecontext")
    w3c.TraceContextTextMapPropagator = lambda: SimpleNamespace(extract=dict)
    for module in (trace, w3c):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, "opentelemetry", ModuleType("opentelemetry"))
    monkeypatch.setitem(
        sys.modules, "opentelemetry.trace.propagation", ModuleType("propagation")
    )
    tracing._tracer.cache_clear()
    yield found
    tracing._tracer.cache_clear()


def job(traceparent: str) -> InferJob:
    made = InferJob(
        lambda job: DecodedRequest({}),
        lambda outcome: outcome,
        lambda job: None,
        time.monotonic() + 1,
        0,
        "clicks",
        traceparent=traceparent,
    )
    made.times[1:] = [made.times[0] + 1, made.times[0] + 2, 0, 0, 0]
    return made


def test_a_span_is_a_child_of_the_callers(spans: list[Span]) -> None:
    tracing.record_span(job(""))
    assert not spans
    failed = job(PARENT)
    failed.error = ValueError("wrong")
    tracing.record_span(failed)
    (span,) = spans
    assert span.given["context"] == {"traceparent": PARENT}
    assert span.given["attributes"]["persia.model"] == "clicks"
    assert [name for name, _ in span.events] == ["started", "decoded"]
    assert span.events[0][1] - span.given["start_time"] == 1
    assert span.failures == [failed.error, "error"]
    assert span.is_ended


def test_without_the_api_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", None)
    tracing._tracer.cache_clear()
    tracing.record_span(job(PARENT))
    tracing._tracer.cache_clear()
