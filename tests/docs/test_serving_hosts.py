"""The programs of docs/serving-hosts.md: short, and run where their host is installed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import persia.serving
from tests.support.processes import ROOT

PAGE = (ROOT / "docs" / "serving-hosts.md").read_text(encoding="utf-8")
PROGRAMS = {
    name.lower().replace(" ", ""): code
    for name, code in re.findall(r"## ([\w ]+)\n+```py\n(.*?)```", PAGE, re.DOTALL)
}


class FakePredictor:
    def __init__(self, folder: str) -> None:
        assert folder == "models/clicks/3"

    def __call__(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return {"output": inputs["x"] * np.float32(2)}


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(persia.serving, "Predictor", FakePredictor)
    monkeypatch.setattr(persia.serving, "current_version", lambda folder: 3)
    return {"__name__": "page"}


@pytest.mark.parametrize("name", ["litserve", "rayserve", "bentoml"])
def test_a_program_is_short(name: str) -> None:
    compile(PROGRAMS[name], name, "exec")
    assert len(PROGRAMS[name].splitlines()) < 30


def test_litserve(names: dict[str, Any]) -> None:
    pytest.importorskip("litserve")
    exec(PROGRAMS["litserve"], names)
    api = names["Clicks"]()
    api.setup("cpu")
    found = api.encode_response(api.predict(api.decode_request({"x": [1.0, 2.0]})))
    assert found == {"output": [2.0, 4.0]}


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")
def test_bentoml(names: dict[str, Any]) -> None:
    pytest.importorskip("bentoml")
    exec(PROGRAMS["bentoml"], names)
    assert names["Clicks"].inner().score(inputs={"x": [1.0]}) == {"output": [2.0]}


def test_ray(names: dict[str, Any]) -> None:
    pytest.importorskip("ray.serve")
    exec(PROGRAMS["rayserve"], names)
    assert names["app"] is not None
