"""Examples of models of persia.nn learn what can be learned, in loops of plain PyTorch."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from persia import env
from tests.support.processes import ROOT, run

pytestmark = pytest.mark.slow  # each trains for ten seconds


def recalls(example: str, folder: Path, *words: object) -> tuple[float, float]:
    """Run an example; return the recall that it prints, and the best possible."""
    script = ROOT / "examples" / example / "train.py"
    ran = run(
        *("-W", "error", script, *words),
        cwd=folder,
        env=env.of_child(PYTHONPATH=ROOT, OMP_NUM_THREADS=1),
        timeout_s=280,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = re.search(r"recall@10 ([\d.]+), best possible ([\d.]+)", ran.stdout)
    assert found is not None, ran.stdout
    return float(found[1]), float(found[2])


def test_two_towers_find_what_users_buy_in_the_exported_items(tmp_path: Path) -> None:
    found, best = recalls("two_tower", tmp_path, "--output", "found.parquet")
    assert found > best - 0.06
    table = pq.read_table(tmp_path / "found.parquet")
    assert table.column_names == ["id", "vector"]
    assert min(table["id"].to_pylist()) == 1 << 40  # ids as they were given


def test_jagged_sequences_are_predicted(tmp_path: Path) -> None:
    found, best = recalls("sequence", tmp_path)
    assert found > best - 0.1
