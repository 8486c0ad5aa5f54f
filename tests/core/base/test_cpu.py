from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from persia._core.base import cpu
from persia.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _best_level_after() -> Iterator[None]:
    yield
    cpu.select(None)


def test_available_levels_rise_from_baseline() -> None:
    names = cpu.available()
    assert names == cpu.NAMES[: len(names)]
    assert names[0] == "baseline"


def test_the_highest_level_is_selected_by_default() -> None:
    cpu.select(None)
    assert cpu.selected() == cpu.available()[-1]


@pytest.mark.parametrize("name", cpu.available())
def test_select_takes_each_available_level(name: str) -> None:
    cpu.select(name)
    assert cpu.selected() == name


@pytest.mark.parametrize("name", ["", "AVX2", "neon", *cpu.NAMES[len(cpu.available()) :]])
def test_an_unavailable_level_is_refused_and_changes_nothing(name: str) -> None:
    cpu.select("baseline")
    with pytest.raises(ConfigError, match=r"expected one of baseline.* got"):
        cpu.select(name)
    assert cpu.selected() == "baseline"
