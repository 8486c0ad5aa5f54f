"""Readings of processes' metrics, and rates between two of them.

/metrics, ctx.metrics()  --text-->  Reading, one per role and replica
two readings of a process  -->  Delta: values now, and rates in between
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from persia._metrics.definitions import EVERY, TRAINER
from persia.errors import DataError

_Samples = dict[str, list[tuple[Mapping[str, str], float]]]


@dataclass(frozen=True, slots=True)
class Reading:
    """The samples of one role and replica."""

    role: str
    replica: int
    at: float  # time.monotonic()
    samples: _Samples

    def get(self, name: str, /, **labels: str) -> float | None:
        """Return the sum of the samples of a name that have these labels; None if none has."""
        samples = self.samples.get(name, ())
        found = [value for of, value in samples if labels.items() <= of.items()]
        return sum(found) if found else None

    def first(self, name: str) -> float | None:
        """Return the first of the samples of a name; None if there is none."""
        return next((value for _, value in self.samples.get(name, ())), None)

    def by(self, name: str, label: str) -> dict[str, float]:
        """Return the samples of a name by one of their labels; the first of each."""
        found: dict[str, float] = {}
        for labels, value in self.samples.get(name, ()):
            found.setdefault(labels.get(label, ""), value)
        return found

    @property
    def run(self) -> str:
        """Run of the process; "" if unknown."""
        return next(iter(self.by("persia_info", "run")), "")


def read(text: str) -> list[Reading]:
    """Parse Prometheus' text; samples of the process are with the first role.

    Raises:
        DataError: If it is not the text of a process of PERSIA.
    """
    from prometheus_client.parser import text_string_to_metric_families

    at = time.monotonic()
    found: dict[tuple[str, int], _Samples] = {}
    own: _Samples = {}
    # Buckets are most of the text, and no reading needs them.
    kept = "\n".join(line for line in text.splitlines() if "_bucket{" not in line)
    try:
        for family in text_string_to_metric_families(f"{kept}\n"):
            for name, labels, value, *_ in family.samples:
                samples = own
                if "role" in labels:
                    samples = found.setdefault((labels["role"], int(labels["replica"])), {})
                samples.setdefault(name, []).append((labels, value))
    except (ValueError, KeyError) as exc:
        raise DataError(f"expected the metrics of a process of PERSIA: {exc}") from exc
    if not found or not {role for role, _ in found} <= set(EVERY):
        raise DataError("expected the metrics of a process of PERSIA, found others, or none")
    # An embedded trainer holds servers as well: it comes first.
    order = sorted(found, key=lambda which: (which[0] != TRAINER, which))
    found[order[0]].update(own)
    return [Reading(role, replica, at, found[role, replica]) for role, replica in order]


class Delta:
    """One process between two readings; rates are None where there is but one."""

    def __init__(self, before: Reading | None, now: Reading) -> None:
        self.now = now
        self._before = before
        self.seconds = 0.0 if before is None else now.at - before.at

    def delta(self, name: str, /, **labels: str) -> float | None:
        """Return how much a counter grew; all of it if the process is another one."""
        now = self.now.get(name, **labels)
        if now is None or self._before is None:
            return None
        before = self._before.get(name, **labels) or 0.0
        return now - before if now >= before else now

    def rate(self, name: str, /, **labels: str) -> float | None:
        """Return how much a counter grew in a second."""
        grown = self.delta(name, **labels)
        return None if grown is None or self.seconds <= 0 else grown / self.seconds

    def share(self, name: str, /, **labels: str) -> float | None:
        """Return the part of the time that a histogram of seconds grew by, at most 1."""
        rate = self.rate(f"{name}_sum", **labels)
        return None if rate is None else min(1.0, rate)

    def mean(self, name: str, /, **labels: str) -> float | None:
        """Return the mean of what a histogram got in between."""
        total, num = self.delta(f"{name}_sum", **labels), self.delta(f"{name}_count", **labels)
        return total / num if total is not None and num else None

    def cpu(self) -> float | None:
        """Return how many processors the process used; None if that was not read before."""
        name = "process_cpu_seconds_total"
        known = self._before is not None and name in self._before.samples
        return self.rate(name) if known else None

    def miss_rate(self) -> float | None:
        """Return which part of the ids that a parameter server looked up had no row."""
        missed = self.delta("index_miss_count_total")
        looked_up = self.delta("persia_looked_up_ids_total")
        return missed / looked_up if missed is not None and looked_up else None
