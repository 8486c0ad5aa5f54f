"""Metrics pushed to a gateway, as the keys of the original PERSIA say.

    common_config.metrics_config.enable_metrics           true: metrics are pushed as well
    common_config.metrics_config.job_name                 the gateway's job
    common_config.metrics_config.push_interval_seconds    how often
    PERSIA_METRICS_GATEWAY_ADDR                           where; metrics_gateway:9091

A process replaces its own metrics only: its group is its job, role, number and address.
"""

from __future__ import annotations

import logging
import socket
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from persia import env

if TYPE_CHECKING:
    from persia._metrics.registry import Metrics

logger = logging.getLogger(__name__)

# Seconds of one try; and of the last one, as the process ends.
_TRY_S, _LAST_TRY_S = 5.0, 1.0


@dataclass(frozen=True, slots=True)
class PushSettings:
    """Settings of section ``metrics_config``."""

    job_name: str
    interval_s: float


class Pusher:
    """Pushes the metrics of a process periodically, and once more when it is closed.

    A gateway that does not answer is logged once, and once more when it answers again.

    Args:
        metrics: Of this process.
        settings: Interval and job.
        role: Of this process.
        replica: Its number.
    """

    def __init__(
        self, metrics: Metrics, settings: PushSettings, role: str, replica: int
    ) -> None:
        self._metrics = metrics
        self._settings = settings
        self._gateway = env.metrics_gateway()
        self._group = {
            "instance": f"rep_{replica}",
            "ip_addr": _own_address(self._gateway),
            "role": role,
        }
        self._failing = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="persia-push", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Push once more, and end the thread."""
        self._closed.set()
        self._thread.join(_TRY_S + 2 * _LAST_TRY_S)

    def _run(self) -> None:
        while not self._closed.wait(self._settings.interval_s):
            self._push(_TRY_S)
        self._push(_LAST_TRY_S)

    def _push(self, timeout_s: float) -> None:
        from prometheus_client import push_to_gateway

        try:
            push_to_gateway(
                self._gateway,
                self._settings.job_name,
                self._metrics.registry,
                self._group,
                timeout_s,
            )
        except Exception as error:
            # Of any class: training must not fail of its metrics.
            if not self._failing:
                logger.warning(
                    "metrics cannot be sent to %s (%s); trying again every %g s",
                    self._gateway,
                    error,
                    self._settings.interval_s,
                )
            self._failing = True
            return
        if self._failing:
            logger.info("metrics are sent to %s again", self._gateway)
        self._failing = False


def _own_address(gateway: str) -> str:
    """Return the address of this host from which the gateway is reached."""
    host = gateway.rpartition("//")[2].partition("/")[0].rpartition(":")[0]
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
