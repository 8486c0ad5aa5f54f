"""Healthcheck of the server in this container: 0, or 1 and a line that says why not.

    python -m persia._cli.health embedding-worker
    python -m persia._cli.health --ready nn-worker

The check is a call, not a connection: a server that has stopped serving still listens. With
``--ready``, and for a data-loader, which serves nothing else, the process is asked at /readyz,
beside its metrics.
"""

from __future__ import annotations

import sys
from contextlib import closing
from http import HTTPStatus

from persia import env
from persia._cli.top import LOOPBACK_OF, fetch, metrics_host
from persia._cluster.connect import listening_address
from persia._metrics.definitions import LOADER, TRAINER
from persia._metrics.endpoint import default_port
from persia._rpc.client import Client
from persia._rpc.methods import embedding_worker, nn_worker, parameter_server
from persia._rpc.zmq_transport import ZmqTransport
from persia.errors import ConfigError, PersiaError, ServiceUnavailable
from persia.utils import ArgumentParser

ROLES = {role().name: role for role in (parameter_server, embedding_worker, nn_worker)}


def check(role: str, timeout_s: float, port: int | None = None) -> None:
    """Call the server of this container; an nn-worker, at its first rank, only says hello."""
    wanted = ROLES[role]()
    index = 0 if role == nn_worker().name else env.replica()[0]
    host = env.listen_host().strip("[]")
    near = LOOPBACK_OF.get(host, host)
    address = listening_address(role, index, port=port, host=near)
    with (
        closing(ZmqTransport()) as transport,
        closing(Client(transport, address, wanted, timeout_s=timeout_s)) as client,
    ):
        client.hello()
        if "stats" in wanted.methods:
            client.call("stats")


def check_ready(role: str, timeout_s: float) -> None:
    """Read /readyz of this container's process; of an nn-worker, of its first rank here."""
    port = env.metrics_port()
    if port == 0 or isinstance(port, str):
        raise ConfigError("PERSIA_METRICS_PORT: expected a port, for /readyz")
    if port is None:
        port = default_port(role, 0 if role == TRAINER else env.replica()[0])
    host = metrics_host()
    try:
        status, text = fetch(host, port, "/readyz", timeout_s)
    except OSError as error:
        raise ServiceUnavailable(f"/readyz at {host}:{port}: {error}", role=role) from error
    if status != HTTPStatus.OK:
        raise ServiceUnavailable(text.strip(), role=role)


def main() -> None:
    example = "python -m persia._cli.health --ready nn-worker"
    parser = ArgumentParser("Ask the server of this container.", example)
    parser.add_argument("role", choices=sorted([*ROLES, LOADER]))
    parser.add_argument("--ready", action="store_true", help="ask at /readyz")
    parser.add_argument("--port", type=int, help="the server's own --port, if it has one")
    parser.add_argument("--timeout", type=float, default=8.0, help="seconds (8)")
    options = parser.parse_args()
    try:
        if options.ready or options.role == LOADER:
            check_ready(options.role, options.timeout)
        else:
            check(options.role, options.timeout, options.port)
    except PersiaError as error:
        sys.exit(f"{options.role}: {error}")


if __name__ == "__main__":
    main()
