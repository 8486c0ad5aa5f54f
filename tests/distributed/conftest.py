"""Two ranks: a launch costs seconds, so one launch serves all tests of a module."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.processes import DEADLINE_S, ROOT

SCRIPTS = Path(__file__).parent / "scripts"
FORKED = SCRIPTS / "forked.py"


def launch(script: str, directory: Path) -> Any:
    """Run a script on two ranks, and return what rank 0 wrote as JSON."""
    output = directory / "found.json"
    # Rank numbers of this process would be taken for the launcher's.
    env = {k: v for k, v in os.environ.items() if k not in {"RANK", "WORLD_SIZE"}}
    ran = subprocess.Popen(
        [sys.executable, str(FORKED), str(SCRIPTS / script), str(output)],
        env=env | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = ran.communicate(timeout=DEADLINE_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(ran.pid, signal.SIGKILL)  # with its ranks
    assert ran.returncode == 0, printed
    return json.loads(output.read_text(encoding="utf-8"))
