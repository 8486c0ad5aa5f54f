"""DLRM on a log in Criteo's layout, by itself and as a job of four processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.support import wait_until_gone
from tests.examples.loading import EXAMPLES, load
from tests.golden.commands import without_persia
from tests.support.places import short_directory
from tests.support.processes import ROOT, run

FOLDER = EXAMPLES / "criteo"


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small log, which the example finds."""
    load("criteo")
    path = tmp_path / "log"
    sys.modules["criteo_log"].generate(path, samples=12_000)
    monkeypatch.setenv("CRITEO_DATA", str(path))
    monkeypatch.setenv("PERSIA_DATALOADER_ENTRY", str(FOLDER / "data_loader.py"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return path


@pytest.mark.usefixtures("log")
def test_it_learns_in_one_process() -> None:
    train = load("criteo")
    options = train.Options(quiet=True, reproducible=True)
    with train.build_ctx(options) as ctx:
        report = train.run(ctx, options)
    assert len(report.losses) == -(-9_600 // 512)
    assert np.mean(report.losses[-4:]) < np.mean(report.losses[:4])
    assert report.auc > 0.6
    assert "test AUC 0." in str(report)


def test_the_log_is_as_criteos(log: Path) -> None:
    lines = (log / "train" / "part-0.txt").read_text().splitlines()
    assert len(lines) == 9_600
    fields = [line.split("\t") for line in lines]
    assert {len(each) for each in fields} == {40}
    assert {each[0] for each in fields} == {"0", "1"}
    assert all(len(word) in (0, 8) for word in fields[0][14:])
    assert any(not field for field in fields[0])


@pytest.fixture
def job(log: Path) -> Iterator[dict[str, str]]:
    """The environment of a job in the folder of the example, with sockets of its own."""
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with short_directory() as sockets:
        yield without_persia(
            PATH=programs,
            PERSIA_EMBEDDING_WORKERS=f"ipc://{sockets}/worker",
            PERSIA_EMBEDDING_PARAMETER_SERVERS=f"ipc://{sockets}/server",
            PERSIA_NN_WORKERS=f"ipc://{sockets}/trainer",
            PERSIA_STATE_DIRECTORY="off",
        )


@pytest.mark.slow
def test_make_run_is_a_job_that_ends_by_itself(job: dict[str, str]) -> None:
    ran = run("make", "run", cwd=FOLDER, env=job, timeout_s=240)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "test AUC 0." in ran.stdout
    assert not (FOLDER / ".job.pid").exists()
    assert "nothing runs here" in run("make", "stop", cwd=FOLDER).stdout


@pytest.mark.slow
def test_make_stop_ends_a_job_that_runs(job: dict[str, str]) -> None:
    with subprocess.Popen(
        ["make", "run"], cwd=FOLDER, env=job, stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        line = ""
        while "embedding_parameter_server" not in line or "serves at" not in line:
            line = running.stdout.readline()
            assert line, "it ended before its servers served"
        # Where make runs the tests it would say which folder it is in.
        stopped = run("make", "--no-print-directory", "stop", cwd=FOLDER)
        rest, _ = running.communicate(timeout=60)
    assert (stopped.returncode, stopped.stdout) == (0, "")
    assert running.returncode != 0
    assert "sending SIGTERM to nn_worker" in rest
    assert "SIGKILL" not in rest
    assert not (FOLDER / ".job.pid").exists()
    wait_until_gone(job["PERSIA_NN_WORKERS"])
