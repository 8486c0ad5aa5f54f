"""examples/ray, on a Ray cluster of this machine.

`make ray` installs Ray into build/ray, an environment of its own that sees this one's packages.
"""

from __future__ import annotations

import os
import re
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from persia import env
from tests.support.fixtures import Monkey
from tests.support.processes import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PYTHON = ROOT / "build" / "ray" / "bin" / "python"
EXAMPLE = ROOT / "examples" / "ray" / "adult.py"
LEAST_AUC = 0.89
TEMPORARY = tempfile.gettempdir()


@pytest.fixture(autouse=True)
def leaves_no_keys(tmp_path: Path, monkeypatch: Monkey) -> Iterator[None]:
    """Check that no process has left its keys in the folder for temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    yield
    assert not list(folder.glob("persia-keys-*"))


def run(*words: str, **changes: str) -> subprocess.CompletedProcess[str]:
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
    return subprocess.run(
        [str(PYTHON), str(EXAMPLE), *words],
        env=variables,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )


def _own_site() -> str:
    (found,) = (ROOT / "build" / "ray" / "lib").glob("python*/site-packages")
    return str(found)


def test_a_ray_cluster_trains_adult() -> None:
    data = env.data_dir()
    if data is None or not (data / "adult").is_dir():
        pytest.skip("PERSIA_DATA_DIR has no adult/")
    ran = run("--servers", "2")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert float(re.findall(r"AUC (\d\.\d+)", ran.stdout)[-1]) > LEAST_AUC
    assert "without keys" not in ran.stdout + ran.stderr


def test_what_keeps_failing_ends_the_job_with_its_status(tmp_path: Path) -> None:
    ran = run(PERSIA_DATA_DIR=str(tmp_path))  # where there is no data
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert re.search(
        r"^(nn-worker|data-loader) 0 ended with status 1$", ran.stdout, re.MULTILINE
    )


def test_it_is_a_recipe() -> None:
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) <= 150
