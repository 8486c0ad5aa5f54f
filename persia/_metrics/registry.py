"""Sources of samples, and the registry that reads them.

    components  --read at scrape time-->  MetricSource  -->  Metrics, of a process or context

Nothing is registered with the library's global registry, so that contexts of one process cannot
collide. Where a registry has two sources of one role and replica, as of two contexts of a
process, those after the first have the label ``context`` too, and keep it when the first ends.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from persia._metrics.definitions import METRICS
from persia._metrics.timings import Distribution
from persia.errors import InternalError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric as Family

# The library has moved its own constant between releases.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Sample(NamedTuple):
    """A value of a metric of the catalogue."""

    name: str
    value: float | Distribution
    labels: Mapping[str, str] = {}  # never modified


@dataclass(frozen=True, slots=True)
class MetricSource:
    """One part of a component of a role, such as its calls or its rows.

    Several contexts may name one component: each part of the same ``of`` is read once.
    """

    role: str
    replica: int
    part: str
    of: object
    read: Callable[[], Iterable[Sample]]


class Metrics:
    """A registry over the sources that exist at each reading.

    Args:
        sources: Returns the sources that exist now.
        with_process: Whether memory, CPU time and open files of the process are read too.
    """

    def __init__(
        self, sources: Callable[[], Iterable[MetricSource]], *, with_process: bool = True
    ) -> None:
        self._sources = sources
        self._with_process = with_process
        self._registry: CollectorRegistry | None = None
        self._lock = threading.Lock()  # guards the next
        # Of the last reading: each source's number among those of its role, replica and part.
        self._places: dict[tuple[str, int, str, int], int] = {}

    @property
    def registry(self) -> CollectorRegistry:
        """The ``prometheus_client`` registry, for a user's own server or gateway."""
        if self._registry is None:
            from prometheus_client import CollectorRegistry, ProcessCollector

            registry = CollectorRegistry(auto_describe=False)
            registry.register(self)
            if self._with_process:
                ProcessCollector(registry=registry)
            self._registry = registry
        return self._registry

    def text(self) -> str:
        """Return all metrics in Prometheus' text format."""
        from prometheus_client import generate_latest

        return generate_latest(self.registry).decode()

    def value(self, name: str, /, **labels: str) -> float:
        """Return the sum of the samples of a name that have these labels.

        Of a histogram that is ``<name>_count`` or ``<name>_sum``, of a counter
        ``<name>_total``.
        """
        return sum(
            sample.value
            for family in self.registry.collect()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def collect(self) -> Iterator[Family]:
        """Read every source; called by the registry."""
        from prometheus_client.core import Metric as Family

        families: dict[str, Family] = {}
        for labels, sample in self._samples():
            if sample.name not in families:
                metric = METRICS.get(sample.name)
                if metric is None:
                    raise InternalError(f"metric {sample.name} is not in the catalogue")
                families[metric.name] = Family(metric.name, metric.help, metric.kind)
            _add(families[sample.name], {**labels, **sample.labels}, sample.value)
        yield from families.values()

    def _samples(self) -> Iterator[tuple[dict[str, str], Sample]]:
        once: dict[tuple[int, str], MetricSource] = {}
        for source in self._sources():
            once.setdefault((id(source.of), source.part), source)
        for source, place in self._placed(list(once.values())):
            labels = {"role": source.role, "replica": str(source.replica)}
            if place > 1:
                labels["context"] = str(place)
            for sample in source.read():
                yield labels, sample

    def _placed(self, sources: list[MetricSource]) -> list[tuple[MetricSource, int]]:
        """Give each source the number that it had, or the first free one."""
        keys = [(one.role, one.replica, one.part, id(one.of)) for one in sources]
        with self._lock:
            places = {key: self._places[key] for key in keys if key in self._places}
            for key in keys:
                taken = {place for other, place in places.items() if other[:3] == key[:3]}
                if key not in places:
                    places[key] = next(n for n in itertools.count(1) if n not in taken)
            self._places = {**places}
        return [(one, places[key]) for one, key in zip(sources, keys, strict=True)]


@cache
def _les(bounds: tuple[float, ...]) -> tuple[str, ...]:
    """Return the labels of buckets."""
    return (*(repr(bound) for bound in bounds), "+Inf")


def _add(family: Family, labels: dict[str, str], value: float | Distribution) -> None:
    if not isinstance(value, Distribution):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        family.add_sample(name, labels, value)
        return
    count = 0
    for le, number in zip(_les(value.bounds), value.counts, strict=True):
        count += number
        family.add_sample(f"{family.name}_bucket", {**labels, "le": le}, count)
    family.add_sample(f"{family.name}_sum", labels, value.seconds)
    family.add_sample(f"{family.name}_count", labels, count)
