"""The end of a job, as each server process knows it.

Whoever ran the training script says once, to every server, with which status it ended. Servers
are told; a data-loader has no address where it could be, so it asks an embedding-worker time
and again. The process that is asked must not leave before each of those has heard the answer.

Two jobs may be started at the same addresses by mistake. The second one's servers cannot
listen, so it ends, and tells the first one's servers: they heed nobody who never configured
them once somebody has.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

# Seconds. Who has not asked for so long is gone, and nobody waits for it.
FORGOTTEN_S = 5.0
_MANY = 4096  # watchers that are waited for


class JobState:
    """Implements ``messages.Job``; any thread may call it.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()  # guards all below
        self._status: int | None = None
        self._is_taken = False
        self._asked_at: dict[str, float] = {}  # by watcher, of those that have not been told

    @property
    def status(self) -> int | None:
        """The exit status of the job; None while it goes on."""
        return self._status

    def take(self) -> None:
        """Note that a training script has configured this server."""
        with self._changed:
            self._is_taken = True

    def finish_job(self, status: int, took_part: bool) -> None:
        """Note that the job has ended; the first status stays.

        Args:
            status: With which the training script ended.
            took_part: Whether that script has configured servers, or tried to. If not, and
                another has configured this one, it is another job's end.
        """
        with self._changed:
            if self._is_taken and not took_part:
                logger.warning(
                    "a job that never configured this server has ended with status %d: this "
                    "one goes on; two jobs need addresses of their own",
                    status,
                )
                return
            if self._status is None:
                self._note(status)
                self._status = status
            self._changed.notify_all()

    def _note(self, status: int) -> None:
        """Called before the end is known to anybody."""

    def job_status(self, watcher: str) -> int | None:
        """Return the status, and note that ``watcher`` has been told it, or has not yet."""
        with self._changed:
            if self._status is None:
                if len(self._asked_at) >= _MANY:
                    self._asked_at = {who: self._asked_at[who] for who in self._waiting()}
                # Who can ask may do so by as many names as he likes: nobody waits for those.
                if len(self._asked_at) < _MANY or watcher in self._asked_at:
                    self._asked_at[watcher] = self._clock()
            else:
                self._asked_at.pop(watcher, None)
                self._changed.notify_all()
            return self._status

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait for the end; returns the status, or None if it did not come in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._status is not None, timeout_s)
            return self._status

    def wait_until_told(self, timeout_s: float) -> bool:
        """Wait until every watcher of the last seconds has been told; False if not in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting(), timeout_s)

    def _waiting(self) -> list[str]:
        now = self._clock()
        return [who for who, at in self._asked_at.items() if now - at < FORGOTTEN_S]
