"""Calls of storages that may hang: each has a deadline, and is left behind after it."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from persia.errors import ServiceTimeout

T = TypeVar("T")
# Seconds between two looks at whether the caller is being closed.
_LOOK_S = 0.1


class _Call(Generic[T]):
    """One call in a thread of its own."""

    def __init__(self, work: Callable[[float], T], deadline: float) -> None:
        self._work, self._deadline = work, deadline
        self.is_done = threading.Event()
        self._results: list[T] = []
        self._error: BaseException | None = None

    def start(self) -> None:
        try:
            threading.Thread(target=self._run, name="persia-rows-load", daemon=True).start()
        except (
            RuntimeError
        ) as exc:  # no thread could be made: may work later, as without memory
            raise OSError(errno.EAGAIN, f"rows: {exc}") from exc

    def _run(self) -> None:
        try:
            self._results.append(self._work(self._deadline))
        except BaseException as exc:
            self._error = exc  # raised by ``result``
        finally:
            self.is_done.set()

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        return self._results[0]


class StorageCalls:
    """Runs calls of storages, at most one that hangs of each place.

    Args:
        stop: Once it is set, calls are left behind.
    """

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        self._lock = threading.Lock()  # guards the next
        self._hung: dict[str, threading.Event] = {}  # set when the call ends after all

    def run(self, place: str, limit_s: float, work: Callable[[float], T]) -> T:
        """Return ``work(deadline)``, which may go on beyond it in a thread left behind.

        Raises:
            ServiceTimeout: It was not done within ``limit_s``, or an earlier one of this place
                still hangs, or ``stop`` is set.
            BaseException: What ``work`` raised.
        """
        deadline = time.monotonic() + limit_s
        with self._lock:
            hung = self._hung.get(place)
            if hung is not None and not hung.is_set():
                raise ServiceTimeout(f"rows: {place}: a call that was given up still hangs")
            self._hung.pop(place, None)
        call = _Call(work, deadline)
        call.start()
        while not call.is_done.wait(max(0.0, min(_LOOK_S, deadline - time.monotonic()))):
            is_late = time.monotonic() >= deadline
            if is_late or self._stop.is_set():
                with self._lock:
                    self._hung[place] = call.is_done
                raise ServiceTimeout(
                    f"rows: {place}: not done within {limit_s:g} s"
                    if is_late
                    else f"rows: {place}: closed before it was done"
                )
        return call.result()
