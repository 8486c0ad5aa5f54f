"""A trainer that is killed again and again in pods, and must end as if nothing had happened.

    KILLS=20 SEED=1 python -m tests.k8s.resumed

Rows are in servers, batches come from data-loaders, each in a pod of its own, and checkpoints
are in a folder of this machine, which is the cluster's node. At random moments the trainer's
container gets SIGKILL and its pod is deleted, or the pod is deleted as a drain does it, with
SIGTERM; the Job makes another one. Rows and dense net have to be those of a job that nothing
happened to, bit by bit.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from tests.e2e.clusters import operator
from tests.faults.kills import (
    FILES,
    PACE_S,
    SIGNALS,
    end_in,
    judge,
    kill_again_and_again,
    steps_for,
)
from tests.k8s.long_runs import begin, job_of_pods, kill_containers, kubectl
from tests.support.waiting import until

KILLS = int(os.environ.get("KILLS", "20"))
STEPS = int(os.environ.get("NUM_BATCHES", steps_for(KILLS)))
NAMESPACE = "persia-resumed"
REPLICAS = {"embeddingParameterServer": 2, "embeddingWorker": 1, "nnWorker": 1, "dataloader": 2}
# Seconds until a job has ended that is not killed any more.
END_S = 900.0


def job(name: str, folder: Path, pace_s: float) -> dict[str, Any]:
    variables = {
        "OMP_NUM_THREADS": "1",
        "PERSIA_RESUME_FROM": f"/checkpoints/{name}",
        "PERSIA_CHECKPOINT_ROOTS": "/checkpoints",
        "NUM_BATCHES": str(STEPS),
        "PACE_S": str(pace_s),
    }
    checkpoints = {"hostPath": {"path": str(folder), "type": "Directory"}}
    found = job_of_pods(
        name, NAMESPACE, FILES, REPLICAS, variables, {"/checkpoints": checkpoints}
    )
    found["spec"]["restartPolicy"] = "OnFailure"
    return found


def pods() -> str:
    return kubectl("get", "pods", "-n", NAMESPACE)


def log_of(pod: str) -> str:
    ran = subprocess.run(
        ["kubectl", "logs", pod, "-n", NAMESPACE, "--tail=50"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,  # its container may not have begun
    )
    return ran.stdout


def kill(pod: str, signal: str) -> None:
    grace = []
    if signal == "SIGKILL":
        if not kill_containers(pod.partition("/")[2]):
            sys.exit(f"{pod}: none of its containers is this machine's Docker's, or runs")
        grace = ["--grace-period=1"]  # of the container that may be started in its place
    kubectl("delete", pod, "-n", NAMESPACE, "--wait=false", *grace)


def run(name: str, folder: Path, kills: int, seed: int) -> dict[str, Any]:
    """Run a job, and kill its trainer that often; returns what it had at its end."""
    document = job(name, folder, PACE_S if kills else 0)
    kubectl("apply", "-f", "-", text=yaml.safe_dump(document))
    label = f"persia_job={name},persia_role=nn-worker"
    words = ("get", "pods", "-n", NAMESPACE, "-l", label, "-o", "name")

    def running() -> dict[str, str]:
        found = kubectl(*words, "--field-selector=status.phase=Running").split()
        return {pod: log_of(pod) for pod in found}

    def phase() -> str:
        path = "jsonpath={.status.phase}"
        return kubectl("get", "pj", name, "-n", NAMESPACE, "-o", path)

    kill_again_and_again(kills, seed, SIGNALS, running, kill, pods)
    until(lambda: phase() in ("Succeeded", "Failed"), END_S, look_s=0.5, details=pods)
    log = kubectl("logs", f"job/{name}-nn-worker-0", "-n", NAMESPACE)
    if phase() != "Succeeded":
        sys.exit(f"{name} has failed\n{log}")
    return end_in(log)


def main() -> None:
    begin(NAMESPACE, FILES)
    seed = int(os.environ.get("SEED", "1"))
    with tempfile.TemporaryDirectory(prefix="persia-") as place:
        folder = Path(place)
        folder.chmod(0o777)  # of the pods' user, too
        with operator("--namespace", NAMESPACE, log=folder / "operator.log"):
            whole = run("whole", folder, 0, seed)
            killed = run("killed", folder, KILLS, seed)
    kubectl("delete", "namespace", NAMESPACE, "--wait=false")
    print(judge(killed, whole, KILLS, STEPS))


if __name__ == "__main__":
    main()
