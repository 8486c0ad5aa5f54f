"""The command line of persia-launcher: options, scripts and their arguments, mistakes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from persia import env, launcher
from persia._cli import scripts
from persia._cluster.process import Options
from persia.errors import ConfigError
from persia.launcher import cli
from tests.e2e.support import Job

Monkey = pytest.MonkeyPatch

SHOWS = (
    "import sys; print('got', sys.argv[1:]); print('from', sys.path[0], __name__, __file__)\n"
)


@pytest.fixture
def ran(monkeypatch: Monkey) -> list[object]:
    """What the commands would have run."""
    calls: list[object] = []

    def note(*arguments: object, **options: object) -> int:
        calls.append((*arguments, *options.values()))
        return 5

    for name in ("run_nn_worker", "run_data_loader", "run_embedding_worker"):
        monkeypatch.setattr(launcher, name, note)
    monkeypatch.setattr(launcher, "run_parameter_server", note)
    monkeypatch.setattr(launcher, "set_up_logging", lambda who: None)
    return calls


def invoke(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli, words)
    return result.exit_code, result.output


def test_the_commands_of_the_original() -> None:
    assert set(cli.commands) - {"keys", "top", "doctor", "init"} == {
        "nn-worker",
        "data-loader",
        "embedding-worker",
        "embedding-parameter-server",
    }


@pytest.mark.parametrize(
    ("words", "want"),
    [
        (["a.py"], ((), 1, 0, 1)),
        (["a.py", "--lr", "3", "x"], (("--lr", "3", "x"), 1, 0, 1)),
        (["--nproc-per-node", "2", "a.py", "-v"], (("-v",), 2, 0, 1)),
        (["a.py", "--lr=3", "--nproc-per-node=2"], (("--lr=3",), 2, 0, 1)),
        (["a.py", "--nnodes", "3", "--node-rank", "2"], ((), 1, 2, 3)),
        (["a.py", "--", "--nnodes", "3"], (("--nnodes", "3"), 1, 0, 1)),
    ],
)
def test_what_is_no_option_goes_to_the_script(
    ran: list[object], tmp_path: Path, monkeypatch: Monkey, words: list[str], want: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.py").touch()
    assert invoke("nn-worker", *words) == (5, "")
    arguments, *options = want
    assert ran == [(scripts.Script(Path("a.py"), arguments), *options)]


def test_scripts_named_in_the_environment(
    ran: list[object], tmp_path: Path, monkeypatch: Monkey
) -> None:
    script = tmp_path / "entry.py"
    script.touch()
    monkeypatch.setenv("PERSIA_NN_WORKER_ENTRY", str(script))
    monkeypatch.setenv("PERSIA_DATALOADER_ENTRY", str(script))
    assert invoke("nn-worker", "--lr", "3") == (5, "")
    assert invoke("data-loader", "--replica-size", "2", "--replica-index", "1") == (5, "")
    assert ran == [
        (scripts.Script(script, ("--lr", "3")), 1, 0, 1),
        (scripts.Script(script), 1, 2),
    ]


@pytest.mark.parametrize("role", ["embedding-worker", "embedding-parameter-server"])
def test_options_of_servers(ran: list[object], monkeypatch: Monkey, role: str) -> None:
    monkeypatch.setenv("PERSIA_EMBEDDING_CONFIG", "slots.yml")
    monkeypatch.setenv("PERSIA_GLOBAL_CONFIG", "global.yml")
    assert invoke(role) == (5, "")
    words = ["--port", "1", "--embedding-config", "a", "--global-config", "b"]
    assert invoke(role, *words, "--replica-index=1", "--replica-size=2") == (5, "")
    assert ran == [
        (Options(Path("slots.yml"), Path("global.yml")),),
        (Options(Path("a"), Path("b"), 1, 2, 1),),
    ]


def test_replicas_numbered_by_the_environment(
    ran: list[object], tmp_path: Path, monkeypatch: Monkey
) -> None:
    monkeypatch.setenv("REPLICA_INDEX", "2")
    monkeypatch.setenv("REPLICA_SIZE", "3")
    monkeypatch.setenv("PERSIA_EMBEDDING_CONFIG", "a")
    script = tmp_path / "entry.py"
    script.touch()
    assert invoke("embedding-worker") == (5, "")
    assert invoke("embedding-parameter-server", "--replica-index", "1") == (5, "")
    assert invoke("data-loader", str(script)) == (5, "")
    assert ran == [
        (Options(Path("a"), None, 2, 3),),
        (Options(Path("a"), None, 1, 3),),
        (scripts.Script(script), 2, 3),
    ]


def test_a_replica_without_a_number_is_refused_by_name(
    ran: list[object], monkeypatch: Monkey, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("REPLICA_INDEX", "first")
    assert invoke("embedding-worker")[0] == 2
    assert "REPLICA_INDEX must be an integer, got 'first'" in caplog.text
    assert not ran


def test_mistakes_are_one_line_and_status_2(job: Job) -> None:
    del job.environment["PERSIA_EMBEDDING_CONFIG"]
    bad = job.script("bad.yml", "slots_config: {feature: {dime: 4}}\n")
    config = ["--embedding-config", bad]
    mistakes = {
        ("embedding-worker",): "give --embedding-config or set PERSIA_EMBEDDING_CONFIG",
        ("embedding-worker", "--embedding-config", "none.yml"): "none.yml",
        ("embedding-parameter-server", *config): "dime",
        ("embedding-parameter-server", *config, "--replica-index", "3"): "0..0 for --replica-s",
        ("nn-worker",): "expected a script: name it, or set PERSIA_NN_WORKER_ENTRY",
        ("nn-worker", "none.py"): "expected a Python script at none.py, found none",
        ("nn-worker", bad, "--nnodes", "2"): "expected MASTER_ADDR to name the host of node 0",
        ("data-loader", bad, "--replica-index", "1"): "--replica-index must be in 0..0",
    }
    started = {
        words: job.start(words[0], *words[1:], TORCHRUN="1" if "--nnodes" in words else "")
        for words in mistakes
    }
    for words, text in mistakes.items():
        assert started[words].wait() == 2
        (line,) = started[words].printed().splitlines()
        assert text in line
        assert f" ERROR {words[0]}" in line


def test_servers_that_were_not_told_how_many_they_are(job: Job) -> None:
    two = "127.0.0.1:1,127.0.0.1:2"
    alone = job.start("embedding-worker", PERSIA_EMBEDDING_WORKERS=two)
    assert alone.wait() == 2
    said = "PERSIA_EMBEDDING_WORKERS lists 2 addresses, but --replica-size is 1"
    assert said in alone.printed()


@pytest.mark.parametrize("role", ["nn-worker", "data-loader"])
def test_a_list_that_cannot_be_read_is_one_line_before_anything_starts(
    job: Job, role: str
) -> None:
    script = job.script("script.py", "print('started')\n")
    process = job.start(role, script, TORCHRUN="1", PERSIA_EMBEDDING_WORKERS="127.0.0.1")
    assert process.wait() == 2
    (line,) = process.printed().splitlines()
    assert "PERSIA_EMBEDDING_WORKERS: " in line
    assert "'127.0.0.1'" in line


def test_an_address_in_use_is_named(job: Job) -> None:
    job.start_server("embedding-parameter-server").wait_for("serves at")
    second = job.start_server("embedding-parameter-server")
    assert second.wait() == 2
    assert "cannot listen at ipc://" in second.printed()


def test_a_script_finds_what_python_would_give_it(job: Job) -> None:
    script = job.script("load.py", SHOWS + "raise SystemExit(4)\n")
    loader = job.start("data-loader", script, "--lr", "a b", PERSIA_LAUNCHER_VERBOSE="1")
    assert loader.wait() == 4
    _, command, *rest = loader.printed().splitlines()
    assert command.startswith("execute command: ")
    assert command.endswith(f"-m persia._cli.run script {script} --lr 'a b'")
    assert "got ['--lr', 'a b']" in rest
    assert f"from {job.directory} __main__ {script}" in rest


def test_a_data_loader_knows_its_number(job: Job) -> None:
    text = (
        "from persia import env\n"
        "print(env.get_replica_index(), env.get_replica_size(), env.get_mode())\n"
        "raise SystemExit(4)\n"
    )
    words = ("--replica-index", "1", "--replica-size", "3")
    loader = job.start("data-loader", job.script("load.py", text), *words, RANK="7")
    assert loader.wait() == 4
    assert "1 3 services\n" in loader.printed()


def test_servers_and_loaders_never_load_torch(job: Job) -> None:
    text = (
        "import sys\nimport persia.launcher, persia.helper\nassert 'torch' not in sys.modules\n"
    )
    loader = job.start("data-loader", job.script("load.py", text + "raise SystemExit(9)"))
    assert loader.wait() == 9


# --- torchrun -------------------------------------------------------------------------------


def test_the_command_of_torchrun(monkeypatch: Monkey) -> None:
    run = ["-m", "persia._cli.torchrun"]
    assert scripts.torchrun(2, 0, 1) == [*run, "--nproc-per-node=2", "--standalone"]
    monkeypatch.setenv("MASTER_ADDR", "node0")
    meet = ["--nnodes=3", "--node-rank=1", "--master-addr=node0"]
    assert scripts.torchrun(2, 1, 3) == [*run, "--nproc-per-node=2", *meet]
    monkeypatch.setenv("MASTER_PORT", "5")
    assert scripts.torchrun(2, 1, 3)[-1] == "--master-port=5"
    with pytest.raises(ConfigError, match=r"--node-rank must be in 0\.\.2, got 3"):
        scripts.torchrun(2, 3, 3)


@pytest.mark.slow
def test_ranks_by_torchrun_and_the_traceback_of_the_first_that_fails(job: Job) -> None:
    text = (
        "import pathlib, signal\n"
        "from persia import env\n"
        "print('rank', env.get_rank(), env.get_local_rank(), env.get_world_size(),\n"
        "      env.get_mode(), flush=True)\n"
        "pipe = pathlib.Path(__file__).parent / 'pipe'\n"
        "if env.get_rank() == 1:\n"
        "    pipe.read_bytes()\n"  # until the other one has begun
        "    raise ValueError('rank 1 is lost')\n"
        "pipe.write_bytes(b'')\n"
        "signal.pause()\n"
    )
    os.mkfifo(job.directory / "pipe")
    script = job.script("train.py", text)
    trainer = job.start("nn-worker", script, "--nproc-per-node=2", TORCHRUN="1")
    assert trainer.wait() == 1
    printed = trainer.printed()
    assert "rank 0 0 2 services\n" in printed
    assert "rank 1 1 2 services\n" in printed
    assert printed.endswith("ValueError: rank 1 is lost\n")


def test_environment_of_a_child(monkeypatch: Monkey) -> None:
    monkeypatch.setenv("RANK", "1")
    child = env.of_child(RANK=None, WORLD_SIZE=3)
    assert "RANK" not in child
    assert child["WORLD_SIZE"] == "3"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_who_is_stopped_while_it_exits_keeps_its_status(number: int) -> None:
    """As by `docker compose up --exit-code-from`, once the first container has ended."""
    program = (
        "import atexit, os\n"
        "from persia import launcher\n"
        f"atexit.register(os.kill, os.getpid(), {int(number)})\n"
        "launcher._run('nn-worker', lambda: 3)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], timeout=60, check=False)
    assert done.returncode == 3
