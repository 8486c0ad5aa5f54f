"""examples/slurm, run by a Slurm of one node: a controller and a daemon of this test alone.

They listen at ports of the kernel's choice, and know each other without munge.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from persia import env
from tests.support import waiting
from tests.support.processes import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

NEEDED = ("slurmctld", "slurmd", "sbatch", "scontrol")
TRAIN_S, UP_S = 240.0, 60.0
OTHERS_S = 120.0  # a minute, after which Slurm ends them
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


class Allocation:
    """The example's script, submitted."""

    def __init__(self, slurm: dict[str, str], folder: Path) -> None:
        self._slurm = slurm
        programs = folder / "bin"
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
        self._log = folder / "job.log"
        words = ("sbatch", "--parsable", f"--output={self._log}")
        self.job = run(variables, *words, "examples/slurm/adult.sbatch").strip()

    def state(self) -> tuple[str, str]:
        found = run(self._slurm, "scontrol", "show", "job", self.job)
        (only,) = re.findall(r"JobState=(\w+).*?ExitCode=(\d+:\d+)", found, re.DOTALL)
        return str(only[0]), str(only[1])

    def text(self) -> str:
        return self._log.read_text(encoding="utf-8") if self._log.exists() else ""

    def wait(self, is_so: Callable[[], object], patience_s: float) -> None:
        waiting.until(
            is_so, patience_s, look_s=0.5, details=lambda: (self.state(), self.text())
        )

    def has_ended(self) -> bool:
        return self.state()[0] not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING")

    def processes(self, *words: str) -> list[int]:
        """Return the processes of this job whose command line has these words."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                line = (folder / "cmdline").read_bytes().split(b"\0")
                variables = (folder / "environ").read_bytes().split(b"\0")
                mine = f"SLURM_CONF={self._slurm['SLURM_CONF']}".encode()
                if {word.encode() for word in words} <= set(line) and mine in variables:
                    found.append(int(folder.name))
        return found


@pytest.fixture
def allocation(slurm: dict[str, str], tmp_path: Path) -> Iterator[Allocation]:
    data = env.data_dir()
    if data is None or not (data / "adult").is_dir():
        pytest.skip("PERSIA_DATA_DIR has no adult/")
    found = Allocation(slurm, tmp_path)
    yield found
    run(slurm, "scancel", found.job, check=False)
    found.wait(lambda: not found.processes("persia.launcher"), UP_S)


def test_an_allocation_trains_and_ends_as_its_trainers_do(allocation: Allocation) -> None:
    allocation.wait(allocation.has_ended, TRAIN_S)
    text = allocation.text()
    assert allocation.state() == ("COMPLETED", "0:0"), text
    assert float(re.findall(r"AUC (\d\.\d+)", text)[-1]) > LEAST_AUC
    assert "without keys" not in text
    assert not (ROOT / f"keys-{allocation.job}").exists()


def test_an_allocation_ends_though_its_trainers_could_not_say_so(
    allocation: Allocation,
) -> None:
    trainers = ("persia.launcher", "nn-worker")
    allocation.wait(lambda: allocation.processes(*trainers), UP_S)
    allocation.wait(lambda: allocation.processes("persia.launcher", "data-loader"), UP_S)
    for process in allocation.processes(*trainers):
        os.kill(process, signal.SIGKILL)
    allocation.wait(allocation.has_ended, OTHERS_S)
    assert allocation.state() == ("FAILED", "137:0"), allocation.text()
    assert not allocation.processes("persia.launcher")
    assert not (ROOT / f"keys-{allocation.job}").exists()
