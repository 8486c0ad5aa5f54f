"""Addresses: names that resolve, ports that are free, and who is there already."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

from persia import env
from persia._cli.checks.findings import Finding, error, ok, warning
from persia._cluster.addresses import TCP, split
from persia._cluster.connect import check_lists, current_addresses
from persia._metrics.definitions import LOADER, SERVER, TRAINER, WORKER
from persia._metrics.endpoint import default_port
from persia._rpc.client import Client
from persia._rpc.methods import Hello, Role, embedding_worker, nn_worker, parameter_server
from persia._rpc.zmq_transport import ZmqTransport
from persia.config import describe_differences
from persia.errors import ConfigError, PersiaError
from persia.version import __version__

# Seconds that a name, a connection and an answer may take.
_NAMES_S, _CONNECT_S, _ANSWER_S = 3.0, 1.0, 3.0


def check_network(fingerprint: str) -> Iterator[Finding]:
    """Yield what is found of the addresses of the job.

    Args:
        fingerprint: Of the embedding config, which servers that run should share; "" if there
            is none.
    """
    try:
        check_lists()
    except ConfigError as exc:
        yield error(
            "addresses", str(exc), "write host:port, or ipc:///path, with commas between"
        )
        return
    yield from _exposed()
    for role, variable, listed in (
        (parameter_server(), env.PARAMETER_SERVERS_VARIABLE, env.parameter_server_addresses()),
        (embedding_worker(), env.EMBEDDING_WORKERS_VARIABLE, env.embedding_worker_addresses()),
        (nn_worker(), env.NN_WORKERS_VARIABLE, env.nn_worker_addresses()),
    ):
        found = current_addresses(role, _NAMES_S)
        yield from _names(variable, listed)
        for address in found:
            yield _address(role, variable, address, fingerprint)
    yield from _metrics_ports()


def _exposed() -> Iterator[Finding]:
    host = env.listen_host()
    try:
        is_here = ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        is_here = host == "localhost"
    if is_here or env.keys_directory() is not None:
        return
    if env.may_listen_without_keys():
        text = f"PERSIA_LISTEN_HOST={host}, and nothing is encrypted"
        yield warning("keys", text, "is it a network that no stranger enters? docs/security.md")
    else:
        yield error(
            "keys",
            f"PERSIA_LISTEN_HOST={host}: servers refuse to listen there without keys",
            "persia-launcher keys keys/, and PERSIA_KEYS=keys/ for every process",
        )


def _names(variable: str, listed: list[str]) -> Iterator[Finding]:
    for address in listed:
        if "://" in address and not address.startswith(TCP):
            continue
        host, port = split(address)
        try:
            socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        except OSError as exc:
            yield error(
                "names",
                f"{variable}: {host} leads nowhere: {exc.strerror}",
                "correct the name; in containers it is that of a service, on the same network",
            )


def _address(role: Role, variable: str, address: str, fingerprint: str) -> Finding:
    who = f"{role.name} at {address}"
    if not _is_there(address):
        return _vacant(who, variable, address)
    try:
        hello = _hello(role, address)
    except PersiaError as exc:
        if not _listens(address):
            return _vacant(who, variable, address)
        return error(
            "ports",
            f"{who} is taken by somebody else: {exc}",
            f"end it, or write another port into {variable}",
        )
    if hello.version != __version__:
        return error(
            "versions",
            f"{who} is PERSIA {hello.version}, and this is {__version__}",
            "install the same version everywhere",
        )
    theirs = hello.schema_fingerprint
    if fingerprint and theirs and theirs != fingerprint:
        return error(
            "versions",
            f"{who} has another embedding config: "
            f"{describe_differences(fingerprint, theirs, 'here', 'there')}",
            "start it with the same --embedding-config",
        )
    replica = f"replica {hello.replica_index} of {hello.replica_size}"
    return ok("versions", f"{who} runs: {replica}, PERSIA {hello.version}")


def _vacant(who: str, variable: str, address: str) -> Finding:
    why = _why_not_free(address)
    if why:
        return error("addresses", f"{who}: {why}", f"write another address into {variable}")
    return ok("addresses", f"{who}: nobody there yet")


def _is_there(address: str) -> bool:
    """Whether somebody may be there, without a connection that a server took for a stranger's.

    Of another machine only a call can tell.
    """
    if not address.startswith(TCP):
        return Path(address.removeprefix("ipc://")).is_socket()
    host, port = split(address)
    try:
        _bind(host.strip("[]"), port)
    except socket.gaierror:
        return False  # the name leads nowhere
    except OSError as exc:
        return exc.errno != errno.EACCES
    return False


def _listens(address: str) -> bool:
    """Whether somebody takes connections there."""
    try:
        if not address.startswith(TCP):
            with closing(socket.socket(socket.AF_UNIX)) as unix:
                unix.settimeout(_CONNECT_S)
                unix.connect(address.removeprefix("ipc://"))
            return True
        host, port = split(address)
        with socket.create_connection((host.strip("[]"), port), _CONNECT_S):
            return True
    except OSError:
        return False


def _why_not_free(address: str) -> str:
    """Say why no server of this machine could listen there; "" if one could, or elsewhere."""
    if not address.startswith(TCP):
        folder = Path(address.removeprefix("ipc://")).parent
        return "" if folder.is_dir() else f"{folder} is no directory"
    host, port = split(address)
    return _why_not_bound(host.strip("[]"), port)


def _bind(host: str, port: int) -> None:
    """Take a port of this machine, and give it back."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    with closing(socket.socket(family)) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((host, port))


def _why_not_bound(host: str, port: int) -> str:
    try:
        _bind(host, port)
    except OSError as exc:
        if exc.errno in (errno.EADDRINUSE, errno.EACCES):
            return f"cannot listen at port {port}: {exc.strerror}"
    return ""  # or it is another machine's


def _hello(role: Role, address: str) -> Hello:
    with ExitStack() as stack:
        transport = stack.enter_context(closing(ZmqTransport()))
        client = Client(transport, address, role, timeout_s=_ANSWER_S)
        stack.callback(client.close)
        return client.hello()


def _metrics_ports() -> Iterator[Finding]:
    port = env.metrics_port()
    if port == "off":
        text = "PERSIA_METRICS_PORT=off: persia-launcher top and Prometheus see nothing"
        yield warning("metrics", text, "unset PERSIA_METRICS_PORT")
        return
    if port is not None:
        return
    host = env.metrics_host()
    taken = [
        str(default_port(role, 0))
        for role in (LOADER, WORKER, SERVER, TRAINER)
        if _why_not_bound(host.strip("[]"), default_port(role, 0))
    ]
    if taken:
        yield warning(
            "metrics",
            f"ports {', '.join(taken)} of {host} are taken: the kernel will choose others",
            "if that is no job of yours: set PERSIA_METRICS_PORT, or name the ports to top",
        )
    else:
        yield ok("metrics", f"the default ports of {host} are free")
