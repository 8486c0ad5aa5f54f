"""What a server counts of each model and version: for its statistics, and for /metrics."""

from __future__ import annotations

import re
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

from persia._metrics.registry import Sample
from persia._metrics.timings import BOUNDS, Distribution

# Stages of a request, in their order. Models that do not say how long they looked rows up have
# all of it in ``forward``.
STAGES = ("queue", "decode", "lookup", "forward", "encode")
# Statistics of Triton, and the stages that they are.
_TRITON_STAGES = {
    "queue": ("queue",),
    "compute_input": ("decode",),
    "compute_infer": ("lookup", "forward"),
    "compute_output": ("encode",),
}
_WHOLE = len(STAGES)  # place of the whole request behind its stages
_BOUNDS_NS = tuple(round(bound * 1e9) for bound in BOUNDS)


class VersionStatistics:
    """Counts of one model and version; any thread may add to them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all below
        # By stage, and of the whole request: durations by bucket, and all nanoseconds.
        self._durations = [[0] * (len(BOUNDS) + 1) for _ in range(_WHOLE + 1)]
        self._nanoseconds = [0] * (_WHOLE + 1)
        self._failed_ns = 0
        self.outcomes = {"answered": 0, "failed": 0}
        self.num_rows = 0
        self.num_executions = 0
        self.last_ms = 0
        # By the number of rows: executions, and nanoseconds of the model.
        self._batches: dict[int, list[int]] = {}

    def add_execution(self, num_rows: int, nanoseconds: int) -> None:
        """Count one call of the model."""
        with self._lock:
            self.num_executions += 1
            self.num_rows += num_rows
            # Sizes are what callers choose: by powers of two beyond 64, so that they stay few.
            size = num_rows if num_rows <= 64 else 1 << (num_rows - 1).bit_length()
            one = self._batches.setdefault(size, [0, 0])
            one[0] += 1
            one[1] += nanoseconds

    def add_answer(self, times: Sequence[int]) -> None:
        """Count an answered request by its nanoseconds at arrival and after each stage."""
        spent = [end - start for start, end in pairwise(times)]
        spent.append(times[-1] - times[0])
        now_ms = time.time_ns() // 1_000_000
        # The caller's answer may wait for this thread: one lock, and little else.
        with self._lock:
            self.outcomes["answered"] += 1
            self.last_ms = now_ms
            for place, nanoseconds in enumerate(spent):
                self._durations[place][bisect_left(_BOUNDS_NS, nanoseconds)] += 1
                self._nanoseconds[place] += nanoseconds

    def add_failure(self, nanoseconds: int) -> None:
        """Count a request that raised."""
        with self._lock:
            self.outcomes["failed"] += 1
            self._failed_ns += nanoseconds

    def distributions(self) -> dict[str, Distribution]:
        """Return the seconds of each stage, and as ``request`` those of whole requests."""
        with self._lock:
            return {
                name: Distribution(tuple(counts), nanoseconds / 1e9)
                for name, counts, nanoseconds in zip(
                    (*STAGES, "request"), self._durations, self._nanoseconds, strict=True
                )
            }

    def read(self) -> dict[str, Any]:
        """Return the statistics as the protocol's extension names them."""
        with self._lock:
            answered, failed = self.outcomes["answered"], self.outcomes["failed"]
            spent = dict(zip(STAGES, self._nanoseconds, strict=False))
            counts = {
                name: {"count": answered, "ns": sum(spent[stage] for stage in stages)}
                for name, stages in _TRITON_STAGES.items()
            }
            counts["success"] = {"count": answered, "ns": self._nanoseconds[_WHOLE]}
            counts["fail"] = {"count": failed, "ns": self._failed_ns}
            return {
                "last_inference": self.last_ms,
                "inference_count": self.num_rows,
                "execution_count": self.num_executions,
                "inference_stats": counts,
                "batch_stats": [
                    {"batch_size": size, "compute_infer": {"count": one[0], "ns": one[1]}}
                    for size, one in sorted(self._batches.items())
                ],
            }


