"""New versions of a model while it is trained: a pause between steps, the rest behind it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

from persia.errors import ConfigError, ServiceTimeout

logger = logging.getLogger("persia.serving")

# Seconds that leaving a context waits for a version that is being written.
CLOSE_S = 1800.0
Write = Callable[[], int]


class Publisher:
    """Publishes a version every so often; a failure stops no training.

    The user's thread calls all of it. ``begin`` takes the cut, between two steps, and returns
    what writes the version, in a thread of its own, and returns its number.
    """

    def __init__(
        self,
        every_s: float,
        begin: Callable[[], Write],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if isinstance(every_s, bool) or not isinstance(every_s, int | float) or not every_s > 0:
            raise ConfigError(f"every_s: expected seconds above 0, got {every_s!r:.80}")
        self._every_s, self._begin, self._clock = every_s, begin, clock
        self._due_at = clock() + every_s
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None  # of the last attempt
        self._counts = {"published": 0, "failed": 0, "version": 0}
        self._is_closed = False

    def note_step(self) -> None:
        """Begin a version if one is due and none is being written."""
        if self._clock() < self._due_at or self._is_closed:
            return
        if self._thread is not None and self._thread.is_alive():
            return
        self.publish()

    def publish(self) -> None:
        """Begin a version now."""
        self.wait()
        self._due_at = self._clock() + self._every_s
        try:
            write = self._begin()
        except Exception as exc:  # whatever copying a model raises, or a GPU without memory
            self._note_failure(exc)
            return
        self._thread = threading.Thread(
            target=self._run, args=(write,), name="persia-publish", daemon=True
        )
        self._thread.start()

    def _run(self, write: Write) -> None:
        try:
            version = write()
        except BaseException as exc:
            self._note_failure(exc)
            return
        self._counts["published"] += 1
        self._counts["version"] = version
        self._failure = None

    def _note_failure(self, exc: BaseException) -> None:
        self._counts["failed"] += 1
        self._failure = exc
        logger.error("a version was not published, the one before stays: %s", exc)

    def wait(self, timeout_s: float = CLOSE_S) -> None:
        """Wait until no version is being written."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
            if thread.is_alive():
                raise ServiceTimeout(f"publish: a version was not written in {timeout_s:g} s")

    def stats(self) -> Mapping[str, int]:
        """Return how many versions were ``published`` and ``failed``, and the last's number."""
        return dict(self._counts)

    def close(self) -> None:
        """Wait for the last version; raise what it raised."""
        self._is_closed = True
        self.wait()
        if not any(self._counts.values()):
            logger.warning(
                "no version was published: training ended before the first was due, %g s "
                "after publish was called; export writes one at once",
                self._every_s,
            )
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
