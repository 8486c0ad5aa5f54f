"""Rows of one table by sign, and all of a group piece by piece, outside any batch."""

from __future__ import annotations

import secrets

import numpy as np

from persia._rpc.messages import (
    FoundRows,
    RowPiece,
    RowsRequest,
    ScanRequest,
    TableSigns,
)
from persia._server.applied_updates import TrainingClock
from persia._server.restore import LoadManager
from persia._server.row_settings import ServerSettings, ServerState
from persia.config import EmbeddingSchema
from persia.errors import StoreError

# Rows of one piece, at most: some MiB of the usual dims.
MAX_ROWS = 1 << 16


class RowAccess:
    """The rows of one server; requests are of its tables and signs. Any thread may call it.

    A server that has no settings yet has no rows, which is no error to who reads.
    """

    def __init__(
        self,
        schema: EmbeddingSchema,
        settings: ServerSettings,
        clock: TrainingClock,
        loads: LoadManager,
    ) -> None:
        self._schema, self._settings, self._clock = schema, settings, clock
        self._loads = loads
        self.renew()

    def renew(self) -> None:
        """Note that all rows were replaced, so that cursors of before mean nothing."""
        self._generation = secrets.randbits(63)

    def _state(self) -> ServerState | None:
        """Return what is held, as of now for rows that expire."""
        state = self._settings.state
        if state is not None:
            state.store.set_clocks(*self._clock.now())
        return state

    def read(self, request: RowsRequest) -> FoundRows:
        """Return rows in the order asked for, without using them."""
        state = self._state()
        if state is None:
            if request.with_states or request.with_initial:
                raise self._settings.not_configured("read_rows with states or initial values")
            shape = len(request.signs), self._schema.tables[request.table].dim
            return FoundRows(np.zeros(shape[0], np.uint8), np.zeros(shape, np.float32), None)
        kind = state.settings.kinds[request.table]
        words = kind.optimizer.state_words(kind.dim)
        with self._loads.shown_rows:
            found, values, states = state.store.read(
                request.signs, kind.dim, words, dtype=kind.dtype
            )
        missing = np.flatnonzero(~found)
        if request.with_initial and len(missing):
            initial = np.empty((len(missing), kind.dim), np.float32)
            signs = request.signs[missing]
            kind.initializer.fill_rows(state.store.seed, signs, initial, kind.dtype)
            values[missing] = initial
        return FoundRows(found.view(np.uint8), values, states if request.with_states else None)

    def delete(self, part: TableSigns) -> int:
        """Drop the rows of these signs; returns how many there were."""
        state = self._settings.state_at(self._clock, "delete_rows")
        with self._loads.whole_rows:
            return state.store.delete(part.signs)

    def scan(self, request: ScanRequest) -> RowPiece:
        """Return a piece of the rows of a group."""
        if not 1 <= request.max_rows <= MAX_ROWS or not 0 <= request.cursor < 1 << 64:
            raise StoreError(
                f"scan_rows: expected 1..{MAX_ROWS} rows from a cursor of a reply, got "
                f"{request.max_rows} from {request.cursor:#x}"
            )
        state = self._state()
        if state is None:
            none = np.empty((0, self._schema.tables[request.table].dim), np.float32)
            return RowPiece(np.empty(0, np.uint64), none, None, None, self._generation)
        kind = state.settings.kinds[request.table]
        with self._loads.shown_rows:
            generation = self._generation  # no load replaces rows from here on
            signs, values, states, cursor = state.store.scan(
                request.prefix,
                self._schema.prefix_bits,
                kind.dim,
                kind.optimizer.state_words(kind.dim),
                dtype=kind.dtype,
                cursor=request.cursor,
                max_rows=request.max_rows,
                with_states=request.with_states,
            )
        return RowPiece(signs, values, states, cursor, generation)

    def count(self, table: int, prefix: int) -> int:
        """Return the number of rows of a group, which is a look at each row of their format."""
        state = self._state()
        if state is None:
            return 0
        kind = state.settings.kinds[table]
        words = kind.optimizer.state_words(kind.dim)
        with self._loads.shown_rows:
            return state.store.count(
                prefix, self._schema.prefix_bits, kind.dim, words, dtype=kind.dtype
            )