class ServingStatistics:
    """All versions that have been asked, and what was refused before a version was known."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards both
        self._versions: dict[tuple[str, str], VersionStatistics] = {}
        self._refused: dict[str, int] = {}

    def of(self, model: str, version: str) -> VersionStatistics:
        """Return the counts of a version that exists."""
        found = self._versions.get((model, version))
        if found is None:
            with self._lock:
                found = self._versions.setdefault((model, version), VersionStatistics())
        return found

    def add_refused(self, reason: str) -> None:
        """Count a request that no version was asked for."""
        with self._lock:
            self._refused[reason] = self._refused.get(reason, 0) + 1

    def read(self, model: str, version: str) -> dict[str, Any]:
        """Return the statistics of a version, zeros if it was never asked."""
        found = self._versions.get((model, version)) or VersionStatistics()
        return {"name": model, "version": version, **found.read()}

    def samples(self) -> Iterator[Sample]:
        """Yield the samples of /metrics."""
        with self._lock:
            versions = dict(self._versions)
            refused = dict(self._refused)
        for (model, version), found in versions.items():
            labels = {"model": model, "version": version}
            durations = found.distributions()
            whole = durations.pop("request")
            for stage, read in durations.items():
                yield Sample("persia_serving_stage_seconds", read, {**labels, "stage": stage})
            yield Sample("persia_serving_request_seconds", whole, labels)
            yield Sample("persia_serving_rows", found.num_rows, labels)
            yield Sample("persia_serving_executions", found.num_executions, labels)
            for outcome, count in found.outcomes.items():
                yield Sample("persia_serving_requests", count, {**labels, "outcome": outcome})
        for reason, count in refused.items():
            yield Sample("persia_serving_refused", count, {"reason": reason})


class StateLine(Protocol):
    """A line of the repository's index."""

    @property
    def model(self) -> str: ...
    @property
    def version(self) -> int | None: ...
    @property
    def state(self) -> str: ...
    @property
    def reason(self) -> str: ...


def version_samples(lines: Sequence[StateLine]) -> Iterator[Sample]:
    """Yield which versions answer, and why others do not."""
    for line in lines:
        if line.version is not None:
            labels = {"model": line.model, "version": str(line.version)}
            yield Sample("persia_serving_version_ready", line.state == "READY", labels)
    why = Counter((line.model, _kind_of(line.reason)) for line in lines if line.reason)
    for (model, reason), count in why.items():
        labels = {"model": model, "reason": reason}
        yield Sample("persia_serving_not_loaded", count, labels)


def _kind_of(reason: str) -> str:
    """Return one of few words: the error's class, if it was one."""
    word = re.sub(r"^version \d+: ", "", reason).partition(":")[0]
    if word.isidentifier():
        return word
    return "timeout" if "takes longer than" in reason else "other"


# Counts of rows that follow a log, and what the metric calls them.
_PACKETS = {
    "applied_packets": "applied",
    "gaps": "gaps",
    "resyncs": "resyncs",
    "damaged_loads": "damaged",
}


def row_samples(labels: Mapping[str, str], stats: Mapping[str, Any]) -> Iterator[Sample]:
    """Yield what a model says of its rows: ``Servable.stats``; what is unknown is left out."""
    for name in ("rows", "bytes"):
        if name in stats:
            yield Sample(f"persia_serving_held_{name}", stats[name], labels)
    for name, what in _PACKETS.items():
        if name in stats:
            yield Sample("persia_serving_packets", stats[name], {**labels, "what": what})
    for name in ("hits", "misses", "flushes"):
        if f"cache_{name}" in stats:
            count = stats[f"cache_{name}"]
            yield Sample("persia_serving_cache", count, {**labels, "what": name})
    for server, seconds in stats.get("row_ages", {}).items():
        more = {**labels, "server": str(server)}
        yield Sample("persia_serving_row_age_seconds", seconds, more)
    for feature, count in stats.get("missing", {}).items():
        yield Sample("persia_serving_missing_ids", count, {**labels, "feature": feature})
