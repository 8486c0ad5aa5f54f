"""Faults while a job trains in real pods, and the books at its end.

    MINUTES=20 SEED=7 python -m tests.k8s.chaos       # make k8s-chaos

The job counts (``tests/compose/counts``): each id of each batch lowers its row by 1, so a batch
that is lost or trained twice shows, and a row that is lost. An operator of this tree runs
beside the cluster of KUBECONFIG, whose nodes are on this machine's Docker. Faults, one after
another; training has to go on after each:

    killed      SIGKILL to the container of a server, an embedding-worker or a data-loader
    deleted     a pod of an embedding-worker or a data-loader
    operator    SIGKILL, and another one after half a minute
    api         the API server is stopped for half a minute, where its process is k8s-here's

Not done: a server's pod is not deleted, since its rows go with it, and a trainer is not killed,
since the job would begin again.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from tests.e2e.clusters import GUARD
from tests.k8s.scale import kubectl
from tests.support.processes import ROOT

MINUTES = float(os.environ.get("MINUTES", "20"))
IMAGE = os.environ.get("PERSIA_TEST_IMAGE", "persia")
NAMESPACE, NAME = "persia-chaos", "counts"
COUNTS = ROOT / "tests" / "compose" / "counts"
NUM_BATCHES = 2_000
# Seconds: of a fault of what is not a pod, between two faults, and until training goes on.
AWAY_S, PAUSE_S, GO_ON_S, END_S = 30.0, 8.0, 420.0, 900.0
ROLES = {"embedding-parameter-server": 3, "embedding-worker": 2, "data-loader": 2}
LOSSES = ("failed", "abandoned", "incomplete", "unused")


def job() -> dict[str, Any]:
    mounts = [{"name": "workspace", "mountPath": "/workspace"}]
    small = {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"memory": "1Gi"}}
    role = {"volumeMounts": mounts, "resources": small, "image": f"{IMAGE}:server"}
    paths = ("global_config.yml", "embedding_config.yml")
    items = [{"key": name, "path": f"config/{name}"} for name in paths]
    config = {"name": "counts-config", "items": items}
    files: list[dict[str, Any]] = [{"configMap": {"name": "counts"}}, {"configMap": config}]
    return {
        "apiVersion": "persia.com/v1",
        "kind": "PersiaJob",
        "metadata": {"name": NAME, "namespace": NAMESPACE},
        "spec": {
            "persiaEnv": {
                "PERSIA_GLOBAL_CONFIG": "/workspace/config/global_config.yml",
                "PERSIA_EMBEDDING_CONFIG": "/workspace/config/embedding_config.yml",
                "PERSIA_NN_WORKER_ENTRY": "/workspace/train.py",
                "PERSIA_DATALOADER_ENTRY": "/workspace/data_loader.py",
            },
            "env": [
                {"name": "OMP_NUM_THREADS", "value": "1"},
                {"name": "NUM_BATCHES", "value": str(NUM_BATCHES)},
                {"name": "SPREAD_S", "value": str(MINUTES * 60)},
            ],
            "volumes": [{"name": "workspace", "projected": {"sources": files}}],
            "embeddingParameterServer": {**role, "replicas": 3, "shmSize": "128Mi"},
            "embeddingWorker": {**role, "replicas": 2},
            "dataloader": {**role, "replicas": 2},
            "nnWorker": {**role, "replicas": 1, "image": f"{IMAGE}:nn-worker"},
        },
    }


def start_operator() -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "persia.k8s_utils", "operator", "--namespace", NAMESPACE]
    log = (Path(tempfile.gettempdir()) / f"persia-chaos-operator-{os.getpid()}.log").open("a")
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(words, env=variables, stdout=log, stderr=log)


def kill_containers(pod: str) -> int:
    """Send SIGKILL to the containers of a pod; returns their number."""
    label = f"label=io.kubernetes.pod.name={pod}"
    words = ["docker", "ps", "--quiet", "--filter", label, "--no-trunc"]
    ids = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    kind = '{{index .Config.Labels "io.kubernetes.docker.type"}}'
    count = 0
    for one in ids:
        words = ["docker", "inspect", "-f", kind, one]
        found = subprocess.run(words, capture_output=True, text=True, check=False)
        if found.stdout.strip() == "container":  # the other holds the pod's network
            words = ["docker", "kill", "--signal", "KILL", one]
            subprocess.run(words, capture_output=True, check=False)
            count += 1
    return count


class Chaos:
    """Does one thing after another to a job, and waits for it to go on."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self._pause = threading.Event()  # never set
        self.counts: Counter[str] = Counter()
        self.operator = start_operator()
        found = Path(os.environ["KUBECONFIG"]).parent / "run" / "kube-apiserver.pid"
        self._api_pid = int(found.read_text().split()[0]) if found.is_file() else None
        self._faults: list[Callable[[], str]] = [self.killed] * 5 + [self.deleted] * 2
        self._faults.append(self.operator_away)
        if self._api_pid is None:
            print("no fault of the API server: its process is not k8s-here's", flush=True)
        else:
            self._faults.append(self.api_away)

    def progress(self) -> int:
        log = kubectl("logs", f"job/{NAME}-nn-worker-0", "-n", NAMESPACE, "--tail=200")
        found = [line.split()[1] for line in log.splitlines() if line.startswith("progress ")]
        return int(found[-1]) if found else -1

    def trains(self) -> bool:
        return self.status().get("phase") == "Running" and self.progress() >= 0

    def has_ended(self) -> bool:
        return self.status().get("phase") in ("Succeeded", "Failed")

    def status(self) -> dict[str, Any]:
        text = kubectl("get", "pj", NAME, "-n", NAMESPACE, "-o", "json")
        found: dict[str, Any] = json.loads(text).get("status") or {}
        return found

    def wait(self, what: str, is_so: Callable[[], bool], patience_s: float) -> float:
        begin = time.monotonic()
        while not is_so():
            if time.monotonic() > begin + patience_s:
                pods = kubectl("get", "pods", "-n", NAMESPACE)
                sys.exit(f"{what}: not within {patience_s:g} s; {self.status()}\n{pods}")
            self._pause.wait(1.0)
        return time.monotonic() - begin

    def go_on_for(self, seconds: float) -> None:
        end, longest_s = time.monotonic() + seconds, 0.0
        while time.monotonic() < end and not self.has_ended():
            what = self._dice.choice(self._faults)()
            before = self.progress()
            print(f"{time.strftime('%X')} {what}, at batch {before}", flush=True)

            def goes_on(before: int = before) -> bool:
                return self.progress() > before or self.has_ended()

            longest_s = max(longest_s, self.wait(f"training goes on: {what}", goes_on, GO_ON_S))
            self._pause.wait(self._dice.uniform(0, PAUSE_S))
        print(f"{self.counts.total()} faults {dict(self.counts)}, {longest_s:.0f} s at most")
        if not any(number for what, number in self.counts.items() if what.endswith("killed")):
            sys.exit("no container was killed: the faults that were done prove too little")

    # --- faults ------------------------------------------------------------------------------

    def _pod(self, *roles: str) -> tuple[str, str]:
        role = self._dice.choice(roles)
        words = ("get", "pods", "-n", NAMESPACE, "-l", f"persia_job={NAME},persia_role={role}")
        running = ("--field-selector=status.phase=Running", "-o", "name")
        found = kubectl(*words, *running).split()
        return role, self._dice.choice(found).partition("/")[2] if found else ""

    def killed(self) -> str:
        role, pod = self._pod(*ROLES)
        self.counts[f"{role} killed"] += kill_containers(pod)
        return f"{pod} killed"

    def deleted(self) -> str:
        role, pod = self._pod("embedding-worker", "data-loader")
        if pod:
            kubectl("delete", "pod", pod, "-n", NAMESPACE, "--wait=false")
            self.counts[f"{role} deleted"] += 1
        return f"{pod} deleted"

    def operator_away(self) -> str:
        self.operator.kill()
        self.operator.wait()
        self._pause.wait(AWAY_S)
        self.operator = start_operator()
        self.counts["operator"] += 1
        return "operator killed"

    def api_away(self) -> str:
        if self._api_pid is not None:
            os.kill(self._api_pid, signal.SIGSTOP)
            try:
                self._pause.wait(AWAY_S)
            finally:
                os.kill(self._api_pid, signal.SIGCONT)
            self.counts["api"] += 1
        return "API server away"


