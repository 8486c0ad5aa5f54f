"""Trainers that are killed and go on by themselves: bit-equal to one that was not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.resumed import draw_kills, run_embedded

STEPS, KILLS = 20, 5


@pytest.mark.slow
def test_a_trainer_that_is_killed_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    whole = run_embedded(tmp_path / "whole", STEPS, [])
    killed = run_embedded(tmp_path / "killed", STEPS, draw_kills(KILLS, STEPS, 1))
    assert whole["rank 0"]["steps"] == STEPS
    assert killed == whole
