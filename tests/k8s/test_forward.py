"""A job in a cluster, seen from here through kubectl, which is stood in for."""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from persia._k8s.forward import doctor_of_job, forwarded, processes_of, top_of_job
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

JOB, OPTIONS = "adult-income", ["--namespace=training"]


class StandIn:
    """The pods of a job as it is rendered, and a kubectl that knows them."""

    def __init__(self, folder: Path, keys: Path, monkeypatch: Monkey, **spec: Any) -> None:
        _, (self.secret, *objects) = render(read_job(original(**spec)), keys=keys)
        self.pods = {
            one["metadata"]["name"]: {
                "metadata": {
                    "name": one["metadata"]["name"],
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
def cluster(tmp_path: Path, keys: Path, monkeypatch: Monkey) -> StandIn:
    trainers = {"replicas": 2, "nprocPerNode": 2}
    return StandIn(tmp_path, keys, monkeypatch, nnWorker=trainers, engine="native")


def test_processes_are_those_that_the_job_has(cluster: StandIn) -> None:
    found = {
        (one.role, one.index, one.port)
        for pod in cluster.pods.values()
        for one in processes_of(pod, "metrics")
    }
    ranks = {(TRAINER, rank, 9400 + rank % 2) for rank in range(4)}
    servers = {(role, number, 9400) for role in (SERVER, WORKER) for number in (0, 1)}
    assert found == {*ranks, *servers, (LOADER, 0, 9400)}
    calls = [one for pod in cluster.pods.values() for one in processes_of(pod, "rpc")]
    assert {one.port for one in calls if one.role == TRAINER} == {23457, 23458}
    assert {one.port for one in calls if one.role != TRAINER} == {8887, 8888}


def test_top_shows_the_processes_that_run_by_their_own_metrics(
    cluster: StandIn, capsys: pytest.CaptureFixture[str], monkeypatch: Monkey
) -> None:
    monkeypatch.setenv("PERSIA_RUN_ID", "another")  # of this shell
    cluster.pods["adult-income-dataloader-0"]["status"]["phase"] = "Pending"
    with ExitStack() as stack:
        for name, pod in cluster.pods.items():
            for one in processes_of(pod, "metrics"):
                text = text_of(one.role, one.index, run="adult-income-1")
                port = stack.enter_context(web.answering(lambda _, __, text=text: text))  # type: ignore[misc]
                cluster.ports[f"{name}:{one.port}"] = ("127.0.0.1", port)
        cluster.write()
        assert top_of_job(JOB, OPTIONS, interval_s=0.1, is_once=True) == 0
    shown = capsys.readouterr().out
    assert "run adult-income-1: 8 of 8 processes answer" in shown


def test_what_kubectl_says_is_the_error(cluster: StandIn, monkeypatch: Monkey) -> None:
    cluster.write()
    with pytest.raises(ConfigError, match=r"expected pods of a job none .*, found none"):
        top_of_job("none", OPTIONS, interval_s=0.1, is_once=True)
    processes = [*processes_of(cluster.pods["adult-income-nn-worker-0"], "rpc")]
    why = "port-forward adult-income-nn-worker-0: error: unable to forward port"
    with pytest.raises(ConfigError, match=why), forwarded(processes, OPTIONS):
        pass
    cluster.secret["metadata"]["name"] = "another"
    cluster.write()
    with pytest.raises(ConfigError, match=r'kubectl get: .*secrets "adult-income-keys"'):
        doctor_of_job(JOB, OPTIONS, None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="expected kubectl in PATH"):
        doctor_of_job(JOB, OPTIONS, None)


def test_doctor_compares_servers_that_it_reaches_with_the_job_s_keys(
    cluster: StandIn, keys: Path, tmp_path: Path, monkeypatch: Monkey
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, pod in cluster.pods.items():
        is_there = name.endswith(("embedding-ps-0", "embedding-worker-0"))
        pod["status"]["phase"] = "Running" if is_there else "Succeeded"
    cluster.pods["adult-income-nn-worker-1"]["status"]["phase"] = "Pending"
    here = tmp_path / "slots.yml"
    here.write_text(yaml.safe_dump(slots(8), sort_keys=False), encoding="utf-8")
    variables = {"PERSIA_KEYS": str(keys), "PERSIA_METRICS_PORT": "off"}
    with Cluster(slots(8), transport="tcp", environment=variables) as job:
        for process in job.start_servers():
            process.wait_for("serves at")
        for role, name, port in (
            (SERVER, "adult-income-embedding-ps-0", 8888),
            (WORKER, "adult-income-embedding-worker-0", 8887),
        ):
            host, _, local = job.addresses[role][0].rpartition(":")
            cluster.ports[f"{name}:{port}"] = (host, int(local))
        cluster.write()
        report = doctor_of_job(JOB, OPTIONS, here)
        found = {(one.check, one.status, one.text) for one in report.findings}
        running = sorted(text for check, _, text in found if check == "versions")
        assert len(running) == 2, found
        assert all("runs: replica 0 of 1" in text for text in running), running
        errors = [(check, text) for check, status, text in found if status == "error"]
        assert errors == [("pods", "adult-income-nn-worker-1 is Pending")]
        here.write_text(yaml.safe_dump(slots(4), sort_keys=False), encoding="utf-8")
        report = doctor_of_job(JOB, OPTIONS, here)
        texts = [one.text for one in report.findings if one.check == "versions"]
        assert all("has another embedding config" in text for text in texts), texts
        assert len(texts) == 2
