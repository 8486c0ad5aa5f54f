"""What every context is: entered and left, the one entered last being the current one."""

from __future__ import annotations

import enum
import logging
from numbers import Integral
from typing import TYPE_CHECKING, Any

from persia import _context_stack, env
from persia._cluster import process_metrics
from persia._deprecated import Renewed
from persia._metrics.definitions import TRAINER
from persia._metrics.registry import Metrics
from persia.embedding import EmbeddingConfig
from persia.errors import ConfigError

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

    from persia._metrics.registry import MetricSource


logger = logging.getLogger("persia.ctx")


class PreprocessMode(enum.Enum):
    """What a context does with batches; EVAL and INFERENCE change no row."""

    TRAIN = 1
    EVAL = 2
    INFERENCE = 3  # gives no labels


class BaseCtx(Renewed):
    """A context that can be entered; the one entered last is the current one.

    Args:
        threadpool_worker_size: Without effect: threads are set where they are used.
        device_id: Number of the CUDA device of the model. None, or below 0, is the CPU.
    """

    def __init__(self, threadpool_worker_size: int = 10, device_id: int | None = None) -> None:
        env.warn_of_misspelled()
        self.threadpool_worker_size = threadpool_worker_size
        self._is_device_open = device_id is None  # not below 0, which is the CPU
        self.device_id = usable_device(device_id)
        self.origin_context: object | None = None  # the current context when this was entered
        self._entered = False

    _role = TRAINER  # of a process that enters the context, for its metrics

    @property
    def common_context(self) -> CommonContext:
        """What programs of the original set servers up with."""
        return CommonContext(self)

    def metric_sources(self) -> list[MetricSource]:
        """Return the sources that ``metrics`` reads."""
        return []

    def metrics(self) -> Metrics:
        """Return the metrics of this context, in a registry of its own, for any thread.

        ``text()`` is what Prometheus reads, ``value("persia_trained_samples_total")`` one.
        """
        return Metrics(self.metric_sources, with_process=False)

    def why_not_ready(self) -> str:
        """Say why this context cannot be used now; "" if it can."""
        return ""

    def why_not_healthy(self) -> str:
        """Name the threads of this context that ended too early; "" if none did."""
        return ""

    def _wait_for_servers(self) -> None:
        """Wait until the servers can be used; a context without embeddings has none."""

    def _enter(self) -> None:
        """Do what entering means for the class."""

    def _exit(self, raised: BaseException | None) -> None:
        """Undo ``_enter``; called however the body ended, with what it raised."""

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
            self._exit(exc)
        except BaseException as own:
            if exc is None:
                raise
            # The body's exception is the one that the user must see.
            logger.error("leaving %s also failed: %r", type(self).__name__, own)
        finally:
            _context_stack.pop(self)
            process_metrics.release()
        return None


class CommonContext:
    """The calls of the original's native context by which its programs set a job up."""

    def __init__(self, ctx: BaseCtx) -> None:
        self._ctx = ctx

    def __getattr__(self, name: str) -> Any:
        # The original's object had the servers' other calls as well.
        worker = None if name.startswith("_") else getattr(self._ctx, "embedding_worker", None)
        if worker is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(worker, name)

    def init_nats_publisher(self, world_size: int | None = None) -> None:
        """Do nothing: there is no NATS, and entering the context connects."""

    def configure_embedding_parameter_servers(
        self,
        initialize_lower: float,
        initialize_upper: float,
        admit_probability: float,
        enable_weight_bound: bool,
        weight_bound: float,
    ) -> None:
        """Configure the servers as the method of ``EmbeddingCtx`` of this name does."""
        configure = getattr(self._ctx, "configure_embedding_parameter_servers", None)
        if configure is None:
            raise ConfigError(
                f"{type(self._ctx).__name__} has no embeddings: expected a TrainCtx"
            )
        bound = weight_bound if enable_weight_bound else 0
        lower_upper = (initialize_lower, initialize_upper)
        configure(EmbeddingConfig(lower_upper, admit_probability, bound))

    def wait_servers_ready(self) -> None:
        """Wait, up to 300 s, until all servers are configured and answer."""
        self._ctx._wait_for_servers()


def cnt_ctx() -> BaseCtx | None:
    """Return the context entered last, or None outside any."""
    ctx = _context_stack.current()
    return ctx if isinstance(ctx, BaseCtx) else None


def usable_device(device_id: int | None) -> int | None:
    """Return the device's number, selected in torch, or None for the CPU."""
    if isinstance(device_id, bool) or not isinstance(device_id, Integral | None):
        raise ConfigError(
            f"device_id: expected the number of a CUDA device, or None for the CPU, got "
            f"{device_id!r}; 0 is cuda:0"
        )
    if device_id is None or device_id < 0:
        return None
    import torch  # not at the top: a data-loader has no device, and no torch

    count = torch.cuda.device_count()
    if device_id >= count:
        found = f"0 to {count - 1}" if count else "none"
        raise ConfigError(
            f"device_id: expected one of the CUDA devices that torch finds, {found}, got "
            f"{device_id}; leave it out to train on the CPU"
        )
    torch.cuda.set_device(device_id)
    return device_id
