"""The operator with many jobs, on a control plane with stand-in nodes.

    python -m tests.k8s.scale            # 200 jobs of 20 pods: make k8s-scale
    JOBS=20 IDLE_S=30 python -m tests.k8s.scale

It measures one process of the operator, beside the cluster that KUBECONFIG names, twice: while
the jobs are created, and restarted with all of them there.

    reconcile  seconds in which a job is reconciled, calls of the API included
    latency    the same from the moment at which it was queued
    call       seconds of a call of the API: how busy the cluster is
    resident   memory that the process holds, and the most that it held
    requests   calls of the API and watches begun: all, and each second in which no job changes
    processor  seconds of it

Exits with 1 if a goal is missed. Times hold for a machine that does nothing else.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from tests.e2e.clusters import GUARD
from tests.k8s.specs import original
from tests.support.processes import ROOT

NUM_JOBS = int(os.environ.get("JOBS", "200"))
IDLE_S = float(os.environ.get("IDLE_S", "120"))
# Jobs that are created at a time, and seconds until all of them run.
AT_ONCE, RUN_S = 20, 1800.0
ROLES = {"embeddingParameterServer": 8, "embeddingWorker": 4, "nnWorker": 6, "dataloader": 2}
NAMESPACE = "persia-scale"
MOST_RECONCILE_S, MOST_MB, MOST_REQUESTS = 2.0, 150.0, 1.0


def kubectl(*words: str, text: str | None = None) -> str:
    ran = subprocess.run(
        ["kubectl", *words],
        input=text,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if ran.returncode:
        sys.exit(f"kubectl {' '.join(words)}: {ran.stderr}")
    return ran.stdout


def job(number: int) -> dict[str, Any]:
    found = original(podAnnotations={"k8s-here/after": "never"}, restartPolicy="OnFailure")
    found["metadata"] = {"name": f"job-{number:03}", "namespace": NAMESPACE}
    for key, replicas in ROLES.items():
        found["spec"][key] |= {"replicas": replicas, "resources": None}
    return found


class Measured:
    """An operator in a process of its own, and what it says of itself (``scale_child``)."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._errors = log.with_suffix(".err").open("w")
        command = [sys.executable, "-m", "tests.k8s.scale_child", str(log), NAMESPACE]
        variables = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            command, env=variables, stdout=self._errors, stderr=self._errors
        )
        self.begin = time.monotonic()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)
        self._errors.close()

    def memory_mb(self) -> tuple[float, float]:
        text = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8")
        values = dict(line.split(":", 1) for line in text.splitlines())
        return tuple(int(values[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM"))  # type: ignore[return-value]

    def processor_s(self) -> float:
        text = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="utf-8")
        user, system = text.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def rows(self, since: float = 0.0) -> Iterator[tuple[str, float, float]]:
        """Yield what was noted since a moment: kind, moment, and value."""
        for line in self._log.read_text(encoding="utf-8").splitlines():
            kind, moment, value = json.loads(line)
            if moment >= since:
                yield kind, moment, value


@contextmanager
def measured(log: Path) -> Iterator[Measured]:
    found = Measured(log)
    try:
        yield found
    finally:
        found.stop()


def running() -> int:
    words = ("get", "pj", "-n", NAMESPACE, "-o", "jsonpath={.items[*].status.phase}")
    return kubectl(*words).split().count("Running")


def wait_for(number: int, operator: Measured) -> None:
    deadline, pause = time.monotonic() + RUN_S, threading.Event()
    while (now := running()) < number:
        if time.monotonic() > deadline or operator.process.poll() is not None:
            sys.exit(f"{now} of {number} jobs run after {RUN_S:g} s, or the operator has ended")
        pause.wait(1.0)


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


def judge(what: str, operator: Measured, idle_since: float) -> bool:
    """Print what was measured of a process; returns whether every goal is met."""
    noted: defaultdict[str, list[float]] = defaultdict(list)
    for kind, _, value in operator.rows():
        noted[kind].append(value)
    idle = sum(kind == "request" for kind, _, _ in operator.rows(idle_since))
    each_s = idle / (time.monotonic() - idle_since)
    now_mb, most_mb = operator.memory_mb()
    print(f"{what}: {len(noted['reconcile'])} reconciliations; seconds, p50 and p99:", end=" ")
    for kind, name in (("reconcile", "reconcile"), ("latency", "latency"), ("request", "call")):
        values = noted[kind]
        print(f"{name} {percentile(values, 0.5):.3f} {percentile(values, 0.99):.3f}", end=", ")
    print(f"resident {now_mb:.0f} MB, at most {most_mb:.0f}, processor", end=" ")
    print(f"{operator.processor_s():.0f} s, {len(noted['request'])} requests", end=", ")
    print(f"idle {each_s:.2f} requests/s", flush=True)
    p99 = percentile(noted["reconcile"], 0.99)
    return p99 < MOST_RECONCILE_S and most_mb < MOST_MB and each_s < MOST_REQUESTS


def main() -> None:
    if os.environ.get(GUARD) != "1" or not os.environ.get("KUBECONFIG"):
        sys.exit(f"no cluster for tests: set KUBECONFIG, and {GUARD}=1")
    crd = str(ROOT / "deploy/crd/jobs.persia.com.yaml")
    kubectl("apply", "-f", crd)
    kubectl("wait", "--for=condition=Established", "crd/persiajobs.persia.com", "--timeout=30s")
    kubectl("create", "namespace", NAMESPACE)
    load = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs"
    print(f"{NUM_JOBS} jobs of {sum(ROLES.values())} pods; {load}", flush=True)
    results = []
    with TemporaryDirectory() as folder:
        for what in ("created", "restarted"):
            with measured(Path(folder) / f"{what}.jsonl") as operator:
                if what == "created":
                    for first in range(0, NUM_JOBS, AT_ONCE):
                        several = [job(n) for n in range(first, min(first + AT_ONCE, NUM_JOBS))]
                        kubectl("apply", "-f", "-", text=yaml.safe_dump_all(several))
                        wait_for(first + len(several), operator)
                    took = time.monotonic() - operator.begin
                    print(f"all run after {took:.0f} s; load {os.getloadavg()[0]:.1f}")
                # What was last changed is seen, and a list of everything may come.
                threading.Event().wait(30)
                idle_since = time.monotonic()
                threading.Event().wait(IDLE_S)
                results.append(judge(what, operator, idle_since))
    kubectl("delete", "pj", "--all", "-n", NAMESPACE, "--wait=false")
    kubectl("delete", "namespace", NAMESPACE, "--wait=false")
    if not all(results):
        sys.exit("a goal was missed")


if __name__ == "__main__":
    main()
