"""The optimizer in C: equal to its model, and part of a training that learns."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from persia import env
from tests.support.processes import ROOT, run

EXAMPLE = ROOT / "examples" / "own_optimizer"
pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


def test_the_kernel_is_its_model(tmp_path: Path) -> None:
    variables = env.of_child(PYTHONPATH=ROOT, CACHED_CPP_EXTENSION_BUILD_DIR=tmp_path)
    words = ("-m", "persia.cpp_extension", "check", EXAMPLE / "sophia.c")
    ran = run(*words, "--model", EXAMPLE / "model.py", env=variables, timeout_s=200)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "model.py, bit for bit" in ran.stdout
    assert "speed: " in ran.stdout


@pytest.mark.slow
def test_a_model_learns_by_it(tmp_path: Path) -> None:
    variables = env.of_child(PYTHONPATH=ROOT, CACHED_CPP_EXTENSION_BUILD_DIR=tmp_path)
    ran = run(sys.executable, EXAMPLE / "train.py", env=variables, timeout_s=200)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert float(ran.stdout.split()[-1]) > 0.75
