"""A registry over the sources that exist at each reading."""

from __future__ import annotations

import pytest

from persia._metrics.registry import Metrics, MetricSource, Sample
from persia._metrics.timings import Timing
from persia.errors import InternalError

ROWS = "persia_rows"


def source(value: float, of: object, name: str = ROWS) -> MetricSource:
    role = "embedding-parameter-server"
    return MetricSource(role, 0, "rows", of, lambda: [Sample(name, value)])


def test_a_component_that_two_contexts_name_is_read_once() -> None:
    one = object()
    metrics = Metrics(lambda: [source(3, one), source(3, one)], with_process=False)
    assert metrics.value(ROWS) == 3
    assert 'persia_rows{replica="0",role="embedding-parameter-server"} 3.0' in metrics.text()


def test_a_name_beyond_the_catalogue_is_a_defect() -> None:
    metrics = Metrics(lambda: [source(1, object(), name="rows")], with_process=False)
    with pytest.raises(InternalError, match="metric rows is not in the catalogue"):
        metrics.text()


def test_durations_become_a_histogram() -> None:
    timing = Timing()
    for seconds in (0.0001, 0.5, 1e9):
        timing.add(seconds)
    name, of = "forward_client_time_cost_sec", object()
    read = MetricSource("trainer", 0, "t", of, lambda: [Sample(name, timing.read())])
    metrics = Metrics(lambda: [read], with_process=False)
    assert metrics.value(f"{name}_count") == 3
    assert metrics.value(f"{name}_sum") == 0.0001 + 0.5 + 1e9
    assert metrics.value(f"{name}_bucket", le="+Inf") == 3
