"""The report of a run: one file, from its recorder, its batches and its servers."""

from __future__ import annotations

import datetime
import math
import os
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from persia import env
from persia._core.ids import cardinality
from persia._metrics import format as texts
from persia._report.page import render, short
from persia._report.recorder import Recorder
from persia._report.run import Chart, ChartSeries, FeatureRow, Points, Run, as_json, save
from persia.errors import ConfigError, ServiceError
from persia.version import __version__

if TYPE_CHECKING:
    from persia._rpc.messages import FeatureStats

_T = TypeVar("_T")

_REPORTED = "reported/"
# A loss of at least this many points is smoothed as well.
_MANY = 60


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
    for name, given in (("report", report), ("tensorboard", tensorboard)):
        if given is None:
            continue
        if not isinstance(given, str | os.PathLike) or not os.fspath(given):
            raise ConfigError(f"{name}: expected a path, got {given!r:.80}")
        if rank == 0:
            _check_writable(name, Path(given), is_folder=name == "tensorboard")


def _check_writable(name: str, path: Path, *, is_folder: bool) -> None:
    folder = path if is_folder else path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(f"{name}: cannot make the folder {folder}: {exc.strerror}") from exc
    if path.is_dir() and not is_folder:
        raise ConfigError(f"{name}: expected a file, got the folder {path}")
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"{name}: the folder {folder} cannot be written to")


def write(path: str | os.PathLike[str], recorder: Recorder, model: object) -> None:
    """Write the report of a run so far; the file appears whole or not at all.

    A name that ends in ``.json`` gets the data alone, any other a page.
    """
    recorder.settle()
    target = Path(path)
    run = gather(f"Training report: {type(model).__name__}", recorder)
    save(target, as_json(run) if target.suffix == ".json" else render({target.stem: run}))


def gather(title: str, recorder: Recorder) -> Run:
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
    )
    return Run(
        title=title,
        facts=" \u00b7 ".join(facts),
        parameters={"batch size": str(recorder.batch_size), **recorder.parameters},
        tiles=_tiles(recorder, servers),
        warnings=_warnings(recorder, servers, features),
        charts=_charts(recorder),
        marks=recorder.marks,
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
    if "loss" in recorder.curves:
        tiles.append(("loss at the end", f"{_end(recorder, 'loss'):.4f}"))
    for name, key in _reported(recorder).items():
        tiles.append((f"{name}, last", f"{_end(recorder, key):.4f}"))
    missed = recorder.tracker.missed.read()
    if missed.num:
        mean = missed.seconds / missed.num
        tiles.append(("updates missed by a lookup, mean", f"{mean:.2f}"))
        waits = recorder.tracker.timings["get_train_batch_time_cost_more_than_1ms_sec"].read()
        share = waits.seconds / max(recorder.seconds, 1e-9)
        tiles.append(("time that the loop waited for batches", texts.percent(share)))
    counts = _unless_gone(recorder.worker.stats) or {}
    if num := counts.get("compensated_updates", 0):
        took_ms = counts["compensation_us"] / num / 1000
        tiles.append(("delay compensation, of an update", f"{took_ms:.2f} ms"))
    if servers:
        tiles.append(("rows held", short(sum(one["rows"] for one in servers))))
        tiles.append(("their memory", short(sum(one["bytes"] for one in servers), "B")))
    return tiles


def _points(recorder: Recorder, name: str, over_time: bool = False) -> Points:
    """Return a curve over steps or over seconds; an empty one if nothing was added."""
    curves = recorder.curves.get(name)
    return curves[over_time].points() if curves else []


def _end(recorder: Recorder, name: str) -> float:
    """Return the last point over steps; NaN or infinity, which no point is, if it ended so."""
    last = recorder.curves[name][0].last
    return _points(recorder, name)[-1][1] if math.isfinite(last) else last


def _reported(recorder: Recorder) -> dict[str, str]:
    """Return the curves of what the script reported, by its names."""
    names = [name for name in list(recorder.curves) if name.startswith(_REPORTED)]
    return {name.removeprefix(_REPORTED): name for name in names}


# Title, unit, whether over time, and the recorded name of each line by its label.
_STALENESS = {
    "between lookup and update": "staleness",
    "updates that wait": "update_queue",
    "updates missed by a lookup": "missed_updates",
}
_GRADIENTS = {"embeddings": "gradient_norm_embeddings", "dense net": "gradient_norm_dense"}
_CHARTS: tuple[tuple[str, str, bool, dict[str, str]], ...] = (
    ("Throughput", "samples / s, all ranks", True, {"samples / s": "samples_per_second"}),
    ("Staleness", "batches", True, _STALENESS),
    ("Rows", "of all servers", True, {"rows": "rows"}),
    ("Memory of rows", "B", True, {"all servers": "embedding_bytes"}),
    ("Memory of this process", "B", True, {"resident": "process_bytes"}),
    ("Gradients", "norm", False, _GRADIENTS),
    ("Embeddings", "norm of a vector, mean of features", False, {"norm": "embedding_norm"}),
)


def _charts(recorder: Recorder) -> list[Chart]:
    losses = _points(recorder, "loss")
    of_loss: tuple[ChartSeries, ...] = (ChartSeries("loss", _rounded(losses)),)
    if len(losses) >= _MANY:
        smoothed = ChartSeries("smoothed", _rounded(_smoothed(losses)))
        of_loss = (ChartSeries("as it is", _rounded(losses), is_faint=True), smoothed)
    charts = [Chart("Loss", "mean of 16 steps", of_loss)]
    for name, key in _reported(recorder).items():
        points = _points(recorder, key)
        if len(points) > 1:  # a single value is a tile, and no curve
            series = (ChartSeries(name, _rounded(points)),)
            charts.append(Chart(_title(name), "as reported", series))
    for title, unit, over_time, lines in _CHARTS:
        of_all = tuple(
            ChartSeries(label, _rounded(_points(recorder, name, over_time)))
            for label, name in lines.items()
        )
        charts.append(Chart(title, unit, of_all, over_time, from_zero=True))
    return charts


# How a chart of what is reported under a usual name is called.
_TITLES = {
    **{name: name.upper() for name in ("auc", "gauc", "ndcg")},
    "log_loss": "Log loss",
    "normalized_entropy": "Normalized entropy",
    "calibration": "Calibration",
    "recall": "Recall",
}


def _title(name: str) -> str:
    """``recall_at_10`` -> ``Recall@10``."""
    stem, _, k = name.partition("_at_")
    if k.isdecimal() and stem in _TITLES:
        return f"{_TITLES[stem]}@{k}"
    return _TITLES.get(name, name)


def _rounded(points: Points) -> Points:
    """Return the points with more digits than a chart shows, in half the characters."""
    return [(float(f"{x:.9g}"), float(f"{y:.7g}")) for x, y in points]


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
    for name, key in {"losses": "loss", **_reported(recorder)}.items():
        if key in recorder.curves:
            not_finite = recorder.curves[key][0].num_not_finite
            found.append((f"{name} not finite", not_finite, "NaN or infinity."))
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
