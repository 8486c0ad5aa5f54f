"""The example of serving: trains, publishes, serves and asks at once, and ends by itself."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.loading import EXAMPLES
from tests.golden.commands import without_persia
from tests.support.processes import ROOT

DEADLINE_S = 240.0


def free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    found = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_scores_follow_the_training(tmp_path: Path) -> None:
    pytest.importorskip("hnswlib")
    folder = tmp_path / "serving"
    ignored = shutil.ignore_patterns("run", "__pycache__")
    shutil.copytree(EXAMPLES / "serving", folder, ignore=ignored)
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    http_port, grpc_port = free_ports(2)
    ran = subprocess.run(
        [
            "make",
            "run",
            *(f"HTTP_PORT={http_port}", f"GRPC_PORT={grpc_port}"),
            *("SECONDS_OF_LOG=25", "PUBLISH_EVERY=4"),
        ],
        cwd=folder,
        env=without_persia()
        | {
            "PATH": programs,
            "PYTHONPATH": str(ROOT),
        },
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    switches = re.findall(r"version (\d+) answers\n", ran.stdout)
    assert len(switches) >= 2, ran.stdout
    assert switches == sorted(switches, key=int)
    scores = [float(one) for one in re.findall(r"new item (0\.\d+)", ran.stdout)]
    assert scores[-1] > scores[0] + 0.2, ran.stdout
    assert "none failed" in ran.stdout
    recall = re.search(r"recall (\S+) of the exact search", ran.stdout)
    assert recall is not None
    assert float(recall[1]) > 0.9
