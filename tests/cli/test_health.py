"""/readyz of the process in a container; servers: tests/e2e/test_doors.py."""

from __future__ import annotations

from contextlib import closing

import pytest

from persia import env
from persia._cli import health
from persia._metrics.definitions import LOADER
from persia._metrics.endpoint import Endpoint
from persia.errors import ConfigError, ServiceUnavailable
from tests.support.waiting import PATIENCE_S


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_ready_is_what_the_process_says(host: str) -> None:
    problems = ["no server answers"]
    with (
        env.changed(PERSIA_METRICS_PORT=0, PERSIA_METRICS_HOST=host),
        closing(Endpoint(LOADER, 0, list, lambda: "; ".join(problems), str)) as endpoint,
    ):
        port = int(endpoint.url.rpartition(":")[2])
        with env.changed(PERSIA_METRICS_PORT=port):
            with pytest.raises(ServiceUnavailable, match="no server answers"):
                health.check_ready(LOADER, PATIENCE_S)
            problems.clear()
            health.check_ready(LOADER, PATIENCE_S)


def test_a_process_that_is_gone_or_has_no_port() -> None:
    with env.changed(PERSIA_METRICS_PORT=1), pytest.raises(ServiceUnavailable, match=":1: "):
        health.check_ready(LOADER, PATIENCE_S)
    for port in ("off", 0):
        with (
            env.changed(PERSIA_METRICS_PORT=port),
            pytest.raises(ConfigError, match="PERSIA_METRICS_PORT: expected a port"),
        ):
            health.check_ready(LOADER, PATIENCE_S)
