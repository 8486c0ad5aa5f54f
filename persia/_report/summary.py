"""The report of a run, from its recorder, its batches and its servers."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from persia import env
from persia._core.ids import cardinality
from persia._metrics.format import count
from persia._report.html import Chart, ChartSeries, FeatureRow, Page, render, short
from persia._report.recorder import CurveStore, Points, Recorder, need_tensorboard
from persia.errors import ConfigError, ServiceError
from persia.version import __version__

if TYPE_CHECKING:
    from persia._rpc.messages import EmbeddingWorker, FeatureStats
    from persia._training.backward import BackwardPipeline
    from persia._training.inflight import InFlightTracker

_T = TypeVar("_T")

_REPORTED = "reported/"
# A loss of at least this many points is smoothed as well.
_MANY = 60


class TrainingRecord:
    """What a TrainCtx of rank 0 records, and the report it writes at the end.

    Args:
        report: The report's file; None writes none. Its folder is made now.
        tensorboard: Folder of event files; None writes none.
        rank: Others than 0 record nothing.

    Raises:
        ConfigError: If no file can be written there, or TensorBoard is not installed.
    """

    def __init__(
        self,
        report: str | os.PathLike[str] | None,
        tensorboard: str | os.PathLike[str] | None,
        rank: int,
    ) -> None:
        if tensorboard is not None:
            need_tensorboard()
        if report is not None and rank == 0:
            _make_folder(report)
        self.has_report = report is not None
        self._report, self._tensorboard = report, tensorboard
        self._rank = rank
        self._recorder: Recorder | None = None

    def begin(
        self,
        worker: EmbeddingWorker,
        tracker: InFlightTracker,
        engine: BackwardPipeline,
        world_size: int,
    ) -> Recorder | None:
        """Begin to record a run; None if nothing is to be recorded."""
        if not self._rank and (self.has_report or self._tensorboard is not None):
            self._recorder = Recorder(worker, tracker, engine, world_size, self._tensorboard)
        return self._recorder

    def end(self) -> None:
        """End the recording."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.close()

    def write(
        self, path: str | os.PathLike[str] | None, model_name: str, optimizers: str
    ) -> None:
        """Write the report of the run so far; the file appears whole or not at all.

        Raises:
            ConfigError: If no run is recorded for a report.
            OSError: If the file cannot be written.
        """
        if self._recorder is None or self._report is None:
            raise ConfigError(
                "TrainCtx.write_report: expected TrainCtx(report='report.html'), which has the "
                "run recorded, and to be called inside its `with`"
            )
        self._recorder.settle()
        page = gather(f"Training report: {model_name}", optimizers, self._recorder)
        target = Path(self._report if path is None else path)
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            aside.write_text(render(page), encoding="utf-8")
            aside.replace(target)
        finally:
            aside.unlink(missing_ok=True)


def _make_folder(path: str | os.PathLike[str]) -> None:
    """Make the folder of a report now, and not after a run of days."""
    folder = Path(path).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(f"report: cannot make the folder {folder}: {exc.strerror}") from exc
    if Path(path).is_dir():
        raise ConfigError(f"report: expected a file, got the folder {path}")
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"report: the folder {folder} cannot be written to")


def gather(title: str, optimizers: str, recorder: Recorder) -> Page:
    """Return what is known of a run now."""
    # Servers may be gone when a report is written: it has what the others say.
    servers = _unless_gone(recorder.worker.server_stats) or []
    features = _unless_gone(recorder.worker.feature_stats) or ()
    facts = (
        f"{datetime.datetime.now().astimezone():%Y-%m-%d %H:%M %Z}",
        f"PERSIA {__version__}",
        f"{env.get_mode()} mode",
        count(recorder.world_size, "rank"),
        count(len(servers), "parameter server"),
        optimizers,
    )
    return Page(
        title=title,
        facts=" \u00b7 ".join(facts),
        tiles=_tiles(recorder, servers),
        warnings=_warnings(recorder, servers, features),
        charts=_charts(recorder.curves),
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
    losses = recorder.curves.of("loss").points()
    if losses:
        tiles.append(("loss at the end", f"{losses[-1][1]:.4f}"))
    for name, points in _reported(recorder.curves).items():
        tiles.append((f"{name}, last", f"{points[-1][1]:.4f}"))
    if servers:
        tiles.append(("rows held", short(sum(one["rows"] for one in servers))))
        tiles.append(("their memory", short(sum(one["bytes"] for one in servers), "B")))
    return tiles


def _reported(curves: CurveStore) -> dict[str, Points]:
    """Return what the script reported by name, over steps."""
    names = [name for name in curves.names() if name.startswith(_REPORTED)]
    found = {name.removeprefix(_REPORTED): curves.of(name).points() for name in names}
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


def _charts(curves: CurveStore) -> list[Chart]:
    losses = curves.of("loss").points()
    of_loss: tuple[ChartSeries, ...] = (ChartSeries("loss", losses),)
    if len(losses) >= _MANY:
        smoothed = ChartSeries("smoothed", _smoothed(losses))
        of_loss = (ChartSeries("as it is", losses, True), smoothed)
    charts = [Chart("Loss", "mean of 16 steps", "step", of_loss)]
    for name, points in _reported(curves).items():
        if len(points) > 1:  # a single value is a tile, and no curve
            title = name.upper() if name in ("auc", "gauc") else name
            charts.append(Chart(title, "as reported", "step", (ChartSeries(name, points),)))
    for title, unit, over_time, lines in _CHARTS:
        across = "seconds since the start" if over_time else "step"
        series = tuple(
            ChartSeries(label, curves.of(name, over_time=over_time).points())
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
            one.num_ids / max(one.num_samples, 1),
            one.num_empty / max(one.num_samples, 1),
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
    not_finite = recorder.curves.of("loss").num_not_finite
    found = [("losses not finite", not_finite, "NaN or infinity.")]
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
