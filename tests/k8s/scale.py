"""The operator with many jobs, on a control plane with stand-in nodes.

    python -m tests.k8s.scale            # 200 jobs of 20 pods: make k8s-scale
    JOBS=20 IDLE_S=30 python -m tests.k8s.scale

Nodes have to have room for all pods, which k8s-here's stand-ins have from K8S_HERE_NODES=5 on.

It measures one process of the operator, beside the cluster that KUBECONFIG names, twice: while
the jobs are created, and restarted with all of them there.

    create     seconds in which a new job is reconciled, calls of the API included
    reconcile  the same of every reconciliation: most of them find nothing to do
    latency    that from the moment at which it was queued
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from tests.k8s.long_runs import begin, kubectl
from tests.k8s.specs import original
from tests.support.processes import ROOT

NUM_JOBS = int(os.environ.get("JOBS", "200"))
IDLE_S = float(os.environ.get("IDLE_S", "120"))
# Jobs that are created at a time, and seconds until all of them run.
AT_ONCE, RUN_S = 20, 1800.0
ROLES = {"embeddingParameterServer": 8, "embeddingWorker": 4, "nnWorker": 6, "dataloader": 2}
NAMESPACE = "persia-scale"
MOST_CREATE_S, MOST_MB, MOST_REQUESTS = 2.0, 150.0, 1.0


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
    rows = list(operator.rows())
    for kind, _, value in rows:
        noted[kind].append(value)
    idle = sum(kind == "request" for kind, _, _ in operator.rows(idle_since))
    each_s = idle / (time.monotonic() - idle_since)
    now_mb, most_mb = operator.memory_mb()
    print(f"{what}: {len(noted['reconcile'])} reconciliations; seconds, p50 and p99:", end=" ")
    for kind in ("create", "reconcile", "latency", "request"):
        if values := noted[kind]:
            name = kind.replace("request", "call")
            found = [percentile(values, share) for share in (0.5, 0.99)]
            print(f"{name} {found[0]:.3f} {found[1]:.3f}", end=", ")
    print(f"resident {now_mb:.0f} MB, at most {most_mb:.0f}, processor", end=" ")
    print(f"{operator.processor_s():.0f} s, {len(noted['request'])} requests", end=", ")
    print(f"idle {each_s:.2f} requests/s", flush=True)
    return meets_goals(what, rows, most_mb=most_mb, each_s=each_s)


def meets_goals(
    what: str, rows: Sequence[tuple[str, float, float]], *, most_mb: float, each_s: float
) -> bool:
    """Whether the goals are met; a restarted operator creates nothing."""
    created = [value for kind, _, value in rows if kind == "create"]
    if what == "created" and percentile(created, 0.99) >= MOST_CREATE_S:
        return False
    return most_mb < MOST_MB and each_s < MOST_REQUESTS


def check_room() -> None:
    path = "jsonpath={.items[*].status.allocatable.pods}"
    # The API writes a thousand as 1k.
    found = kubectl("get", "nodes", "-o", path).replace("k", "000")
    room = sum(map(int, found.split()))
    wanted = NUM_JOBS * sum(ROLES.values())
    if room < wanted:
        sys.exit(f"the nodes have room for {room} pods, and {wanted} are wanted")


def main() -> None:
    check_room()
    begin(NAMESPACE)
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
