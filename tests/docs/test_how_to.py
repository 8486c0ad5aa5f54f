"""Each how-to page's program reaches its numbers, and equals its twin in plain PyTorch."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from tests.docs.test_pages import blocks
from tests.docs.twins import choosing, gpu
from tests.golden.commands import quiet_surroundings
from tests.support.fixtures import Monkey, Record
from tests.support.processes import ROOT

# The most that the default staleness of 10 may change: short runs over few, hot ids lose by it.
# Seen were 0.0006 to 0.006 of AUC; 0.002 of AUC; 0.017 to 0.038 of recall; 0.009 to 0.02 of
# AUC; 0.002 to 0.021 nats; and 0.009 to 0.018 of recall.
PAGES = {
    "validation": 0.03,
    "din": 0.01,
    "sasrec": 0.06,
    "several-tasks": 0.04,
    "weight-tying": 0.05,
    "two-tower": 0.04,
}


class Program(NamedTuple):
    """A page that has run: its names, what it printed, and what it says that it prints."""

    page: Any
    printed: str
    stated: str


def run_page(name: str, num_blocks: int | None = None) -> Program:
    """Run the programs of a page, or some of them from the first on."""
    path = ROOT / "docs/how-to" / f"{name}.md"
    found = blocks(path.read_text(encoding="utf-8"))
    names: dict[str, Any] = {"__name__": "how_to"}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for block in [each for each in found if each.language == "python"][:num_blocks]:
            source = "\n" * (block.line - 1) + block.text
            exec(compile(source, str(path), "exec"), names)
    stated = "".join(block.text for block in found if block.language == "text")
    return Program(SimpleNamespace(**names), printed.getvalue(), stated)


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_page_reaches_its_numbers_and_equals_its_twin(
    name: str, tmp_path: Path, monkeypatch: Monkey, record_property: Record
) -> None:
    monkeypatch.chdir(tmp_path)
    twin = importlib.import_module(f"tests.docs.twins.{name.replace('-', '_')}")
    with quiet_surroundings():
        page, printed, stated = run_page(name)
        of_twin = twin.train(page)
        with contextlib.redirect_stdout(io.StringIO()):
            of_default = page.train()
    line = f"{name}: {page.result}, twin {of_twin}, default staleness {of_default}"
    record_property("measured", line)
    assert page.result == pytest.approx(of_twin, abs=0.001), line
    assert page.result == pytest.approx(of_default, abs=PAGES[name]), line
    number = re.compile(r"\d+(?:\.\d+)?")
    assert number.sub("", printed) == number.sub("", stated)
    wanted = [pytest.approx(float(each), abs=0.01) for each in number.findall(stated)]
    assert [float(each) for each in number.findall(printed)] == wanted


@pytest.mark.slow
def test_the_best_choice_is_the_tables_and_equals_its_twin(record_property: Record) -> None:
    """Of the page of choices, whose other numbers ``test_pages`` compares as the page does."""
    with quiet_surroundings():
        page, _, _ = run_page("choosing", 1)
        result, of_twin = page.train(page.Adagrad(lr=0.3)), choosing.train(page)
    text = (ROOT / "docs/how-to/choosing.md").read_text(encoding="utf-8")
    (stated,) = re.findall(r"^\| `Adagrad` \|.*\| 0\.3: \*\*(.*?)\*\* \|", text, re.MULTILINE)
    line = f"choosing: {result}, twin {of_twin}, stated {stated}"
    record_property("measured", line)
    assert result == pytest.approx(of_twin, abs=0.001), line
    assert result == pytest.approx(float(stated), abs=0.01), line  # a mean of three seeds


@pytest.mark.slow
def test_the_script_for_any_device_equals_its_twin(
    tmp_path: Path, monkeypatch: Monkey, record_property: Record
) -> None:
    monkeypatch.chdir(tmp_path)
    with quiet_surroundings():
        page, _, _ = run_page("gpu", 1)
        result, of_twin = page.train(mixed_precision=False)[0], gpu.train(page)
    line = f"gpu: {result}, twin {of_twin}"
    record_property("measured", line)
    assert result == pytest.approx(of_twin, abs=0.001), line
