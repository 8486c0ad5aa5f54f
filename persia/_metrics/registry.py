"""Sources of samples, and the registry that reads them.

    components  --read at scrape time-->  MetricSource  -->  Metrics, of a process or context

Nothing is registered with the library's global registry, so that contexts of one process cannot
collide. Where a registry has two sources of one role and replica, as of two contexts of a
process, those after the first have the label ``context`` too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from persia._metrics.definitions import METRICS
from persia._metrics.timings import BOUNDS, Distribution
from persia.errors import InternalError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric as Family

# The library has moved its own constant between releases.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LES = (*(repr(bound) for bound in BOUNDS), "+Inf")


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

    ``with_process``: of memory, CPU time and open files of the process too.
    """

    def __init__(
        self, sources: Callable[[], Iterable[MetricSource]], *, with_process: bool = True
    ) -> None:
        self._sources = sources
        self._with_process = with_process

    @cached_property
    def registry(self) -> CollectorRegistry:
        """The ``prometheus_client`` registry, for a user's own server or gateway."""
        from prometheus_client import CollectorRegistry, ProcessCollector

        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        if self._with_process:
            ProcessCollector(registry=registry)
        return registry

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
        num_alike: Counter[tuple[str, int, str]] = Counter()
        for source in once.values():
            labels = {"role": source.role, "replica": str(source.replica)}
            key = source.role, source.replica, source.part
            num_alike[key] += 1
            if num_alike[key] > 1:
                labels["context"] = str(num_alike[key])
            for sample in source.read():
                yield labels, sample


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
