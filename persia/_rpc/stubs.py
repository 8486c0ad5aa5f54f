"""The roles' Protocols, answered by a server somewhere else.

Each class stands where the plain object would: the embedding-worker asks a
``RemoteParameterServer`` as it asks a ``ParameterServer`` of its own process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from persia._rpc.client import CallInFlight, Client
from persia._rpc.messages import (
    BatchGradients,
    CutInfo,
    CutRequest,
    CutStatus,
    FeatureStats,
    HyperParameters,
    IDFeatures,
    LoadRequest,
    LoadStatus,
    LookupReply,
    LookupRequest,
    LookupResult,
    OptimizerSettings,
    RemoteRef,
    StreamedBatch,
    StreamNews,
    StreamOpening,
    StreamState,
    TableEntries,
    TableSigns,
    UpdateReply,
    UpdateReport,
    UpdateRequest,
    WriteRequest,
)
from persia._rpc.methods import Hello, Role, embedding_worker, nn_worker, parameter_server
from persia._rpc.transport import Transport

Self = TypeVar("Self", bound="Remote")


class Remote:
    """A client and what its server said about itself when it was first asked."""

    def __init__(self, client: Client, hello: Hello) -> None:
        self._client = client
        self._hello = hello

    # Called when a client is made: the tables are built on first use.
    _role: ClassVar[Callable[[], Role]]

    @classmethod
    def connect(
        cls: type[Self],
        transport: Transport,
        address: str,
        *,
        hello_timeout_s: float | None = None,
        **options: Any,
    ) -> Self:
        """Connect and ask who is there.

        Args:
            transport: How to get there.
            address: Where the server listens.
            hello_timeout_s: Seconds to wait for the server to be there.
            options: Further arguments of ``Client``.

        Raises:
            ConfigError: If another role or replica answers.
            ServiceError: If nobody answers in time.
        """
        client = Client(transport, address, cls._role(), **options)
        try:
            return cls(client, client.hello(hello_timeout_s))
        except BaseException:
            client.close()
            raise

    @property
    def client(self) -> Client:
        """What calls go through."""
        return self._client

    @property
    def replica_index(self) -> int:
        """Number of this server."""
        return self._hello.replica_index

    @property
    def replica_size(self) -> int:
        """Number of servers of its role."""
        return self._hello.replica_size

    @property
    def incarnation(self) -> int | None:
        """The process that answered last."""
        return self._client.incarnation

    @property
    def schema_fingerprint(self) -> str:
        """What the server takes signs and tables to mean."""
        return self._hello.schema_fingerprint

    def begin(self, method: str, *arguments: Any) -> CallInFlight:
        """Begin a call, whose result is to be asked for, so that others go with it."""
        return self._client.begin(method, *arguments)

    def finish_job(self, status: int, took_part: bool = True) -> None:
        """Tell the server that the job has ended, with this exit status."""
        self._client.call("finish_job", status, took_part)

    def job_status(self, watcher: str, timeout_s: float | None = None) -> int | None:
        """Return the exit status of the job; None while it goes on.

        Args:
            watcher: Who asks; the server stays until each of them has been told.
            timeout_s: Seconds, if other than the client's.
        """
        status: int | None = self._client.call("job_status", watcher, timeout_s=timeout_s)
        return status

    def close(self) -> None:
        """End the connection."""
        self._client.close()


class RemoteParameterServer(Remote):
    """Implements ``messages.ParameterServer``."""

    _role = staticmethod(parameter_server)

    def configure(self, settings: HyperParameters) -> None:
        """Give the server the settings of rows."""
        self._client.call("configure", settings)

    def register_optimizer(self, settings: OptimizerSettings) -> None:
        """Give the server the optimizer."""
        self._client.call("register_optimizer", settings)

    def ready_for_serving(self) -> bool:
        """Whether training can begin."""
        ready: bool = self._client.call("ready_for_serving")
        return ready

    def lookup(self, request: LookupRequest) -> LookupReply:
        """Return the rows asked for."""
        reply: LookupReply = self._client.call("lookup", request)
        return reply

    def update(self, request: UpdateRequest) -> UpdateReply:
        """Step each row by its gradient, once per update id."""
        reply: UpdateReply = self._client.call("update", request)
        return reply

    def set_embedding(self, tables: Sequence[TableEntries]) -> None:
        """Write rows."""
        self._client.call("set_embedding", tables)

    def read_embedding(self, tables: Sequence[TableSigns]) -> tuple[TableEntries, ...]:
        """Return those of the rows asked for that exist."""
        entries: tuple[TableEntries, ...] = self._client.call("read_embedding", tables)
        return entries

    def get_embedding_size(self) -> int:
        """Return the number of rows held."""
        size: int = self._client.call("get_embedding_size")
        return size

    def clear_embeddings(self) -> None:
        """Drop every row."""
        self._client.call("clear_embeddings")

    def begin_cut(self, request: CutRequest) -> CutInfo:
        """Begin a snapshot of this moment."""
        info: CutInfo = self._client.call("begin_cut", request)
        return info

    def write_cut(self, request: WriteRequest) -> None:
        """Write a cut's parts in the background."""
        self._client.call("write_cut", request)

    def cut_status(self, cut_id: int) -> CutStatus:
        """Return how far the server is with a cut."""
        status: CutStatus = self._client.call("cut_status", cut_id)
        return status

    def end_cut(self, cut_id: int, committed: bool) -> None:
        """End a cut, whose files are published if it is committed."""
        self._client.call("end_cut", cut_id, committed)

    def load(self, request: LoadRequest) -> LoadStatus:
        """Begin a step of a load, or return how far the server is with it."""
        status: LoadStatus = self._client.call("load", request)
        return status

    def stats(self) -> Mapping[str, int]:
        """Return the server's counts."""
        stats: Mapping[str, int] = self._client.call("stats")
        return stats


