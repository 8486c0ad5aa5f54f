"""The examples' scripts say what may be typed, and answer what may not by one line."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable

import pytest

from tests.examples.loading import EXAMPLES

SCRIPTS = [
    "quickstart/train.py",
    "adult_income/train.py",
    "adult_income/data_loader.py",
    "adult_income/prepare_data.py",
    "criteo/train.py",
    "criteo/data_loader.py",
    "criteo/criteo_log.py",
]


Run = Callable[..., tuple[object, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(name: str, *words: str) -> tuple[object, str, str]:
        path = EXAMPLES / name
        monkeypatch.setattr(sys, "argv", [str(path), *words])
        monkeypatch.syspath_prepend(str(path.parent))
        with pytest.raises(SystemExit) as leaving:
            runpy.run_path(str(path), run_name="__main__")
        said = capsys.readouterr()
        return leaving.value.code, said.out, said.err

    return run


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_has_an_example_and_a_bad_word_one_line(run: Run, name: str) -> None:
    status, text, _ = run(name, "--help")
    assert status == 0
    example = text.splitlines()[-1].removeprefix("Example: ")
    script = name.rpartition("/")[2]
    assert example.startswith((f"python {script}", f"persia-launcher data-loader {script}"))
    status, out, line = run(name, "--nothing")
    assert (status, out, line.count("\n")) == (2, "", 1)
    assert line.startswith(f"{script}: ")
    assert line.endswith(f". Example: {example}\n")


@pytest.mark.parametrize(
    ("name", "option", "low"),
    [
        ("quickstart/train.py", "--samples", 1000),
        ("adult_income/train.py", "--threads", 1),
        ("criteo/criteo_log.py", "--samples", 100),
    ],
)
def test_a_number_out_of_range_is_one_line(run: Run, name: str, option: str, low: int) -> None:
    for text in (str(low - 1), "many"):
        words = option, text, *(["--into", "nowhere"] if "log" in name else [])
        status, out, line = run(name, *words)
        assert (status, out, line.count("\n")) == (2, "", 1)
        assert f"argument {option}: expected an integer of at least {low}, got {text!r}" in line
