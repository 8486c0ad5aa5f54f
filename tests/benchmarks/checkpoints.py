"""Writing and reading parts of a checkpoint, against dd on the same disk in the same run.

    python -m tests.benchmarks.checkpoints --pairs 5

A gigabyte, in this folder and on tmpfs. dd writes zeros with conv=fdatasync; rows are written
from blocks as a store gives them, and read with the page cache emptied of them, checked, and
given as blocks again. Rates are of the bytes of the files. Ratios are taken pair by pair.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from persia._files.manifest import Part
from persia._files.part_writer import PartWriter
from persia._files.parts import read_ahead
from persia._files.storage import LocalStorage
from tests.benchmarks.interleaved import Series, parser, ratio
from tests.files.support import block

DIM = 16
BLOCK_ROWS = 65_536
NUM_BLOCKS = 16  # distinct ones; 144 bytes a row, so that no cache holds them


def timed(work: Callable[..., object], *arguments: object) -> float:
    start = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - start


def dd(folder: Path, num_bytes: int) -> float:
    """Return bytes a second."""
    target = folder / "zeros"
    command = ["dd", "if=/dev/zero", f"of={target}", "bs=1M", f"count={num_bytes >> 20}"]
    command.append("conv=fdatasync")
    seconds = timed(partial(subprocess.run, command, check=True, capture_output=True))
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


def against_dd(
    parent: str,
    pairs: int,
    dump: Callable[[Path], object],
    load: Callable[[Path], object],
    asked: str = "",
) -> None:
    """Print the rates of a dump into a folder and of a load from it, and their parts of dd's.

    The first pair is not counted: it has memory and the page cache to get.
    """
    rates: dict[str, list[float]] = {"dd": [], "dump": [], "load": []}
    for _ in range(pairs + 1):
        with tempfile.TemporaryDirectory(dir=parent, prefix="bench-") as name:
            folder = Path(name)
            dumping = timed(dump, folder / "job")
            size = sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
            rates["dd"].append(dd(folder, size))
            forget(folder)
            loading = timed(load, folder / "job")
        rates["dump"].append(size / dumping)
        rates["load"].append(size / loading)
    disk = Series(rates["dd"][1:])
    print(f"{parent}: dd {disk.rate / 1e9:.2f} GB/s")
    for name in ("dump", "load"):
        own = Series(rates[name][1:])
        print(f"  {name} {own.rate / 1e9:.2f} GB/s, {ratio(own, disk)} of dd{asked}")


def measure(parent: str, pairs: int, num_bytes: int) -> None:
    signs = np.random.default_rng(0).permutation(NUM_BLOCKS * BLOCK_ROWS) << 40
    blocks = [
        block(part, dim=DIM, words=DIM, seed=number)
        for number, part in enumerate(np.split(signs, NUM_BLOCKS))
    ]
    parts: list[Part] = []

    def dump(folder: Path) -> None:
        with PartWriter(LocalStorage(folder), "id") as writer:
            for number in range(num_bytes // blocks[0].num_bytes):
                writer.add("table0", blocks[number % NUM_BLOCKS])
            parts[:] = writer.finish()

    def load(folder: Path) -> None:
        for _block in read_ahead(LocalStorage(folder), parts):
            pass

    against_dd(parent, pairs, dump, load)


def main() -> None:
    arguments = parser(__doc__, 5).parse_args()
    for parent in (".", "/dev/shm"):
        measure(parent, arguments.pairs, 1 << (24 if arguments.quick else 30))


if __name__ == "__main__":
    main()
