"""A run's report as one HTML file, which fetches nothing.

``template.html.jinja`` has the page with its layout and script; all text in it is escaped. Here
is what it is filled with.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from persia._metrics import format as texts

_MOST_TICKS = 5


class ChartSeries(NamedTuple):
    """One line of a chart."""

    name: str
    points: Sequence[tuple[float, float]]
    is_faint: bool = False


class Chart(NamedTuple):
    """A line chart; ``unit`` is of its values, "B" for bytes."""

    title: str
    unit: str
    across: str  # label of the x axis, with its unit
    series: tuple[ChartSeries, ...]
    from_zero: bool = False


class FeatureRow(NamedTuple):
    """One line of the table of features."""

    name: str
    dim: int
    distinct: float  # estimated
    num_ids: int
    ids_a_sample: float
    missing: float  # share of samples without an id
    vector_norm: float | None  # None where no step had it
    gradient_norm: float | None


@dataclass(frozen=True, slots=True)
class Page:
    """All that a report shows."""

    title: str
    facts: str  # one line below the title
    tiles: Sequence[tuple[str, str]]  # label and value
    warnings: Sequence[tuple[str, int, str]]  # what, how often, and why
    charts: Sequence[Chart]
    features: Sequence[FeatureRow]


def render(page: Page) -> str:
    """Return the file's text."""
    import jinja2  # not at the top: only a run that is reported needs it

    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["short"] = short
    template = Path(__file__).with_name("template.html.jinja").read_text("utf-8")
    return environment.from_string(template).render(
        page=page, plots=[plot(chart) for chart in page.charts]
    )


def plot(chart: Chart) -> dict[str, Any]:
    """Return the lines of a chart that have points, and the ticks of both axes."""
    lines = [line for line in chart.series if line.points]
    if not lines:
        return {"chart": chart, "lines": lines}
    xs, ys = zip(*(point for line in lines for point in line.points), strict=True)
    low = 0.0 if chart.from_zero else min(ys)
    # A single x has no range to divide.
    first, last = min(xs), max(xs) if max(xs) > min(xs) else min(xs) + 1
    across = [x for x in ticks(first, last) if first <= x <= last * (1 + 1e-9)]
    up = ticks(low, max(*ys, low), chart.unit)
    return {"chart": chart, "lines": lines, "xs": (first, last), "across": across, "up": up}


def short(value: float | None, unit: str = "") -> str:
    """Return a number with a few digits: 1.2M, 3.1 GiB, 0.0021."""
    if unit == "B":
        return texts.byte_size(value)
    is_large = value is not None and abs(value) >= 10_000
    return texts.short(value) if is_large else texts.plain(value)


def ticks(low: float, high: float, unit: str = "") -> list[float]:
    """Return round numbers that span a range; of bytes, round in powers of two."""
    if unit == "B":
        power = 1024.0 ** max(0, math.floor(math.log(max(high, 1), 1024)))
        return [tick * power for tick in ticks(low / power, high / power)]
    if high <= low:
        low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
    rough = max((high - low) / _MOST_TICKS, sys.float_info.min)
    ten = 10.0 ** math.floor(math.log10(rough))
    step = next(ten * by for by in (1, 2, 2.5, 5, 10) if ten * by >= rough * 0.999)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, max(last, first + 1) + 1)]
