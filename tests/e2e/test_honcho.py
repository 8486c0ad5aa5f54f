"""Jobs under honcho, which ends everything when the first process ends."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner

from persia import launcher
from persia._cluster.process import Options
from tests.e2e.support import PATIENT, Job, processes_with
from tests.e2e.test_lifecycle import TALKS
from tests.support.fixtures import Monkey
from tests.support.processes import ROOT, SERVERS, run
from tests.support.waiting import PATIENCE_S


def honcho(job: Job, trainer: str) -> subprocess.CompletedProcess[str]:
    """Run a job of the four roles from a Procfile, whose data-loader's script ends first."""
    # Others stay for longer behind the trainer's end, which honcho shall see first; it kills
    # them after 5 s.
    stay = PATIENT.replace("cli()", "scripts.GRACE_S = process.GRACE_S = 2.5; cli()")
    # A launcher makes an endpoint in place of its script's, once it knows that this has ended.
    ended = f"__import__('pathlib').Path({str(job.place / 'ended')!r})"
    noting = (
        f"make = scripts.Endpoint; scripts.Endpoint = lambda *of: {ended}.touch() or make(*of)"
    )
    waiting = f"from tests.support.waiting import until\nuntil({ended}.exists)\n"
    roles = {
        "data_loader": ["data-loader", job.script("load.py", "print('sent')")],
        "nn_worker": ["nn-worker", job.script("train.py", waiting + trainer)],
        "embedding_worker": ["embedding-worker"],
        "embedding_parameter_server": ["embedding-parameter-server"],
    }
    lines = []
    for name, words in roles.items():
        code = stay if name != "data_loader" else stay.replace("cli()", f"{noting}; cli()")
        command = shlex.join([sys.executable, "-c", code, *words])
        lines.append(f"{name}: exec {command}\n")
    (job.place / "Procfile").write_text("".join(lines))
    honcho = ("-m", "honcho", "start", "--no-colour")
    return run(*honcho, cwd=job.place, env=job.environment, timeout_s=PATIENCE_S)


def test_a_job_ends_by_itself_with_status_0(job: Job) -> None:
    ran = honcho(job, TALKS)
    assert ran.returncode == 0, ran.stdout
    trained, _, after = ran.stdout.partition("nn_worker.1 stopped (rc=0)")
    assert "rows [0]" in trained
    assert "sending SIG" not in trained
    assert "SIGKILL" not in after
    # honcho signals the others all the same; they have ended well, and say nothing of it.
    assert after.count("stopped (rc=0)") == len(SERVERS) + 1, after
    assert "after SIG" not in ran.stdout
    assert not processes_with(str(job.place))


def test_the_procfile_runs_the_four_roles(monkeypatch: Monkey) -> None:
    monkeypatch.chdir(ROOT)
    commands = dict(line.split(": ", 1) for line in Path("Procfile").read_text().splitlines())
    config = Path("examples/adult_income/config")
    options = Options(config / "embedding_config.yml", config / "global_config.yml")
    assert all(path.is_file() for path in config.glob("*.yml"))
    ran: list[object] = []

    def note(given: object) -> int:
        ran.append(given)
        return 0

    for name in ("run_embedding_worker", "run_parameter_server"):
        monkeypatch.setattr(launcher, name, note)
    monkeypatch.setattr(launcher, "set_up_logging", lambda who: None)
    for name in ("embedding_worker", "embedding_parameter_server"):
        execute, program, *words = shlex.split(commands.pop(name))
        assert (execute, program) == ("exec", "persia-launcher")
        assert CliRunner().invoke(launcher.cli, words).exit_code == 0
    assert ran == [options, options]
    assert commands == {
        "data_loader": "exec persia-launcher data-loader examples/adult_income/data_loader.py",
        "nn_worker": "exec env OMP_NUM_THREADS=1 persia-launcher nn-worker "
        "examples/adult_income/train.py",
    }
