"""A job in a cluster, seen from here through kubectl, which is stood in for."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from concurrent.futures import Future
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from signal import SIGHUP, SIGKILL, SIGTERM, Signals
from threading import Thread
from typing import Any

import pytest
import yaml

from persia._cli.doctor import Report
from persia._k8s import forward
from persia._k8s.forward import _read, doctor_of_job, processes_of, top_of_job
from persia._k8s.render import render
from persia._k8s.spec import read_job
from persia._metrics.definitions import LOADER, SERVER, TRAINER, WORKER
from persia._rpc.curve import make_keys
from persia.errors import ConfigError
from tests.k8s.specs import original
from tests.metrics.job import text_of
from tests.support import web
from tests.support.fixtures import Monkey
from tests.support.processes import ROOT, Cluster
from tests.support.scripts import slots
from tests.support.waiting import PATIENCE_S, until

JOB, OPTIONS = "adult-income", ["--namespace=training"]


class StandIn:
    """The pods of a job as it is rendered, and a kubectl that knows them."""

    def __init__(
        self, folder: Path, keys: Path | None, monkeypatch: Monkey, **spec: Any
    ) -> None:
        _, objects = render(read_job(original(**spec)), keys=keys)
        self.secret = objects[0]
        self.pods = {
            one["metadata"]["name"]: {
                "metadata": {
                    "name": one["metadata"]["name"],
                    "creationTimestamp": "2026-01-02T00:00:00Z",
                    **one["spec"]["template"]["metadata"],
                },
                "spec": one["spec"]["template"]["spec"],
                "status": {"phase": "Running"},
            }
            for one in objects
            if one["kind"] == "Job"
        }
        self.ports: dict[str, tuple[str, int]] = {}
        self._path = folder / "state.json"
        program = folder / "kubectl"
        program.write_text(
            f'#!/bin/sh\nexec {sys.executable} -m tests.k8s.kubectl_stand_in "$@"'
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        monkeypatch.setenv("KUBECTL_STAND_IN", str(self._path))

    def write(self) -> None:
        state = {"pods": list(self.pods.values()), "secret": self.secret, "ports": self.ports}
        self._path.write_text(json.dumps(state), encoding="utf-8")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    make_keys(folder)
    return folder


@pytest.fixture
def stand_in(tmp_path: Path, keys: Path, monkeypatch: Monkey) -> StandIn:
    trainers = {"replicas": 2, "nprocPerNode": 2}
    return StandIn(tmp_path, keys, monkeypatch, nnWorker=trainers, engine="native")


def test_processes_are_those_that_the_job_has(stand_in: StandIn) -> None:
    pods = stand_in.pods.values()
    for sidecar in ({"ports": [{"containerPort": 1}]}, {"ports": [{"name": "metrics"}]}):
        found = {(one.role, one.index, one.port) for one in processes_of(pods, "metrics")}
        ranks = {(TRAINER, rank, 9400 + rank % 2) for rank in range(4)}
        servers = {(role, number, 9400) for role in (SERVER, WORKER) for number in (0, 1)}
        assert found == {*ranks, *servers, (LOADER, 0, 9400)}
        calls = list(processes_of(pods, "rpc"))
        assert {one.port for one in calls if one.role == TRAINER} == {23457, 23458}
        assert {one.port for one in calls if one.role != TRAINER} == {8887, 8888}
        for pod in pods:
            pod["spec"]["containers"].insert(0, {"name": "proxy", **sidecar})
    stand_in.pods["adult-income-nn-worker-1"]["status"]["phase"] = "Pending"
    assert [one.index for one in processes_of(pods, "metrics") if one.role == TRAINER] == [0, 1]


def test_top_shows_the_processes_that_run_by_their_own_metrics(
    stand_in: StandIn, capsys: pytest.CaptureFixture[str], monkeypatch: Monkey
) -> None:
    monkeypatch.setenv("PERSIA_RUN_ID", "another")  # of this shell
    monkeypatch.setattr(forward, "DEADLINE_S", PATIENCE_S)  # a busy machine may be slow
    stand_in.pods["adult-income-dataloader-0"]["status"]["phase"] = "Pending"
    with ExitStack() as stack:
        for one in processes_of(stand_in.pods.values(), "metrics"):
            text = text_of(one.role, one.index, run="adult-income-1")
            port = stack.enter_context(web.answering(lambda _, __, text=text: text))  # type: ignore[misc]
            stand_in.ports[f"{one.pod}:{one.port}"] = ("127.0.0.1", port)
        # A pod that is gone meanwhile.
        del stand_in.ports["adult-income-embedding-ps-1:9400"]
        stand_in.write()
        assert top_of_job(JOB, OPTIONS, interval_s=0.1, is_once=True) == 0
    shown = capsys.readouterr()
    assert "run adult-income-1: 7 of 8 processes answer" in shown.out
    assert f"{SERVER} 1 at 127.0.0.1:0: not running" in shown.out
    why = f"{SERVER} 1 in pod adult-income-embedding-ps-1: error: unable to forward port"
    assert why in shown.err
    stand_in.ports.clear()  # nothing answers
    stand_in.write()
    assert top_of_job(JOB, OPTIONS, interval_s=0.1, is_once=True) == 1
    todo = f"kubectl get pods --selector=persia_job={JOB} shows its pods"
    assert capsys.readouterr().err.endswith(f"no process answers: {todo}\n")


def test_what_kubectl_says_is_the_error(stand_in: StandIn, monkeypatch: Monkey) -> None:
    stand_in.write()
    with pytest.raises(ConfigError, match=r"expected pods of a job none .*, found none"):
        top_of_job("none", OPTIONS, interval_s=0.1, is_once=True)
    stand_in.secret["metadata"]["name"] = "another"
    stand_in.write()
    with pytest.raises(ConfigError, match=r'kubectl get: .*secrets "adult-income-keys"'):
        doctor_of_job(JOB, OPTIONS, None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="expected kubectl in PATH"):
        doctor_of_job(JOB, OPTIONS, None)


def test_what_kubectl_says_later_is_read_and_dropped() -> None:
    source, target = os.pipe()
    answer: Future[dict[int, int] | str] = Future()
    reader = Thread(target=_read, args=(os.fdopen(source, "rb"), 1, answer), daemon=True)
    reader.start()
    with os.fdopen(target, "wb") as said:
        said.write(b"Forwarding from 127.0.0.1:40001 -> 8888\n")
        said.flush()
        assert answer.result(PATIENCE_S) == {8888: 40001}
        said.write(b"Handling connection for 40001\n" * 10_000)  # more than a pipe holds
    reader.join(PATIENCE_S)
    assert not reader.is_alive()


def findings_of(report: Report, *statuses: str) -> list[tuple[str, str]]:
    return [(one.check, one.text) for one in report.findings if one.status in statuses]


def test_doctor_looks_at_nothing_but_the_pods_of_the_job(
    stand_in: StandIn, tmp_path: Path, monkeypatch: Monkey
) -> None:
    monkeypatch.chdir(tmp_path)
    for variable in ("PERSIA_EMBEDDING_PARAMETER_SERVERS", "PERSIA_NN_WORKERS"):
        monkeypatch.setenv(variable, "127.0.0.1:1")  # of this shell
    monkeypatch.setenv("PERSIA_LISTEN_HOST", "0.0.0.0")
    for pod in stand_in.pods.values():
        pod["status"]["phase"] = "Succeeded"
    stand_in.write()
    report = doctor_of_job(JOB, OPTIONS, None)
    assert {one.check for one in report.findings} == {"config"}
    # Of a host the newest pod counts: the others were replaced.
    old = json.loads(json.dumps(stand_in.pods["adult-income-embedding-ps-0"]))
    old["metadata"] |= {"name": "old", "creationTimestamp": "2026-01-01T00:00:00Z"}
    old["status"]["phase"] = "Failed"
    stand_in.pods["old"] = old
    stand_in.pods["adult-income-nn-worker-0"]["status"]["phase"] = "Failed"
    stand_in.pods["adult-income-nn-worker-1"]["status"]["phase"] = "Pending"
    del stand_in.pods["adult-income-embedding-worker-1"]
    stand_in.write()
    assert findings_of(doctor_of_job(JOB, OPTIONS, None), "error") == [
        ("pods", "adult-income-nn-worker-0 is Failed"),
        ("pods", "adult-income-nn-worker-1 is Pending"),
        ("pods", "adult-income-embedding-worker-1 has no pod"),
    ]


@pytest.mark.parametrize("has_keys", [True, False])
def test_doctor_compares_servers_that_it_reaches_with_the_job_s_keys(
    tmp_path: Path, keys: Path, monkeypatch: Monkey, has_keys: bool
) -> None:
    spec = {"nnWorker": {"replicas": 1, "nprocPerNode": 2}, "engine": "native"}
    stand_in = StandIn(tmp_path, keys if has_keys else None, monkeypatch, **spec)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("persia._cli.checks._FORWARDED_S", 1.5)
    for name, pod in stand_in.pods.items():
        pod["status"]["phase"] = "Succeeded" if "dataloader" in name else "Running"
    here = tmp_path / "slots.yml"
    here.write_text(yaml.safe_dump(slots(8), sort_keys=False), encoding="utf-8")
    variables = {"PERSIA_METRICS_PORT": "off"}
    variables |= {"PERSIA_KEYS": str(keys)} if has_keys else {}
    with Cluster(slots(8), transport="tcp", environment=variables) as job:
        for process in job.start_servers():
            process.wait_for("serves at")
        for role, name, port in (
            (SERVER, "adult-income-embedding-ps-0", 8888),
            (WORKER, "adult-income-embedding-worker-0", 8887),
        ):
            host, _, local = job.addresses[role][0].rpartition(":")
            stand_in.ports[f"{name}:{port}"] = (host, int(local))
        monkeypatch.setenv("PERSIA_KEYS", str(keys))  # of this shell: not of a job without keys
        # Containers in which nothing listens; to embedding-ps-1 kubectl does not forward.
        for name in ("embedding-worker-1:8887", "nn-worker-0:23457", "nn-worker-0:23458"):
            stand_in.ports[f"adult-income-{name}"] = ("127.0.0.1", 1)
        stand_in.write()
        report = Report([], [])

        def is_reached() -> bool:
            nonlocal report
            report = doctor_of_job(JOB, OPTIONS, here)
            return [check for check, _ in findings_of(report, "ok")].count("versions") == 2

        until(is_reached, details=lambda: report.findings)
        running = findings_of(report, "ok")[-2:]
        names = ("embedding-ps-0 runs", "embedding-worker-0 runs")
        for (check, text), name in zip(running, names, strict=True):
            assert check == "versions"
            assert f"0 in pod adult-income-{name}: replica 0 of 1" in text
        (away, silent) = findings_of(report, "error")
        why = "error: unable to forward port because pod is not running."
        assert away == ("pods", f"{SERVER} 1 in pod adult-income-embedding-ps-1: {why}")
        assert silent[0] == "servers"
        who = f"{WORKER} 1 in pod adult-income-embedding-worker-1"
        assert silent[1] == f"{who} does not answer: no connection within 1.5 s, for hello"
        assert not [one for one in report.findings if "127.0.0.1" in one.text]
        # A trainer listens once its script reads from data-loaders.
        assert {check for check, _ in findings_of(report, "warning")} == {"servers"}
        assert len(findings_of(report, "warning")) == 2
        here.write_text(yaml.safe_dump(slots(4), sort_keys=False), encoding="utf-8")
        for name, pod in stand_in.pods.items():
            is_there = name.endswith(("embedding-ps-0", "embedding-worker-0"))
            pod["status"]["phase"] = "Running" if is_there else "Succeeded"
        stand_in.write()
        texts: list[str] = []

        def is_told() -> bool:
            found = findings_of(doctor_of_job(JOB, OPTIONS, here), "error")
            texts[:] = [text for _, text in found]
            return not any("does not answer" in text for text in texts)

        until(is_told, details=lambda: texts)
        assert all("has another embedding config" in text for text in texts), texts
        assert len(texts) == 2


@pytest.mark.parametrize(("command", "number"), [("top", SIGTERM), ("doctor", SIGHUP)])
def test_a_signal_leaves_no_kubectl_and_no_keys(
    stand_in: StandIn, tmp_path: Path, monkeypatch: Monkey, command: str, number: Signals
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    written = tmp_path / "state.json.pids"
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        for port in ("metrics", "rpc"):
            for one in processes_of(stand_in.pods.values(), port):
                stand_in.ports[f"{one.pod}:{one.port}"] = silent.getsockname()
        stand_in.write()
        words = [sys.executable, "-m", "persia.k8s_utils", command, JOB, *OPTIONS]
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, cwd=tmp_path)
        kubectls: list[int] = []
        try:
            num_pods = {"top": 7, "doctor": 6}[command]  # data-loaders serve nothing
            until(lambda: written.exists() and written.read_text().count("\n") == num_pods)
            kubectls = [int(one) for one in written.read_text().split()]
            assert len(list(tmp_path.glob("persia-keys-*"))) == (command == "doctor")
            process.send_signal(number)
            assert process.wait(PATIENCE_S) == 128 + number
            left = [pid for pid in kubectls if Path(f"/proc/{pid}").exists()]
        finally:
            process.kill()
            process.wait()
            for pid in kubectls:
                with suppress(ProcessLookupError):
                    os.kill(pid, SIGKILL)
        assert not left
        assert not list(tmp_path.glob("persia-keys-*"))


def test_a_signal_ends_a_process_that_is_in_a_destructor() -> None:
    """Where what a handler raises would be printed and forgotten."""
    script = (
        "import os, signal, threading\n"
        "from persia._k8s.forward import exit_on_signals\n"
        "exit_on_signals()\n"
        "class Dropped:\n"
        "    def __del__(self):\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        f"        threading.Event().wait({PATIENCE_S})\n"
        "Dropped()\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], timeout=PATIENCE_S, check=False)
    assert ran.returncode == 128 + SIGTERM
