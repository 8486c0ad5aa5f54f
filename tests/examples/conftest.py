"""What both examples' tests share."""

from __future__ import annotations

import pytest

from tests.examples.loading import EXAMPLES

LOADER = EXAMPLES / "adult_income" / "data_loader.py"


@pytest.fixture(autouse=True)
def adult_data_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    """In embedded mode the script beside the main one is started, which here is pytest."""
    monkeypatch.setenv("PERSIA_DATALOADER_ENTRY", str(LOADER))
