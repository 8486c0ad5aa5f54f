"""The report of a run: one HTML file, from its recorder, its batches and its servers.

``template.html.jinja`` has the page with its layout and script, which fetches nothing.
"""

from __future__ import annotations

import datetime
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from persia import env
from persia._core.ids import cardinality
from persia._metrics import format as texts
from persia._report.recorder import Points, Recorder
from persia.errors import ConfigError, ServiceError
from persia.version import __version__

if TYPE_CHECKING:
    from persia._rpc.messages import FeatureStats

_T = TypeVar("_T")

_REPORTED = "reported/"
# A loss of at least this many points is smoothed as well.
_MANY = 60
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


class Page(NamedTuple):
    """All that a report shows."""

    title: str
    facts: str  # one line below the title
    tiles: Sequence[tuple[str, str]]  # label and value
    warnings: Sequence[tuple[str, int, str]]  # what, how often, and why
    charts: Sequence[Chart]
    features: Sequence[FeatureRow]


def check_outputs(
    report: str | os.PathLike[str] | None,
    tensorboard: str | os.PathLike[str] | None,
    rank: int,
) -> None:
    """Raise a ConfigError now, and not after a run of days, if nothing can be written there."""
    if tensorboard is not None and find_spec("tensorboard") is None:
        raise ConfigError(
            "tensorboard=: expected the package tensorboard, which is not installed: "
            "pip install tensorboard"
        )
    if report is None or rank > 0:
        return
    folder = Path(report).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(f"report: cannot make the folder {folder}: {exc.strerror}") from exc
    if Path(report).is_dir():
        raise ConfigError(f"report: expected a file, got the folder {report}")
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"report: the folder {folder} cannot be written to")


def write(
    path: str | os.PathLike[str],
    recorder: Recorder,
    model: object,
    embedding_optimizer: object,
    dense_optimizer: object,
) -> None:
    """Write the report of a run so far; the file appears whole or not at all."""
    recorder.settle()
    title = f"Training report: {type(model).__name__}"
    optimizers = (
        f"{type(embedding_optimizer).__name__} for embeddings, "
        f"{type(dense_optimizer).__name__} for the dense net"
    )
    page = gather(title, optimizers, recorder)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        aside.write_text(render(page), encoding="utf-8")
        aside.replace(target)
    finally:
        aside.unlink(missing_ok=True)


def gather(title: str, optimizers: str, recorder: Recorder) -> Page:
    """Return what is known of a run now."""
    # Servers may be gone when a report is written: it has what the others say.
    servers = _unless_gone(recorder.worker.server_stats) or []
    features = _unless_gone(recorder.worker.feature_stats) or ()
    facts = (
        f"{datetime.datetime.now().astimezone():%Y-%m-%d %H:%M %Z}",
        f"PERSIA {__version__}",
        f"{env.get_mode()} mode",
        texts.count(recorder.world_size, "rank"),
        texts.count(len(servers), "parameter server"),
        optimizers,
    )
    return Page(
        title=title,
        facts=" \u00b7 ".join(facts),
        tiles=_tiles(recorder, servers),
        warnings=_warnings(recorder, servers, features),
        charts=_charts(recorder),
        features=_feature_rows(recorder, features),
    )


def _unless_gone(read: Callable[[], _T]) -> _T | None:
    try:
        return read()
    except ServiceError:
        return None


def _tiles(recorder: Recorder, servers: Sequence[Mapping[str, int]]) -> list[tuple[str, str]]:
    samples = recorder.tracker.totals()[0] * recorder.world_size
    tiles = [
        ("steps", f"{recorder.step:,}"),
        ("samples", short(samples)),
        ("time", str(datetime.timedelta(seconds=round(recorder.seconds)))),
        ("samples / s", short(samples / max(recorder.seconds, 1e-9))),
    ]
    losses = _points(recorder, "loss")
    if losses:
        tiles.append(("loss at the end", f"{losses[-1][1]:.4f}"))
    for name, points in _reported(recorder).items():
        tiles.append((f"{name}, last", f"{points[-1][1]:.4f}"))
    if servers:
        tiles.append(("rows held", short(sum(one["rows"] for one in servers))))
        tiles.append(("their memory", short(sum(one["bytes"] for one in servers), "B")))
    return tiles


def _points(recorder: Recorder, name: str, over_time: bool = False) -> Points:
    """Return a curve over steps or over seconds; an empty one if nothing was added."""
    curves = recorder.curves.get(name)
    return curves[over_time].points() if curves else []


def _reported(recorder: Recorder) -> dict[str, Points]:
    """Return what the script reported by name, over steps."""
    names = [name for name in list(recorder.curves) if name.startswith(_REPORTED)]
    found = {name.removeprefix(_REPORTED): _points(recorder, name) for name in names}
    return {name: points for name, points in found.items() if points}


