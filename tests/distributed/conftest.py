"""Two ranks: a start costs seconds, so one serves all tests of a module."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.distributed.batches import SLOTS
from tests.support.processes import DEADLINE_S, ROOT, Cluster

SCRIPTS = Path(__file__).parent / "scripts"


def launch(script: str, directory: Path) -> Any:
    """Run a script on two ranks, and return what rank 0 wrote as JSON."""
    output = directory / "found.json"
    # Rank numbers of this process would be taken for the launcher's.
    env = {k: v for k, v in os.environ.items() if k not in {"RANK", "WORLD_SIZE"}}
    ran = subprocess.Popen(
        [sys.executable, str(SCRIPTS / "forked.py"), str(SCRIPTS / script), str(output)],
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


# What each rank saw, by phase.
Results = list[list[dict[str, Any]]]


def run_job(num_servers: int, *phases: str, **options: Any) -> tuple[Results, list[str]]:
    """Run phases over services, all of which end well; returns what data-loaders said, too."""
    with Cluster(SLOTS, num_servers=num_servers, num_workers=2, num_ranks=2) as cluster:
        cluster.start_servers()
        cluster.start_loaders(SCRIPTS / "phases_loader.py", 2, *phases)
        words = (str(SCRIPTS / "phases.py"), str(cluster.place), json.dumps(options), *phases)
        cluster.start_trainer("--nproc-per-node", "2", *words)
        failed = {name for name, status in cluster.wait().items() if status}
        assert failed == ({"data-loader-1"} if "failing" in phases else set()), cluster.logs()
        files = [cluster.place / f"rank-{rank}.json" for rank in range(2)]
        by_rank = [json.loads(file.read_text()) for file in files]
        said = [cluster.log(f"data-loader-{number}") for number in range(2)]
    return [list(pair) for pair in zip(*by_rank, strict=True)], said
