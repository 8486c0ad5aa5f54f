from collections.abc import Iterator, Sequence
from typing import final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

DTYPES: tuple[str, ...]

def pack_int8(
    rows: NDArray[np.float32],
) -> tuple[NDArray[np.uint16], NDArray[np.uint16], NDArray[np.uint8]]:
    """Return the f16 codes of scales [n] and offsets [n], and the steps [n, dim] of rows."""

@final
class RowTable:
    """Embedding rows by sign, without the state of an optimizer, for serving.

    Tables are numbered; number t has rows of ``dims[t]`` values. A sign is in one of them at
    most: written to another one, it leaves the first. Any number of threads may read while one
    writes (a second one waits for it); readers never wait, and see whole rows only.

    Values are held as ``dtype``: float32, float16 and bfloat16 (rounded to nearest as the
    store's rows are), or int8: 256 steps a row, from an offset and by a scale in f16. Then a
    row with a value that is not finite reads as NaN throughout.

    ConfigError: a dim, the dtype or the number of threads (which share large lookups) is out of
    its range.
    """

    dims: tuple[int, ...]
    dtype: str
    num_threads: int

    def __new__(
        cls, dims: Sequence[int], dtype: str = "float32", *, num_threads: int = 1
    ) -> Self: ...
    def __len__(self) -> int:
        """How many rows are held; tombstones are none."""

    @property
    def num_deleted(self) -> int:
        """How many tombstones are held."""

    @property
    def num_bytes(self) -> int:
        """Memory in bytes: rows, index, and what was replaced while readers may see it."""

    def reserve(self, num_rows: int) -> None:
        """Make the index large enough for this many rows and tombstones."""

    def write(self, table: int, signs: NDArray[np.uint64], rows: NDArray[np.float32]) -> None:
        """Insert or replace the rows [n, dim] of these signs [n]; of a repeated one the last.

        DataError: the table or a shape is wrong. MemoryError: some of the rows were written;
        each sign has its old row or its new one.
        """

    def delete(self, signs: NDArray[np.uint64]) -> int:
        """Forget rows and tombstones of these signs; returns how many rows there were."""

    def mark_deleted(self, signs: NDArray[np.uint64]) -> None:
        """Put tombstones in the place of these rows, whether there are any or not."""

    def lookup(
        self,
        table: int,
        signs: NDArray[np.uint64],
        rows_out: NDArray[np.float32],
        state_out: NDArray[np.uint8] | None = None,
    ) -> int:
        """Write each sign's row to ``rows_out`` [n, dim], zeros where the table has none.

        ``state_out`` [n] gets 0 absent, 1 present, 2 deleted (a tombstone). Returns how many
        are not present.
        """

    def signs(self, table: int) -> NDArray[np.uint64]:
        """Return the signs of a table, in no order."""

    def deleted_signs(self) -> NDArray[np.uint64]:
        """Return the signs of tombstones, in no order."""

    def blocks(
        self, table: int, max_rows: int = 65536
    ) -> Iterator[tuple[NDArray[np.uint64], NDArray[np.float32]]]:
        """Yield the signs [k] and rows [k, dim] of a table, at most ``max_rows`` at a time.

        A row that is replaced meanwhile may come twice, or not at all.
        """

    def merge(
        self,
        other: RowTable,
        start: int = 0,
        max_rows: int = 65536,
        *,
        keep_deleted: bool = False,
    ) -> int:
        """Take over rows of ``other`` bit for bit; its tombstones delete rows here.

        It looks at ``max_rows`` places from ``start`` on, and returns the place to go on from,
        or 0 at the end: ``while start := base.merge(overlay, start): ...``. With
        ``keep_deleted``, tombstones stay tombstones. Others must not write to ``other``
        meanwhile. DataError: other dims or another dtype.
        """
