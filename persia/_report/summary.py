"""What a report says of a run: gathered from its recorder, its batches and its servers."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from persia._core.ids import cardinality
from persia._report.charts import Chart, ChartSeries, Points, short
from persia._report.html import FeatureRow, Page, Warn, render
from persia.errors import ConfigError, ServiceError
from persia.version import __version__

if TYPE_CHECKING:
    from persia._report.recorder import CurveStore, Recorder
    from persia._rpc.messages import EmbeddingWorker, FeatureStats
    from persia._training.inflight import InFlightTracker

_T = TypeVar("_T")

_REPORTED = "reported/"
# Points of a loss that is smoothed as well.
_MANY = 60
_NOTE = (
    "Distinct ids are estimated by HyperLogLog: the standard error is 1.6 %. Each has a row, "
    "but for those that were evicted, expired or not admitted, and but for features that share "
    "rows in a group. Vectors are their size as f32, without optimizer state. Evaluation's ids "
    "count as well. The norm of a vector is the root mean square over a batch's rows, pooled "
    "as the model sees them; norms are of the last step that was looked at."
)


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What the context says of itself."""

    title: str
    mode: str
    world_size: int
    optimizer: str


def check_place(path: str | os.PathLike[str]) -> None:
    """Make the folder of a report, before the run at whose end it is written.

    Raises:
        ConfigError: If no file can be written there.
    """
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(
            f"report: cannot make the folder {target.parent}: {exc.strerror}"
        ) from exc
    if target.is_dir():
        raise ConfigError(
            f"report: expected a file, got the folder {target}; give {target / 'report.html'}"
        )
    if not os.access(target.parent, os.W_OK):
        raise ConfigError(f"report: the folder {target.parent} cannot be written to")


