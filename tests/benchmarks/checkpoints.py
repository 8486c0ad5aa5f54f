"""Writing and reading parts of a checkpoint, against dd on the same disk in the same run.

    python -m tests.benchmarks.checkpoints --pairs 5

A gigabyte, in this folder and on tmpfs. dd writes zeros with conv=fdatasync; rows are written
from blocks as a store gives them, and read with the page cache emptied of them, checked, and
given as blocks again. Rates are of the bytes of the files. Ratios are taken pair by pair.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from persia._core.store.blocks import RowBlock
from persia._files.part_writer import PartWriter
from persia._files.parts import read_ahead
from persia._files.storage import LocalStorage
from tests.benchmarks.interleaved import Series, parser, ratio

DIM = 16
BLOCK_ROWS = 65_536
NUM_BLOCKS = 16  # distinct ones; 144 bytes a row, so that no cache holds them


def block(number: int) -> RowBlock:
    rng = np.random.default_rng(number)
    return RowBlock(
        0,
        "float32",
        rng.integers(0, 1 << 64, BLOCK_ROWS, dtype=np.uint64),
        rng.normal(size=(BLOCK_ROWS, DIM)).astype(np.float32),
        rng.integers(0, 1 << 32, (BLOCK_ROWS, DIM), dtype=np.uint32),
        np.arange(BLOCK_ROWS, dtype=np.uint64),
        np.zeros(BLOCK_ROWS, np.uint32),
        np.zeros(BLOCK_ROWS, np.uint64),
    )


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def dd(folder: Path, num_bytes: int) -> float:
    """Return bytes a second."""
    target = folder / "zeros"
    command = ["dd", "if=/dev/zero", f"of={target}", "bs=1M", f"count={num_bytes >> 20}"]
    seconds = timed(
        lambda: subprocess.run([*command, "conv=fdatasync"], check=True, capture_output=True)
    )
    target.unlink()
    return (num_bytes >> 20 << 20) / seconds


def forget(folder: Path) -> None:
    """Have no file of a checkpoint in memory, as far as the system lets go."""
    os.sync()
    for path in folder.rglob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def measure(folder: Path, pairs: int, num_bytes: int) -> None:
    blocks = [block(number) for number in range(NUM_BLOCKS)]
    storage = LocalStorage(folder)
    rates: dict[str, list[float]] = {"dd": [], "dump": [], "load": []}
    for _ in range(pairs):
        rates["dd"].append(dd(folder, num_bytes))
        start = time.perf_counter()
        with PartWriter(storage, "id") as writer:
            for number in range(num_bytes // blocks[0].num_bytes):
                writer.add("table0", blocks[number % NUM_BLOCKS])
            parts = list(writer.finish())
        dumped = time.perf_counter() - start
        forget(folder)
        start = time.perf_counter()
        for _block in read_ahead(storage, parts):
            pass
        loaded = time.perf_counter() - start
        size = sum(part.num_bytes for part in parts)
        rates["dump"].append(size / dumped)
        rates["load"].append(size / loaded)
        shutil.rmtree(folder / "id")
    report(str(folder), rates)


def report(title: str, rates: dict[str, list[float]], asked: str = "") -> None:
    """Print rates in bytes a second, and their parts of dd's."""
    disk = Series(rates["dd"])
    print(f"{title}: dd {disk.rate / 1e9:.2f} GB/s")
    for name in ("dump", "load"):
        own = Series(rates[name])
        print(f"  {name} {own.rate / 1e9:.2f} GB/s, {ratio(own, disk)} of dd{asked}")


def main() -> None:
    options = parser(__doc__, 5)
    arguments = options.parse_args()
    for parent in (".", "/dev/shm"):
        with tempfile.TemporaryDirectory(dir=parent, prefix="bench-") as folder:
            measure(Path(folder), arguments.pairs, 1 << (24 if arguments.quick else 30))


if __name__ == "__main__":
    main()
