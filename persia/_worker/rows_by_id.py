"""Rows by id: read, written, dropped and walked over, outside any batch.

    ids of a feature --as its batches have them--> signs --by owner--> servers

Features of a group share rows, so what is written under one is read under the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from persia._core.base.arrays import empty_floats
from persia._core.base.hashing import route
from persia._core.base.threads import ThreadPool
from persia._rpc.messages import (
    FeatureScan,
    FoundRows,
    IDRows,
    IDsRequest,
    RowPiece,
    RowsRequest,
    ScanRequest,
    Signs,
    TableEntries,
    TableInfo,
    TableSigns,
)
from persia._rpc.stubs import Remote
from persia._worker.packing import FeatureStatistics, check_names, signs_of, split_entries
from persia._worker.server_pool import ServerSet
from persia.config import EmbeddingSchema, Slot
from persia.errors import ConfigError, DataError, DimMismatch, ProtocolError

_ROLE = "embedding-parameter-server"


class RowsByID:
    """The rows of each feature, on all servers; any thread may call it."""

    def __init__(
        self,
        schema: EmbeddingSchema,
        servers: ServerSet,
        owners: NDArray[np.uint16],
        threads: ThreadPool,
        statistics: FeatureStatistics,
    ) -> None:
        self._schema, self._servers, self._owners = schema, servers, owners
        self._num_servers = len(servers.servers)
        self._threads, self._statistics = threads, statistics

    def _slot(self, feature: str) -> Slot:
        check_names([feature], self._schema.slots, "the embedding config")
        return self._schema.slots[feature]

    def _own_rows(self, feature: str, what: str) -> Slot:
        """Return the slot of a feature whose ids have rows of their own."""
        slot = self._slot(feature)
        if slot.hash_stack_rounds:
            raise ConfigError(
                f"feature {feature!r}: expected ids with rows of their own to {what}, got a "
                f"hash stack of {slot.hash_stack_rounds} rounds, whose rows many ids share; "
                "read() returns the sums"
            )
        return slot

    def _signs(self, slot: Slot, ids: Signs) -> Signs:
        signs, num_masked = signs_of(slot, ids, self._schema, self._threads)
        if num_masked:
            self._statistics.add_masked({slot.name: num_masked})
        return signs

    def _ask(self, method: str, requests: Mapping[int, Any]) -> dict[int, Any]:
        answers = self._servers.ask(method, requests)
        for answer in answers.values():
            if isinstance(answer, Exception):
                raise answer
        return answers

    def info(self, feature: str) -> TableInfo:
        """Return what the embedding config says of a feature's rows."""
        slot, slots = self._slot(feature), self._schema.slots.values()
        return TableInfo(
            feature=feature,
            group=slot.group,
            features=tuple(one.name for one in slots if one.group == slot.group),
            dim=slot.dim,
            dtype=self._schema.tables[slot.table].dtype,
            index_bits=64 - self._schema.prefix_bits,
            strict_ids=self._schema.strict_ids,
            hash_stack_rounds=slot.hash_stack_rounds,
            num_servers=self._num_servers,
        )

    def read(self, request: IDsRequest) -> FoundRows:
        """Return the vectors of ids: of a hash stack the sums of their rows."""
        slot = self._slot(request.feature)
        rounds = slot.hash_stack_rounds
        if rounds and request.with_states:
            self._own_rows(request.feature, "read optimizer state")
        signs = self._signs(slot, request.ids)
        found = self._read(slot, signs, request)
        if not rounds:
            return found
        values = found.values.reshape(-1, rounds, slot.dim)
        total = values[:, 0].copy()
        for number in range(1, rounds):  # in the order of pooling, for the same bits
            total += values[:, number]
        return FoundRows(found.found.reshape(-1, rounds).min(axis=1), total, None)

    def _read(self, slot: Slot, signs: Signs, request: IDsRequest) -> FoundRows:
        order, starts = route(signs, self._owners, self._num_servers)
        flags = request.with_states, request.with_initial
        requests = {
            server: RowsRequest(
                slot.table, signs[order[starts[server] : starts[server + 1]]], *flags
            )
            for server in range(self._num_servers)
            if starts[server + 1] > starts[server]
        }
        found = np.zeros(len(signs), np.uint8)
        values = empty_floats(len(signs), slot.dim)
        states: NDArray[np.uint32] | None = None
        for server, reply in self._ask("read_rows", requests).items():
            self._check_reply(server, requests[server], reply, slot.dim)
            places = order[starts[server] : starts[server + 1]]
            found[places], values[places] = reply.found, reply.values
            if reply.states is not None:
                if states is None:
                    states = np.zeros((len(signs), reply.states.shape[1]), np.uint32)
                states[places] = reply.states
        if states is None and request.with_states:
            states = np.zeros((len(signs), 0), np.uint32)
        return FoundRows(found, values, states)

    def _check_reply(
        self, server: int, request: RowsRequest, reply: FoundRows, dim: int
    ) -> None:
        """Refuse a reply of other shapes: the codec does not know what was asked for."""
        count = len(request.signs)
        num_states = count if reply.states is None else len(reply.states)
        got = len(reply.found), reply.values.shape, num_states
        if got != (count, (count, dim), count):
            raise ProtocolError(
                f"{_ROLE} {server}: expected {count} rows of dim {dim}, got {got}",
                role=_ROLE,
                replica=server,
                method="read_rows",
            )

    def write(self, rows: IDRows) -> None:
        """Write the rows of ids; without states, those that are there keep theirs."""
        slot = self._own_rows(rows.feature, "write")
        if rows.values.shape != (len(rows.ids), slot.dim):
            raise DimMismatch(
                f"feature {slot.name!r}: expected values of shape {[len(rows.ids), slot.dim]}, "
                f"got {list(rows.values.shape)}"
            )
        signs = self._signs(slot, rows.ids)
        if len(np.unique(signs)) < len(signs):
            raise DataError(
                f"feature {slot.name!r}: expected each id once in a write, got "
                f"{len(signs)} ids of {len(np.unique(signs))} rows"
            )
        keeps = rows.states is None
        entries = TableEntries(slot.table, signs, rows.values, rows.states, keeps_states=keeps)
        requests = split_entries([entries], self._owners, self._num_servers)
        self._ask("set_embedding", requests)

    def delete(self, feature: str, ids: Signs) -> int:
        """Drop the rows of ids; returns how many there were."""
        slot = self._own_rows(feature, "delete")
        signs = self._signs(slot, ids)
        order, starts = route(signs, self._owners, self._num_servers)
        requests = {
            server: TableSigns(slot.table, signs[order[starts[server] : starts[server + 1]]])
            for server in range(self._num_servers)
            if starts[server + 1] > starts[server]
        }
        return sum(self._ask("delete_rows", requests).values())

    def scan(self, request: FeatureScan) -> RowPiece:
        """Return a piece of the rows of one server."""
        slot = self._own_rows(request.feature, "walk over")
        if slot.id_hash is not None:
            raise ConfigError(
                f"feature {request.feature!r}: expected rows of ids to walk over, got rows of "
                f"the hashes of {slot.id_hash}, from which no id follows; read() finds "
                "them by their ids"
            )
        if not 0 <= request.server < self._num_servers:
            raise DataError(
                f"scan_rows: expected a server in 0..{self._num_servers - 1}, got "
                f"{request.server}"
            )
        scan = ScanRequest(
            slot.table, slot.prefix, request.cursor, request.max_rows, request.with_states
        )
        answer: RowPiece = self._ask("scan_rows", {request.server: scan})[request.server]
        is_of_dim = answer.values.shape == (len(answer.signs), slot.dim)
        if isinstance(self._servers.servers[request.server], Remote) and not is_of_dim:
            raise ProtocolError(
                f"{_ROLE} {request.server}: expected rows of dim {slot.dim}, got "
                f"{list(answer.values.shape)} of {len(answer.signs)} signs",
                role=_ROLE,
                replica=request.server,
                method="scan_rows",
            )
        return answer

    def count(self, feature: str) -> list[int]:
        """Return the number of rows on each server."""
        slot = self._slot(feature)
        return self._servers.ask_all("count_rows", slot.table, slot.prefix)
