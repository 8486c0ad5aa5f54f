"""A short run of ``make soak-load``."""

from __future__ import annotations

import pytest

from tests.load.soak import soak


@pytest.mark.slow
def test_w65_fifty_loaders_and_eight_ranks_at_one_worker() -> None:
    print(soak(25.0).partition("\n")[0])