def books() -> dict[str, Any]:
    log = kubectl("logs", f"job/{NAME}-nn-worker-0", "-n", NAMESPACE)
    (line,) = (one for one in log.splitlines() if one.startswith("books "))
    found: dict[str, Any] = json.loads(line.partition(" ")[2])
    return found


def main() -> None:
    if os.environ.get(GUARD) != "1" or not os.environ.get("KUBECONFIG"):
        sys.exit(f"no cluster for tests: set KUBECONFIG, and {GUARD}=1")
    kubectl("apply", "-f", str(ROOT / "deploy/crd/jobs.persia.com.yaml"))
    kubectl("create", "namespace", NAMESPACE)
    for name, folder in (("counts", COUNTS), ("counts-config", COUNTS / "config")):
        kubectl("create", "configmap", name, f"--from-file={folder}", "-n", NAMESPACE)
    kubectl("apply", "-f", "-", text=yaml.safe_dump(job()))
    chaos = Chaos(int(os.environ.get("SEED", "1")))
    try:
        took_s = chaos.wait("the job trains", chaos.trains, GO_ON_S)
        print(f"the job trains after {took_s:.0f} s; load {os.getloadavg()[0]:.1f}", flush=True)
        chaos.go_on_for(MINUTES * 60)
        chaos.wait("the job has ended", chaos.has_ended, END_S)
        if chaos.status()["phase"] != "Succeeded":
            log = kubectl("logs", f"job/{NAME}-nn-worker-0", "-n", NAMESPACE, "--tail=40")
            sys.exit(f"{chaos.status()['message']}\n{log}")
        found = books()
        print(found)
        wrong = {name: found[name] for name in (*LOSSES, "wrong_ids") if found.get(name)}
        if wrong:
            sys.exit(f"the books are wrong: {wrong}")
    finally:
        chaos.operator.terminate()
        chaos.operator.wait(30)
    kubectl("delete", "namespace", NAMESPACE, "--wait=false")


if __name__ == "__main__":
    main()
