"""Seconds that a start takes for a module that is compiled, beyond those of torch itself.

    python -m tests.benchmarks.cold_start [--pairs 21]

Each start is a process that imports torch, and then the example of docs/native-code.md, which a
start before the first one has compiled. What is timed is the second import.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

from persia import env
from tests.docs.test_pages import blocks
from tests.support.processes import ROOT, run

PAGE = ROOT / "docs" / "native-code.md"
START = """
import time
begin = time.perf_counter()
import torch
middle = time.perf_counter()
import example
print(middle - begin, time.perf_counter() - middle)
"""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--pairs", type=int, default=21, help="starts")
    num_starts = options.parse_args().pairs
    seconds = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for block in blocks(PAGE.read_text()):
            if block.file:
                (folder / block.file).parent.mkdir(exist_ok=True)
                (folder / block.file).write_text(block.text)
        variables = env.of_child(
            PYTHONPATH=os.pathsep.join([str(ROOT), name]),
            CACHED_CPP_EXTENSION_BUILD_DIR=folder / "cache",
        )
        for _ in range(1 + num_starts):  # the first one compiles
            ran = run("-c", START, cwd=folder, env=variables, timeout_s=600.0)
            if ran.returncode:
                sys.exit(ran.stdout + ran.stderr)
            torchs, own = map(float, ran.stdout.splitlines()[-1].split())
            seconds.append((torchs, own))
    torch_s, own_s = (sorted(each) for each in zip(*seconds[1:], strict=True))
    print(
        f"{num_starts} starts: torch {statistics.median(torch_s):.3f} s, the module beyond it "
        f"{statistics.median(own_s):.3f} s, at most {own_s[-1]:.3f} s; compiled in "
        f"{seconds[0][1]:.1f} s"
    )


if __name__ == "__main__":
    main()
