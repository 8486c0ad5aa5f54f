"""What every context is: entered and left, the one entered last being the current one."""

from __future__ import annotations

import enum
import logging
from typing import TYPE_CHECKING

from persia import _context_stack
from persia._cluster import process_metrics
from persia._deprecated import Renewed
from persia._metrics.definitions import TRAINER
from persia._metrics.registry import Metrics
from persia.ctx.devices import usable_device
from persia.errors import (
    ConfigError,
)

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

    from persia._metrics.registry import Source as MetricSource


logger = logging.getLogger("persia.ctx")


class PreprocessMode(enum.Enum):
    """What a context does with batches.

    TRAIN gives embeddings a gradient and new ids a row. EVAL and INFERENCE read only, and
    INFERENCE gives no labels.
    """

    TRAIN = 1
    EVAL = 2
    INFERENCE = 3


class BaseCtx(Renewed):
    """A context that can be entered; the one entered last is the current one.

    Args:
        threadpool_worker_size: Kept for scripts of the original; PERSIA's threads are set
            where they are used.
        device_id: Number of the CUDA device of the model. None, or below 0, is the CPU.

    Raises:
        ConfigError: If there is no such device.
    """

    def __init__(self, threadpool_worker_size: int = 10, device_id: int | None = None) -> None:
        self.threadpool_worker_size = threadpool_worker_size
        self.device_id = usable_device(device_id)
        self.origin_context: object | None = None  # the current context when this was entered
        self._entered = False

    # What it makes of a process, for its metrics.
    _role = TRAINER

    def metric_sources(self) -> list[MetricSource]:
        """Return what is to be told of this context, see ``metrics``."""
        return []

    def metrics(self) -> Metrics:
        """Return the metrics of this context, in a registry of its own.

        ``text()`` is what Prometheus reads, ``value(name, **labels)`` one of them, and
        ``registry`` is for a server of one's own. They can be read at any time, by any thread.

        Example:
            >>> with TrainCtx(...) as ctx:  # doctest: +SKIP
            ...     for batch in loader:
            ...         ...
            ...     ctx.metrics().value("persia_trained_samples_total")
        """
        return Metrics(self.metric_sources, with_process=False)

    def why_not_ready(self) -> str:
        """Say why this context cannot be used now; "" if it can."""
        return ""

    def why_not_healthy(self) -> str:
        """Say which of its threads have ended before their time; "" if none has."""
        return ""

    def _enter(self) -> None:
        """Do what entering means for the class."""

    def _exit(self) -> None:
        """Undo it; called however the body ended."""

    def __enter__(self) -> Self:
        if self._entered:
            raise ConfigError(f"this {type(self).__name__} is entered already")
        self.origin_context = _context_stack.current()
        process_metrics.hold(self._role)
        try:
            self._enter()
        except BaseException:
            process_metrics.release()
            raise
        self._entered = True
        _context_stack.push(self)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        self._entered = False
        try:
            self._exit()
        except BaseException as own:
            if exc is None:
                raise
            # The body's exception is the one that the user must see.
            logger.error("leaving %s also failed: %r", type(self).__name__, own)
        finally:
            _context_stack.pop(self)
            process_metrics.release()
        return None


def cnt_ctx() -> BaseCtx | None:
    """Return the context entered last, or None outside any."""
    ctx = _context_stack.current()
    return ctx if isinstance(ctx, BaseCtx) else None
