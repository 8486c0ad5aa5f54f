"""Rows a second that readers turn into batches, against Arrow's own scan of the same columns.

    python -m tests.benchmarks.readers [--pairs 11] [--rows 400000]

Criteo's columns: a label, 13 f32, 26 u64 with ids as skewed as in logs. Arrow's scan is
``pyarrow.dataset``'s, of batches as large, on as many threads. `text` is the same data in
Criteo's layout, against ``pyarrow.csv`` that leaves ids texts. Pairs are interleaved; a ratio
is the median of the pairs' own. `memory` is the most that Arrow held beyond the beginning.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from persia.readers import Columns, CriteoReader, ParquetReader
from persia.readers._text import DENSE, IDS, LABEL
from tests.benchmarks.interleaved import interleave, parser, ratio

GROUP_ROWS = 1 << 16
BATCH = 4096
NUM_TEXT_ROWS = 100_000  # are 20 MB
NAMES = [LABEL, *DENSE, *IDS]
COLUMNS = Columns(IDS, DENSE, [LABEL], strings="hex")


def write(folder: Path, num_rows: int) -> None:
    """Write the data as Parquet and, its first rows, as text."""
    rng = np.random.default_rng(1)
    columns: dict[str, Any] = {LABEL: rng.integers(0, 2, num_rows).astype(np.int8)}
    columns |= {name: rng.normal(size=num_rows).astype(np.float32) for name in DENSE}
    columns |= {name: rng.zipf(1.2, num_rows).astype(np.uint64) % (1 << 22) for name in IDS}
    pq.write_table(pa.table(columns), folder / "a.parquet", row_group_size=GROUP_ROWS)
    with (folder / "a.txt").open("w", encoding="ascii") as file:
        for row in range(min(num_rows, NUM_TEXT_ROWS)):
            fields = [str(columns[LABEL][row])]
            fields += [str(int(100 * columns[name][row])) for name in DENSE]
            fields += [f"{columns[name][row]:08x}" for name in IDS]
            file.write("\t".join(fields) + "\n")


def readers(folder: Path) -> dict[str, tuple[Callable[[], int], ...]]:
    """For each format ours and Arrow's way to read it; each returns the number of rows."""

    def parquet() -> int:
        reader = ParquetReader(folder / "a.parquet", COLUMNS, BATCH, shard=(0, 1))
        return sum(each.batch_size for each in reader)

    def scan() -> int:
        data = ds.dataset(folder / "a.parquet")
        return sum(each.num_rows for each in data.to_batches(columns=NAMES, batch_size=BATCH))

    def text() -> int:
        reader = CriteoReader(folder / "a.txt", BATCH, shard=(0, 1))
        return sum(each.batch_size for each in reader)

    def csv() -> int:
        types = {name: pa.string() if name in IDS else pa.float32() for name in NAMES}
        stream = pacsv.open_csv(
            folder / "a.txt",
            pacsv.ReadOptions(column_names=NAMES),
            pacsv.ParseOptions(delimiter="\t", quote_char=False),
            pacsv.ConvertOptions(column_types=types),
        )
        return sum(each.num_rows for each in stream)

    return {"parquet": (parquet, scan), "text": (text, csv)}


def rate(read: Callable[[], int]) -> float:
    """Return million rows a second."""
    start = time.perf_counter()
    return read() / (time.perf_counter() - start) / 1e6


def memory(path: Path) -> tuple[int, int]:
    """Return the most bytes that Arrow holds while we read, and those of all rows."""
    before, most = pa.total_allocated_bytes(), 0
    for _ in ParquetReader(path, COLUMNS, BATCH, shard=(0, 1)):
        most = max(most, pa.total_allocated_bytes() - before)
    return most, pq.read_table(path).nbytes


def main() -> None:
    options = parser(__doc__, 11)
    options.add_argument("--rows", type=int, default=400_000)
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, given.rows)
        # First, while nothing is there that could be freed meanwhile.
        held, whole = memory(folder / "a.parquet")
        for kind, (ours, theirs) in readers(folder).items():
            turns = {"ours": partial(rate, ours), "theirs": partial(rate, theirs)}
            own, other = interleave(turns, given.pairs).values()
            quotient = ratio(own, other)
            print(f"{kind}: {own.rate:.2f} M rows/s, Arrow {other.rate:.2f}: {quotient}")
    print(f"memory: {held / 1e6:.1f} MB of {whole / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
