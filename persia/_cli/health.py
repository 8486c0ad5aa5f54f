"""Whether the server in this container does its work: for healthchecks and probes.

    python -m persia._cli.health embedding-worker
    python -m persia._cli.health --ready nn-worker

Exits with 0 if it does, else with 1 and a line that says why not.

Being asked means more than being there: a server that has stopped serving still listens. Its
own counts come from the same threads as everything else, and an embedding-worker that has not
found its parameter servers refuses.

With ``--ready`` the process is asked at /readyz, where its metrics are: whether its script has
entered a context, and all that it needs answers and is configured. A data-loader can be asked
in no other way.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack, closing
from urllib.error import HTTPError
from urllib.request import ProxyHandler, build_opener

from persia import env
from persia._cluster.addresses import TCP, split
from persia._cluster.connect import listening_address
from persia._metrics.definitions import LOADER, TRAINER
from persia._metrics.endpoint import default_port
from persia._rpc.client import Client
from persia._rpc.methods import embedding_worker, nn_worker, parameter_server
from persia._rpc.zmq_transport import ZmqTransport
from persia.errors import ConfigError, PersiaError, ServiceUnavailable
from persia.utils import ArgumentParser

# What a server listens at when it listens everywhere, and where that is from here.
_HERE = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]", "::": "[::1]", "*": "127.0.0.1"}

ROLES = {role().name: role for role in (parameter_server, embedding_worker, nn_worker)}


def check(role: str, timeout_s: float, port: int | None = None) -> None:
    """Ask the server of this container, of which the environment says where it listens.

    An nn-worker is asked who it is, at the address of its first rank here.

    Raises:
        ConfigError: If another role answers, or the environment cannot be read.
        ServiceError: If it does not answer in time, or refuses.
    """
    wanted = ROLES[role]()
    index = 0 if role == nn_worker().name else env.replica()[0]
    address = listening_address(role, index, port=port)
    if address.startswith(TCP):
        host, listens_at = split(address)
        address = f"{TCP}{_HERE.get(host, host)}:{listens_at}"
    with ExitStack() as stack:
        transport = stack.enter_context(closing(ZmqTransport()))
        client = Client(transport, address, wanted, timeout_s=timeout_s)
        stack.callback(client.close)
        client.hello()
        if "stats" in wanted.methods:
            client.call("stats")


def check_ready(role: str, timeout_s: float) -> None:
    """Ask the process of this container at /readyz; of an nn-worker, its first rank here.

    Raises:
        ConfigError: If it cannot be said where that is.
        ServiceError: If it does not answer in time, or says that it is not ready.
    """
    port = env.metrics_port()
    if port in ("off", 0):
        raise ConfigError("PERSIA_METRICS_PORT: expected a port, where /readyz can be asked")
    if port is None:
        port = default_port(role, 0 if role == TRAINER else env.replica()[0])
    host = env.metrics_host()
    url = f"http://{_HERE.get(host, host)}:{port}/readyz"
    try:
        # Not by a proxy of the environment's.
        with build_opener(ProxyHandler({})).open(url, timeout=timeout_s):
            return
    except HTTPError as error:
        with error:
            why = error.read().decode(errors="replace").strip()
    except OSError as error:
        why = f"{url}: {error}"
    raise ServiceUnavailable(why, role=role)


def main() -> None:
    """Check what the command line names."""
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
