"""``persia-launcher top`` beside a job of real processes, and its picture."""

from __future__ import annotations

import signal
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.cli.job import ask, training_job
from tests.cli.pictures import draw_doctor, draw_top, whole_frame
from tests.support.processes import ROOT

# PyTorch takes seconds to load, and on a busy machine minutes.
pytestmark = pytest.mark.slow

ROLES = ("data-loader", "embedding-worker", "parameter-server", "nn-worker")
NUM_PROCESSES = 2 + 1 + 2 + 1


def _texts(picture: Path) -> str:
    """Return the words of a picture, in which each stands for itself."""
    root = ElementTree.parse(picture).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert not root.findall(".//{*}script")
    return "\n".join(root.itertext()).replace("\xa0", " ")


def test_top_shows_a_job_and_who_stands_still() -> None:
    with training_job() as cluster:
        whole_frame(cluster)  # all are there
        ran = ask(cluster, "top", "--once", "--interval", "0.5")
        assert ran.returncode == 0, ran.stderr + cluster.logs()
        lines = ran.stdout.splitlines()
        assert f"{NUM_PROCESSES} of {NUM_PROCESSES} processes answer" in lines[0]
        assert "samples/s" in lines[1]
        assert "accuracy 0." in ran.stdout
        assert "slowest: " in ran.stdout
        tables = [line.split()[0] for line in lines if " state " in line]
        assert tuple(tables) == ROLES
        assert ran.stdout.count(" ready ") == NUM_PROCESSES

        server = cluster.processes["embedding-parameter-server-1"]
        server.send_signal(signal.SIGSTOP)
        try:
            ran = ask(cluster, "top", "--once", "--interval", "0.1", "--timeout", "4")
        finally:
            server.send_signal(signal.SIGCONT)
        assert ran.returncode == 0, ran.stderr
        assert f"{NUM_PROCESSES - 1} of {NUM_PROCESSES} processes answer" in ran.stdout
        assert "embedding-parameter-server 1 at " in ran.stdout
        assert "no answer" in ran.stdout

        cluster.kill("embedding-parameter-server-0")
        ran = ask(cluster, "top", "--once", "--interval", "0.1")
        assert "not running: connection refused" in ran.stdout


def test_the_picture_of_top_is_of_a_real_run(tmp_path: Path) -> None:
    text = _texts(draw_top(tmp_path))
    for word in (*ROLES, "slowest:", "samples/s", "accuracy", "6 of 6 processes answer"):
        assert word in text
    assert "persia-launcher top" in _texts(ROOT / "docs/images/top.svg")


def test_the_picture_of_doctor_is_of_a_real_run(tmp_path: Path) -> None:
    text = _texts(draw_doctor(tmp_path))
    for word in ("torch", "huge pages", "feature school of the config", "bytes a row"):
        assert word in text
    assert "persia-launcher doctor" in _texts(ROOT / "docs/images/doctor.svg")
