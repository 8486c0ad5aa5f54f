"""The commands by the names that people type, in this process or in one of their own."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from typing import Any

from click.testing import CliRunner, Result

from tests.support.processes import ROOT

SCRIPTS = dict(
    re.findall(
        r'^([\w-]+) = "(persia[\w.]*:\w+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
)


def _place(name: str) -> list[str]:
    return str(SCRIPTS[name]).split(":")


def command(name: str) -> Any:
    """Return a command as pyproject.toml declares it."""
    module, attribute = _place(name)
    return getattr(importlib.import_module(module), attribute)


def without_persia(**more: str) -> dict[str, str]:
    """Return the environment without what describes a job."""
    left = ("PERSIA_", "REPLICA_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOG_LEVEL")
    kept = {name: text for name, text in os.environ.items() if not name.startswith(left)}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "80", **more}


def invoke(name: str, *arguments: object) -> Result:
    """Run a command in this process."""
    words = [str(argument) for argument in arguments]
    runner = CliRunner(env={"COLUMNS": "80"})
    return runner.invoke(command(name), words, prog_name=name, terminal_width=80)


def run(name: str, *arguments: str) -> tuple[int, str]:
    """Run a command in a process of its own; returns its status and what it printed."""
    module, attribute = _place(name)
    start = f"import sys; sys.argv[0] = {name!r}; from {module} import {attribute}"
    ran = subprocess.run(
        [sys.executable, "-c", f"{start}; {attribute}()", *arguments],
        cwd=ROOT,
        env=without_persia(),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return ran.returncode, ran.stdout + ran.stderr
