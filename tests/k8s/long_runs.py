"""What the long tests on a cluster share: kubectl, their namespace, and a job of real pods.

KUBECONFIG names the cluster. Its nodes are on this machine's Docker where pods are real.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.e2e.clusters import GUARD
from tests.support.processes import ROOT

IMAGE = os.environ.get("PERSIA_TEST_IMAGE", "persia")
WORKSPACE = "workspace"  # name of the volume, and of its ConfigMap
# By their place in the workspace, where its files are in this repository.
Files = Mapping[str, str | Path]


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


def begin(namespace: str, files: Files | None = None) -> None:
    """Create the resource of jobs and a namespace, with a workspace of these files."""
    if os.environ.get(GUARD) != "1" or not os.environ.get("KUBECONFIG"):
        sys.exit(f"no cluster for tests: set KUBECONFIG, and {GUARD}=1")
    kubectl("apply", "-f", str(ROOT / "deploy/crd/jobs.persia.com.yaml"))
    kubectl("wait", "--for=condition=Established", "crd/persiajobs.persia.com", "--timeout=30s")
    kubectl("create", "namespace", namespace)
    if files:
        sources = [f"--from-file={_key(name)}={ROOT / path}" for name, path in files.items()]
        kubectl("create", "configmap", WORKSPACE, *sources, "-n", namespace)


def _key(name: str) -> str:
    return name.replace("/", ".")


def job_of_pods(
    name: str,
    namespace: str,
    files: Files,
    replicas: Mapping[str, int],
    variables: Mapping[str, str],
    volumes: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Return a job of small pods whose workspace has these files.

    Args:
        name: Of the job.
        namespace: Of the job.
        files: As ``begin`` was given.
        replicas: By key of the spec.
        variables: Of the environment.
        volumes: By where they are mounted in every pod; the last part of that is their name.
    """
    items = [{"key": _key(one), "path": one} for one in files]
    workspace = {"configMap": {"name": WORKSPACE, "items": items}}
    mounted: dict[str, Mapping[str, Any]] = {f"/{WORKSPACE}": workspace, **(volumes or {})}
    small = {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"memory": "1Gi"}}
    mounts = [{"name": Path(at).name, "mountPath": at} for at in mounted]
    role = {"volumeMounts": mounts, "resources": small, "image": f"{IMAGE}:server"}
    roles = {key: {**role, "replicas": count} for key, count in replicas.items()}
    roles["embeddingParameterServer"]["shmSize"] = "128Mi"
    roles["nnWorker"]["image"] = f"{IMAGE}:nn-worker"
    return {
        "apiVersion": "persia.com/v1",
        "kind": "PersiaJob",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "persiaEnv": {
                "PERSIA_GLOBAL_CONFIG": f"/{WORKSPACE}/config/global_config.yml",
                "PERSIA_EMBEDDING_CONFIG": f"/{WORKSPACE}/config/embedding_config.yml",
                "PERSIA_NN_WORKER_ENTRY": f"/{WORKSPACE}/train.py",
                "PERSIA_DATALOADER_ENTRY": f"/{WORKSPACE}/data_loader.py",
            },
            "env": [{"name": key, "value": value} for key, value in variables.items()],
            "volumes": [{"name": Path(at).name, **one} for at, one in mounted.items()],
            **roles,
        },
    }


def kill_containers(pod: str) -> int:
    """Send SIGKILL to the containers of a pod; returns how many it reached."""
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
            count += not subprocess.run(words, capture_output=True, check=False).returncode
    return count
