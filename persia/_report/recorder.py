"""What a run writes down of itself, for its report and for TensorBoard.

    user's thread   step(loss), norms of every 16th step, ctx.report(auc=...) --+
                                                                                +--> sinks
    a thread        twice a second at first: speed, staleness, rows, memory ----+

Losses stay on their device until 16 are read at once, so that a step waits for nothing. The
thread asks the servers what they count anyway; the longer the run, the less often. Rank 0
records; the others do nothing.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from persia._report.curves import History
from persia.errors import ServiceError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from persia._rpc.messages import EmbeddingWorker
    from persia._training.backward import BackwardPipeline
    from persia._training.inflight import InFlightTracker
    from persia._training.transfer import PersiaTrainingBatch

logger = logging.getLogger(__name__)

# Steps between two readings of losses and norms.
EVERY = 16
# Seconds between two readings of everything else; and how many of them a run may have before
# they become rarer.
FIRST_S = 0.5
NUM_EVEN = 500
# Speed over less than this says nothing.
_SHORTEST_S = 0.2
# How long a reading that is under way at the end is waited for.
_JOIN_S = 30.0


class Sink(Protocol):
    """Where values go."""

    def add(self, name: str, step: int, seconds: float, value: float) -> None: ...
    def close(self) -> None: ...


class CurveStore:
    """A sink that keeps curves, of what a step has over steps, of the rest over seconds."""

    def __init__(self) -> None:
        self.by_step, self.by_time = History(), History()

    def add(self, name: str, step: int, seconds: float, value: float) -> None:
        """Add a value to both curves of a name."""
        self.by_step.add(name, step, value)
        self.by_time.add(name, seconds, value)

    def close(self) -> None:
        """Keep all of it."""


class Recorder:
    """Writes a run down until it is closed.

    Args:
        worker: Whose servers are asked.
        book: The run's batches.
        engine: The run's updates.
        sinks: Where it goes; closed with this.
        world_size: Ranks that make the steps.
    """

    def __init__(
        self,
        worker: EmbeddingWorker,
        book: InFlightTracker,
        engine: BackwardPipeline,
        sinks: Sequence[Sink],
        world_size: int,
    ) -> None:
        self.begin = time.monotonic()
        self.feature_norms: dict[str, tuple[float, float]] = {}  # of vectors, of gradients
        self.missed = 0  # readings of servers that failed
        self.worker, self._book, self._engine = worker, book, engine
        self._world_size = world_size
        self._sinks = sinks
        self._lock = threading.Lock()  # guards the sinks
        self._losses: list[torch.Tensor] = []
        self._step = 0
        self._last = (self.begin, book.totals()[0])  # when speed was read, and samples then
        self._ended = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="persia-recorder", daemon=True)
        self._thread.start()

    @property
    def seconds(self) -> float:
        """How long it has recorded."""
        return time.monotonic() - self.begin

    @property
    def steps(self) -> int:
        """The number of the last step."""
        return self._step

    # --- the user's thread ------------------------------------------------------------------

    def note_step(self, step: int, loss: torch.Tensor) -> bool:
        """Note a step before its gradients are taken; whether ``note_norms`` is due."""
        self._step = step
        self._losses.append(loss)
        if len(self._losses) < EVERY:
            return False
        self._read_losses()
        return True

    def _read_losses(self) -> None:
        losses, self._losses = self._losses, []
        if not losses:
            return
        first = self._step - len(losses) + 1
        values = torch.stack([loss.float() for loss in losses]).tolist()
        finite = [value for value in values if math.isfinite(value)]
        for value in values:
            if not math.isfinite(value):
                self._add({"loss": value}, self._step)
        if finite:
            self._add({"loss": sum(finite) / len(finite)}, first + len(values) // 2)

    def note_norms(
        self,
        batches: Iterable[PersiaTrainingBatch],
        parameters: Iterable[torch.Tensor],
        scale: float,
    ) -> None:
        """Note the norms of vectors and gradients, while leaves still have them.

        Args:
            batches: Those that the backward reached.
            parameters: Of the dense model.
            scale: What the loss was multiplied with.
        """
        leaves = [leaf for batch in batches for leaf in batch.leaves]
        vectors = [leaf.tensor.detach() for leaf in leaves]
        reached = [leaf for leaf in leaves if leaf.tensor.grad is not None]
        gradients = [leaf.tensor.grad for leaf in reached if leaf.tensor.grad is not None]
        dense = [one.grad for one in parameters if one.grad is not None]
        norms = _norms([*vectors, *gradients, *dense])
        of_vectors, rest = norms[: len(vectors)], norms[len(vectors) :]
        of_gradients, of_dense = rest[: len(gradients)], rest[len(gradients) :]
        of_features = {
            leaf.name: norm / scale for leaf, norm in zip(reached, of_gradients, strict=True)
        }
        rows = [max(len(leaf.tensor), 1) for leaf in leaves]
        means = [norm / math.sqrt(num) for norm, num in zip(of_vectors, rows, strict=True)]
        for leaf, mean in zip(leaves, means, strict=True):
            self.feature_norms[leaf.name] = (mean, of_features.get(leaf.name, math.nan))
        self._add(
            {
                "gradient_norm_dense": math.hypot(*of_dense) / scale,
                "gradient_norm_embeddings": math.hypot(*of_features.values()),
                "embedding_norm": sum(means) / max(len(means), 1),
            },
            self._step,
        )

    def note_reported(self, values: Mapping[str, float]) -> None:
        """Note what the user's script reports."""
        self._add({f"reported/{name}": value for name, value in values.items()}, self._step)

    def settle(self) -> None:
        """Read all that was noted, and the servers once more.

        Raises:
            BaseException: What ended the thread.
        """
        self._read_losses()
        self._read()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """End the thread and the sinks."""
        self._ended.set()
        self._thread.join(_JOIN_S)
        with self._lock:
            for sink in self._sinks:
                sink.close()

    # --- the recorder's thread --------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._ended.wait(max(FIRST_S, self.seconds / NUM_EVEN)):
                self._read()
        except BaseException as exc:
            self._failure = exc  # raised by ``settle``

    def _read(self) -> None:
        now, num_samples = time.monotonic(), self._book.totals()[0]
        values: dict[str, float] = {}
        with self._lock:
            then, before = self._last
            if now - then >= _SHORTEST_S or then == self.begin:  # or of a very short run
                self._last = (now, num_samples)
                took_s = max(now - then, 1e-9)
                speed = (num_samples - before) * self._world_size / took_s
                values["samples_per_second"] = speed
        values["staleness"] = float(str(self._book.stats()["staleness"]))
        values["update_queue"] = self._engine.measure()[0]
        try:
            servers = self.worker.server_stats()
        except ServiceError as exc:
            self.missed += 1
            logger.debug("no figures of the servers: %s", exc)
        else:
            values["rows"] = sum(stats["rows"] for stats in servers)
            values["embedding_bytes"] = sum(stats["bytes"] for stats in servers)
        held = _resident_bytes()
        if held is not None:
            values["process_bytes"] = held
        self._add(values, self._step)

    def _add(self, values: Mapping[str, float], step: int) -> None:
        seconds = self.seconds
        with self._lock:
            for name, value in values.items():
                for sink in self._sinks:
                    sink.add(name, step, seconds, value)


def _norms(tensors: list[torch.Tensor]) -> list[float]:
    if not tensors:
        return []
    norms: list[float] = torch.stack(
        [torch.linalg.vector_norm(one, dtype=torch.float32) for one in tensors]
    ).tolist()
    return norms


def _resident_bytes() -> int | None:
    """Return the memory of this process, where the system says it in /proc."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return None
    import resource

    return int(statm.read_text("ascii").split()[1]) * resource.getpagesize()
