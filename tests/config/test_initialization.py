"""Distributions of initial values: names, parameters, defaults."""

from __future__ import annotations

import math

import pytest

from persia.config import INITIALIZATIONS, Initialization
from persia.errors import ConfigError


def test_defaults_are_filled_in() -> None:
    assert Initialization("uniform", {"lower": -1}).options == {"lower": -1.0, "upper": 0.01}
    assert Initialization("zeros", {}).options == {}


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("gamma", {"shape": 1.0}, "scale: gamma needs a value"),
        ("constant", {}, "value: constant needs a value"),
        ("uniform", {"lower": 1.0, "upper": 1.0}, "lower: must be below upper"),
        ("uniform", {"low": 1.0}, "low: not a parameter of uniform.*did you mean 'lower'"),
        (
            "normal",
            {"standard_deviation": 0.0},
            "standard_deviation: expected a number above 0",
        ),
        ("poisson", {"lam": -1.0}, "lam: expected a number above 0"),
        ("normal", {"mean": math.nan}, "mean: expected a finite number, got nan"),
        ("normal", {"mean": "0"}, "mean: expected a number, got str '0'"),
        ("constant", {"value": True}, "value: expected a number, got bool True"),
    ],
)
def test_what_cannot_be_used(method: str, options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Initialization(method, options)


def test_every_method_is_known_by_its_own_name() -> None:
    for method, parameters in INITIALIZATIONS.items():
        options = {name: 0.5 if name != "upper" else 2.0 for name in parameters}
        assert Initialization(method, options).options == options