class RemoteEmbeddingWorker(Remote):
    """Implements ``messages.EmbeddingWorker``."""

    _role = staticmethod(embedding_worker)

    def register(self, features: IDFeatures, timeout_s: float | None = None) -> int:
        """Take the ids of a batch and return its ref, within seconds if they are given."""
        ref: int = self._client.call("register", features, timeout_s=timeout_s)
        return ref

    def lookup(self, ref: int, is_training: bool) -> LookupResult:
        """Return the outputs of a registered batch."""
        result: LookupResult = self._client.call("lookup", ref, is_training)
        return result

    def lookup_direct(self, features: IDFeatures) -> LookupResult:
        """Register and look up in one."""
        result: LookupResult = self._client.call("lookup_direct", features)
        return result

    def update(self, gradients: BatchGradients) -> UpdateReport:
        """Step the rows of a batch and retire its ref."""
        report: UpdateReport = self._client.call("update", gradients)
        return report

    def release(self, ref: int) -> None:
        """Retire a ref for which no gradient will come."""
        self._client.call("release", ref)

    def configure(self, settings: HyperParameters) -> None:
        """Give every server the settings of rows."""
        self._client.call("configure", settings)

    def register_optimizer(self, settings: OptimizerSettings) -> None:
        """Give every server the optimizer."""
        self._client.call("register_optimizer", settings)

    def tables_at_rate(self, group: str | None) -> tuple[int, ...]:
        """Return the tables that a learning rate of a group, or of all groups, is for."""
        tables: tuple[int, ...] = self._client.call("tables_at_rate", group)
        return tables

    def ready_for_serving(self) -> bool:
        """Whether every server can train."""
        ready: bool = self._client.call("ready_for_serving")
        return ready

    def set_embedding(self, tables: Sequence[TableEntries]) -> None:
        """Write rows, each to the server that owns its sign."""
        self._client.call("set_embedding", tables)

    def get_embedding_size(self) -> list[int]:
        """Return the number of rows of each server."""
        sizes: list[int] = self._client.call("get_embedding_size")
        return sizes

    def clear_embeddings(self) -> None:
        """Drop every row of every server."""
        self._client.call("clear_embeddings")

    def begin_cut(self, request: CutRequest) -> tuple[CutInfo, ...]:
        """Begin a snapshot of this moment on every server."""
        info: tuple[CutInfo, ...] = self._client.call("begin_cut", request)
        return info

    def write_cut(self, request: WriteRequest) -> None:
        """Write a cut's parts in the background."""
        self._client.call("write_cut", request)

    def cut_status(self, cut_id: int) -> tuple[CutStatus, ...]:
        """Return how far each server is with a cut."""
        status: tuple[CutStatus, ...] = self._client.call("cut_status", cut_id)
        return status

    def end_cut(self, cut_id: int, committed: bool) -> None:
        """End a cut, whose files are published if it is committed."""
        self._client.call("end_cut", cut_id, committed)

    def load(self, request: LoadRequest) -> tuple[LoadStatus, ...]:
        """Begin a step of a load, or return how far each server is with it."""
        status: tuple[LoadStatus, ...] = self._client.call("load", request)
        return status

    def stats(self) -> Mapping[str, int]:
        """Return the worker's counts."""
        stats: Mapping[str, int] = self._client.call("stats")
        return stats

    def server_stats(self) -> list[Mapping[str, int]]:
        """Return the counts of each server."""
        stats: list[Mapping[str, int]] = self._client.call("server_stats")
        return stats

    def feature_stats(self) -> tuple[FeatureStats, ...]:
        """Return what the worker has seen of each feature."""
        stats: tuple[FeatureStats, ...] = self._client.call("feature_stats")
        return stats


class RemoteNNWorker(Remote):
    """Implements ``messages.NNWorker``."""

    _role = staticmethod(nn_worker)

    def open_stream(self, opening: StreamOpening) -> StreamState:
        """Begin to send batches, or go on with an nn-worker that was started anew."""
        state: StreamState = self._client.call("open_stream", opening)
        return state

    def deliver(self, stream: tuple[int, int], batch: StreamedBatch) -> None:
        """Send one batch, for which there must be a credit."""
        self._client.call("deliver", stream, batch)

    def relocate(self, stream: tuple[int, int], batch_id: int, ids: RemoteRef) -> None:
        """Say where the ids of a batch are now."""
        self._client.call("relocate", stream, batch_id, ids)

    def end_stream(self, stream: tuple[int, int], next_batch_id: int, failure: str) -> None:
        """Say that no batch from ``next_batch_id`` on will come, and why if by a failure."""
        self._client.call("end_stream", stream, next_batch_id, failure)

    def poll(self, stream: tuple[int, int], seen: int) -> StreamNews:
        """Return what is new, as soon as there is something, or after some seconds."""
        news: StreamNews = self._client.call("poll", stream, seen)
        return news
