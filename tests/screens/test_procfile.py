"""What doctor finds in a Procfile."""

from __future__ import annotations

from pathlib import Path

import pytest

from persia import env, launcher
from persia._cli.checks.procfile import check_procfile, file_named_in
from tests.meta.sources import ROOT

LOADER = "persia-launcher data-loader load.py"
WORKER = "persia-launcher embedding-worker --embedding-config=slots.yml"
SERVER = "env A=1 persia-launcher embedding-parameter-server --global-config slots.yml"


@pytest.fixture(autouse=True)
def _project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("load.py", "train.py", "slots.yml"):
        Path(name).touch()
    commands = ("persia-launcher", "sh")
    found = {name: f"/bin/{name}" for name in commands}
    monkeypatch.setattr("shutil.which", found.get)
    for name in ("REPLICA_INDEX", "REPLICA_SIZE", "PERSIA_EMBEDDING_WORKERS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PERSIA_EMBEDDING_PARAMETER_SERVERS", "a:1,b:1")
    env.reload_env()


def bad(*lines: str) -> list[tuple[str, str]]:
    Path("Procfile").write_text("\n".join(lines))
    found = [*check_procfile(Path("Procfile"), launcher.cli)]
    assert all(one.todo for one in found if one.status != "ok")
    assert [one.status for one in found] == ["ok"] or "ok" not in [one.status for one in found]
    return [(one.status, one.text) for one in found if one.status != "ok"]


def test_what_can_be_started_is_well() -> None:
    servers = [f"s{n}: {SERVER} --replica-index {n} --replica-size 2" for n in range(2)]
    trainer = "train: env OMP_NUM_THREADS=1 persia-launcher nn-worker train.py --epochs 3"
    assert bad(f"load: {LOADER}", f"work: {WORKER}", *servers, trainer, "x: sh -c 'a b'") == []
    assert bad("# nothing but a comment") == []


@pytest.mark.parametrize(
    "line",
    [
        "cd sub && persia-launcher data-loader nowhere.py",
        "exec persia-launcher data-loader nowhere.py",
        ". ./env.sh; persia-launchr data-loader load.py",
        f"{LOADER} --replica-index ${{I:-0}}",
        "persia-launcher data-loader ~/load.py",
        "persia-launcher embedding-worker --embedding-config $CFG/slots.yml",
        "A=$(cat x y) persia-launcher data-loader load.py",
        "A=1 exec nowhere",
        "env -u A nowhere",
    ],
)
def test_what_is_for_a_shell_is_not_looked_into(line: str) -> None:
    assert bad(f"a: {line}") == []
    assert bad(f"a: {line} data-loader", f"b: {LOADER} --replica-size 2") == []
    (found,) = check_procfile(Path("Procfile"))
    assert "1 command, each of which is there; 1 of a shell, not looked into" in found.text


def test_the_first_config_that_servers_are_given() -> None:
    lines = f"a: {LOADER}\nb: {WORKER} $A\nc: {WORKER}\nd: {SERVER}"
    Path("Procfile").write_text(lines)
    assert file_named_in(Path("Procfile"), "--embedding-config") == Path("slots.yml")
    assert file_named_in(Path("Procfile"), "--other") is None


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["w: persia-launchr embedding-worker"], "Procfile:1: w: no such command: persia-la"),
        (["", "w: A=1 B=2 honco"], "Procfile:2: w: no such command: honco"),
        (["w: persia-launcher embeding-worker"], "no role 'embeding-worker'"),
        (["w: persia-launcher data-loader nowhere.py"], "w: no such file: nowhere.py"),
        (["w: persia-launcher embedding-worker --global-config no.yml"], "file: no.yml"),
        (["w: sh -c 'a"], "Procfile:1: w: No closing quotation"),
        ([f"w: {WORKER} --replica-size two"], "Invalid value for '--replica-size'"),
        ([f"w: {WORKER} --replica-index 1"], "w: replica 1 of REPLICA_SIZE 1"),
        (
            [f"a: {SERVER} --replica-size 2", f"b: REPLICA_SIZE=3 {SERVER} --replica-index 1"],
            "2 lines of embedding-parameter-server: REPLICA_SIZE is 2 and 3",
        ),
        ([f"a: {LOADER}", f"b: {LOADER}"], "b: replica 0 is started twice"),
        (["w: persia-launcher embedding-worker --embeding-config slots.yml"], "No such option"),
        ([f"w: PERSIA_RPC_TIMEOUT=3s {WORKER}"], "PERSIA_RPC_TIMEOUT must be a positive"),
        ([f"s: {SERVER}"], "is 1, and PERSIA_EMBEDDING_PARAMETER_SERVERS has 2"),
    ],
)
def test_what_a_job_would_fail_of_is_an_error(lines: list[str], says: str) -> None:
    ((status, text),) = bad(*lines)
    assert status == "error"
    assert says in text


def test_lines_and_variables_that_nothing_reads_are_warnings() -> None:
    Path(".env").write_text("PERSIA_EMBEDING_WORKERS=a:1\n")
    assert bad(f"load {LOADER}", f"a: {LOADER}", f"b: {WORKER}") == [
        ("warning", f"Procfile:1: nothing is started by {f'load {LOADER}'!r}"),
        (
            "warning",
            "PERSIA_EMBEDING_WORKERS: nothing reads it, "
            "did you mean 'PERSIA_EMBEDDING_WORKERS'?",
        ),
    ]


def test_replicas_that_start_elsewhere_are_a_warning() -> None:
    Path(".env").write_text("REPLICA_SIZE=3\n# nothing\n")
    ((status, text),) = bad(f"load: {LOADER}")
    assert (status, text) == (
        "warning",
        "Procfile:1: load: 1 of REPLICA_SIZE 3 start here",
    )


@pytest.mark.parametrize("name", ["", "examples/criteo"])
def test_our_own_are_well(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT / name)
    monkeypatch.delenv("PERSIA_EMBEDDING_PARAMETER_SERVERS")
    assert [one.status for one in check_procfile(Path("Procfile"))] == ["ok"]
