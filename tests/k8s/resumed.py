"""A trainer that is killed again and again in pods, and must end as if nothing had happened.

    KILLS=20 SEED=1 python -m tests.k8s.resumed

Rows are in servers, each in a pod of its own, batches are made by the trainer, and checkpoints
are in a folder of this machine, which is the cluster's node. At random moments the trainer's
container gets SIGKILL and its pod is deleted, or the pod is deleted as a drain does it, with
SIGTERM; the Job makes another one. Rows and dense net have to be those of a job that nothing
happened to, bit by bit.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from tests.distributed.batches import SLOTS
from tests.e2e.clusters import GUARD, operator
from tests.k8s.chaos import IMAGE, kill_containers
from tests.k8s.scale import kubectl
from tests.support.processes import ROOT

KILLS, STEPS = int(os.environ.get("KILLS", "20")), int(os.environ.get("STEPS", "4000"))
NAMESPACE = "persia-resumed"
# Seconds: of a step of the job that is killed, from its progress to a kill, and of waits.
PAUSE_S, MOST_S, PATIENCE_S = 0.05, 6.0, 420.0
FILES = ("tests/distributed/batches.py", "tests/distributed/net.py")
SCRIPT = "tests/k8s/scripts/resumed.py"


def job(name: str, folder: Path, pause_s: float) -> dict[str, Any]:
    mounts = [
        {"name": "workspace", "mountPath": "/workspace"},
        {"name": "checkpoints", "mountPath": "/checkpoints"},
    ]
    small = {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"memory": "1Gi"}}
    role = {"volumeMounts": mounts, "resources": small, "image": f"{IMAGE}:server"}
    items = [{"key": Path(one).name, "path": one} for one in (*FILES, SCRIPT)]
    items += [{"key": one, "path": one} for one in ("slots.yml", "global.yml")]
    values = {
        "OMP_NUM_THREADS": "1",
        "PERSIA_RESUME_FROM": f"/checkpoints/{name}",
        "PERSIA_CHECKPOINT_ROOTS": "/checkpoints",
        "STEPS": str(STEPS),
        "PAUSE_S": str(pause_s),
    }
    return {
        "apiVersion": "persia.com/v1",
        "kind": "PersiaJob",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "persiaEnv": {
                "PERSIA_GLOBAL_CONFIG": "/workspace/global.yml",
                "PERSIA_EMBEDDING_CONFIG": "/workspace/slots.yml",
                "PERSIA_NN_WORKER_ENTRY": f"/workspace/{SCRIPT}",
            },
            "env": [{"name": key, "value": value} for key, value in values.items()],
            "restartPolicy": "OnFailure",
            "volumes": [
                {"name": "workspace", "configMap": {"name": "scripts", "items": items}},
                {"name": "checkpoints", "hostPath": {"path": str(folder), "type": "Directory"}},
            ],
            "embeddingParameterServer": {**role, "replicas": 2, "shmSize": "64Mi"},
            "embeddingWorker": {**role, "replicas": 1},
            "nnWorker": {**role, "replicas": 1, "image": f"{IMAGE}:nn-worker"},
        },
    }


def until(what: str, condition: Callable[[], Any]) -> Any:
    """Return what the condition is, once it is true."""
    deadline, pause = time.monotonic() + PATIENCE_S, threading.Event()
    while not (found := condition()):
        if time.monotonic() > deadline:
            pods = kubectl("get", "pods", "-n", NAMESPACE)
            sys.exit(f"{what}: not within {PATIENCE_S:g} s\n{pods}")
        pause.wait(0.5)
    return found


def progress(pod: str) -> int:
    """Return the last step that a pod's trainer has printed; 0 before any."""
    ran = subprocess.run(
        ["kubectl", "logs", pod, "-n", NAMESPACE, "--tail=50"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,  # its container may not have begun
    )
    found = [line.split()[1] for line in ran.stdout.splitlines() if line.startswith("progress")]
    return int(found[-1]) if found else 0


def run(name: str, folder: Path, kills: int, dice: random.Random) -> dict[str, Any]:
    """Run a job, and kill its trainer that often; returns what it had at its end."""
    kubectl("apply", "-f", "-", text=yaml.safe_dump(job(name, folder, kills and PAUSE_S)))
    label = f"persia_job={name},persia_role=nn-worker"
    words = ("get", "pods", "-n", NAMESPACE, "-l", label, "-o", "name")
    gone: set[str] = set()
    for number in range(kills):

        def trains() -> tuple[str, int] | None:
            running = kubectl(*words, "--field-selector=status.phase=Running").split()
            steps = {pod: progress(pod) for pod in running if pod not in gone}
            return next(((pod, step) for pod, step in steps.items() if step), None)

        pod, step = until(f"{name}: the trainer goes on after {number} kills", trains)
        threading.Event().wait(dice.uniform(0.0, MOST_S))
        is_hard = number % 2 == 0
        grace = []
        if is_hard:
            kill_containers(pod.partition("/")[2])
            grace = ["--grace-period=1"]  # of the container that may be started in its place
        kubectl("delete", pod, "-n", NAMESPACE, "--wait=false", *grace)
        gone.add(pod)
        how = "SIGKILL" if is_hard else "SIGTERM"
        print(f"{time.strftime('%X')} {number + 1}: {how} after step {step}", flush=True)

    def phase() -> str:
        found = kubectl("get", "pj", name, "-n", NAMESPACE, "-o", "jsonpath={.status.phase}")
        return found if found in ("Succeeded", "Failed") else ""

    ended = until(f"{name} has ended", phase)
    log = kubectl("logs", f"job/{name}-nn-worker-0", "-n", NAMESPACE)
    if ended != "Succeeded":
        sys.exit(f"{name}: {ended}\n{log}")
    (line,) = (one for one in log.splitlines() if one.startswith("end "))
    found: dict[str, Any] = json.loads(line.partition(" ")[2])
    return found


def main() -> None:
    if os.environ.get(GUARD) != "1" or not os.environ.get("KUBECONFIG"):
        sys.exit(f"no cluster for tests: set KUBECONFIG, and {GUARD}=1")
    kubectl("apply", "-f", str(ROOT / "deploy/crd/jobs.persia.com.yaml"))
    kubectl("create", "namespace", NAMESPACE)
    dice = random.Random(int(os.environ.get("SEED", "1")))
    with tempfile.TemporaryDirectory(prefix="persia-") as place:
        folder = Path(place)
        folder.chmod(0o777)  # of the pods' user, too
        (folder / "slots.yml").write_text(
            yaml.safe_dump(SLOTS, sort_keys=False), encoding="utf-8"
        )
        (folder / "global.yml").write_text("{}\n", encoding="utf-8")
        sources = [ROOT / one for one in (*FILES, SCRIPT)]
        sources += [folder / one for one in ("slots.yml", "global.yml")]
        files = [f"--from-file={one}" for one in sources]
        kubectl("create", "configmap", "scripts", *files, "-n", NAMESPACE)
        with operator("--namespace", NAMESPACE, log=folder / "operator.log"):
            whole = run("whole", folder, 0, dice)
            killed = run("killed", folder, KILLS, dice)
    kubectl("delete", "namespace", NAMESPACE, "--wait=false")
    if killed != whole or whole["steps"] != STEPS:
        sys.exit(f"after {KILLS} kills {killed}, and undisturbed {whole}")
    print(f"{KILLS} kills: bit-equal after {STEPS} steps")


if __name__ == "__main__":
    main()
