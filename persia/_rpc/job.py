"""The end of a job, as each server process knows it.

The launcher of the training script announces its exit status once, to every server. A
data-loader has no address to be notified at, so it polls an embedding-worker; that process must
not exit before each polling data-loader has received the status.

Two jobs may be started at the same addresses by mistake. The second one's servers cannot
listen, so it ends, and announces that to the first one's servers. Once configured, a server
accepts the end of a job only from a script that configured it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

# Seconds without a poll after which a watcher is taken for gone.
FORGOTTEN_S = 5.0
_MAX_WATCHERS = 4096


class JobState:
    """Implements ``messages.Job``; any thread may call it.

    ``clock`` is monotonic: a corrected wall clock must not end the wait for a watcher.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()  # guards all below
        self.status: int | None = None  # the exit status of the job; None while it goes on
        self._is_configured = False
        self._is_closed = False
        # When each watcher without the status polled last, in seconds of the clock.
        self._polled_at: dict[str, float] = {}

    def mark_configured(self) -> None:
        """Note that a training script has configured this server."""
        with self._changed:
            # Never reset: a server serves one job in its life.
            self._is_configured = True

    def finish_job(self, status: int, took_part: bool) -> None:
        """Note that the job has ended with its script's exit status; the first one stays.

        If that script did not take part, by configuring servers or trying to, and this server
        is configured, the end is another job's.
        """
        with self._changed:
            if self._is_configured and not took_part:
                logger.warning(
                    "a job that never configured this server has ended with status %d: this "
                    "one goes on; give each job its own addresses",
                    status,
                )
                return
            if self.status is None:
                # Logged first: the status may end this process, or lead to lines of others.
                logger.info("the job has ended with status %d", status)
                self.status = status
            # Also for a repeated end: a waiter may have begun after the first.
            self._changed.notify_all()

    def job_status(self, watcher: str) -> int | None:
        """Return the status, and note whether ``watcher`` has it now or still waits for it."""
        with self._changed:
            if self.status is None:
                if len(self._polled_at) >= _MAX_WATCHERS:
                    self._polled_at = {one: self._polled_at[one] for one in self._waiting()}
                # A hostile peer may poll under any number of names: those beyond the bound
                # are not waited for.
                if len(self._polled_at) < _MAX_WATCHERS or watcher in self._polled_at:
                    self._polled_at[watcher] = self._clock()
            else:
                # The reply is sent right after; the server lingers for replies when it stops.
                self._polled_at.pop(watcher, None)
                self._changed.notify_all()
            return self.status

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait for the end; returns the status, or None if it did not come before ``close``."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.status is not None or self._is_closed, timeout_s
            )
            return self.status

    def close(self) -> None:
        """Let the threads go that wait for the end."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def wait_until_notified(self, timeout_s: float) -> bool:
        """Wait until every watcher that polled lately has the status; False if not in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting(), timeout_s)

    def _waiting(self) -> list[str]:
        now = self._clock()
        # A data-loader that was killed must not keep the process from exiting.
        return [watcher for watcher, at in self._polled_at.items() if now - at < FORGOTTEN_S]
