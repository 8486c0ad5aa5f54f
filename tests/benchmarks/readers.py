"""Rows a second that readers turn into batches, against Arrow's own scan of the same columns.

    python -m tests.benchmarks.readers [--pairs 11] [--rows 2000000] [--cpu-time]

Criteo's columns: a label, 13 f32, 26 u64 with ids as skewed as in logs. Arrow's scan is
``pyarrow.dataset``'s, of batches as large, on as many threads. `text` is the same data in
Criteo's layout, against ``pyarrow.csv`` that leaves ids texts. Pairs are interleaved; a ratio
is the median of the pairs' own. `shuffled` mixes samples, `1 of 2` is the mean rate of the two
shards of a job; `--cpu-time` counts the seconds of all threads, where others use the machine.
`memory` is the most that arrays of Arrow and of numpy held beyond the beginning.

2,000,000 rows are 20 windows of the default buffer. A pass begins with a window of which
nothing can be handed out yet, and ends with one behind which nothing is left to decode: half of
the four windows of `--rows 400000`, a tenth of these.

`request` is ``Columns.batch``: milliseconds for one, for 64 and for 1024 samples of 26 ids, and
with 13 numbers beside them; and how many times as long a ``TableReader`` takes.
"""

from __future__ import annotations

import tempfile
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from persia.readers import Columns, CriteoReader, ParquetReader, TableReader
from persia.readers._text import DENSE, IDS, LABEL
from tests.benchmarks.interleaved import Clock, interleave, parser, pin_malloc, ratio

GROUP_ROWS = 1 << 16
BATCH = 4096
NUM_TEXT_ROWS = 100_000  # are 20 MB
NUM_REQUESTS = 30
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

    def parquet(shards: int = 1, **options: Any) -> int:
        return sum(
            each.batch_size
            for index in range(shards)
            for each in ParquetReader(
                folder / "a.parquet", COLUMNS, BATCH, shard=(index, shards), **options
            )
        )

    def scan() -> int:
        data = ds.dataset(folder / "a.parquet")
        return sum(each.num_rows for each in data.to_batches(columns=NAMES, batch_size=BATCH))

    def text(**options: Any) -> int:
        reader = CriteoReader(folder / "a.txt", BATCH, shard=(0, 1), **options)
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

    return {
        "parquet": (parquet, scan),
        "parquet, shuffled": (partial(parquet, shuffle_seed=1), scan),
        "parquet, shuffled, 1 of 2": (partial(parquet, 2, shuffle_seed=1), scan),
        "text": (text, csv),
        "text, shuffled": (partial(text, shuffle_seed=1), csv),
    }


def rate(clock: Clock, read: Callable[[], int]) -> float:
    """Return million rows a second."""
    start = clock()
    return read() / (clock() - start) / 1e6


def memory(path: Path, **options: Any) -> int:
    """Return the most bytes that arrays hold while we read."""

    def held() -> int:
        return int(pa.total_allocated_bytes()) + tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    before, most = held(), 0
    for _ in ParquetReader(path, COLUMNS, BATCH, shard=(0, 1), **options):
        most = max(most, held() - before)
    tracemalloc.stop()
    return most


def requests(pairs: int) -> None:
    """Print how long ``Columns.batch`` takes for a few samples, and a table for the same."""
    for dense in ((), DENSE):
        for size in (1, 64, 1024):
            columns = Columns(IDS, dense, requires_grad=False)
            values: dict[str, list[Any]] = {name: list(range(size)) for name in IDS}
            values |= {name: [0.5 * row for row in range(size)] for name in dense}

            def ours(columns: Columns = columns, values: Any = values) -> int:
                return columns.batch(values).batch_size

            def table(columns: Columns = columns, values: Any = values) -> int:
                (batch,) = TableReader(pa.table(values), columns, 1024, shard=(0, 1))
                return batch.batch_size

            turns = {"ours": partial(repeated, ours), "table": partial(repeated, table)}
            own, other = interleave(turns, pairs).values()
            print(
                f"request, {size} of {len(IDS)} ids and {len(dense)} numbers: "
                f"{1 / own.rate:.3f} ms, TableReader {1 / other.rate:.3f}: {ratio(own, other)}"
            )


def repeated(make: Callable[[], int]) -> float:
    """Return how many batches are made in a millisecond."""
    start = time.perf_counter()
    for _ in range(NUM_REQUESTS):
        make()
    return NUM_REQUESTS / (time.perf_counter() - start) / 1e3


def main() -> None:
    options = parser(__doc__, 11, cpu_time=True)
    options.add_argument("--rows", type=int, default=2_000_000)
    given = options.parse_args()
    pin_malloc()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, given.rows)
        # First, while nothing is there that could be freed meanwhile.
        held = memory(folder / "a.parquet"), memory(folder / "a.parquet", shuffle_seed=1)
        whole = pq.read_table(folder / "a.parquet").nbytes
        for kind, (ours, theirs) in readers(folder).items():
            turns = {
                "ours": partial(rate, given.clock, ours),
                "theirs": partial(rate, given.clock, theirs),
            }
            own, other = interleave(turns, given.pairs).values()
            quotient = ratio(own, other)
            print(f"{kind}: {own.rate:.2f} M rows/s, Arrow {other.rate:.2f}: {quotient}")
    plain, shuffled = (each / 1e6 for each in held)
    requests(given.pairs)
    print(f"memory: {plain:.1f} MB, shuffled {shuffled:.1f} MB, of {whole / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
