"""The commands by the names that people type, and the same surroundings for every run."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from click.testing import CliRunner, Result

from persia import env
from tests.support import processes
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


@contextmanager
def quiet_surroundings(**more: str) -> Iterator[None]:
    """Have no variables of a job but these, and torch compute in one thread."""
    import torch  # takes seconds, which not every user of this module has to wait

    threads, of_job = torch.get_num_threads(), os.environ.keys() - without_persia().keys()
    with env.changed(**{**dict.fromkeys(of_job), **more}):
        env.reload_env()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
    env.reload_env()


def invoke(name: str, *arguments: object) -> Result:
    """Run a command in this process."""
    words = [str(argument) for argument in arguments]
    runner = CliRunner(env={"COLUMNS": "80"})
    return runner.invoke(command(name), words, prog_name=name, terminal_width=80)


def run(name: str, *arguments: str) -> tuple[int, str]:
    """Run a command in a process of its own; returns its status and what it printed."""
    module, attribute = _place(name)
    start = f"import sys; sys.argv[0] = {name!r}; from {module} import {attribute}"
    code = f"{start}; {attribute}()"
    ran = processes.run("-c", code, *arguments, env=without_persia())
    return ran.returncode, ran.stdout + ran.stderr
