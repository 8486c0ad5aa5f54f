"""The HTML page of a report: of one run, or of several whose curves lie over each other.

``template.html.jinja`` has the page with its layout and script, which fetches nothing.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from persia._metrics import format as texts
from persia._report.run import Chart, ChartSeries, Mark, Run, embedded
from persia.errors import ConfigError

# As many as there are colours.
MOST_RUNS = 8
_MOST_TICKS = 5
_NOT_SET = "-"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table with a column for each run."""

    name: str
    values: tuple[str, ...]

    @property
    def differs(self) -> bool:
        return len(set(self.values)) > 1


def render(runs: Mapping[str, Run]) -> str:
    """Return the page of these runs, by the names that it shows.

    Raises:
        ConfigError: If there are more runs than a chart can show.
    """
    import jinja2  # not at the top: only a run that is reported needs it
    import markupsafe

    if len(runs) > MOST_RUNS:
        raise ConfigError(f"report: expected at most {MOST_RUNS} runs, got {len(runs)}")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["short"] = short
    template = Path(__file__).with_name("template.html.jinja").read_text("utf-8")
    one = next(iter(runs.values())) if len(runs) == 1 else None
    parameters = rows_of({name: run.parameters for name, run in runs.items()})
    return environment.from_string(template).render(
        title=one.title if one else f"{len(runs)} training runs",
        runs=runs,
        one=one,
        # What differs first: that is what a page of several runs is read for.
        parameters=sorted(parameters, key=lambda row: not row.differs),
        tiles=rows_of({name: dict(run.tiles) for name, run in runs.items()}),
        plots=plots(runs),
        data=markupsafe.Markup(embedded(one)) if one else "",
    )


def rows_of(columns: Mapping[str, Mapping[str, str]]) -> list[Row]:
    """Return a line for each name of any run, in the order of the first that has it."""
    names = dict.fromkeys(name for column in columns.values() for name in column)
    return [
        Row(name, tuple(column.get(name, _NOT_SET) for column in columns.values()))
        for name in names
    ]


def plots(runs: Mapping[str, Run]) -> list[dict[str, Any]]:
    """Return the charts to draw: those with one title and both axes alike are one chart.

    Of one run each line has a colour. Of several each run has one, and its second line in a
    chart is dashed.
    """
    found: dict[tuple[str, str, bool], list[tuple[int, Chart]]] = {}
    for number, run in enumerate(runs.values()):
        for chart in run.charts:
            axes = (chart.title, chart.unit, chart.over_time)
            found.setdefault(axes, []).append((number, chart))
    names, drawn, is_alone = list(runs), [], len(runs) == 1
    for charts in found.values():
        lines: list[tuple[str, str, ChartSeries]] = []
        marks: list[tuple[int, Mark]] = []
        for number, chart in charts:
            dashes = itertools.cycle(range(4))
            for place, one in enumerate(chart.series):
                dash = 0 if one.is_faint else next(dashes)
                style = f"s{place % MOST_RUNS}" if is_alone else f"s{number} d{dash}"
                name = one.name if is_alone else f"{names[number]}: {one.name}"
                lines.append((name, style, one))
            marks += [(number, mark) for mark in list(runs.values())[number].marks]
        drawn.append(plot(charts[0][1], lines, marks))
    return drawn


def plot(
    chart: Chart,
    named: Sequence[tuple[str, str, ChartSeries]],
    marks: Sequence[tuple[int, Mark]] = (),
) -> dict[str, Any]:
    """Return the lines of a chart that have points, its marks, and the ticks of both axes."""
    lines = [
        {
            "name": name,
            "style": style + (" faint" if one.is_faint else ""),
            "points": one.points,
        }
        for name, style, one in named
        if one.points
    ]
    if not lines:
        return {"chart": chart, "lines": lines}
    xs, ys = zip(*(point for _, _, one in named for point in one.points), strict=True)
    low = 0.0 if chart.from_zero else min(ys)
    high = max(*ys, low)
    if chart.from_zero and high == low:
        high = 1.0
    # A single x has no range to divide.
    first, last = min(xs), max(xs)
    if last == first:
        last += max(1.0, abs(last))
    at = [(mark.seconds if chart.over_time else mark.step, run, mark) for run, mark in marks]
    return {
        "chart": chart,
        "lines": lines,
        "data": [[line["name"], line["points"]] for line in lines],
        "xs": (first, last),
        "across": [x for x in ticks(first, last) if first <= x <= last * (1 + 1e-9)],
        "up": ticks(low, high, chart.unit),
        # A point is the middle of what it is the mean of: a mark may be behind the last one.
        "marks": [(min(x, last), run, mark) for x, run, mark in at if x >= first],
    }


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
