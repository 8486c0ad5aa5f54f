"""Milliseconds of a lookup of served rows, against a dictionary of places and a numpy matrix.

    python -m tests.benchmarks.serving_lookup [--pairs 11] [--rows 630000] [--keys 2000]
    python -m tests.benchmarks.serving_lookup --prove    exit 1 if a lookup is too slow

Rows of dim 16, keys by a power law over all of them, in no order in memory; one thread. A pair
is one turn of each over the same requests; a ratio is the median of the pairs' own. `missing`
has a tenth of its keys unknown. `write` is the time in which another thread replaces all rows,
again and again. Bytes are those of a row with its part of the index. ``--prove`` has keys by
rank to the power of -1.2.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from persia._core.table.row_table import DTYPES, RowTable
from tests.benchmarks.interleaved import interleave, parser, pin_malloc, ratio

DIM = 16
NUM_REQUESTS = 200
POWER, MOST_P50_MS, MOST_P99_MS = 1.2, 0.10, 0.20
Keys = NDArray[np.uint64]
Lookup = Callable[[Keys, NDArray[np.float32]], Any]


def requests(signs: Keys, num_keys: int, missing: float = 0.0) -> list[Keys]:
    """Power-law ranks over rows that stand anywhere."""
    rng = np.random.default_rng(2)
    made = []
    for _ in range(NUM_REQUESTS):
        ranks = len(signs) * rng.random(num_keys) ** 3
        keys = signs[ranks.astype(np.int64)]
        keys[rng.random(num_keys) < missing] += np.uint64(1)
        made.append(keys)
    return made


def dictionary(signs: Keys, rows: NDArray[np.float32]) -> Lookup:
    """The peer: places by key, the last one's row is zeros."""
    places = {int(sign): place for place, sign in enumerate(signs)}
    matrix = np.concatenate([rows, np.zeros((1, DIM), np.float32)])

    def lookup(keys: Keys, out: NDArray[np.float32]) -> None:
        last = len(rows)
        found = [places.get(key, last) for key in keys.tolist()]
        np.take(matrix, found, 0, out)

    return lookup


def times(lookup: Lookup, asked: list[Keys]) -> NDArray[np.float64]:
    """Milliseconds of each request."""
    out = np.empty((len(asked[0]), DIM), np.float32)
    spent = []
    for keys in asked:
        began = time.perf_counter()
        lookup(keys, out)
        spent.append(time.perf_counter() - began)
    return 1e3 * np.array(spent)


def rate(lookup: Lookup, asked: list[Keys]) -> float:
    """Million keys a second."""
    return len(asked) * len(asked[0]) / 1e3 / float(times(lookup, asked).sum())


@contextmanager
def written(table: RowTable, signs: Keys, rows: NDArray[np.float32]) -> Iterator[None]:
    """Another thread replaces rows meanwhile."""
    done = threading.Event()

    def write() -> None:
        while not done.is_set():
            table.write(0, signs, rows)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def show(name: str, lookup: Lookup, asked: list[Keys]) -> tuple[float, float]:
    spent = np.concatenate([times(lookup, asked) for _ in range(5)])
    p50, p99 = map(float, np.percentile(spent, [50, 99]))
    print(f"{name}: p50 {p50:.3f} ms, p99 {p99:.3f} ms")
    return p50, p99


def prove(signs: Keys, rows: NDArray[np.float32], num_keys: int) -> int:
    """Look keys of a steep power law up in rows of each dtype; 1 if that takes too long."""
    ends = np.cumsum(np.arange(1, len(signs) + 1) ** -POWER)
    rng = np.random.default_rng(2)
    drawn = rng.random((NUM_REQUESTS, num_keys)) * ends[-1]
    asked = [signs[np.searchsorted(ends, one)] for one in drawn]
    fails = 0
    for dtype in DTYPES:
        table = RowTable([DIM], dtype)
        table.write(0, signs, rows)
        lookup: Lookup = partial(table.lookup, 0)
        times(lookup, asked)
        p50, p99 = show(dtype, lookup, asked)
        fails += not (p50 <= MOST_P50_MS and p99 <= MOST_P99_MS)
    print(f"at most p50 {MOST_P50_MS} ms, p99 {MOST_P99_MS} ms: {'FAILS' if fails else 'ok'}")
    return int(fails > 0)


def main() -> int:
    options = parser(__doc__, 11)
    options.add_argument("--rows", type=int, default=630_000)
    options.add_argument("--keys", type=int, default=2000)
    options.add_argument("--prove", action="store_true", help="judge times; nothing else")
    given = options.parse_args()
    pin_malloc()
    rng = np.random.default_rng(1)
    signs = 2 * rng.permutation(given.rows).astype(np.uint64)
    rows = rng.normal(size=(given.rows, DIM)).astype(np.float32)
    if given.prove:
        return prove(signs, rows, given.keys)
    peer = dictionary(signs, rows)
    asked = {
        "present": requests(signs, given.keys),
        "missing": requests(signs, given.keys, 0.1),
    }
    for dtype in DTYPES:
        table = RowTable([DIM], dtype)
        table.write(0, signs, rows)
        own: Lookup = partial(table.lookup, 0)
        print(f"{dtype}: {table.num_bytes / given.rows:.1f} bytes a row")
        for name, some in asked.items():
            turns = {"own": partial(rate, own, some), "peer": partial(rate, peer, some)}
            ours, theirs = interleave(turns, given.pairs).values()
            print(f"  {name}: {ours.rate:.1f} M keys/s, dictionary {theirs.rate:.1f}: ", end="")
            print(ratio(ours, theirs))
            show(f"  {name}", own, some)
        with written(table, signs, rows):
            show("  write", own, asked["present"])
    show("dictionary", peer, asked["present"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
