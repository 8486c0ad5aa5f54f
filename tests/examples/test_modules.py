"""The examples of persia.nn reach nearly what is possible on the data that they draw."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.loading import load

pytestmark = pytest.mark.slow


def test_two_towers_recall_and_export_items(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    items = tmp_path / "run" / "items.parquet"
    assert load("two_tower").main(["--items", str(items)]) > 0.5  # of 0.57
    assert f"1000 items in {items}" in capsys.readouterr().out


def test_the_next_item_of_a_jagged_sequence_is_found() -> None:
    assert load("sequence").main([]) > 0.75  # of 0.805
