"""A cluster for tests: kubectl, and an operator of this tree beside it.

KUBECONFIG names the cluster, and PERSIA_TEST_CLUSTER=1 says that it is one for tests: no other
is touched by accident. Pods are stood in for where its nodes are stand-ins.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import waiting
from tests.support.processes import ROOT

Kubectl = Callable[..., str]

DEADLINE_S = 60.0
GUARD = "PERSIA_TEST_CLUSTER"
JOBS = "jobs.batch,pods,services,networkpolicies,pdb"


def kubectl_of_tests() -> Kubectl:
    """Return kubectl for the cluster of tests; skips, with the reason, where there is none."""
    if os.environ.get(GUARD) != "1" or not os.environ.get("KUBECONFIG"):
        pytest.skip(f"no cluster for tests: set KUBECONFIG, and {GUARD}=1")
    program = shutil.which("kubectl")
    if program is None:
        pytest.skip("no kubectl in PATH")
    pytest.importorskip("kopf")

    def call(*words: str, text: str | None = None, check: bool = True) -> str:
        ran = subprocess.run(
            [program, *words],
            input=text,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert not check or ran.returncode == 0, (words, ran.stderr)
        return ran.stdout

    return call


def create_resource(kubectl: Kubectl) -> None:
    kubectl("apply", "-f", str(ROOT / "deploy/crd/jobs.persia.com.yaml"))
    kubectl("wait", "--for=condition=Established", "crd/persiajobs.persia.com", "--timeout=30s")


def runs_containers(kubectl: Kubectl) -> bool:
    """Return whether the nodes are real: a stand-in names no container runtime."""
    nodes = json.loads(kubectl("get", "nodes", "-o", "json"))["items"]
    return any(one["status"]["nodeInfo"]["containerRuntimeVersion"] for one in nodes)


def until(condition: Callable[[], Any], what: str, patience_s: float = DEADLINE_S) -> Any:
    """Return what the condition is, once it is true."""
    found: list[Any] = [None]

    def is_so() -> bool:
        found[0] = condition()
        return bool(found[0])

    waiting.until(is_so, patience_s, look_s=0.2, details=lambda: what)
    return found[0]


@contextmanager
def operator(*words: str, log: Path, kubeconfig: str | None = None) -> Iterator[int]:
    """Run the operator of this tree beside the cluster; yields its process' number."""
    command = [sys.executable, "-m", "persia.k8s_utils", "operator", *words]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    if kubeconfig is not None:
        variables["KUBECONFIG"] = kubeconfig
    with log.open("a") as file:
        process = subprocess.Popen(command, stderr=file, stdout=file, env=variables)
        try:
            yield process.pid
            assert process.poll() is None, log.read_text()
        finally:
            process.terminate()
            process.wait(30)


def k8s_utils(*words: str) -> subprocess.CompletedProcess[str]:
    """Run ``persia-k8s-utils`` of this tree."""
    return subprocess.run(
        [sys.executable, "-m", "persia.k8s_utils", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def status_of(kubectl: Kubectl, namespace: str, name: str) -> dict[str, Any]:
    text = kubectl("get", "pj", name, "-n", namespace, "-o", "json")
    found: dict[str, Any] = json.loads(text).get("status", {})
    return found


def names(kubectl: Kubectl, namespace: str) -> set[str]:
    return set(kubectl("get", JOBS, "-n", namespace, "-o", "name").split())


def serving_objects(kubectl: Kubectl) -> list[dict[str, Any]]:
    """Return those of examples/kubernetes/serving, in the versions that the cluster has."""
    folder = ROOT / "examples" / "kubernetes" / "serving"
    text = kubectl("kustomize", str(folder))
    served = kubectl("api-versions").split()
    for new, old in (
        ("policy/v1", "policy/v1beta1"),
        ("autoscaling/v2", "autoscaling/v2beta2"),
    ):
        if new not in served:
            text = text.replace(f"apiVersion: {new}\n", f"apiVersion: {old}\n")
    return list(yaml.safe_load_all(text))
