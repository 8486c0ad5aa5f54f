from __future__ import annotations

import pytest

from persia._core.base import cpu
from persia.errors import ConfigError


def test_each_available_level_can_be_selected_and_the_highest_is_the_default(
    level: str,
) -> None:
    names = cpu.available()
    assert names == cpu.NAMES[: len(names)]
    assert names[0] == "baseline"
    assert cpu.selected() == level
    for name in ("", "AVX2", "neon", *cpu.NAMES[len(names) :]):
        with pytest.raises(ConfigError, match=r"expected one of baseline.* got"):
            cpu.select(name)
        assert cpu.selected() == level
    cpu.select(None)
    assert cpu.selected() == names[-1]
