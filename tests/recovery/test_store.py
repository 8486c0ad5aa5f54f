"""A store that ends anywhere is, for the next process, as if it had not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from persia import env
from tests.meta.sources import ROOT


def crash(directory: Path, stride: int) -> int:
    """End processes at every ``stride``-th point; returns how many."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.recovery.crash_points", str(directory), str(stride)],
        env=env.of_child(OPENBLAS_NUM_THREADS=1, PYTHONPATH=ROOT),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[0])


def test_requests_cut_short_and_repeated_give_the_same_rows(directory: Path) -> None:
    assert crash(directory, 61) > 20


@pytest.mark.slow
def test_requests_cut_short_anywhere_and_repeated_give_the_same_rows(directory: Path) -> None:
    assert crash(directory, 1) > 1000