def write(path: str | os.PathLike[str], page: Page) -> None:
    """Write a report; the file appears whole or not at all.

    Raises:
        OSError: If it cannot be written.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        aside.write_text(render(page), encoding="utf-8")
        aside.replace(target)
    finally:
        aside.unlink(missing_ok=True)


def gather(
    told: RunFacts,
    recorder: Recorder,
    kept: CurveStore,
    book: InFlightTracker,
    worker: EmbeddingWorker,
) -> Page:
    """Return what is known of a run now."""
    servers = _asked(worker.server_stats) or []
    features = _asked(worker.feature_stats) or ()
    return Page(
        title=told.title,
        facts=" \u00b7 ".join(
            (
                f"{datetime.datetime.now().astimezone():%Y-%m-%d %H:%M %Z}",
                f"PERSIA {__version__}",
                f"{told.mode} mode",
                f"{told.world_size} rank{'s' if told.world_size > 1 else ''}",
                f"{len(servers) or 'no'} parameter server{'s' if len(servers) != 1 else ''}",
                told.optimizer,
            )
        ),
        tiles=_tiles(told, recorder, kept, book, servers),
        warnings=_warnings(recorder, kept, book, worker, servers) + _unseen(features),
        charts=_charts(kept),
        features=_features(recorder, features),
        note=_NOTE,
    )


def _tiles(
    told: RunFacts,
    recorder: Recorder,
    kept: CurveStore,
    book: InFlightTracker,
    servers: Sequence[Mapping[str, int]],
) -> list[tuple[str, str]]:
    samples = book.totals()[0] * told.world_size
    losses = kept.by_step.points("loss")
    tiles = [
        ("steps", f"{recorder.steps:,}"),
        ("samples", short(samples)),
        ("time", _duration(recorder.seconds)),
        ("samples / s", short(samples / max(recorder.seconds, 1e-9))),
    ]
    if losses:
        tiles.append(("loss at the end", f"{losses[-1][1]:.4f}"))
    for name in _reported(kept):
        tiles.append((f"{name}, last", f"{kept.by_step.points(_REPORTED + name)[-1][1]:.4f}"))
    if servers:
        tiles.append(("rows held", short(sum(one["rows"] for one in servers))))
        tiles.append(("their memory", short(sum(one["bytes"] for one in servers), "B")))
    return tiles


def _reported(kept: CurveStore) -> list[str]:
    names = [name for name in kept.by_step.names() if name.startswith(_REPORTED)]
    return [name.removeprefix(_REPORTED) for name in names if kept.by_step.points(name)]


def _charts(kept: CurveStore) -> list[Chart]:
    step, seconds = kept.by_step.points, kept.by_time.points
    losses = step("loss")
    reported = _reported(kept)
    charts = [
        Chart(
            "Loss",
            "mean of 16 steps",
            "step",
            (ChartSeries("as it is", losses, True), ChartSeries("smoothed", _smoothed(losses)))
            if len(losses) >= _MANY
            else (ChartSeries("loss", losses),),
        )
    ]
    charts += [
        Chart(name.upper() if name in ("auc", "gauc") else name, "as reported", "step",
              (ChartSeries(name, step(_REPORTED + name)),))
        for name in reported
        if len(step(_REPORTED + name)) > 1  # one value is told above, and no curve
    ]  # fmt: skip
    time = "seconds since the start"
    return [
        *charts,
        Chart("Throughput", "samples / s, all ranks", time,
              (ChartSeries("samples / s", seconds("samples_per_second")),), True),
        Chart("Staleness", "batches", time,
              (ChartSeries("between lookup and update", seconds("staleness")),
               ChartSeries("updates that wait", seconds("update_queue"))), True),
        Chart("Rows", "of all servers", time, (ChartSeries("rows", seconds("rows")),), True),
        Chart("Memory", "B", time,
              (ChartSeries("rows, of all servers", seconds("embedding_bytes")),
               ChartSeries("this process", seconds("process_bytes"))), True),
        Chart("Gradients", "norm", "step",
              (ChartSeries("embeddings", step("gradient_norm_embeddings")),
               ChartSeries("dense net", step("gradient_norm_dense"))), True),
        Chart("Embeddings", "norm of a vector, mean of features", "step",
              (ChartSeries("norm", step("embedding_norm")),), True),
    ]  # fmt: skip


def _smoothed(points: Points) -> Points:
    """Return a running mean of about the last twentieth of the points."""
    smooth: list[tuple[float, float]] = []
    for number, (x, y) in enumerate(points, 1):
        weight = max(1 / number, min(20 / len(points), 1.0))
        smooth.append((x, smooth[-1][1] + weight * (y - smooth[-1][1]) if smooth else y))
    return smooth


def _features(recorder: Recorder, features: Sequence[FeatureStats]) -> list[FeatureRow]:
    nothing = (float("nan"), float("nan"))
    return [
        FeatureRow(
            one.name,
            one.dim,
            cardinality.estimate(one.registers),
            one.num_ids,
            one.num_ids / max(one.num_samples, 1),
            one.num_empty / max(one.num_samples, 1),
            *recorder.feature_norms.get(one.name, nothing),
        )
        for one in features
        if one.num_samples
    ]


def _unseen(features: Sequence[FeatureStats]) -> list[Warn]:
    """Warn of slots of the embedding config that no batch had, where one had any."""
    names = [one.name for one in features if not one.num_samples]
    if not names or len(names) == len(features):
        return []
    why = f"{', '.join(names)}: the model got no embeddings of them."
    return [Warn("slots that no batch had", len(names), why)]


_OF_BATCHES = {
    "abandoned": ("batches without a backward", "They were handed out and not trained on."),
    "skipped": ("batches skipped", "A GradScaler found a gradient that was not finite."),
    "failed": ("batches lost", "Their update raised."),
    "incomplete": (
        "batches of incomplete rounds",
        "Other ranks had none at the end of a pass.",
    ),
    "missing": (
        "gradients without a row",
        "Their ids were not admitted, or evicted since the lookup.",
    ),
}
_BY_FEATURE = {
    "nan_samples": ("gradient rows not finite: {}", "They were left out of the update."),
    "nan_rows": ("summed gradients not finite: {}", "The row made no step."),
    "skipped_slots": ("batches without a gradient: {}", "The loss did not reach the feature."),
}
_OF_SERVERS = {
    "evicted": ("rows evicted", "Capacity or memory_limit was reached; their ids begin anew."),
    "expired": ("rows expired", "Nobody had used them for the time their policy says."),
    "refused": ("ids not admitted", "The admission policy kept them out for now."),
    "repeated_updates": ("updates sent again", "An answer was lost; they were applied once."),
}


def _warnings(
    recorder: Recorder,
    kept: CurveStore,
    book: InFlightTracker,
    worker: EmbeddingWorker,
    servers: Sequence[Mapping[str, int]],
) -> list[Warn]:
    found = [Warn("losses not finite", kept.by_step.num_not_finite("loss"), "NaN or infinity.")]
    of_batches = book.stats()
    for key, (what, why) in _OF_BATCHES.items():
        number = of_batches[key]
        found.append(Warn(what, number if isinstance(number, int) else 0, why))
    for key, (what, why) in _BY_FEATURE.items():
        counts = of_batches[key]
        if isinstance(counts, Mapping):
            found += [Warn(what.format(name), num, why) for name, num in sorted(counts.items())]
    found.append(Warn("lookups that raised", book.totals()[1], "The log says why."))
    of_worker = _asked(worker.stats) or {}
    for name, number in sorted(of_worker.items()):
        if name.startswith("masked_ids."):
            feature = name.removeprefix("masked_ids.")
            why = (
                "They need more bits than feature_index_prefix_bit leaves, and may share rows."
            )
            found.append(Warn(f"ids masked: {feature}", number, why))
    restarts = of_worker.get("server_restarts", 0)
    found.append(
        Warn("parameter servers restarted", restarts, "What they did not save is gone.")
    )
    for key, (what, why) in _OF_SERVERS.items():
        found.append(Warn(what, sum(one.get(key, 0) for one in servers), why))
    found.append(Warn("readings missed", recorder.missed, "Servers did not answer in time."))
    return [one for one in found if one.num]


def _asked(ask: Callable[[], _T]) -> _T | None:
    """Ask servers, which may be gone when a report is written: None."""
    try:
        return ask()
    except ServiceError:
        return None


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{seconds:.1f} s"
