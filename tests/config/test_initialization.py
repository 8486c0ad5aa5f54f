"""Distributions of initial values: names, parameters, defaults."""

from __future__ import annotations

import math

import pytest

from persia.config import Initialization
from persia.errors import ConfigError


def test_defaults_are_filled_in() -> None:
    assert Initialization("uniform", {"lower": -1}).options == {"lower": -1.0, "upper": 0.01}
    assert Initialization("zeros", {}).options == {}


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("gamma", {"shape": 1.0}, "gamma: scale must be a number, it was not given"),
        ("uniform", {"lower": 1.0, "upper": 1.0}, "lower must be below upper"),
        ("uniform", {"low": 1.0}, "no option 'low'; did you mean 'lower'"),
        ("normal", {"mean": math.nan}, "mean must be finite"),
        ("normal", {"mean": "0"}, "mean must be a number, got '0'"),
    ],
)
def test_what_cannot_be_used(method: str, options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Initialization(method, options)
