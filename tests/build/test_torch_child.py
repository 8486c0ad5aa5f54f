"""The process that compiles for torch: what it hands on, and that it ends with its parent.

PyTorch's own tool chain is replaced here; tests/test_cpp_extension.py has the real one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from persia import env
from tests.support.processes import ROOT
from tests.support.waiting import PATIENCE_S

LOAD = """
import json, os
from pathlib import Path

def load(**options):
    folder = Path(options["build_directory"])
    (folder / "got.json").write_text(json.dumps(options))
    if options["name"] == "waits":
        (folder / "begun").write_text("begun")
        (folder / "never").read_text()
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    package = tmp_path / "torch" / "utils"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "cpp_extension.py").write_text(LOAD)
    os.mkfifo(tmp_path / "begun")
    os.mkfifo(tmp_path / "never")
    return tmp_path


def start(place: Path, name: str) -> subprocess.Popen[bytes]:
    request = {"name": name, "sources": ["a.cpp"], "build_directory": str(place)}
    (place / "request.json").write_text(json.dumps(request))
    return subprocess.Popen(
        [sys.executable, "-m", "persia._build.torch_child", str(place / "request.json")],
        env=env.of_child(PYTHONPATH=os.pathsep.join([str(place), str(ROOT)])),
        stdin=subprocess.PIPE,
        start_new_session=True,
    )


def test_it_hands_the_request_on_and_has_everything_printed(place: Path) -> None:
    with start(place, "ends") as process:
        assert process.wait(PATIENCE_S) == 0
    got = json.loads((place / "got.json").read_text())
    assert got == {
        "name": "ends",
        "sources": ["a.cpp"],
        "build_directory": str(place),
        "verbose": True,
    }


def test_it_ends_when_its_parent_is_gone(place: Path) -> None:
    with start(place, "waits") as process:
        assert (place / "begun").read_text() == "begun"
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(PATIENCE_S) == -signal.SIGKILL
