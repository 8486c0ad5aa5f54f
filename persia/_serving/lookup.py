"""The rows of a served model, pooled by the code that training pools with.

An embedding-worker asks one parameter server, whose rows are ``LiveRows`` of this process: each
request sees those of one moment. Or it asks servers for the rows of the bundle's checkpoint,
and takes no others, so that dense net and rows are of one cut. Where an id has no row, its
feature's policy says what it is.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from persia._cluster.embedded import NEVER
from persia._core.base.arrays import empty_floats
from persia._core.ids.feature_batch import FeatureBatch
from persia._files.change_log import read_chain
from persia._rows.live_rows import LiveRows
from persia._rows.row_source import RowSource, SchemaMatch, open_checkpoint
from persia._rpc.messages import (
    IDFeatures,
    LoadRequest,
    LookupReply,
    LookupRequest,
    ParameterServer,
    SlotOutput,
    TableRows,
)
from persia._rpc.stubs import RemoteParameterServer
from persia._rpc.zmq_transport import ZmqTransport
from persia._server.restore import settings_of
from persia._server.row_settings import initializer_of
from persia._serving.bundle import ServedFeature, ServedRows
from persia._serving.remote_rows import RemoteRows, RowServers
from persia._worker.service import EmbeddingWorker
from persia.config import EmbeddingSchema, EmbeddingWorkerConfig, schema_fingerprint
from persia.errors import ConfigError

if TYPE_CHECKING:
    from persia._rpc.client import Client

Floats = NDArray[np.float32]
Signs = NDArray[np.uint64]


class MissingRows:
    """Fills the rows of ids that have none, by the policy of their feature group.

    ``initial`` are the values that training would begin the id with, ``mean`` the mean of the
    group's rows when they were loaded.
    """

    def __init__(
        self,
        schema: EmbeddingSchema,
        features: Sequence[ServedFeature],
        url: str,
        rows: ServedRows,
    ) -> None:
        self._shift = np.uint64(64 - schema.prefix_bits)
        self._schema = schema
        self._policies: dict[int, str] = {}  # by a group's prefix, as signs have it above
        self._of_group: dict[int, list[str]] = {}
        for feature in features:
            slot = schema.slots[feature.name]
            prefix = int(slot.prefix) >> int(self._shift)
            if self._policies.setdefault(prefix, feature.missing) != feature.missing:
                raise ConfigError(
                    f"missing: expected one policy of feature group {slot.group!r}, whose rows "
                    f"are shared, got {self._policies[prefix]!r} and {feature.missing!r}"
                )
            self._of_group.setdefault(prefix, []).append(feature.name)
        used = set(self._policies.values())
        self._seed, self._initial = 0, {}
        if used - {"zeros"} and not url:
            raise ConfigError(
                "missing: expected 'zeros' where rows come from a change log alone"
            )
        if "initial" in used:
            hyper, *_ = settings_of(LoadRequest(0, "verify", url, rows.checkpoint, None))
            self._seed = hyper.seed
            for table in schema.tables:
                chosen = table.initialization or hyper.initialization
                self._initial[table.number] = initializer_of(chosen)
        self._means = self._read_means(url, rows) if "mean" in used else {}
        self._lock = threading.Lock()
        self._counts: dict[int, int] = {}

    def _read_means(self, url: str, rows: ServedRows) -> dict[int, Floats]:
        sums: dict[int, NDArray[np.float64]] = {}
        counts: dict[int, int] = {}
        match = SchemaMatch(self._schema)
        for chain in open_checkpoint(url, rows.checkpoint).chains:
            mapping = match.mapping(chain.manifests[-1].schema)
            for block in read_chain(chain, None, mapping):
                prefixes = block.signs >> self._shift
                for prefix in np.unique(prefixes).tolist():
                    values = block.values[prefixes == prefix].astype(np.float64)
                    sums[prefix] = sums.get(prefix, 0.0) + values.sum(axis=0)
                    counts[prefix] = counts.get(prefix, 0) + len(values)
        return {one: (sums[one] / counts[one]).astype(np.float32) for one in sums}

    def fill(self, table: int, signs: Signs, rows: Floats, states: NDArray[np.uint8]) -> None:
        """Write the rows [n, dim] of signs whose state is not 1; count them."""
        absent = np.flatnonzero(states != 1)
        missing = signs[absent]
        prefixes = missing >> self._shift
        dtype = self._schema.tables[table].dtype
        for prefix, count in zip(*np.unique(prefixes, return_counts=True), strict=True):
            one = int(prefix)
            with self._lock:
                self._counts[one] = self._counts.get(one, 0) + int(count)
            policy = self._policies.get(one, "zeros")
            at = prefixes == prefix
            if policy == "initial":
                found = empty_floats(int(count), rows.shape[1])
                self._initial[table].fill_rows(self._seed, missing[at], found, dtype)
                rows[absent[at]] = found
            elif policy == "mean" and one in self._means:
                rows[absent[at]] = self._means[one]

    def counts(self) -> dict[str, int]:
        """Return how many distinct ids had no row, by feature, or ``a+b`` that share rows."""
        with self._lock:
            return {"+".join(self._of_group[one]): n for one, n in self._counts.items()}


class LocalRows:
    """A parameter server of this process that only answers evaluation lookups."""

    replica_index, replica_size = 0, 1

    def __init__(self, schema: EmbeddingSchema, rows: LiveRows, missing: MissingRows) -> None:
        self.schema_fingerprint = schema_fingerprint(schema)
        self._dims = [table.dim for table in schema.tables]
        self._rows, self._missing = rows, missing

    def lookup(self, request: LookupRequest) -> LookupReply:
        """Return the rows asked for, all of one moment."""
        found = []
        with self._rows.view() as view:
            for part in request.tables:
                rows = empty_floats(len(part.signs), self._dims[part.table])
                states = np.empty(len(part.signs), np.uint8)
                if view.lookup(part.table, part.signs, rows, states):
                    self._missing.fill(part.table, part.signs, rows, states)
                found.append(TableRows(part.table, rows, None))
            return LookupReply(tuple(found), view.version)

    def ready_for_serving(self) -> bool:
        """Whether there are rows."""
        return self._rows.is_ready

    def close(self) -> None:
        """Stop following a change log."""
        self._rows.close()


class _FilledCall:
    """A lookup under way, in whose answer missing rows are filled."""

    def __init__(self, pending: Any, request: LookupRequest, missing: MissingRows) -> None:
        self._pending, self._request, self._missing = pending, request, missing
        self.cancel = pending.cancel

    def result(self) -> LookupReply:
        reply: LookupReply = self._pending.result()
        filled = []
        for asked, part in zip(self._request.tables, reply.tables, strict=False):
            rows = part.rows
            # Servers for inference do not say which ids have no row.
            states = np.asarray(rows.any(axis=1), np.uint8)
            if not states.all() and len(states) == len(asked.signs):
                rows = rows.copy()
                self._missing.fill(asked.table, asked.signs, rows, states)
            filled.append(TableRows(part.table, rows, part.hints))
        return LookupReply((*filled, *reply.tables[len(filled) :]), reply.version)


class _FilledClient:
    """Begins calls of a client for rows."""

    def __init__(self, client: Client, missing: MissingRows) -> None:
        self._client, self._missing = client, missing
        self.incarnation = None

    def close(self) -> None:
        self._client.close()

    def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        return self.begin(method, *arguments, timeout_s=timeout_s).result()

    def begin(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        pending = self._client.begin(method, *arguments, timeout_s=timeout_s)
        if method != "lookup":
            return pending
        return _FilledCall(pending, arguments[0], self._missing)


class FilledServer(RemoteParameterServer):
    """A server of rows, where ids without one have what their feature's policy says.

    A row of zeros counts as none.
    """

    @classmethod
    def before(cls, server: RemoteParameterServer, missing: MissingRows) -> FilledServer:
        """Fill what a server answers; closing it closes the server's client."""
        return cls(cast("Client", _FilledClient(server.client, missing)), server._hello)


