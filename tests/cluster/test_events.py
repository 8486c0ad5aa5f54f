"""Signals and failures of threads, as events of a process."""

from __future__ import annotations

import os
import signal
import threading

from persia._cluster.events import Event, watched_process


def test_signals_and_failures_come_one_after_the_other() -> None:
    error = ValueError("lost my mind")

    def fail() -> None:
        raise error

    before = signal.getsignal(signal.SIGTERM), threading.excepthook
    with watched_process() as events:
        os.kill(os.getpid(), signal.SIGTERM)
        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()
        assert events.get(timeout=10) == Event("signal", signal.SIGTERM)
        assert events.get(timeout=10) == Event("failure", error=error)
    assert (signal.getsignal(signal.SIGTERM), threading.excepthook) == before
