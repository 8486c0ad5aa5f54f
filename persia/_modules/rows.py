"""Rows by id of a module's table, wherever they are: read, written, dropped, counted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from persia._modules.homes import home_of
from persia.errors import ConfigError
from persia.tables import Table

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from persia._modules.tables import ModuleTable


class ModuleRows(Table):
    """The rows of a module's table; modules learn of what is written there."""

    def __init__(self, table: ModuleTable) -> None:
        home = home_of(table)
        super().__init__(
            home.worker, table.name, flush=self._await_home, is_read_only=not home.trains
        )
        self._table = table

    def _await_home(self) -> None:
        home = home_of(self._table)
        if home.worker is not self._worker:
            raise ConfigError(
                f"table {self.name!r}: its rows are elsewhere now, as it has another optimizer "
                "or a context was entered or left; take `.table` of its module again"
            )
        home.wait()

    def write(self, ids: ArrayLike, vectors: Any, states: Any = None) -> None:
        """Insert or replace the rows of ids, as ``Table.write``."""
        try:
            super().write(ids, vectors, states)
        finally:
            self._note_change()

    def delete(self, ids: ArrayLike) -> int:
        """Drop the rows of ids, as ``Table.delete``."""
        try:
            return super().delete(ids)
        finally:
            self._note_change()

    def _note_change(self) -> None:
        self._table.padding_rows.clear()
        self._table.note_change()
