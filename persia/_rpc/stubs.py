"""The roles' Protocols, implemented by calls of a server somewhere else.

A stub stands where the plain object would: the embedding-worker calls a
``RemoteParameterServer`` as it calls a ``ParameterServer`` of its own process. The methods of a
stub are those of its Protocol; each forwards its arguments to ``Client.call``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from persia._rpc import messages
from persia._rpc.client import Client
from persia._rpc.messages import (
    EmbeddingWorker,
    IDFeatures,
    NNWorker,
    ParameterServer,
    WireDtypes,
)
from persia._rpc.methods import Hello, Role, embedding_worker, nn_worker, parameter_server
from persia.errors import ConfigError

if TYPE_CHECKING:
    from persia._rpc.zmq_transport import ZmqTransport

Self = TypeVar("Self", bound="Remote")


class Remote:
    """A client and the identity that its server gave when it was first asked."""

    # Called when a client is made: a role's coders are built on first use.
    _role: ClassVar[Callable[[], Role]]

    def __init_subclass__(cls) -> None:
        """Define each method that the class inherits from its role's Protocol."""
        super().__init_subclass__()
        for name, function in inspect.getmembers(cls, inspect.isfunction):
            # Only the Protocol's own: a method that a stub or Remote defines stays.
            if function.__module__ == messages.__name__:
                setattr(cls, name, _forwarder(name, function))

    def __init__(self, client: Client, hello: Hello) -> None:
        self.client = client
        self._hello = hello

    @classmethod
    def of(cls: type[Self], client: Client, hello: Hello) -> Self:
        """Make a stub of a client whose server was asked for its identity."""
        return cls(client, hello)

    @classmethod
    def connect(cls: type[Self], transport: ZmqTransport, address: str, **options: Any) -> Self:
        """Connect and ask the server for its identity; ``options`` are a ``Client``'s."""
        client = Client(transport, address, cls._role(), **options)
        try:
            # Also fixes the replica index that later calls carry.
            return cls(client, client.hello())
        except BaseException:
            client.close()
            raise

    def close(self) -> None:
        """End the connection."""
        self.client.close()

    @property
    def replica_index(self) -> int:
        """Index of this server."""
        return self._hello.replica_index

    @property
    def replica_size(self) -> int:
        """Number of servers of its role."""
        return self._hello.replica_size

    @property
    def schema_fingerprint(self) -> str:
        """Fingerprint of the server's embedding config: groups, tables and dims of signs."""
        return self._hello.schema_fingerprint

    def check_wire(self, expected: WireDtypes) -> None:
        """Check that the server sends rows, and wants gradients, as this process does.

        Raises:
            ConfigError: If it has another ``wire_config``.
        """
        there = self._hello.wire
        if there != expected:
            raise ConfigError(
                f"{self.client.origin('')}: expected common_config.wire_config as here, "
                f"{describe_wire(expected)}, got {describe_wire(there)}; all processes of a "
                "job have one global config"
            )

    @property
    def incarnation(self) -> int | None:
        """The process that answered last."""
        return self.client.incarnation

    def finish_job(self, status: int, took_part: bool = True) -> None:
        """Announce the end of the job with an exit status."""
        self.client.call("finish_job", status, took_part)

    def job_status(self, watcher: str, timeout_s: float | None = None) -> int | None:
        """Return the exit status of the job, None while it goes on.

        ``watcher`` names the caller: the server stays until each watcher has the status.
        """
        status: int | None = self.client.call("job_status", watcher, timeout_s=timeout_s)
        return status


def describe_wire(wire: WireDtypes) -> str:
    """Return dtypes as the global config has them."""
    return f"row_dtype: {wire.rows}, gradient_dtype: {wire.gradients}"


def _forwarder(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Remote, *arguments: Any) -> Any:
        return self.client.call(name, *arguments)

    # Not functools.wraps: __wrapped__ would let inspect take this for the Protocol's function.
    forward.__name__, forward.__doc__ = name, function.__doc__
    forward.__qualname__ = f"Remote.{name}"
    return forward


class RemoteParameterServer(Remote, ParameterServer):
    """An embedding-parameter-server."""

    _role = staticmethod(parameter_server)


class RemoteEmbeddingWorker(Remote, EmbeddingWorker):
    """An embedding-worker."""

    _role = staticmethod(embedding_worker)

    def register(self, features: IDFeatures, timeout_s: float | None = None) -> int:
        """Take the ids of a batch and return its ref, within seconds if they are given."""
        ref: int = self.client.call("register", features, timeout_s=timeout_s)
        return ref


class RemoteNNWorker(Remote, NNWorker):
    """An nn-worker."""

    _role = staticmethod(nn_worker)
