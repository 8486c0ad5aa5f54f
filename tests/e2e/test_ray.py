"""examples/ray, on a Ray cluster of this machine.

`make ray` installs Ray into build/ray, an environment of its own that sees this one's packages.
"""

from __future__ import annotations

import os
import re
import signal
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from persia import env
from tests.support.fixtures import Monkey
from tests.support.processes import ROOT, Process

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PYTHON = ROOT / "build" / "ray" / "bin" / "python"
EXAMPLE = ROOT / "examples" / "ray" / "adult.py"
LEAST_AUC, END_S = 0.89, 170.0
TEMPORARY = tempfile.gettempdir()


@pytest.fixture(autouse=True)
def leaves_no_keys(tmp_path: Path, monkeypatch: Monkey) -> Iterator[None]:
    """Check that no process has left its keys in the folder for temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    yield
    assert not list(folder.glob("persia-keys-*"))


@contextmanager
def driver(log: Path, *words: str, **changes: str) -> Iterator[Process]:
    if not PYTHON.is_file():
        pytest.skip("no Ray: `make ray` installs it into build/ray")
    site = sysconfig.get_path("purelib")
    variables = {
        **{name: text for name, text in os.environ.items() if not name.startswith("RAY_")},
        # Ray's own packages are before these.
        "PYTHONPATH": os.pathsep.join((str(ROOT), _own_site(), site)),
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TMPDIR": TEMPORARY,  # names of its sockets are long
        **changes,
    }
    process = Process([str(PYTHON), "-u", str(EXAMPLE), *words], variables, log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _own_site() -> str:
    (found,) = (ROOT / "build" / "ray" / "lib").glob("python*/site-packages")
    return str(found)


def test_a_ray_cluster_trains_adult(tmp_path: Path) -> None:
    data = env.data_dir()
    if data is None or not (data / "adult").is_dir():
        pytest.skip("PERSIA_DATA_DIR has no adult/")
    with driver(tmp_path / "log", "--servers", "2") as job:
        status, said = job.wait(END_S), job.printed()
    assert status == 0, said
    assert float(re.findall(r"AUC (\d\.\d+)", said)[-1]) > LEAST_AUC
    assert "without keys" not in said


def test_what_keeps_failing_ends_the_job_with_its_status(tmp_path: Path) -> None:
    with driver(tmp_path / "log", PERSIA_DATA_DIR=str(tmp_path)) as job:  # there is no data
        status, said = job.wait(END_S), job.printed()
    assert status == 1, said
    assert re.search(r"^(nn-worker|data-loader) 0 ended with status 1$", said, re.MULTILINE)


def test_ctrl_c_ends_its_processes(tmp_path: Path) -> None:
    with driver(tmp_path / "log") as job:
        job.wait_for("serves at")
        job.send_signal(signal.SIGINT)
        status, said = job.wait(END_S), job.printed()
    assert status not in (0, -signal.SIGKILL), said
    assert "stops after SIGTERM" in said


def test_it_is_a_recipe() -> None:
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) <= 150
