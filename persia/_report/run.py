"""A run as its report shows it: what a page is made of, and what a file of it holds.

A page of one run has the run's data in itself, so a report in either form can be shown again,
beside others: ``persia-launcher report``.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from persia.config.document import Expect, InvalidValue, Listed, Model, Named, integer, validate
from persia.errors import ConfigError

# So far from the largest that a range of them is finite, too.
_Finite = Annotated[float, Expect("a finite number", allow_inf_nan=False, ge=-1e300, le=1e300)]
_Count = Annotated[int, integer()]
_Point = Listed[tuple[_Finite, _Finite]]
Points = list[tuple[float, float]]

# What surrounds the data in a page; nothing in the data can end it, see ``embedded``.
BEGIN, END = '<script type="application/json" id="persia-run">', "</script>"


@dataclass(frozen=True, slots=True)
class ChartSeries(Model):
    """One line of a chart."""

    name: str
    points: Listed[list[_Point]]
    is_faint: bool = False


@dataclass(frozen=True, slots=True)
class Chart(Model):
    """A line chart over steps, or over seconds; ``unit`` is of its values, "B" for bytes."""

    title: str
    unit: str
    series: Listed[tuple[ChartSeries, ...]]
    over_time: bool = False
    from_zero: bool = False


@dataclass(frozen=True, slots=True)
class Mark(Model):
    """A moment of the run that its charts show."""

    kind: Literal["end of a pass", "checkpoint"]
    step: _Count
    seconds: _Finite  # since the start


@dataclass(frozen=True, slots=True)
class FeatureRow(Model):
    """One line of the table of features."""

    name: str
    dim: _Count
    distinct: _Finite  # estimated
    num_ids: _Count
    ids_a_sample: _Finite
    missing: _Finite  # share of samples without an id
    vector_norm: _Finite | None  # None where no step had it
    gradient_norm: _Finite | None


@dataclass(frozen=True, slots=True)
class Run(Model):
    """All that a report says of one run."""

    title: str
    facts: str  # one line below the title
    parameters: Named[str] = field(default_factory=dict)  # what it was run with
    # Label and value.
    tiles: Listed[list[Listed[tuple[str, str]]]] = field(default_factory=list)
    # What, how often, and why.
    warnings: Listed[list[Listed[tuple[str, _Count, str]]]] = field(default_factory=list)
    charts: Listed[list[Chart]] = field(default_factory=list)
    marks: Listed[list[Mark]] = field(default_factory=list)
    features: Listed[list[FeatureRow]] = field(default_factory=list)
    version: Literal[1] = 1  # of this form


def as_json(run: Run) -> str:
    """Return the text of a file; numbers that are not finite are null in it."""
    return json.dumps(_plain(dataclasses.asdict(run)), allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def embedded(run: Run) -> str:
    """Return what a page holds of the run; ``<`` is escaped, which would begin a tag."""
    return BEGIN + as_json(run).replace("<", "\\u003c") + END


def save(target: Path, text: str) -> None:
    """Write a file that appears whole or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        aside.write_text(text, encoding="utf-8")
        aside.replace(target)
    finally:
        aside.unlink(missing_ok=True)


def load(path: str | os.PathLike[str]) -> Run:
    """Read a report, of either form.

    Raises:
        ConfigError: If the file cannot be read, or is not the report of one run.
    """
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        why = (exc.strerror if isinstance(exc, OSError) else None) or exc
        raise ConfigError(f"report: cannot read {path}: {why}") from exc
    in_page = re.search(re.escape(BEGIN) + "(.*?)" + re.escape(END), text, re.DOTALL)
    if not in_page and text.startswith("<!doctype html>"):
        raise ConfigError(
            f"report: {path} has no run's data: a page of several runs or of an old "
            "version has none; give the report of each run"
        )
    try:
        found = json.loads(in_page[1] if in_page else text)
        json.dumps(found, ensure_ascii=False).encode()  # no half of a surrogate pair
        return validate(Run, found)
    except (ValueError, RecursionError) as exc:
        says = exc.at("") if isinstance(exc, InvalidValue) else str(exc)
        raise ConfigError(
            "report: expected a file that TrainCtx(report='run.json') or "
            f"TrainCtx(report='run.html') wrote for one run, got {path}: {says}"
        ) from exc
