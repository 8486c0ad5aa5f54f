"""Short runs of the proofs: what is counted has to hold; times are not judged."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.serving.proofs import fresh, hostile, int8, kills, switch


@pytest.mark.slow
def test_no_answer_is_mixed_while_versions_and_rows_change(tmp_path: Path) -> None:
    assert switch.run(tmp_path, 1500, 8000, 100.0, 20_000, judges=False) == 0


@pytest.mark.slow
def test_every_update_becomes_visible(tmp_path: Path) -> None:
    assert fresh.run(tmp_path, 6, 0.5, judges=False) == 0


@pytest.mark.slow
def test_rows_of_int8_keep_the_auc_and_save_memory(tmp_path: Path) -> None:
    assert int8.run(tmp_path, 12_000, 200_000) == 0


@pytest.mark.slow
def test_no_kill_makes_a_row_zero(tmp_path: Path) -> None:
    assert kills.run(tmp_path, 4, 1) == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_hostile_input_harms_nothing(tmp_path: Path) -> None:
    assert hostile.run(tmp_path, 20.0, 1) == 0
