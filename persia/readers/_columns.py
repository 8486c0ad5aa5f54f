"""Which columns of a table are what of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from persia.embedding.data import Label, NonIDTypeFeature, PersiaBatch
from persia.errors import ConfigError
from persia.readers import _arrays

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Names = Sequence[str] | Mapping[str, Sequence[str]]


class Columns:
    """Which columns of a table are what of a batch.

    Args:
        ids: Columns of ids, each a feature of its name; or a mapping from feature to column,
            so that two features may read one column.
        dense: Columns of numbers, side by side in one f32 array [B, n] of the name ``dense``;
            or a mapping from a name to its columns, for several arrays.
        labels: Columns of numbers, each a label f32 [B, 1] of its name.
        strings: What texts in id columns mean: ``hash`` (a stable hash of 64 bits), or ``hex``
            (the number that 1 to 16 hexadecimal digits spell).
        fill: What a null is among dense numbers; None makes it an error, as it is in labels.
        requires_grad: Whether embeddings shall be trained; False for evaluation.

    Raises:
        ConfigError: If there are no ids, one is named twice, or ``strings`` is another word.

    Example:
        >>> columns = Columns(ids=["user", "items"], dense=["age", "price"], labels=["click"])
        >>> columns.names
        ['user', 'items', 'age', 'price', 'click']
    """

    def __init__(
        self,
        ids: Sequence[str] | Mapping[str, str],
        dense: Names = (),
        labels: Sequence[str] = (),
        *,
        strings: str = "hash",
        fill: float | None = 0.0,
        requires_grad: bool = True,
    ) -> None:
        if isinstance(ids, str) or isinstance(dense, str) or isinstance(labels, str):
            raise ConfigError("Columns: expected lists of names, got a str")
        if strings not in ("hash", "hex"):
            raise ConfigError(f"strings: expected 'hash' or 'hex', got {strings!r}")
        self.ids: dict[str, str] = (
            dict(ids) if isinstance(ids, Mapping) else {name: name for name in ids}
        )
        if len(self.ids) != len(ids):
            names = list(ids)
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(f"ids: expected each feature once, got {twice!r} twice")
        if not self.ids:
            raise ConfigError("ids: expected at least one column, got none")
        groups = dense if isinstance(dense, Mapping) else {"dense": dense}
        self.dense = {name: list(group) for name, group in groups.items() if group}
        self.labels = list(labels)
        self.strings = strings
        self.fill = fill
        self.requires_grad = requires_grad

    @property
    def names(self) -> list[str]:
        """The columns that are read, each once."""
        dense = [name for group in self.dense.values() for name in group]
        return list(dict.fromkeys([*self.ids.values(), *dense, *self.labels]))

    def check(self, where: str, schema: Any) -> None:
        """Check that a table of this Arrow schema has the columns, in types that can be read.

        Args:
            where: The table's name, for messages.
            schema: A ``pyarrow.Schema``.

        Raises:
            ConfigError: If a column is not there; says which are.
            DataTypeError: If one is of another type; names it, what was expected and came.
        """
        dense = [name for group in self.dense.values() for name in group]
        _arrays.check_types(where, schema, list(self.ids.values()), dense, self.labels)

    def batch_of(self, rows: Any) -> PersiaBatch:
        """Return the rows of a ``pyarrow.RecordBatch`` as a batch.

        Raises:
            DataError: If a number is null where none may be, or a text is no number.
        """
        at = {name: number for number, name in enumerate(rows.schema.names)}
        features = [
            _arrays.id_feature(feature, column, rows.column(at[column]), self.strings)
            for feature, column in self.ids.items()
        ]
        dense = [
            NonIDTypeFeature(self._matrix([(n, rows.column(at[n])) for n in group]), name)
            for name, group in self.dense.items()
        ]
        labels = []
        for name in self.labels:
            values = self._matrix([(name, rows.column(at[name]))], is_label=True)
            labels.append(Label(values, name))
        return PersiaBatch(features, dense, labels, None, self.requires_grad)

    def _matrix(
        self, columns: list[tuple[str, Any]], is_label: bool = False
    ) -> NDArray[np.float32]:
        """Return columns of numbers side by side."""
        widths = [_arrays.width_of(array.type) for _, array in columns]
        out = np.empty((len(columns[0][1]), sum(widths)), np.float32)
        begin = 0
        for (name, array), width in zip(columns, widths, strict=True):
            fill = None if is_label else self.fill
            _arrays.numbers(name, array, out[:, begin : begin + width], fill)
            begin += width
        return out