# Title, unit, whether over time, and the recorded name of each line by its label.
_STALENESS = {"between lookup and update": "staleness", "updates that wait": "update_queue"}
_MEMORY = {"rows, of all servers": "embedding_bytes", "this process": "process_bytes"}
_GRADIENTS = {"embeddings": "gradient_norm_embeddings", "dense net": "gradient_norm_dense"}
_CHARTS: tuple[tuple[str, str, bool, dict[str, str]], ...] = (
    ("Throughput", "samples / s, all ranks", True, {"samples / s": "samples_per_second"}),
    ("Staleness", "batches", True, _STALENESS),
    ("Rows", "of all servers", True, {"rows": "rows"}),
    ("Memory", "B", True, _MEMORY),
    ("Gradients", "norm", False, _GRADIENTS),
    ("Embeddings", "norm of a vector, mean of features", False, {"norm": "embedding_norm"}),
)


def _charts(recorder: Recorder) -> list[Chart]:
    losses = _points(recorder, "loss")
    of_loss: tuple[ChartSeries, ...] = (ChartSeries("loss", losses),)
    if len(losses) >= _MANY:
        smoothed = ChartSeries("smoothed", _smoothed(losses))
        of_loss = (ChartSeries("as it is", losses, True), smoothed)
    charts = [Chart("Loss", "mean of 16 steps", "step", of_loss)]
    for name, points in _reported(recorder).items():
        if len(points) > 1:  # a single value is a tile, and no curve
            title = name.upper() if name in ("auc", "gauc") else name
            charts.append(Chart(title, "as reported", "step", (ChartSeries(name, points),)))
    for title, unit, over_time, lines in _CHARTS:
        across = "seconds since the start" if over_time else "step"
        series = tuple(
            ChartSeries(label, _points(recorder, name, over_time))
            for label, name in lines.items()
        )
        charts.append(Chart(title, unit, across, series, from_zero=True))
    return charts


def _smoothed(points: Points) -> Points:
    """Return a running mean of about the last twentieth of the points."""
    smooth: Points = []
    for number, (x, y) in enumerate(points, 1):
        weight = max(1 / number, min(20 / len(points), 1.0))
        smooth.append((x, smooth[-1][1] + weight * (y - smooth[-1][1]) if smooth else y))
    return smooth


def _feature_rows(recorder: Recorder, features: Sequence[FeatureStats]) -> list[FeatureRow]:
    return [
        FeatureRow(
            one.name,
            one.dim,
            cardinality.estimate(one.registers),
            one.num_ids,
            one.num_ids / one.num_samples,
            one.num_empty / one.num_samples,
            *recorder.feature_norms.get(one.name, (None, None)),
        )
        for one in features
        if one.num_samples
    ]


_OF_BATCHES = {
    "abandoned": ("batches without a backward", "They were handed out and not trained on."),
    "skipped": ("batches skipped", "A GradScaler found a gradient that was not finite."),
    "failed": ("batches lost", "Their update raised."),
    "incomplete": (
        "batches of incomplete rounds",
        "Other ranks had none at the end of a pass.",
    ),
    "missing": ("gradients without a row", "Their ids were not admitted, or evicted since."),
    "nan_samples": ("gradient rows not finite: {}", "They were left out of the update."),
    "nan_rows": ("summed gradients not finite: {}", "The row made no step."),
    "skipped_slots": ("batches without a gradient: {}", "The loss did not reach the feature."),
}
_OF_SERVERS = {
    "evicted": ("rows evicted", "Capacity or memory_limit was reached; their ids start over."),
    "expired": ("rows expired", "They were not used for the time that their policy sets."),
    "refused": ("ids not admitted", "The admission policy kept them out for now."),
    "repeated_updates": ("updates sent again", "An answer was lost; they were applied once."),
}


def _warnings(
    recorder: Recorder,
    servers: Sequence[Mapping[str, int]],
    features: Sequence[FeatureStats],
) -> list[tuple[str, int, str]]:
    of_batches = recorder.tracker.stats()
    of_worker = _unless_gone(recorder.worker.stats) or {}
    unseen = [one.name for one in features if not one.num_samples]
    found = []
    if "loss" in recorder.curves:
        not_finite = recorder.curves["loss"][0].num_not_finite
        found.append(("losses not finite", not_finite, "NaN or infinity."))
    for key, (what, why) in _OF_BATCHES.items():
        counts = of_batches[key]
        if isinstance(counts, int):
            found.append((what, counts, why))
        elif isinstance(counts, Mapping):  # by feature
            found += [(what.format(name), num, why) for name, num in sorted(counts.items())]
    found.append(("lookups that raised", recorder.tracker.totals()[1], "The log says why."))
    why = "They need more bits than feature_index_prefix_bit leaves, and may share rows."
    for name, num in sorted(of_worker.items()):
        if name.startswith("masked_ids."):
            found.append((f"ids masked: {name.removeprefix('masked_ids.')}", num, why))
    restarts = of_worker.get("server_restarts", 0)
    found.append(("parameter servers restarted", restarts, "What they did not save is gone."))
    for key, (what, why) in _OF_SERVERS.items():
        found.append((what, sum(one.get(key, 0) for one in servers), why))
    found.append(("readings missed", recorder.num_missed, "Servers did not answer in time."))
    if len(unseen) < len(features):  # where no batch had any slot, that is no news
        why = f"{', '.join(unseen)}: the model got no embeddings of them."
        found.append(("slots that no batch had", len(unseen), why))
    return [warning for warning in found if warning[1]]


# --- the page -------------------------------------------------------------------------------


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
