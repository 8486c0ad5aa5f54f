"""What a run records of itself, for its report and for TensorBoard.

    user's thread   step(loss), norms of every 16th step, ctx.report(auc=...) --+
                                                                                +--> curves
    a thread        twice a second at first: speed, staleness, rows, memory ----+

Beside them what the run is run with, and when passes ended and checkpoints were made.

Losses stay on their device until 16 are read at once, so that a step waits for nothing. The
longer the run, the rarer the thread reads the servers' statistics. Only rank 0 records.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from persia._metrics.timings import Distribution
from persia._report.run import Mark, Points
from persia.errors import ServiceError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Literal

    from persia._rpc.messages import EmbeddingWorker
    from persia._training.backward import BackwardPipeline
    from persia._training.batch import PersiaTrainingBatch
    from persia._training.forward import PassOptions
    from persia._training.inflight import InFlightTracker

logger = logging.getLogger(__name__)

# Steps between two readings of losses and norms.
EVERY = 16
# Seconds between two readings of the rest, and how many there are before they become rarer.
FIRST_S = 0.5
NUM_EVEN = 500
# A speed measured over fewer seconds is noise.
_SHORTEST_S = 0.2
# How long ``close`` waits for a reading of the servers that has begun.
_JOIN_S = 30.0
# Points of a curve, even: more than a chart has pixels for.
MOST = 600
# Marks of one kind: beyond, every second one is left out, of later ones too.
MOST_MARKS = 100


class Curve:
    """Means of equally many consecutive values; how many doubles when there are MOST points."""

    __slots__ = ("_num", "_points", "_x", "_y", "every", "last", "num_not_finite")

    def __init__(self) -> None:
        self.every = 1  # values per point
        self.num_not_finite = 0
        self.last = 0.0  # value, finite or not
        self._points: Points = []
        self._num, self._x, self._y = 0, 0.0, 0.0  # sums for the next point

    def add(self, x: float, y: float) -> None:
        """Add one value; one that is not finite is counted, not drawn."""
        self.last = y
        if not math.isfinite(y):
            self.num_not_finite += 1
            return
        self._num += 1
        self._x += x
        self._y += y
        if self._num < self.every:
            return
        self._points.append((self._x / self._num, self._y / self._num))
        self._num, self._x, self._y = 0, 0.0, 0.0
        if len(self._points) >= MOST:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [((a + c) / 2, (b + d) / 2) for (a, b), (c, d) in pairs]
            self.every *= 2

    def points(self) -> Points:
        """Return the points so far, an incomplete last one included."""
        if not self._num:
            return list(self._points)
        return [*self._points, (self._x / self._num, self._y / self._num)]


class Recorder:
    """Records a run until it is closed.

    Args:
        parameters: What it is run with, by name.
        tensorboard: Folder for event files, if any.
    """

    def __init__(
        self,
        worker: EmbeddingWorker,
        tracker: InFlightTracker,
        engine: BackwardPipeline,
        world_size: int,
        parameters: Mapping[str, str],
        tensorboard: str | os.PathLike[str] | None,
    ) -> None:
        self.begin = time.monotonic()
        # Of vectors, and of gradients.
        self.feature_norms: dict[str, tuple[float, float | None]] = {}
        self.num_missed = 0  # readings of servers that failed
        self.step = 0  # the last one
        self.batch_size = 0  # the largest
        self.parameters = dict(parameters)
        self.marks: list[Mark] = []  # replaced, not changed
        self._marked: dict[str, tuple[int, int]] = {}  # by kind: how many, and how many a mark
        self.worker, self.tracker, self.world_size = worker, tracker, world_size
        self._engine = engine
        # By name, the oldest first: over steps, and over seconds.
        self.curves: dict[str, tuple[Curve, Curve]] = {}
        self._writer: Any = None
        if tensorboard is not None:
            from torch.utils.tensorboard.writer import SummaryWriter

            self._writer = SummaryWriter(os.fspath(tensorboard))
        self._lock = threading.Lock()  # guards the curves, the writer and _last
        self._losses: list[torch.Tensor] = []
        self._last = (self.begin, tracker.totals()[0])  # when speed was read; samples then
        self._missed = Distribution((), 0.0)  # of lookups, when it was read last
        self._ended = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="persia-recorder", daemon=True)
        self._thread.start()

    @property
    def seconds(self) -> float:
        """How long it has recorded."""
        return time.monotonic() - self.begin

    # --- the user's thread ------------------------------------------------------------------

    def note_pass(self, options: PassOptions) -> None:
        """Note how a pass over the training data is run."""
        self.parameters |= {
            "embedding_staleness": "auto" if options.is_adaptive else str(options.staleness),
            "reproducible": str(options.reproducible),
            "lookups at the same time": str(options.num_workers),
        }

    def note_mark(self, kind: Literal["end of a pass", "checkpoint"]) -> None:
        """Note what happened after the last step."""
        number, every = self._marked.get(kind, (0, 1))
        if number % every == 0:
            marks = [*self.marks, Mark(kind, self.step, self.seconds)]
            alike = [mark for mark in marks if mark.kind == kind]
            if len(alike) > MOST_MARKS:
                left_out = alike[1::2]
                marks = [mark for mark in marks if mark not in left_out]
                every *= 2
            self.marks = marks
        self._marked[kind] = number + 1, every

    def note_step(self, step: int, loss: torch.Tensor, batch_size: int) -> bool:
        """Note a step before its gradients are taken; return whether norms are due."""
        self.step, self.batch_size = step, max(self.batch_size, batch_size)
        self._losses.append(loss)
        if len(self._losses) < EVERY:
            return False
        self._read_losses()
        return True

    def _read_losses(self) -> None:
        losses, self._losses = self._losses, []
        if not losses:
            return
        values = torch.stack([loss.float() for loss in losses]).tolist()
        finite = [value for value in values if math.isfinite(value)]
        if finite:
            middle = self.step - len(losses) + 1 + len(losses) // 2
            self._add({"loss": sum(finite) / len(finite)}, middle)
        # Behind the mean, so that the curve ends with them: see ``summary._end``.
        for value in values:
            if not math.isfinite(value):
                self._add({"loss": value}, self.step)

    def note_norms(
        self,
        batches: Iterable[PersiaTrainingBatch],
        dense: Sequence[torch.Tensor],
        scale: float,
    ) -> None:
        """Note the norms of vectors and of gradients of a loss times ``scale``.

        The leaves of ``batches``, which the backward reached, have their gradients still;
        ``dense`` are the gradients of the dense net.
        """
        leaves = [leaf for batch in batches for leaf in batch.leaves]
        vectors = [leaf.tensor.detach() for leaf in leaves]
        reached = {leaf.name: g for leaf in leaves if (g := leaf.tensor.grad) is not None}
        # One transfer from the device for all of them.
        norms = iter(_norms([*vectors, *reached.values(), *dense]))
        means = [next(norms) / math.sqrt(max(len(vector), 1)) for vector in vectors]
        of_features = {name: next(norms) / scale for name in reached}
        of_dense = list(norms)
        for leaf, mean in zip(leaves, means, strict=True):
            self.feature_norms[leaf.name] = (mean, of_features.get(leaf.name))
        self._add(
            {
                "gradient_norm_dense": math.hypot(*of_dense) / scale,
                "gradient_norm_embeddings": math.hypot(*of_features.values()),
                "embedding_norm": sum(means) / max(len(means), 1),
            },
            self.step,
        )

    def note_reported(self, values: Mapping[str, float]) -> None:
        """Note what the user's script reports."""
        self._add({f"reported/{name}": value for name, value in values.items()}, self.step)

    def settle(self) -> None:
        """Read all that was noted, and the servers once more; raise what ended the thread."""
        self._read_losses()
        self._read()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """End the thread, and write what is left."""
        self._ended.set()
        self._thread.join(_JOIN_S)
        with self._lock:
            if self._writer is not None:
                self._writer.close()

    # --- the recorder's thread --------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._ended.wait(max(FIRST_S, self.seconds / NUM_EVEN)):
                self._read()
        except BaseException as exc:
            self._failure = exc  # raised by ``settle``

    def _read(self) -> None:
        now, num_samples = time.monotonic(), self.tracker.totals()[0]
        values: dict[str, float] = {}
        with self._lock:
            then, before = self._last
            if now - then >= _SHORTEST_S or then == self.begin:  # or of a very short run
                self._last = (now, num_samples)
                took_s = max(now - then, 1e-9)
                speed = (num_samples - before) * self.world_size / took_s
                values["samples_per_second"] = speed
        values["staleness"] = float(str(self.tracker.stats()["staleness"]))
        values["update_queue"] = self._engine.measure()[0]
        missed = self.tracker.missed.read()
        if missed.num > self._missed.num:
            num = missed.num - self._missed.num
            values["missed_updates"] = (missed.seconds - self._missed.seconds) / num
        self._missed = missed
        try:
            servers = self.worker.server_stats()
        except ServiceError as exc:
            self.num_missed += 1
            logger.debug("no statistics of the servers: %s", exc)
        else:
            values["rows"] = sum(stats["rows"] for stats in servers)
            values["embedding_bytes"] = sum(stats["bytes"] for stats in servers)
        resident = _resident_bytes()
        if resident is not None:
            values["process_bytes"] = resident
        self._add(values, self.step)

    def _add(self, values: Mapping[str, float], step: int) -> None:
        seconds = self.seconds
        with self._lock:
            for name, value in values.items():
                over_steps, over_time = self.curves.setdefault(name, (Curve(), Curve()))
                over_steps.add(step, value)
                over_time.add(seconds, value)
                if self._writer is not None:
                    self._writer.add_scalar(name.removeprefix("reported/"), value, step)


def _norms(tensors: list[torch.Tensor]) -> list[float]:
    if not tensors:
        return []
    norms: list[float] = torch.stack(
        [torch.linalg.vector_norm(one, dtype=torch.float32) for one in tensors]
    ).tolist()
    return norms


def _resident_bytes() -> int | None:
    """Return the memory of this process, where the system has /proc."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return None
    import resource  # not on every system

    return int(statm.read_text("ascii").split()[1]) * resource.getpagesize()
