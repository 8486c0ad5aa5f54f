"""What is in checkpoints and packets, read into tables of rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from persia._core.table.row_table import RowTable
from persia._files.change_log import Deletion, Packet, Rows, read_chain, read_packet
from persia._rows.row_source import Opened, SchemaMatch
from persia.config import EmbeddingSchema
from persia.errors import ConfigError

Signs = NDArray[np.uint64]
# Bytes of rows that are written to a table between two pauses, and signs that are deleted: half
# a millisecond of work.
_PIECE_BYTES, _PIECE_SIGNS = 128 << 10, 4096
# Rows of kept groups that are copied at a time.
_BLOCK_ROWS = 65_536


class RowReader:
    """Reads rows into tables; any thread may call it.

    Args:
        schema: The embedding config, whose groups and tables rows are mapped to by names.
        dtype: How values are held: float32, float16, bfloat16 or int8.
        owned: (replica, count): only rows of that one of ``count`` servers; None is all.
        kept_groups: Feature groups whose rows stay though training has dropped them.
        num_threads: Threads that large lookups of whole tables share.
        rest: Called between two pieces of work, by any thread; may pause.
    """

    def __init__(
        self,
        schema: EmbeddingSchema,
        dtype: str,
        owned: tuple[int, int] | None,
        kept_groups: Collection[str],
        num_threads: int,
        rest: Callable[[], object] = bool,
    ) -> None:
        self._rest = rest
        self._schema, self._dtype, self._owned = schema, dtype, owned
        self._num_threads = num_threads
        self._match = SchemaMatch(schema)
        unknown = set(kept_groups) - set(schema.groups)
        if unknown:
            raise ConfigError(f"kept_groups: expected feature groups, got {sorted(unknown)}")
        self._kept = np.array([schema.groups[name] for name in kept_groups], np.uint64)

    def read_all(self, opened: Opened, check: Callable[[], object]) -> RowTable:
        """Read chains into a table; ``check`` is called now and then, and may raise."""
        table = self._new_table(self._num_threads)
        rows = sum(m.num_rows for chain in opened.chains for m in chain.manifests[:1])
        table.reserve(rows // (1 if self._owned is None else self._owned[1]) * 17 // 16)
        for chain in opened.chains:
            mapping = self._match.mapping(chain.manifests[-1].schema)
            chain.storage.on_progress = self._rest
            for block in read_chain(chain, self._owned, mapping):
                self._write(table, block)
                check()
        return table

    def read_overlay(self, packet: Packet) -> tuple[RowTable, Counter[str]]:
        """Read a packet into a table, its deletions as tombstones; returns counts too."""
        overlay = self._new_table(1)
        return overlay, self.read_into(overlay, packet, is_overlay=True)

    def read_into(
        self, table: RowTable, packet: Packet, *, is_overlay: bool = False
    ) -> Counter[str]:
        """Apply a packet to a table, part by part; returns what is counted of it."""
        mapping = self._match.mapping(packet.manifest.schema)
        counts: Counter[str] = Counter(applied_packets=1)
        packet.storage.on_progress = self._rest
        for item in read_packet(packet, self._owned, mapping):
            if isinstance(item, Deletion):
                signs = item.signs[~self._is_kept(item.signs)]
                counts["deleted_rows"] += len(signs)
                for start in range(0, len(signs), _PIECE_SIGNS):
                    piece = signs[start : start + _PIECE_SIGNS]
                    (table.mark_deleted if is_overlay else table.delete)(piece)
                    self._rest()
            else:
                counts["applied_rows"] += len(item.signs)
                self._write(table, item)
        return counts

    def keep_rows(self, table: RowTable, before: Sequence[RowTable]) -> int:
        """Copy rows of kept groups that only the tables before have; returns how many.

        Of two tables before, the first one's rows count. An int8 row may move by a step's part.
        """
        count = 0
        if not len(self._kept):
            return count
        for one in before:
            for number, dim in enumerate(one.dims):
                for signs, rows in one.blocks(number, _BLOCK_ROWS):
                    states = np.empty(len(signs), np.uint8)
                    table.lookup(number, signs, np.empty((len(signs), dim), np.float32), states)
                    lacking = np.flatnonzero(self._is_kept(signs) & (states != 1))
                    if len(lacking):
                        table.write(number, signs[lacking], rows[lacking])
                        count += len(lacking)
        return count

    def _write(self, table: RowTable, rows: Rows) -> None:
        number, size = _number(rows.table), max(1, _PIECE_BYTES // rows.values[:1].nbytes)
        for start in range(0, len(rows.signs), size):
            piece = slice(start, start + size)
            table.write(number, rows.signs[piece], rows.values[piece])
            self._rest()

    def _new_table(self, num_threads: int) -> RowTable:
        dims = [one.dim for one in self._schema.tables]
        return RowTable(dims, self._dtype, num_threads=num_threads)

    def _is_kept(self, signs: Signs) -> NDArray[np.bool_]:
        if not len(self._kept):
            return np.zeros(len(signs), np.bool_)
        groups = (signs >> np.uint64(64 - self._schema.prefix_bits)) - np.uint64(1)
        return np.isin(groups, self._kept)


def _number(name: str) -> int:
    return int(name.removeprefix("table"))  # as ``schema.table_name`` names it
