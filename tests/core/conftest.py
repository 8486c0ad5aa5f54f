"""What tests of kernels share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from persia._core.base import cpu


@pytest.fixture(params=cpu.available())
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each variant of the kernels that this machine can run, in turn."""
    cpu.select(request.param)
    yield request.param
    cpu.select(None)
