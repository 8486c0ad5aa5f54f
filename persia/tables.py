"""Rows by id: read, write, drop and walk over what training keeps for a feature.

    with TrainCtx(...) as ctx:
        users = ctx.table("user")
        vectors = users.read([17, 42])          # f32 [2, dim]
        users.write([17], vectors[:1])

Features of one group share rows: what is written under one of them is read under all. Ids are
taken as batches have them, so that an id of more bits than the embedding config leaves for it
(``feature_index_prefix_bit``) is cut, or refused with ``strict_ids``. ``docs/tables.md`` is the
page of it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from persia._files.vectors import write_vectors
from persia._foreign.arrays import read_numpy, read_parquet, read_state_dict
from persia._foreign.dcp import dcp_tables, read_dcp
from persia._foreign.original import read_original
from persia._foreign.source import IDSource, array_of_ids
from persia._rpc.messages import FeatureScan, FoundRows, IDRows, IDsRequest
from persia.embedding.data import bits_of
from persia.errors import ConfigError, DataError, DataTypeError, DimMismatch, StoreError
from persia.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import ArrayLike, NDArray

    from persia._rpc.messages import EmbeddingWorker, TableInfo

__all__ = [
    "IDSource",
    "Table",
    "dcp_tables",
    "read_dcp",
    "read_numpy",
    "read_original",
    "read_parquet",
    "read_state_dict",
]

_logger = get_logger("persia.tables")

MISSING = ("zeros", "initial", "raise")
# Bytes of rows in one call, about; and rows, at most.
_CALL_BYTES = 4 << 20
_CALL_ROWS = 1 << 16
# Ids that an error names.
_MAX_NAMED = 5


class Table:
    """The rows of one feature, on all servers; any thread may use it.

    A context has it as ``ctx.table(name)``. Reads see this process's updates before them, of
    all its batches whose ``backward`` was called. Large arrays go in several calls, so that a
    read or write beside training is not of one moment.

    Args:
        worker: A context's ``embedding_worker``.
        feature: Name of the feature.
        flush: Called before each operation, to wait for updates under way.
        is_read_only: Whether ``write`` and ``delete`` are refused here.

    Attributes:
        name: The feature.
        group: The group whose features share these rows.
        features: All of them.
        dim: Values of a vector.

    Raises:
        DataError: If the embedding config has no such feature.
    """

    def __init__(
        self,
        worker: EmbeddingWorker,
        feature: str,
        *,
        flush: Callable[[], None] | None = None,
        is_read_only: bool = False,
    ) -> None:
        self._worker, self._flush, self._is_read_only = worker, flush, is_read_only
        info: TableInfo = worker.table_info(feature)
        self._info = info
        self.name, self.group, self.features = info.feature, info.group, info.features
        self.dim = info.dim
        self._mask = np.uint64((1 << info.index_bits) - 1)
        self._call_rows = max(1, min(_CALL_ROWS, _CALL_BYTES // (4 * info.dim)))

    def __repr__(self) -> str:
        return f"Table({self.name!r}, dim={self.dim}, group={self.group!r})"

    # --- by id ------------------------------------------------------------------------------

    def read(self, ids: ArrayLike, missing: str = "zeros") -> NDArray[np.float32]:
        """Return the vectors of ids, which may repeat; training does not count it as a use.

        Of a feature with a hash stack they are the sums of an id's rows.

        Args:
            ids: Integers [n], of any dtype; a tensor too.
            missing: What an id without a row gets: ``"zeros"``, as in an evaluation;
                ``"initial"``, the values that training would begin with; or ``"raise"``.

        Returns:
            f32 [n, dim].

        Raises:
            DataError: An id has no row, with ``missing="raise"``.
            DataTypeError: Ids are no integers.
        """
        if missing not in MISSING:
            raise ConfigError(f"missing: expected one of {', '.join(MISSING)}, got {missing!r}")
        checked = self._ids(ids)
        found, vectors, _ = self._read(checked, with_initial=missing == "initial")
        if missing == "raise" and not found.all():
            absent = checked[~found]
            named = ", ".join(map(str, absent[:_MAX_NAMED].tolist()))
            raise DataError(
                f"table {self.name!r}: {len(absent)} of {len(checked)} ids have no row: {named}"
                + (", ..." if len(absent) > _MAX_NAMED else "")
            )
        return vectors

    def contains(self, ids: ArrayLike) -> NDArray[np.bool_]:
        """Return which ids have a row, bool [n]; of a hash stack, which have all of theirs."""
        return self._read(self._ids(ids))[0]

    def read_with_state(
        self, ids: ArrayLike
    ) -> tuple[NDArray[np.bool_], NDArray[np.float32], NDArray[np.uint32]]:
        """Return which ids have a row, their vectors, and what the optimizer keeps for them.

        Returns:
            bool [n]; f32 [n, dim]; u32 [n, words], which ``docs/optimizers.md`` describes,
            mostly the bits of f32 values (``state.view(np.float32)``). Zeros without a row.

        Raises:
            ConfigError: Of a feature with a hash stack.
            NotAllowed: With a key that may only read vectors.
        """
        checked = self._ids(ids)
        found, vectors, states = self._read(checked, with_states=True)
        if states is None:  # there are no ids
            states = np.zeros((len(checked), 0), np.uint32)
        return found, vectors, states

    def _read(
        self, ids: NDArray[np.uint64], *, with_states: bool = False, with_initial: bool = False
    ) -> tuple[NDArray[np.bool_], NDArray[np.float32], NDArray[np.uint32] | None]:
        self._wait()
        found = np.empty(len(ids), np.bool_)
        vectors = np.empty((len(ids), self.dim), np.float32)
        states: NDArray[np.uint32] | None = None
        for start in range(0, len(ids), self._call_rows):
            part = slice(start, start + self._call_rows)
            reply: FoundRows = self._worker.read_rows(
                IDsRequest(self.name, ids[part], with_states, with_initial)
            )
            found[part], vectors[part] = reply.found, reply.values
            if reply.states is not None:
                if states is None:
                    states = np.zeros((len(ids), reply.states.shape[1]), np.uint32)
                states[part] = reply.states
        return found, vectors, states

    def write(self, ids: ArrayLike, vectors: Any, states: Any = None) -> None:
        """Insert or replace the rows of ids; it counts as a use.

        What the optimizer keeps for a row stays as it is, and begins as training begins it for
        a row that is new. With ``states`` it is replaced too, so that what ``read_with_state``
        returned is written back whole.

        All is checked before anything is written. If a server fails then, some rows are
        written: write the same again.

        Args:
            ids: Integers [n], each once.
            vectors: Floats [n, dim], finite; a tensor too. They are kept as f32, or in the
                dtype that the group has.
            states: u32 [n, words].

        Raises:
            DataError: An id comes twice, a value is not finite, lengths differ.
            DataTypeError: Ids are no integers, vectors no floats.
            DimMismatch: The vectors, or states, have another dim.
            ConfigError: Here is only read; or the feature has a hash stack.
            NotConfigured: The servers do not know the optimizer yet: no TrainCtx was entered.
        """
        self._check_writable("write")
        checked = self._ids(ids)
        self._check_distinct(checked)
        values = self._vectors(vectors, checked)
        words = self._states(states, checked)
        self._wait()
        for start in range(0, len(checked), self._call_rows):
            part = slice(start, start + self._call_rows)
            own = None if words is None else words[part]
            self._worker.write_rows(IDRows(self.name, checked[part], values[part], own))

    def delete(self, ids: ArrayLike) -> int:
        """Drop the rows of ids, values and state; an id that trains again begins again.

        A change log and incremental checkpoints have it as an eviction.

        Returns:
            How many rows there were.

        Raises:
            DataTypeError: Ids are no integers.
            ConfigError: Here is only read; or the feature has a hash stack.
        """
        self._check_writable("delete")
        checked = self._ids(ids)
        self._wait()
        num_rows = 0
        for start in range(0, len(checked), _CALL_ROWS):
            num_rows += self._worker.delete_rows(self.name, checked[start : start + _CALL_ROWS])
        return num_rows

    def load(self, source: IDSource) -> int:
        """Write all rows that another program wrote; returns how many.

        ``persia.tables.read_numpy``, ``read_parquet``, ``read_state_dict``, ``read_dcp`` and
        ``read_original`` make sources. Rows are read and written a few thousand at a time, and
        of an id that comes again in a later part, the last one counts. What a source does not
        carry over is logged. If an error ends it, a part of the rows is written.

        Raises:
            DimMismatch: The source has another dim, or states of another optimizer.
            PersiaError: What ``write``, or reading the source, raises.
        """
        self._check_writable("load")
        if source.dim != self.dim and source.num_rows != 0:
            raise DimMismatch(
                f"table {self.name!r}: expected vectors of dim {self.dim}, got {source.dim} in "
                f"{source.name}"
            )
        for note in source.notes:
            _logger.warning("%s: %s", source.name, note)
        num_rows = 0
        with _progress(f"loading {self.name}", "row", source.num_rows) as bar:
            for ids, vectors, states in source.blocks():
                self.write(ids, vectors, states)
                num_rows += len(ids)
                bar.update(len(ids))
        return num_rows

    # --- all rows ---------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of rows, over all servers.

        The servers look at every row of this dim. While training goes on, rows that come or go
        meanwhile are counted or not.
        """
        self._wait()
        return sum(self._worker.count_rows(self.name))

    def __bool__(self) -> bool:
        """Return True: a table without rows is a table."""
        return True

    def blocks(
        self, size: int = 1 << 16
    ) -> Iterator[tuple[NDArray[np.uint64], NDArray[np.float32]]]:
        """Yield ids u64 [k] and vectors f32 [k, dim] of all rows, k at most ``size``.

        In no order. Training may go on: a row that is there throughout comes once, with the
        values of some moment; one that comes or goes meanwhile comes once or not at all. The
        servers keep nothing for it, so it may take any time, or be left.

        Raises:
            StoreError: All rows were replaced meanwhile: a checkpoint was loaded, they were
                cleared, or a server was restarted.
            ConfigError: Of a feature with a hash stack.
        """
        if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 1:
            raise ConfigError(f"size: expected at least 1 row, got {size!r}")
        self._wait()
        max_rows = min(int(size), self._call_rows)
        for server in range(self._info.num_servers):
            cursor: int | None = 0
            generation: int | None = None
            while cursor is not None:
                piece = self._worker.scan_rows(
                    FeatureScan(self.name, server, cursor, max_rows, with_states=False)
                )
                if generation not in (None, piece.generation):
                    raise StoreError(
                        f"table {self.name!r}: the rows of parameter server {server} were "
                        "replaced while they were read, by a load, clear_embeddings or a "
                        "restart: begin again"
                    )
                generation, cursor = piece.generation, piece.cursor
                if len(piece.signs):
                    yield piece.signs & self._mask, piece.values

    def __iter__(self) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Yield id and vector f32 [dim] of all rows, as ``blocks`` does."""
        for ids, vectors in self.blocks():
            yield from zip(ids.tolist(), vectors, strict=True)

    def export(self, path: str | os.PathLike[str]) -> int:
        """Write all ids and vectors into one file for a nearest-neighbour search.

        The columns, or arrays, are ``id`` u64 and ``vector`` f32 [dim], as ``persia-ckpt export
        --feature`` has them. While training goes on, rows are as in ``blocks``.

        Args:
            path: A local file. One that ends with .parquet is written as rows come, in no
                order; with .npz from memory, by ascending id.

        Returns:
            The number of rows.

        Raises:
            ConfigError: Of another suffix, or without pyarrow; CheckpointError: The file cannot
                be written.
        """
        with _progress(f"exporting {self.name}", "row") as bar:

            def counted() -> Iterator[tuple[NDArray[np.uint64], NDArray[np.float32]]]:
                for ids, vectors in self.blocks():
                    yield ids, vectors
                    bar.update(len(ids))

            return write_vectors(Path(path), counted(), self.dim)

    # --- checks -----------------------------------------------------------------------------

    def _wait(self) -> None:
        if self._flush is not None:
            self._flush()

    def _check_writable(self, what: str) -> None:
        if self._is_read_only:
            raise ConfigError(
                f"table {self.name!r}: {what}: this context only reads rows; a TrainCtx writes"
            )

    def _ids(self, given: Any) -> NDArray[np.uint64]:
        ids = array_of_ids(given)
        if ids.ndim == 1 and not len(ids):
            return np.empty(0, np.uint64)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise DataTypeError(
                f"table {self.name!r}: expected ids as integers [n], got {ids.dtype} "
                f"{list(ids.shape)}"
            )
        return np.ascontiguousarray(bits_of(self.name, ids))

    def _check_distinct(self, ids: NDArray[np.uint64]) -> None:
        kept = np.sort(ids & self._mask)
        repeated = kept[1:][kept[1:] == kept[:-1]]
        if len(repeated):
            one = repeated[0]
            given = ids[(ids & self._mask) == one]
            cut = "" if (given == one).all() else f", as {given[0]} and {given[-1]} when cut"
            raise DataError(
                f"table {self.name!r}: expected each id once, got {one} {len(given)} times{cut}"
            )

    def _vectors(self, given: Any, ids: NDArray[np.uint64]) -> NDArray[np.float32]:
        vectors = _as_array(given)
        if vectors.dtype.kind != "f":
            raise DataTypeError(
                f"table {self.name!r}: expected vectors of floats, got {vectors.dtype}"
            )
        if vectors.ndim != 2 or vectors.shape[1] != self.dim:
            raise DimMismatch(
                f"table {self.name!r}: expected vectors [n, {self.dim}], got "
                f"{list(vectors.shape)}"
            )
        if len(vectors) != len(ids):
            raise DataError(
                f"table {self.name!r}: expected a vector for each of {len(ids)} ids, got "
                f"{len(vectors)}"
            )
        with np.errstate(over="ignore"):
            values = np.ascontiguousarray(vectors, np.float32)
        is_finite = np.isfinite(values).all(axis=1)
        if not is_finite.all():
            row = int(np.argmin(is_finite))
            raise DataError(
                f"table {self.name!r}: expected finite values, got "
                f"{vectors[row].tolist()!r:.200} for id {ids[row]}, in "
                f"{len(ids) - int(is_finite.sum())} of {len(ids)} rows"
            )
        return values

    def _states(self, given: Any, ids: NDArray[np.uint64]) -> NDArray[np.uint32] | None:
        if given is None:
            return None
        states = np.asarray(given)
        if states.dtype != np.uint32 or states.ndim != 2 or len(states) != len(ids):
            raise DataTypeError(
                f"table {self.name!r}: expected states as uint32 [{len(ids)}, words], as "
                f"read_with_state returns them, got {states.dtype} {list(states.shape)}"
            )
        return np.ascontiguousarray(states)


def _as_array(given: Any) -> NDArray[Any]:
    """Return a list, an array or a tensor on any device as an array."""
    if hasattr(given, "detach"):  # a tensor; bfloat16 has no dtype in numpy
        tensor = given.detach().cpu()
        if tensor.is_floating_point() and tensor.element_size() == 2:
            tensor = tensor.float()
        array: NDArray[Any] = tensor.numpy()
        return array
    try:
        return np.asarray(given)
    except ValueError as exc:  # a list of lists of other lengths
        raise DataTypeError(f"expected an array, got {type(given).__name__}: {exc}") from None


def _progress(what: str, unit: str, total: int | None = None) -> Any:
    """Return a bar that shows after a second, where there is a terminal."""
    options: dict[str, Any] = {"unit_scale": True, "delay": 1.0, "disable": None}
    return tqdm(total=total, desc=what, unit=f" {unit}", **options)
