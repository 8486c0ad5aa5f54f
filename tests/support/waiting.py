"""Waiting for what sends no event: a counter, another process's log, the kernel's view.

Where there is an event, a pipe or a thread to join, a test waits for that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from persia.errors import ServiceBusy, ServiceTimeout, ServiceUnavailable

T = TypeVar("T")

# Seconds. Nothing here takes long unless it is broken, or the machine is very busy.
PATIENCE_S = 60.0
_LOOK_S = 0.005


def answered(call: Callable[[], T], patience_s: float = PATIENCE_S) -> T:
    """Call again while no answer comes in the call's own time; a refusal is an answer."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return call()
        except ServiceBusy:
            raise
        except (ServiceTimeout, ServiceUnavailable):
            if time.monotonic() > deadline:
                raise


def until(
    is_so: Callable[[], Any],
    patience_s: float = PATIENCE_S,
    *,
    look_s: float = _LOOK_S,
    details: Callable[[], object] = str,
) -> None:
    """Look until it is so; what ``details`` returns goes into the error if it never is."""
    pause = threading.Event()  # never set
    deadline = time.monotonic() + patience_s
    while not is_so():
        if time.monotonic() > deadline:
            raise AssertionError(f"it did not come to pass within {patience_s:g} s {details()}")
        pause.wait(look_s)
