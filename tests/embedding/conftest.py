"""Each test here starts outside any job, whatever the shell says, and leaves no trace."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _outside(no_job: None) -> None:
    """Use ``no_job``."""
