"""What the threads of one data-loader share: where it stands, and what ends it."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from persia.errors import JobFinished

logger = logging.getLogger(__name__)

# Seconds between two lines that say who is waited for.
LINE_S = 10.0
# Seconds between two tries at a server that refused at once.
AGAIN_S = 0.02


class LoaderState:
    """One data-loader's run over its data.

    Args:
        loader: Number of this data-loader.
        num_loaders: How many there are.
        num_ranks: How many nn-workers.
        deadline_s: Seconds to wait for a server that does not answer.
        gone_s: Seconds to wait for a server to which there is no connection.
    """

    def __init__(
        self, loader: int, num_loaders: int, num_ranks: int, deadline_s: float, gone_s: float
    ) -> None:
        self.loader = loader
        self.num_loaders = num_loaders
        self.num_ranks = num_ranks
        self.deadline_s = deadline_s
        self.gone_s = gone_s
        self.stream = loader, secrets.randbits(63)
        self.stopping = threading.Event()
        self.changed = threading.Condition()  # guards all below, and the lanes
        self.next_id = loader  # of the batch that the user sends next
        self.is_ending = False  # no more will be sent
        self.status: int | None = None  # of the job, once it has ended
        self.failure: BaseException | None = None  # of a thread
        self.counts: Counter[str] = Counter()
        self.threads: list[threading.Thread] = []

    def __str__(self) -> str:
        return f"data-loader {self.loader} of {self.num_loaders}"

    @property
    def is_over(self) -> bool:
        """Whether there is nothing left to wait for."""
        return self.failure is not None or self.status is not None or self.stopping.is_set()

    def check(self) -> None:
        """Raise what ended this run, if anything did."""
        if self.failure is not None:
            raise self.failure
        if self.status is not None:
            raise ended(self.status)
        if self.stopping.is_set():
            raise JobFinished(f"{self} is closed")

    def spawn(self, name: str, function: Callable[[], None]) -> threading.Thread:
        """Start a thread; what ends it is raised in the user's thread."""
        thread = threading.Thread(target=self._guard, args=(function,), name=name, daemon=True)
        self.threads.append(thread)
        thread.start()
        return thread

    def _guard(self, function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as exc:
            with self.changed:
                if not self.is_over:
                    self.failure = exc
                self.changed.notify_all()

    def wait(
        self, is_ready: Callable[[], bool], whom: Callable[[], str], level: int = logging.INFO
    ) -> None:
        """Wait, with the lock held, saying now and then for whom.

        It has no deadline of its own: a rank may take as long as it likes for a step, and one
        that is gone ends the wait as the failure of its thread.
        """
        while not self.changed.wait_for(lambda: is_ready() or self.is_over, LINE_S):
            logger.log(level, "%s waits for %s", self, whom())
        self.check()

    def pause(self) -> None:
        """Let a moment pass before the next try."""
        self.stopping.wait(AGAIN_S)
        self.check()


def ended(status: int) -> JobFinished:
    """Make the error that says that the job has ended."""
    error = JobFinished(f"the job has ended, with exit status {status}")
    error.status = status
    return error


def join(threads: Sequence[threading.Thread], timeout_s: float) -> list[threading.Thread]:
    """Wait for threads, for so long in all, and return those that are still alive."""
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [thread for thread in threads if thread.is_alive()]
