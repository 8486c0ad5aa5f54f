"""What both examples' tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from persia._core import cpu


@pytest.fixture
def restored_isa() -> Iterator[None]:
    before = cpu.selected()
    yield
    cpu.select(before)
