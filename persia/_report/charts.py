"""Line charts as SVG text: axes with units, grid, legend, and points that a pointer can read.

Colours are CSS classes, so that one picture serves light and dark; the page that holds charts
has the rules, and the few lines of script that follow the pointer.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 12, 40
_MOST_TICKS = 5

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class ChartSeries:
    """One line of a chart."""

    name: str
    points: Points
    is_faint: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart; ``unit`` is of its values, "B" for bytes."""

    title: str
    unit: str
    across: str  # what the other axis is, with its unit
    series: tuple[ChartSeries, ...]
    from_zero: bool = False


def short(value: float, unit: str = "") -> str:
    """Return a number as people read it: 1.24 M, 3.1 GiB, 0.0021."""
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
    return (
        f"{value:.3g} {names[power]}".strip()
        if abs(value) < 1000
        else f"{value:.0f} {names[power]}"
    )


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


def draw(chart: Chart) -> str:
    """Return a chart as ``<figure>``."""
    lines = [line for line in chart.series if line.points]
    title = escape(chart.title)
    if not lines:
        return (
            f'<figure class="chart"><figcaption>{title}</figcaption>'
            '<p class="none">nothing was recorded</p></figure>'
        )
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    low = 0.0 if chart.from_zero else min(ys)
    up = ticks(low, max(*ys, low), chart.unit)
    right = ticks(min(xs), max(xs)) if max(xs) > min(xs) else [min(xs), min(xs) + 1]
    first, last = (min(xs), max(xs)) if max(xs) > min(xs) else (right[0], right[-1])
    across = WIDTH - _LEFT - _RIGHT
    down = HEIGHT - _TOP - _BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            _LEFT + (x - first) / (last - first) * across,
            _TOP + (1 - (y - up[0]) / (up[-1] - up[0])) * down,
        )

    parts = []
    for y in up:
        at = place(first, y)[1]
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" '
            f'y1="{at:.1f}" y2="{at:.1f}"/>'
        )
        parts.append(
            f'<text class="tick end" x="{_LEFT - 7}" y="{at + 4:.1f}">'
            f"{short(y, chart.unit)}</text>"
        )
    for x in right:
        if not first <= x <= last * (1 + 1e-9):
            continue
        at = place(x, up[0])[0]
        parts.append(
            f'<text class="tick mid" x="{at:.1f}" y="{HEIGHT - _BOTTOM + 17}">{short(x)}</text>'
        )
    parts.append(
        f'<text class="axis mid" x="{_LEFT + across / 2:.0f}" y="{HEIGHT - 5}">'
        f"{escape(chart.across)}</text>"
    )
    told = []
    for number, line in enumerate(lines):
        placed = [place(x, y) for x, y in line.points]
        name = f"s{number}{' faint' if line.is_faint else ''}"
        if len(placed) == 1:
            x, y = placed[0]
            parts.append(f'<circle class="dot {name}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>')
        else:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
            parts.append(f'<polyline class="line {name}" points="{path}"/>')
            if len(placed) <= 12:
                parts += [
                    f'<circle class="dot {name}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>'
                    for x, y in placed
                ]
        told.append(
            {
                "name": line.name,
                "at": [
                    [round(x, 1), f"{short(given[0])}: {short(given[1], chart.unit)}"]
                    for (x, _), given in zip(placed, line.points, strict=True)
                ],
            }
        )
    parts.append(f'<line class="pointer" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}" x1="0" x2="0"/>')
    unit = {"B": "", "": ""}.get(chart.unit, f" <small>{escape(chart.unit)}</small>")
    legend = "".join(
        f'<span class="key"><i class="s{number}{" faint" if line.is_faint else ""}"></i>'
        f"{escape(line.name)}</span>"
        for number, line in enumerate(lines)
    )
    data = escape(json.dumps(told), quote=True)
    return (
        f'<figure class="chart"><figcaption>{title}{unit}</figcaption>'
        f'<div class="legend">{legend if len(lines) > 1 else ""}<output></output></div>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}" '
        f'data-points="{data}">{"".join(parts)}</svg></figure>'
    )
