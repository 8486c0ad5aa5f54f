"""A short run of ``make soak-load``."""

from __future__ import annotations

import pytest

from tests.load.soak import soak
from tests.support.fixtures import Record


@pytest.mark.slow
def test_w65_fifty_loaders_and_eight_ranks_at_one_worker(record_property: Record) -> None:
    record_property("measured", soak(25.0).partition("\n")[0])
