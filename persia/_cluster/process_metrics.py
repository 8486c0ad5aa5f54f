"""The metrics of a process that runs a user's script: of the contexts that it has entered.

    persia._cli.run        opens the endpoint before the script begins
    a context, entered     opens it if it is not open; it is closed with the last context

So ``python train.py`` beside servers has one as well. In embedded mode a script has none,
unless ``PERSIA_METRICS_PORT`` asks for it: a notebook should open no port unasked. Sources are
those of the contexts that are on the stack at each reading.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from persia import _context_stack, env
from persia._metrics.definitions import LOADER, TRAINER
from persia._metrics.endpoint import Endpoint, PushSettings
from persia._metrics.registry import MetricSource
from persia._rpc.deadlines import within
from persia.config import GlobalConfig
from persia.errors import ConfigError

# Seconds that the calls behind one probe of readiness get together.
PROBE_S = 3.0


@runtime_checkable
class MonitoredContext(Protocol):
    """A context; a Protocol, as contexts are a layer above."""

    def metric_sources(self) -> Iterable[MetricSource]:
        """Return its metrics."""

    def why_not_ready(self) -> str:
        """Say why it cannot be used; "" if it can."""

    def why_not_healthy(self) -> str:
        """Say which of its threads have ended before their time; "" if none."""


def _entered() -> list[MonitoredContext]:
    return [ctx for ctx in _context_stack.entered() if isinstance(ctx, MonitoredContext)]


def _sources() -> Iterable[MetricSource]:
    return [source for ctx in _entered() for source in ctx.metric_sources()]


def _why_not_ready() -> str:
    contexts = _entered()
    if not contexts:
        return "the script has entered no context"
    with within(PROBE_S):
        return "; ".join(filter(None, (ctx.why_not_ready() for ctx in contexts)))


def _why_not_healthy() -> str:
    return "; ".join(filter(None, (ctx.why_not_healthy() for ctx in _entered())))


_lock = threading.Lock()  # guards both
_num_holders = 0
_endpoint: Endpoint | None = None


def hold(role: str | None = None) -> None:
    """Open the endpoint of this process, if it is to have one; ``release`` undoes it.

    Args:
        role: Of this process; by whether it has a rank, if not given.

    Raises:
        ConfigError: If it cannot listen where the environment says.
    """
    global _num_holders, _endpoint
    with _lock:
        if _num_holders == 0 and _wants_endpoint():
            _endpoint = _open(role)
        _num_holders += 1


def release() -> None:
    """Close it with the last ``hold``."""
    global _num_holders, _endpoint
    with _lock:
        _num_holders -= 1
        endpoint = None
        if _num_holders == 0:
            endpoint, _endpoint = _endpoint, None
    if endpoint is not None:
        endpoint.close()


def push_settings(config: GlobalConfig) -> PushSettings | None:
    """Return what a global config says of the push gateway; None if nothing is to be sent."""
    settings = config.common_config.metrics_config
    if not settings.enable_metrics:
        return None
    return PushSettings(settings.job_name, float(settings.push_interval_seconds))


def url() -> str:
    """Return where this process serves its metrics; "" if nowhere."""
    with _lock:
        return "" if _endpoint is None else _endpoint.url


def _wants_endpoint() -> bool:
    if env.feeds_parent():
        return False  # its parent counts what it has received
    if env.metrics_port() is not None:
        return True
    with contextlib.suppress(ConfigError):  # in no mode; a context of no servers may not care
        return env.get_mode() == "services"
    return False


def _open(role: str | None) -> Endpoint:
    rank = env.get_rank()
    if role is None:
        role = LOADER if rank is None else TRAINER
    config = env.global_config_path()
    number = rank if role == TRAINER else env.get_replica_index()
    return Endpoint(
        role,
        number or 0,
        _sources,
        _why_not_ready,
        _why_not_healthy,
        local_rank=env.get_local_rank() or 0,
        push=None if config is None else push_settings(GlobalConfig.load(config)),
    )