class RowLookup:
    """Looks features up in the rows of one version; any thread may call it.

    Args:
        schema: The bundle's embedding config.
        features: Of the model, with their policies.
        url: Of the rows' checkpoint; "" where the change log has all of them.
        rows: Where they are.
        dtype: How they are held: float32, float16, bfloat16 or int8.
        follow_interval_s: Seconds between two looks into the change log, if there is one.
        servers: That have the rows, if they are not to be held here.

    Raises:
        ServiceError: If servers cannot be asked, or have rows of another checkpoint.
    """

    def __init__(
        self,
        schema: EmbeddingSchema,
        features: Sequence[ServedFeature],
        url: str,
        rows: ServedRows,
        *,
        dtype: str = "float32",
        follow_interval_s: float = 0.25,
        servers: RowServers | None = None,
    ) -> None:
        self._missing = MissingRows(schema, features, url, rows)
        self._transport: ZmqTransport | None = None
        self.rows: LiveRows | RemoteRows | None = None
        settings = dataclasses.replace(EmbeddingWorkerConfig(), buffered_data_expired_sec=NEVER)
        try:
            if servers is not None:
                # Rows of a log go on beside the net: they have no version.
                version = "" if rows.log else rows.checkpoint
                found = self._connect(servers, schema, version)
            else:
                kept = {
                    schema.slots[one.name].group for one in features if one.on_delete == "keep"
                }
                version = ""
                self.rows = live = LiveRows(
                    _source_of(url, rows),
                    schema,
                    dtype=dtype,
                    follow_interval_s=follow_interval_s,
                    kept_groups=sorted(kept),
                )
                live.load()
                if rows.log:
                    live.follow()
                found = [cast("ParameterServer", LocalRows(schema, live, self._missing))]
            self._worker = EmbeddingWorker(schema, settings, found, rows_version=version)
        except BaseException:
            self._close_rows()
            raise

    def _connect(
        self, servers: RowServers, schema: EmbeddingSchema, version: str
    ) -> list[ParameterServer]:
        self._transport = ZmqTransport()
        dims = [table.dim for table in schema.tables]
        self.rows = remote = RemoteRows(self._transport, servers, dims, version)
        return [FilledServer.before(one, self._missing) for one in remote.servers]

    def __call__(self, features: tuple[FeatureBatch, ...]) -> tuple[SlotOutput, ...]:
        """Return the outputs of features, in their order."""
        return self._worker.lookup_direct(IDFeatures(features, 0, False)).outputs

    def stats(self) -> Mapping[str, Any]:
        """Return counts of the rows, and by feature how many ids had none."""
        counts = {} if self.rows is None else self.rows.stats()
        return {**counts, "missing": self._missing.counts()}

    def close(self) -> None:
        """Stop following, and give threads and connections up."""
        self._close_rows()
        self._worker.close()

    def _close_rows(self) -> None:
        if self.rows is not None:
            self.rows.close()
        if self._transport is not None:
            self._transport.close()


def _source_of(url: str, rows: ServedRows) -> RowSource:
    return RowSource(
        checkpoint=url,
        checkpoint_id=rows.checkpoint,
        change_log=rows.log or "",
        packets={int(server): number for server, number in rows.packets.items()},
    )
