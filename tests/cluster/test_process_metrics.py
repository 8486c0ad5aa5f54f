"""Metrics of contexts, in embedded mode too; the endpoint of a process that runs a script."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest

from persia import _context_stack, env
from persia._cluster import process_metrics
from tests.metrics.job import fetch, series
from tests.support.contexts import SIZE, a_batch, train, trained


def readiness() -> tuple[int, str]:
    return fetch(f"{process_metrics.url()}/readyz")


def context(problems: list[str]) -> object:
    return SimpleNamespace(
        metric_sources=list, why_not_ready=lambda: "".join(problems), why_not_healthy=str
    )


def test_a_process_is_ready_when_all_its_contexts_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERSIA_METRICS_PORT", "0")
    entered: list[object] = []
    problems: list[str] = []
    monkeypatch.setattr(_context_stack, "entered", lambda: entered)
    process_metrics.hold()
    with contextlib.ExitStack() as stack:
        stack.callback(process_metrics.release)
        status, text = readiness()
        assert (status, "no context" in text) == (503, True)
        entered += [context([]), context(problems), object()]
        assert readiness()[0] == 200
        problems.append("no stream")
        status, text = readiness()
        assert (status, "no stream" in text) == (503, True)


# --- of contexts -----------------------------------------------------------------------------


def test_w39_w52_two_contexts_of_a_process_do_not_collide() -> None:
    """The original's context was one per process, and a metric's name entered once."""
    with trained() as one, trained() as other:
        train(one, 1)
        loss = train(other, 3)
        for ctx, count in ((one, 1), (other, 3)):
            metrics = ctx.metrics()
            assert metrics.value("persia_trained_samples_total") == count * SIZE
            assert metrics.value("persia_rows") == count * SIZE
            assert metrics.value("persia_batches_total", outcome="trained") == count
        assert other.metrics().value("persia_loss") == pytest.approx(loss)
        assert series(one.metrics().text())
    assert one.metrics().value("persia_trained_samples_total") == SIZE


def test_embedded_mode_has_a_port_if_one_is_asked_for() -> None:
    with trained():
        assert process_metrics.url() == ""

    def samples() -> dict[str | None, float]:
        found = series(fetch(f"{url}/metrics")[1])
        name = "persia_trained_samples_total"
        return {dict(of).get("context"): x for (each, of), x in found.items() if each == name}

    with env.changed(PERSIA_METRICS_PORT=0):
        with contextlib.ExitStack() as first:
            train(first.enter_context(trained()), 1)
            url = process_metrics.url()
            with trained() as other:
                train(other, 2)
                assert readiness() == (200, "ok\n")
                assert samples() == {None: SIZE, "2": 2 * SIZE}
                # Each keeps its label, else its counters would seem to go on from another's.
                first.close()
                assert samples() == {"2": 2 * SIZE}
                with trained() as third:
                    train(third, 3)
                    assert samples() == {None: 3 * SIZE, "2": 2 * SIZE}
                assert process_metrics.url() == url != ""
        assert process_metrics.url() == ""
        with pytest.raises(OSError, match="refused"):
            fetch(f"{url}/metrics")


def test_servers_of_embedded_mode_tell_apart() -> None:
    with trained(embedded_config={"num_servers": 2}) as ctx:
        train(ctx, 4)
        metrics = ctx.metrics()
        rows = [metrics.value("persia_rows", replica=str(number)) for number in range(2)]
        assert sum(rows) == 4 * SIZE
        assert min(rows) > 0
        assert metrics.value("staleness", role="nn-worker") == 0
        assert metrics.value("staleness", role="embedding-worker") == 0


def test_w25_staleness_is_measured_and_not_counted() -> None:
    """Lookups minus updates drifted, and wrapped, with every failure."""
    with trained() as ctx:
        ids = np.arange(SIZE, dtype=np.uint64)
        batch = ctx.get_embedding_from_data(a_batch(ids))
        metrics = ctx.metrics()
        assert metrics.value("staleness", role="nn-worker") == 1
        assert metrics.value("staleness", role="embedding-worker") == 1
        assert metrics.value("persia_worker_buffer_bytes") > 8 * SIZE
        del batch  # without a backward
        train(ctx, 1)
        assert metrics.value("staleness", role="nn-worker") == 0
        assert metrics.value("staleness", role="embedding-worker") == 0
        assert metrics.value("persia_batches_total", outcome="abandoned") == 1


def test_w68_nothing_is_nan_before_there_is_anything() -> None:
    """Ratios of nothing were NaN."""
    with trained() as ctx:
        found = series(ctx.metrics().text())
        assert not any(value != value for value in found.values())
        assert "index_miss_ratio" not in {name for name, _ in found}
