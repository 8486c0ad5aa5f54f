"""The endpoint of a process that runs a script: open while held, and ready by contexts."""

from __future__ import annotations

import contextlib
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from persia import _context_stack
from persia._cluster import process_metrics


@pytest.fixture
def _with_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERSIA_METRICS_PORT", "0")


@contextlib.contextmanager
def held() -> Iterator[None]:
    process_metrics.hold()
    try:
        yield
    finally:
        process_metrics.release()


def readiness() -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"{process_metrics.url()}/readyz", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


class Context:
    problem = ""

    def metric_sources(self) -> list[object]:
        return []

    def why_not_ready(self) -> str:
        return self.problem

    def why_not_healthy(self) -> str:
        return ""


@pytest.mark.usefixtures("_with_port")
def test_the_endpoint_is_open_until_the_last_release() -> None:
    with held():
        url = process_metrics.url()
        with held():
            assert process_metrics.url() == url != ""
        assert process_metrics.url() == url
    assert process_metrics.url() == ""


@pytest.mark.usefixtures("_with_port")
def test_a_process_is_ready_when_all_its_contexts_are(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[object] = []
    monkeypatch.setattr(_context_stack, "entered", lambda: entered)
    with held():
        status, text = readiness()
        assert (status, "no context" in text) == (503, True)
        first, second = Context(), Context()
        entered += [first, second, object()]
        assert readiness()[0] == 200
        second.problem = "no stream"
        status, text = readiness()
        assert (status, "no stream" in text) == (503, True)


def test_embedded_mode_opens_no_port_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PERSIA_METRICS_PORT", raising=False)
    with held():
        assert process_metrics.url() == ""
