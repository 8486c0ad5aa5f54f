"""A run's report as one HTML file, which fetches nothing.

``template.html.jinja`` has the page with its style and script; all text in it is escaped. Here
is what it is filled with, and the geometry of its line charts.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WIDTH, HEIGHT = 560, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 12, 40
_MOST_TICKS = 5
_MOST_DOTS = 12  # of a line: more of them would hide it


@dataclass(frozen=True, slots=True)
class ChartSeries:
    """One line of a chart."""

    name: str
    points: Sequence[tuple[float, float]]
    is_faint: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """A line chart; ``unit`` is of its values, "B" for bytes."""

    title: str
    unit: str
    across: str  # label of the x axis, with its unit
    series: tuple[ChartSeries, ...]
    from_zero: bool = False


@dataclass(frozen=True, slots=True)
class FeatureRow:
    """One line of the table of features."""

    name: str
    dim: int
    distinct: float  # estimated
    num_ids: int
    ids_a_sample: float
    missing: float  # share of samples without an id
    vector_norm: float  # NaN where no step had it
    gradient_norm: float


@dataclass(frozen=True, slots=True)
class RunWarning:
    """A count that the reader should know of."""

    what: str
    num: int
    why: str


@dataclass(frozen=True, slots=True)
class Page:
    """All that a report shows."""

    title: str
    facts: str  # one line below the title
    tiles: Sequence[tuple[str, str]]  # label and value
    warnings: Sequence[RunWarning]
    charts: Sequence[Chart]
    features: Sequence[FeatureRow]
    note: str  # below the features


def render(page: Page) -> str:
    """Return the file's text."""
    import jinja2  # not at the top: only a run that is reported needs it

    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {"short": short, "percent": percent}
    template = Path(__file__).with_name("template.html.jinja").read_text("utf-8")
    return environment.from_string(template).render(
        page=page,
        plots=[plot(chart) for chart in page.charts],
        features=sorted(page.features, key=lambda row: -row.distinct),
        most=max([1.0, *(row.distinct for row in page.features)]),
    )


def plot(chart: Chart) -> dict[str, Any]:
    """Return where the parts of a chart are, in the units of its SVG."""
    found: dict[str, Any] = {"chart": chart, "width": WIDTH, "height": HEIGHT, "lines": []}
    lines = [line for line in chart.series if line.points]
    if not lines:
        return found
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    low = 0.0 if chart.from_zero else min(ys)
    up = ticks(low, max(*ys, low), chart.unit)
    # A single x has no range to divide.
    has_range = max(xs) > min(xs)
    first, last = min(xs), max(xs) if has_range else min(xs) + 1
    across = ticks(first, last) if has_range else [first, last]
    right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM

    def at_x(x: float) -> float:
        return _LEFT + (x - first) / (last - first) * (right - _LEFT)

    def at_y(y: float) -> float:
        return bottom - (y - up[0]) / (up[-1] - up[0]) * (bottom - _TOP)

    def read(x: float, y: float) -> list[Any]:
        return [round(at_x(x), 1), f"{short(x)}: {short(y, chart.unit)}"]

    for number, line in enumerate(lines):
        placed = [(at_x(x), at_y(y)) for x, y in line.points]
        found["lines"].append(
            {
                "name": line.name,
                "style": f"s{number}{' faint' if line.is_faint else ''}",
                "path": " ".join(f"{x:.1f},{y:.1f}" for x, y in placed),
                "dots": placed if len(placed) <= _MOST_DOTS else [],
            }
        )
    return found | {
        "left": _LEFT,
        "right": right,
        "top": _TOP,
        "bottom": bottom,
        "up": [(at_y(y), short(y, chart.unit)) for y in up],
        "across": [(at_x(x), short(x)) for x in across if first <= x <= last * (1 + 1e-9)],
        # What the page's script shows at the pointer.
        "data": json.dumps(
            [{"name": line.name, "at": [read(*xy) for xy in line.points]} for line in lines]
        ),
    }


def short(value: float, unit: str = "") -> str:
    """Return a number with three digits: 1.24 M, 3.1 GiB, 0.0021."""
    if not math.isfinite(value):
        return "\u2013"  # a dash
    if unit == "B":
        return _scaled(value, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))
    if abs(value) >= 10_000:
        return _scaled(value, 1000, ("", "k", "M", "G", "T"))
    if value == int(value):
        return f"{int(value):,}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _scaled(value: float, base: int, names: Sequence[str]) -> str:
    power = 0
    while abs(value) >= base and power < len(names) - 1:
        value /= base
        power += 1
    digits = f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return f"{digits} {names[power]}".strip()


def percent(share: float) -> str:
    """Return a share from 0 to 1 in percent."""
    if share and share < 0.001:
        return "< 0.1 %"
    return f"{100 * share:.1f} %" if share else "0"


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
