"""Counts of a version, as the protocol's statistics and as metrics."""

from __future__ import annotations

from collections.abc import Sequence

from persia._metrics.definitions import METRICS, SERVING
from persia._metrics.registry import Sample
from persia._metrics.timings import Distribution
from persia._rows.live_rows import LiveRows
from persia._rows.row_source import RowSource
from persia._serving.serving_metrics import (
    STAGES,
    ServingStatistics,
    row_samples,
    version_samples,
)
from persia._serving.versions import VersionState
from persia.config import EmbeddingSchema


def test_counts_become_statistics_and_samples() -> None:
    statistics = ServingStatistics()
    one = statistics.of("clicks", "3")
    assert statistics.of("clicks", "3") is one
    one.add_execution(2, 40)
    one.add_execution(100, 60)
    one.add_answer([0, 10, 30, 45, 70, 100])
    one.add_failure(5)
    statistics.add_refused("busy")
    found = statistics.read("clicks", "3")
    assert (found["name"], found["version"]) == ("clicks", "3")
    assert (found["inference_count"], found["execution_count"]) == (102, 2)
    assert found["inference_stats"] == {
        "queue": {"count": 1, "ns": 10},
        "compute_input": {"count": 1, "ns": 20},
        "compute_infer": {"count": 1, "ns": 40},
        "compute_output": {"count": 1, "ns": 30},
        "success": {"count": 1, "ns": 100},
        "fail": {"count": 1, "ns": 5},
    }
    assert [one["batch_size"] for one in found["batch_stats"]] == [2, 128]
    assert found["last_inference"] > 0
    samples = list(statistics.samples())
    check(samples)
    stages = {sample.labels.get("stage") for sample in samples}
    assert set(STAGES) <= stages


def check(samples: Sequence[Sample]) -> None:
    """Hold samples to the catalogue."""
    for sample in samples:
        metric = METRICS[sample.name]
        assert metric.roles == (SERVING,)
        assert set(metric.labels) == set(sample.labels)
        assert isinstance(sample.value, Distribution) == (metric.kind == "histogram")


def test_versions_that_are_not_loaded_are_counted_by_why() -> None:
    lines = [
        VersionState("clicks", 3, "READY", "", True),
        VersionState("clicks", 4, "UNAVAILABLE", "CheckpointError: rows: torn", False),
        VersionState("clicks", 5, "UNAVAILABLE", "loading takes longer than 2 s", False),
        VersionState("other", None, "UNAVAILABLE", "version 7: OSError: full", False),
        VersionState("third", None, "UNAVAILABLE", "it has no version", False),
    ]
    samples = list(version_samples(lines))
    check(samples)
    ready = {s.labels["version"]: s.value for s in samples if "version" in s.labels}
    assert ready == {"3": 1, "4": 0, "5": 0}
    why = {tuple(s.labels.values()): s.value for s in samples if "reason" in s.labels}
    assert why == {
        ("clicks", "CheckpointError"): 1,
        ("clicks", "timeout"): 1,
        ("other", "OSError"): 1,
        ("third", "other"): 1,
    }


def test_what_a_model_says_of_its_rows() -> None:
    rows = LiveRows(
        RowSource(change_log="unused"),
        EmbeddingSchema.load({"slots_config": {"user": {"dim": 4}}}),
    ).stats()
    stats = {**rows, "rows": 7, "bytes": 80, "applied_packets": 3, "gaps": 1}
    more = {"cache_hits": 5, "cache_misses": 2, "row_ages": {0: 0.5}, "missing": {"user": 4}}
    samples = list(row_samples({"model": "clicks", "version": "3"}, {**stats, **more}))
    check(samples)
    values = {(s.name, *[*s.labels.values()][2:]): s.value for s in samples}
    assert values["persia_serving_held_rows",] == 7
    assert values["persia_serving_packets", "applied"] == 3
    assert values["persia_serving_packets", "gaps"] == 1
    assert values["persia_serving_packets", "damaged"] == 0
    assert values["persia_serving_cache", "hits"] == 5
    assert values["persia_serving_row_age_seconds", "0"] == 0.5
    assert values["persia_serving_missing_ids", "user"] == 4
    assert len(samples) == 10


def test_a_version_that_was_never_asked_has_zeros() -> None:
    found = ServingStatistics().read("clicks", "1")
    assert found["inference_count"] == 0
    assert found["inference_stats"]["success"] == {"count": 0, "ns": 0}
