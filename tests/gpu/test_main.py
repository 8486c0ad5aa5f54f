"""``make gpu``: what it says where something is missing, and what it writes otherwise."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch

from tests.benchmarks import gpu as measurement
from tests.gpu import __main__ as program
from tests.gpu import machine
from tests.gpu.__main__ import Part
from tests.support.fixtures import Monkey
from tests.support.processes import run

no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


@no_cuda
def test_without_a_device_one_line_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main([]) == 0
    line = f"gpu: skipped, torch {torch.__version__} finds no CUDA device\n"
    assert capsys.readouterr().out == line


@no_cuda
def test_without_a_device_nothing_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        measurement.main([])
    assert raised.value.code == 2
    assert "expected a CUDA device" in capsys.readouterr().err


def test_what_is_missing_is_named(
    monkeypatch: Monkey, capsys: pytest.CaptureFixture[str]
) -> None:
    required = machine.required()
    assert {"numpy", "torch", "pyzmq", "pydantic", "pytest-timeout"} <= set(required)
    assert machine.missing(required) == []
    assert machine.problems() == []
    monkeypatch.setattr(machine, "required", lambda: ["numpy", "no-such-package"])
    monkeypatch.setattr(machine, "not_compiled", lambda: ["persia/_core/x.pyx"])
    monkeypatch.setenv("CC", "no-such-compiler")
    assert program.main(["--device", "cpu"]) == 2
    packages, compiled = capsys.readouterr().err.splitlines()
    assert "not installed: no-such-package;" in packages
    assert "persia/_core/x.pyx; to compile them, a C compiler (no-such-compiler)" in compiled


def test_what_is_not_compiled_is_compiled_first(monkeypatch: Monkey, tmp_path: Path) -> None:
    assert machine.not_compiled() == []
    assert [one.name for one in program.parts("cuda", False, tmp_path)] == [
        *("tests", "sanitizer", "measurement")
    ]
    monkeypatch.setattr(machine, "not_compiled", lambda: ["persia/_core/x.pyx"])
    assert program.parts("cuda", False, tmp_path)[0].name == "compile"


def test_all_tests_marked_cuda_are_run() -> None:
    """And no others are collected: they import more than is carried to a machine with a GPU."""
    marked = re.compile(r"pytest\.mark\.cuda|ON_EACH")
    found = {
        str(path.relative_to(machine.ROOT))
        for path in machine.ROOT.glob("tests/**/test_*.py")
        if marked.search(path.read_text(encoding="utf-8"))
    }
    assert "tests/training/test_batch.py" in found
    assert not [one for one in found if not one.startswith(program.WITH_CUDA)]
    (tests, *_) = program.parts("cuda", False, Path())
    assert tests.command[-2:] == [*program.WITH_CUDA]


ONLY_CARRIED = """
import importlib.metadata, re, sys
from tests.gpu import machine

def plain(name):
    return re.sub("[-_.]+", "-", name).lower()

of_torch = [re.split(r"[ ;<>=!~\\[(]", one, maxsplit=1)[0]
            for one in importlib.metadata.requires("torch") or ()]
allowed = {plain(one.name) for one in machine.closure([*machine.required(), *of_torch])}
allowed |= machine.NOT_CARRIED
for module, names in importlib.metadata.packages_distributions().items():
    if allowed.isdisjoint(map(plain, names)) and module not in ("persia", "tests"):
        sys.modules[module] = None  # which cannot be imported then

import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_its_tests_import_only_what_is_carried() -> None:
    words = ("--collect-only", "-q", "-m", "cuda", "-p", "pytest_timeout")
    ran = run(
        *("-c", ONLY_CARRIED, *words, *program.WITH_CUDA),
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        timeout_s=200,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "test_training_over_servers" in ran.stdout


def test_packages_are_carried_with_what_they_need(tmp_path: Path) -> None:
    assert 0 < machine.carry(tmp_path / "site") < 64 << 20
    there = {path.name for path in (tmp_path / "site").iterdir()}
    assert {"zmq", "pydantic", "pydantic_core", "yaml", "_pytest", "hypothesis"} <= there
    assert not {"torch", "numpy"} & there
    found = run(
        *(
            "-S",
            "-c",
            "import msgpack, zmq, yaml, pydantic, pytest; print(zmq.__file__)",
        ),
        env={"PYTHONPATH": str(tmp_path / "site")},
    )
    assert found.stdout.startswith(str(tmp_path)), found.stderr


def test_a_part_ends_by_itself_or_by_its_limit(tmp_path: Path) -> None:
    good = Part("good", [sys.executable, "-c", "print('3 passed')"], 60.0)
    bad = Part("bad", [sys.executable, "-c", "raise SystemExit(3)"], 60.0)
    slow = Part(
        "slow", [sys.executable, "-c", "import threading; threading.Event().wait(60)"], 0.2
    )
    late = Part("late", [sys.executable, "-c", ""], 60.0)
    echo = [sys.executable, "-c", "import sys; print(sys.argv[1:])"]
    bounded = Part("bounded", echo, 60.0, is_bounded=True)
    bounded.run(tmp_path, 40.0)
    assert bounded.summary == "['--seconds', '25']"
    for part in (good, bad, slow):
        part.run(tmp_path, 60.0)
    late.run(tmp_path, 0.0)
    assert (good.result, good.summary) == ("passed", "3 passed")
    assert bad.result == "failed (3)"
    assert slow.result == "out of time"
    assert late.result == "not begun: no time was left"
    (tmp_path / "measured.md").write_text("| a table |")
    good.measured = ["memory is flat"]
    text = program.page([good, bad, slow, late], "cuda", False, tmp_path)
    for piece in ("| good | passed |", "| late | not begun", "- memory is flat", "| a table |"):
        assert piece in text


@pytest.mark.slow
def test_the_whole_program_on_a_cpu(tmp_path: Path) -> None:
    ran = run("-m", "tests.gpu", "--device", "cpu", "--quick", "--out", tmp_path, timeout_s=590)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    text = (tmp_path / "gpu.md").read_text()
    for piece in ("A trial of the program", "quickstart on cpu", "| 1 | "):
        assert piece in text
    (of_net,) = json.loads((tmp_path / "measured.json").read_text())
    assert set(of_net["rates"]) == set(measurement.NAMES)
    assert all(rate > 0 for rates in of_net["rates"].values() for rate in rates)
    assert [part["status"] for part in json.loads((tmp_path / "gpu.json").read_text())] == [
        0,
        0,
    ]
