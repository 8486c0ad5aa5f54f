"""The embedding-workers as a data-loader sees them: any that lives will do."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Protocol

from persia._loader.feed import LINE_S, LoaderState
from persia._rpc.messages import IDFeatures, RemoteRef
from persia.errors import ServiceBusy, ServiceError, ServiceTimeout, ServiceUnavailable

logger = logging.getLogger(__name__)

# Seconds of the first try at one, doubled in each round up to the longest; and how long one
# that failed is asked last, so that it costs a small part of the time.
TRY_S = 2.0
LONGEST_TRY_S = 30.0
AVOID_S = 30.0
# Seconds between two questions whether the job has ended, and until one is given up.
WATCH_S = 0.25
ASK_S = 2.0


class Registrar(Protocol):
    """What a data-loader asks of an embedding-worker; ``RemoteEmbeddingWorker`` is one."""

    def register(self, features: IDFeatures, timeout_s: float | None = None) -> int: ...
    def job_status(self, watcher: str, timeout_s: float | None = None) -> int | None: ...


class Registrars:
    """Registers ids at one embedding-worker after the other.

    Args:
        workers: All of them, by replica number.
        feed: Whose ids.
    """

    def __init__(self, workers: Sequence[Registrar], feed: LoaderState) -> None:
        self._workers = workers
        self._feed = feed
        # Guarded by the lock of the feed.
        self._turn = feed.loader
        self._avoided: dict[int, float] = {}  # worker -> monotonic seconds until then

    def register(self, ids: IDFeatures, avoid: int | None = None) -> RemoteRef:
        """Register ids at the next embedding-worker that takes them.

        One that is busy lives: as long as one does, there is no deadline.

        Args:
            ids: What to register.
            avoid: The worker that is asked last.

        Raises:
            DataError: If one refuses the ids.
            ServiceUnavailable: If none answers until the deadline; names them.
        """
        feed = self._feed
        alive_at = told_at = time.monotonic()
        try_s = TRY_S
        while True:
            failures: dict[int, ServiceError] = {}
            for index in self._in_turn(avoid):
                try:
                    ref = self._workers[index].register(ids, try_s)
                except (ServiceUnavailable, ServiceTimeout, ServiceBusy) as exc:
                    feed.check()
                    failures[index] = exc
                    with feed.changed:
                        self._avoided[index] = time.monotonic() + AVOID_S
                        feed.counts["skipped"] += 1
                    if isinstance(exc, ServiceBusy):
                        alive_at = time.monotonic()
                else:
                    with feed.changed:
                        self._avoided.pop(index, None)
                    return RemoteRef(index, ref)
            now = time.monotonic()
            why = "; ".join(f"embedding-worker {i}: {e}" for i, e in failures.items())
            if now - told_at >= LINE_S:
                told_at = now
                logger.warning("%s: batch %d waits for %s", feed, ids.batch_id, why)
            silent_s = now - alive_at
            is_gone = all(isinstance(one, ServiceUnavailable) for one in failures.values())
            if silent_s >= (feed.gone_s if is_gone else feed.deadline_s):
                raise ServiceUnavailable(
                    f"{feed}: no embedding-worker has answered for {silent_s:.0f} s, to take "
                    f"batch {ids.batch_id}: {why}",
                    role="embedding-worker",
                    method="register",
                )
            feed.pause()
            try_s = min(2 * try_s, LONGEST_TRY_S)

    def _in_turn(self, avoid: int | None) -> list[int]:
        """Return all workers, the one whose turn it is first, those that failed last."""
        num = len(self._workers)
        with self._feed.changed:
            now = time.monotonic()
            first = self._turn
            self._turn += 1
            return sorted(
                ((first + i) % num for i in range(num)),
                key=lambda index: (index == avoid, self._avoided.get(index, 0.0) > now),
            )

    def wait_for_end_of_job(self) -> int | None:
        """Return the job's exit status once it has ended; None if the feed stops before."""
        watcher = f"{self._feed}, {self._feed.stream[1]:x}"
        index = self._feed.loader
        while not self._feed.stopping.wait(WATCH_S):
            try:
                status = self._workers[index % len(self._workers)].job_status(watcher, ASK_S)
            except ServiceError:
                index += 1  # whoever is gone is missed elsewhere
                continue
            if status is not None:
                return status
        return None
