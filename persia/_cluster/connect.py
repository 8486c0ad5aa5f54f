"""Which servers there are: the lists of addresses in the environment.

A name in them may resolve to several hosts: each is one server. A list of nn-workers names the
ranks, or the nodes; the ranks of a node listen at consecutive ports. No server needs to be
there yet: ``discovery`` asks until the set is whole.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypedDict, TypeVar

from persia import env
from persia._cluster.addresses import TCP, AddressList, hosts, is_name, resolved, split
from persia._cluster.discovery import Discovery
from persia._rpc.client import Client
from persia._rpc.methods import Hello, Role, embedding_worker, nn_worker, parameter_server
from persia._rpc.stubs import RemoteEmbeddingWorker, RemoteNNWorker, RemoteParameterServer
from persia._rpc.zmq_transport import normalized
from persia.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from persia._rpc.zmq_transport import ZmqTransport

T = TypeVar("T")

logger = logging.getLogger(__name__)

_RESOLVE_S = 3.0  # that the look-up of a name may take

_nats_warning = threading.Lock()  # acquired with the one warning, and never released

_LISTS = {
    parameter_server().name: env.parameter_server_addresses,
    embedding_worker().name: env.embedding_worker_addresses,
    nn_worker().name: env.nn_worker_addresses,
}


class ConnectOptions(TypedDict, total=False):
    """How a set of servers is found."""

    # Where they listen; from the environment if not given.
    addresses: Sequence[str] | None
    # Seconds until all must have answered, and of each later call; ``PERSIA_RPC_TIMEOUT``.
    timeout_s: float | None
    # Called with the replica number when another process answers in its place; see ``Client``.
    on_restart: Callable[[int], None] | None
    # Asked several times a second whether to wait no longer.
    should_stop: Callable[[], bool]
    # Called every few seconds with the log's line about what is missing.
    on_wait: Callable[[str], None]


def connect_parameter_servers(
    transport: ZmqTransport, **options: Unpack[ConnectOptions]
) -> list[RemoteParameterServer]:
    """Connect to every embedding-parameter-server, as ``_connect`` says."""
    return _connect(parameter_server(), RemoteParameterServer.of, transport, **options)


def connect_embedding_workers(
    transport: ZmqTransport, **options: Unpack[ConnectOptions]
) -> list[RemoteEmbeddingWorker]:
    """Connect to every embedding-worker, as ``_connect`` says."""
    return _connect(embedding_worker(), RemoteEmbeddingWorker.of, transport, **options)


def serving_addresses(addresses: Sequence[str] | None) -> tuple[Callable[[], list[str]], bool]:
    """Return what looks up where embedding-workers are, and whether that may change.

    Raises:
        ConfigError: If an address in the list cannot be read.
    """
    listed = _list_of(embedding_worker().name, addresses)
    has_names = any(is_name(address) for address in listed.addresses)
    return lambda: resolved(listed.addresses, _RESOLVE_S), has_names


def connect_nn_workers(
    transport: ZmqTransport, **options: Unpack[ConnectOptions]
) -> list[RemoteNNWorker]:
    """Connect to every nn-worker, as ``_connect`` says."""
    return _connect(nn_worker(), RemoteNNWorker.of, transport, **options)


def _connect(
    role: Role,
    stub: Callable[[Client, Hello], T],
    transport: ZmqTransport,
    *,
    addresses: Sequence[str] | None = None,
    timeout_s: float | None = None,
    on_restart: Callable[[int], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
    on_wait: Callable[[str], None] | None = None,
) -> list[T]:
    """Connect to every server of a role; returns them by replica number.

    Raises:
        ConfigError: If an address cannot be read, or the servers that answer are not one set.
        ServiceUnavailable: If some are missing at the deadline.
        JobFinished: If ``should_stop`` said so.
    """
    name = env.named_nats_variable()
    if name is not None and _nats_warning.acquire(blocking=False):
        logger.warning("%s is ignored: servers are found by their addresses", name)
    discovery = Discovery(
        transport,
        role,
        _list_of(role.name, addresses),
        env.rpc_timeout_s() if timeout_s is None else timeout_s,
        on_restart=on_restart,
        should_stop=should_stop,
        on_wait=on_wait,
    )
    return [stub(client, hello) for client, hello in discovery.run()]


def _list_of(role: str, addresses: Sequence[str] | None = None) -> AddressList:
    read = _LISTS[role]
    variable = f"the list of {role}s given" if addresses else read.name
    # Those of the environment have their ranges expanded already.
    listed = [one for text in addresses or read() for one in _expanded(text, variable)]
    try:
        found = [normalized(address) for address in listed]
    except ConfigError as exc:
        raise ConfigError(f"{variable}: {exc}") from exc
    return AddressList(variable, found, is_by_node=role == nn_worker().name)


def _expanded(text: str, variable: str) -> list[str]:
    try:
        return env.addresses_of(text)
    except ValueError as exc:
        raise ConfigError(
            f"{variable}: expected a range as host-{{0..3}}:8888, got {text!r}"
        ) from exc


def current_lists() -> dict[str, AddressList]:
    """Read the lists of every role, by its name.

    Raises:
        ConfigError: If an address in them cannot be read; names the variable.
    """
    return {role: _list_of(role) for role in _LISTS}


def current_addresses(role: Role, timeout_s: float) -> list[str]:
    """Return every address of a role, with the hosts that its names lead to now."""
    # libzmq would look names up in the thread that moves all messages, and one whose container
    # is gone may take it many seconds.
    return resolved(_list_of(role.name).addresses, timeout_s, hosts)


def listening_address(
    role: str, index: int, *, port: int | None = None, host: str | None = None
) -> str:
    """Return the address at which a server of this process listens.

    ``port`` and ``host`` come first, then the entry of the role's list for this server. That
    says whether it is ``ipc``, and which port it is; its host is how others get here, and this
    server listens at ``PERSIA_LISTEN_HOST``. Port 0 is one that the kernel chooses.

    Raises:
        ConfigError: If the role's list cannot be read, or has no entry for this server.
    """
    host = host or env.listen_host()
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    if port is not None:
        return f"{TCP}{host}:{port}"
    listed = _list_of(role)
    place, offset = index, 0
    if listed.is_by_node:
        place, offset = _node_of(index, len(listed.addresses))
    elif len(listed.addresses) == 1 and listed.addresses[0].startswith(TCP):
        place = 0  # one name that leads to every replica
    if place >= len(listed.addresses):
        raise ConfigError(
            f"{listed.variable}: expected an address for {role} {index}, "
            f"got {len(listed.addresses)}"
        )
    address = listed.addresses[place]
    if address.startswith(TCP):
        return f"{TCP}{host}:{split(address)[1] + offset}"
    if offset:
        raise ConfigError(
            f"{listed.variable}: expected an address for each rank where they are ipc, "
            f"got none for rank {index}"
        )
    return address


def _node_of(rank: int, num_listed: int) -> tuple[int, int]:
    """Return the place of a rank in the list, and how far its port is from the one there."""
    world_size = env.get_world_size() or 1
    if num_listed == world_size:
        return rank, 0
    if num_listed == 1:
        # The name of one node, or of all of them.
        return 0, env.get_local_rank() or 0
    if world_size % num_listed:
        raise ConfigError(
            f"{env.nn_worker_addresses.name}: expected an address for each of {world_size} "
            f"ranks, or for each of the nodes that share them evenly, got {num_listed}"
        )
    return divmod(rank, world_size // num_listed)
