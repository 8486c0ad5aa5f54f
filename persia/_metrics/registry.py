"""What is told to whoever asks: sources, and the registry that reads them.

    components     counts and timings that they keep anyway
       | read at scrape time
    Source         one role's samples, with its labels
       |
    Metrics        one registry: a process's, or a context's of its own

Nothing is registered with the library's global registry, so that several contexts of one
process cannot collide: each has a registry. Where one registry has two sources of one role and
replica, as of two contexts of a process, those after the first have the label ``context`` too,
and keep it when the first has gone.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from persia._metrics.definitions import METRICS
from persia._metrics.timings import BOUNDS, Distribution
from persia.errors import InternalError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric as Family

# A constant, as the library's is at a place that it may change.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LES = (*(repr(bound) for bound in BOUNDS), "+Inf")


class Sample(NamedTuple):
    """A value of a metric of the catalogue."""

    name: str
    value: float | Distribution
    labels: Mapping[str, str] = {}  # nobody changes it


@dataclass(frozen=True, slots=True)
class Source:
    """One component of one role, such as its calls or its rows.

    Sources with the same ``of`` tell of one component, as several contexts may: each part of
    it is read once.
    """

    role: str
    replica: int
    part: str
    of: object
    read: Callable[[], Iterable[Sample]]


Sources = Callable[[], Iterable[Source]]


class Metrics:
    """A registry over sources that are found anew at each reading.

    Args:
        sources: Returns what there is to be read now.
        with_process: Whether to tell of the process, too: memory, CPU time, open files.
    """

    def __init__(self, sources: Sources, *, with_process: bool = True) -> None:
        self._sources = sources
        self._with_process = with_process
        self._registry: CollectorRegistry | None = None
        self._lock = threading.Lock()  # guards the next
        # Of what was read last: which of the sources of one role, replica and part it is.
        self._places: dict[tuple[str, int, str, int], int] = {}

    @property
    def registry(self) -> CollectorRegistry:
        """The ``prometheus_client`` registry, for a server or a gateway of one's own."""
        if self._registry is None:
            from prometheus_client import CollectorRegistry, ProcessCollector

            registry = CollectorRegistry(auto_describe=False)
            registry.register(self)
            if self._with_process:
                ProcessCollector(registry=registry)
            self._registry = registry
        return self._registry

    def text(self) -> str:
        """Return all metrics as Prometheus reads them."""
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
            family = families.get(sample.name)
            if family is None:
                metric = METRICS.get(sample.name)
                if metric is None:
                    raise InternalError(f"metric {sample.name} is not in the catalogue")
                family = Family(metric.name, metric.help, metric.kind)
                families[sample.name] = family
            _add(family, {**labels, **sample.labels}, sample.value)
        yield from families.values()

    def _samples(self) -> Iterator[tuple[dict[str, str], Sample]]:
        once: dict[tuple[int, str], Source] = {}
        for source in self._sources():
            once.setdefault((id(source.of), source.part), source)
        for source, place in self._placed(list(once.values())):
            labels = {"role": source.role, "replica": str(source.replica)}
            if place > 1:
                labels["context"] = str(place)
            for sample in source.read():
                yield labels, sample

    def _placed(self, sources: list[Source]) -> list[tuple[Source, int]]:
        """Give each source the place that it had, or the first one that is free."""
        keys = [(one.role, one.replica, one.part, id(one.of)) for one in sources]
        with self._lock:
            places = {key: self._places[key] for key in keys if key in self._places}
            for key in keys:
                taken = {place for other, place in places.items() if other[:3] == key[:3]}
                if key not in places:
                    places[key] = next(n for n in itertools.count(1) if n not in taken)
            self._places = {**places}
        return [(one, places[key]) for one, key in zip(sources, keys, strict=True)]


def _add(family: Family, labels: dict[str, str], value: float | Distribution) -> None:
    if not isinstance(value, Distribution):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        family.add_sample(name, labels, value)
        return
    count = 0
    for le, number in zip(_LES, value.counts, strict=True):
        count += number
        family.add_sample(f"{family.name}_bucket", {**labels, "le": le}, count)
    family.add_sample(f"{family.name}_sum", labels, value.seconds)
    family.add_sample(f"{family.name}_count", labels, count)
