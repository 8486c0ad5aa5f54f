"""examples/slurm, run by a Slurm of one node: a controller and a daemon of this test alone.

They listen at ports of the kernel's choice, and know each other without munge.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from persia import env
from tests.support import waiting
from tests.support.processes import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

NEEDED = ("slurmctld", "slurmd", "sbatch", "scontrol")
TRAIN_S, UP_S = 240.0, 60.0
LEAST_AUC = 0.89

CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 RealMemory=1024 State=UNKNOWN
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        several = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in several:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in several]


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Have a Slurm of this machine run; yields the variables with which it is found."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    missing = [name for name in NEEDED if shutil.which(name, path=path) is None]
    if missing:
        pytest.skip(f"no Slurm here: {', '.join(missing)} (Debian: apt install slurm-wlm)")
    if os.getuid() != 0:
        pytest.skip("slurmd runs jobs as their users, and so needs root")
    if not list(Path("/usr/lib").glob("*/slurm*/auth_none.so")):
        pytest.skip("this Slurm has no plugin auth/none, and there may be no munge")
    for name in ("state", "spool"):
        (tmp_path / name).mkdir()
    host = socket.gethostname().partition(".")[0]
    config = tmp_path / "slurm.conf"
    config.write_text(
        CONFIG.format(host=host, ports=free_ports(2), folder=tmp_path), encoding="utf-8"
    )
    # Of steps of this allocation, not of one in which the tests themselves may run.
    outer = {name: text for name, text in os.environ.items() if not name.startswith("SLURM_")}
    variables = {**outer, "PATH": path, "SLURM_CONF": str(config)}
    daemons = []
    with (tmp_path / "daemons.log").open("w") as log:
        for words in (["slurmctld"], ["slurmd", "-N", host]):
            command = [*words, "-D", "-f", str(config)]
            daemons.append(subprocess.Popen(command, env=variables, stdout=log, stderr=log))
    try:
        text = (tmp_path / "daemons.log").read_text
        waiting.until(
            lambda: "idle" in run(variables, "sinfo", "--noheader", "-o", "%T", check=False),
            UP_S,
            look_s=0.2,
            details=text,
        )
        yield variables
    finally:
        for one in daemons:
            one.terminate()
        for one in daemons:
            one.wait(30)


def run(variables: dict[str, str], *words: str, check: bool = True) -> str:
    ran = subprocess.run(
        words,
        env=variables,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert not check or ran.returncode == 0, (words, ran.stderr)
    return ran.stdout


def test_an_allocation_trains_and_ends_as_its_trainers_do(
    slurm: dict[str, str], tmp_path: Path
) -> None:
    data = env.data_dir()
    if data is None or not (data / "adult").is_dir():
        pytest.skip("PERSIA_DATA_DIR has no adult/")
    programs = tmp_path / "bin"
    programs.mkdir()
    launcher = programs / "persia-launcher"
    launcher.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m persia.launcher "$@"\n')
    launcher.chmod(0o755)
    variables = {
        **slurm,
        "PATH": f"{programs}:{Path(sys.executable).parent}:{slurm['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    log = tmp_path / "job.log"
    script = "examples/slurm/adult.sbatch"
    job = run(variables, "sbatch", "--parsable", f"--output={log}", script).strip()

    def state() -> tuple[str, str]:
        found = run(slurm, "scontrol", "show", "job", job)
        (only,) = re.findall(r"JobState=(\w+).*?ExitCode=(\d+:\d+)", found, re.DOTALL)
        return str(only[0]), str(only[1])

    def has_ended() -> bool:
        return state()[0] not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING")

    waiting.until(has_ended, TRAIN_S, look_s=0.5, details=lambda: (state(), log.read_text()))
    text = log.read_text(encoding="utf-8")
    assert state() == ("COMPLETED", "0:0"), text
    assert float(re.findall(r"AUC (\d\.\d+)", text)[-1]) > LEAST_AUC
    assert "without keys" not in text
    assert not (ROOT / f"keys-{job}").exists()
