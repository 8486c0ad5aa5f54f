"""The command line of persia-launcher, without what it runs."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from persia import launcher
from persia._cli import scripts
from persia._cluster.process import Options
from persia.launcher import cli
from tests.support.fixtures import Log, Monkey
from tests.support.processes import run


@pytest.fixture
def ran(monkeypatch: Monkey) -> list[object]:
    """What the commands would have run."""
    calls: list[object] = []

    def note(*arguments: object, **options: object) -> int:
        calls.append((*arguments, *options.values()))
        return 5

    for role in ("nn_worker", "data_loader", "embedding_worker", "parameter_server"):
        monkeypatch.setattr(launcher, f"run_{role}", note)
    monkeypatch.setattr(launcher, "set_up_logging", lambda who: None)
    return calls


def invoke(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli, words)
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("words", "want"),
    [
        (["a.py"], ((), 1, 0, 1, 0)),
        (["a.py", "-depth", "3", "x"], (("-depth", "3", "x"), 1, 0, 1, 0)),
        (["--nproc-per-node", "2", "a.py", "-h"], (("-h",), 2, 0, 1, 0)),
        (["a.py", "--lr=3", "--nproc-per-node=2"], (("--lr=3",), 2, 0, 1, 0)),
        (["a.py", "--nnodes", "3", "--node-rank", "2"], ((), 1, 2, 3, 0)),
        (["a.py", "--max-restarts", "4"], ((), 1, 0, 1, 4)),
        (["a.py", "--", "--nnodes", "3"], (("--nnodes", "3"), 1, 0, 1, 0)),
        (["a.py", "--", "--nproc-per-nod"], (("--nproc-per-nod",), 1, 0, 1, 0)),
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


def test_nodes_and_ranks_of_torchrun_s_variables_are_defaults(
    ran: list[object], tmp_path: Path, monkeypatch: Monkey
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.py").touch()
    for name, value in (
        ("NNODES", 3),
        ("NODE_RANK", 2),
        ("NPROC_PER_NODE", 4),
        ("MAX_RESTARTS", 5),
    ):
        monkeypatch.setenv(f"PET_{name}", str(value))
    assert invoke("nn-worker", "a.py") == (5, "")
    assert invoke("nn-worker", "a.py", "--nnodes", "1", "--node-rank", "0") == (5, "")
    script = scripts.Script(Path("a.py"))
    assert ran == [(script, 4, 2, 3, 5), (script, 4, 0, 1, 5)]
    monkeypatch.setenv("PET_NPROC_PER_NODE", "auto")
    status, text = invoke("nn-worker", "a.py")
    assert status == 1
    assert "PET_NPROC_PER_NODE must be an integer, got 'auto'" in text


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
        (scripts.Script(script, ("--lr", "3")), 1, 0, 1, 0),
        (scripts.Script(script), 1, 2),
    ]


@pytest.mark.parametrize("role", ["embedding-worker", "embedding-parameter-server"])
def test_options_of_servers(
    ran: list[object], monkeypatch: Monkey, caplog: Log, role: str
) -> None:
    monkeypatch.setenv("PERSIA_EMBEDDING_CONFIG", "slots.yml")
    monkeypatch.setenv("PERSIA_GLOBAL_CONFIG", "global.yml")
    assert invoke(role) == (5, "")
    monkeypatch.setenv("REPLICA_INDEX", "2")
    monkeypatch.setenv("REPLICA_SIZE", "3")
    words = ["--port", "1", "--embedding-config", "a", "--global-config", "b"]
    assert invoke(role, *words) == (5, "")
    assert invoke(role, *words, "--replica-index=1") == (5, "")
    assert ran == [
        (Options(Path("slots.yml"), Path("global.yml")),),
        (Options(Path("a"), Path("b"), 2, 3, 1),),
        (Options(Path("a"), Path("b"), 1, 3, 1),),
    ]
    monkeypatch.setenv("REPLICA_INDEX", "first")
    assert invoke(role)[0] == 2
    assert "REPLICA_INDEX must be an integer, got 'first'" in caplog.text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_who_is_stopped_while_it_exits_keeps_its_status(number: int) -> None:
    """As by `docker compose up --exit-code-from`, once the first container has ended."""
    program = (
        "import atexit, os\n"
        "from persia import launcher\n"
        f"atexit.register(os.kill, os.getpid(), {int(number)})\n"
        "launcher._run('nn-worker', lambda: 3)\n"
    )
    assert run("-c", program).returncode == 3
