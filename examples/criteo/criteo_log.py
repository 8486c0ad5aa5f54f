"""Where the log is, and a generated one in Criteo's layout. Imports no torch.

    python examples/criteo/criteo_log.py --into FOLDER --samples 1000000

A folder has two below it, ``train`` and ``test``, each with files of lines

    label <tab> 13 integers <tab> 26 ids in hexadecimal digits

of which any but the label may be empty. CRITEO_DATA names it; without, a small one is generated
beside this script, where clicks depend on eight of the ids and two of the numbers.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv

from persia.utils import ArgumentParser, at_least

BATCH_SIZE = 512
NUM_DENSE, NUM_IDS = 13, 26
# Ids of a column; like Criteo's, some have a few and some have many.
NUM_VALUES = tuple(20 * 4 ** (column % 5) for column in range(NUM_IDS))
TEST_SHARE = 5  # one line in five
MISSING = 0.05


def folder() -> Path:
    """Return where the log is; generates it if none is named and none is there."""
    named = os.environ.get("CRITEO_DATA")
    if named:
        return Path(named)
    path = Path(__file__).parent / "data"
    if not path.exists():
        generate(path)
    return path


def generate(path: Path, samples: int = 60_000, seed: int = 1) -> None:
    """Write a log; it is there as a whole, or not at all."""
    table = draw(samples, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as name:
        aside = Path(name) / "log"
        cut = samples - samples // TEST_SHARE
        for part, rows in (("train", table.slice(0, cut)), ("test", table.slice(cut))):
            (aside / part).mkdir(parents=True)
            options = pacsv.WriteOptions(
                include_header=False, delimiter="\t", quoting_style="none"
            )
            pacsv.write_csv(rows, aside / part / "part-0.txt", options)
        try:
            aside.rename(path)
        except OSError:
            if not path.exists():  # another process was faster, with the same lines
                raise


def draw(samples: int, seed: int) -> pa.Table:
    """Return lines as columns."""
    rng = np.random.default_rng(seed)
    score = np.full(samples, -0.5)
    columns = {}
    for column in range(NUM_DENSE):
        numbers = rng.geometric(0.1, samples)
        if column < 2:
            score += (1 - 2 * column) * (np.log1p(numbers) - 2.0)
        columns[f"I{column + 1}"] = pa.array(numbers, mask=rng.random(samples) < MISSING)
    for column, count in enumerate(NUM_VALUES):
        # The square makes small numbers frequent.
        ids = (count * rng.random(samples) ** 2).astype(np.int64)
        if column < 8:
            score += rng.normal(0, 0.7, count)[ids]
        words = pa.array([f"{word:08x}" for word in rng.integers(0, 2**32, count)])
        texts = words.take(pa.array(ids, mask=rng.random(samples) < MISSING))
        columns[f"C{column + 1}"] = texts
    clicks = (rng.random(samples) < 1 / (1 + np.exp(-score))).astype(np.int64)
    return pa.table({"label": clicks, **columns})


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(__doc__, "python criteo_log.py --into data --samples 1000000")
    parser.add_argument("--into", type=Path, required=True, help="a folder that is not there")
    parser.add_argument("--samples", type=at_least(100), default=60_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    generate(args.into, args.samples, args.seed)
    print(f"CRITEO_DATA={args.into}")


if __name__ == "__main__":
    main()
