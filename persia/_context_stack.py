"""The contexts this process has entered, innermost last.

They belong to the process and not to a thread, because a dataset's thread sends to the context
that the main thread entered.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from persia.errors import InternalError

if TYPE_CHECKING:
    from persia._rpc.messages import OptimizerSettings

_lock = threading.Lock()
_entered: list[object] = []  # guarded by _lock


@runtime_checkable
class TakesOptimizer(Protocol):
    """A context that can hand an embedding optimizer to the servers."""

    def register_optimizer(self, settings: OptimizerSettings) -> None:
        """Register the optimizer on every server."""


def push(ctx: object) -> None:
    """Make ``ctx`` the current context."""
    with _lock:
        _entered.append(ctx)


def pop(ctx: object) -> None:
    """Remove ``ctx``, entered last or not: two threads may leave theirs in any order."""
    with _lock:
        for place in reversed(range(len(_entered))):
            if _entered[place] is ctx:
                del _entered[place]
                return
    raise InternalError(f"expected {ctx!r} among the entered contexts, it is not")


def entered() -> list[object]:
    """Return all contexts that are entered, outermost first."""
    with _lock:
        return list(_entered)


def current() -> object | None:
    """Return the context entered last, or None outside any."""
    with _lock:
        return _entered[-1] if _entered else None
