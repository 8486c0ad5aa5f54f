"""Jobs on a real control plane of Kubernetes, where one is given.

Pods are stood in for where its nodes are stand-ins (annotations ``k8s-here/...`` say how they
end); validation, watches, garbage collection, quotas and rights are the API server's own.
KUBECONFIG names the cluster; the tests use namespaces of their own, and the resource of
PersiaJobs, which they apply.
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

from persia._k8s.render import as_yaml, render
from persia._k8s.spec import read_job
from tests.k8s.specs import original
from tests.support import waiting
from tests.support.processes import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

DEADLINE_S = 60.0
STAND_IN = "PERSIA_TEST_CLUSTER"  # as a guard: no cluster is touched by accident


@pytest.fixture(scope="module")
def kubectl() -> Callable[..., str]:
    if os.environ.get(STAND_IN) != "1" or not os.environ.get("KUBECONFIG"):
        pytest.skip(f"no cluster for tests: set KUBECONFIG, and {STAND_IN}=1")
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

    call("apply", "-f", str(ROOT / "deploy/crd/jobs.persia.com.yaml"))
    call("wait", "--for=condition=Established", "crd/persiajobs.persia.com", "--timeout=30s")
    return call


@pytest.fixture
def namespace(kubectl: Callable[..., str], request: pytest.FixtureRequest) -> Iterator[str]:
    name = f"persia-{os.getpid()}-{abs(hash(request.node.name)) % 10_000}"
    kubectl("create", "namespace", name)
    yield name
    kubectl("delete", "namespace", name, "--wait=false")


def until(condition: Callable[[], Any], what: str) -> Any:
    """Return what the condition is, once it is true."""
    found: list[Any] = [None]

    def is_so() -> bool:
        found[0] = condition()
        return bool(found[0])

    waiting.until(is_so, DEADLINE_S, look_s=0.2, details=lambda: what)
    return found[0]


def document(namespace: str, **annotations: str) -> dict[str, Any]:
    found = original(
        podAnnotations={f"k8s-here/{key}": text for key, text in annotations.items()}
    )
    found["spec"] |= {"restartPolicy": "OnFailure"}
    found["metadata"]["namespace"] = namespace
    return found


@contextmanager
def operator(namespace: str, log: Path, kubeconfig: str | None = None) -> Iterator[None]:
    command = [sys.executable, "-m", "persia.k8s_utils", "operator", "--namespace", namespace]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    if kubeconfig is not None:
        variables["KUBECONFIG"] = kubeconfig
    with log.open("a") as file:
        process = subprocess.Popen(command, stderr=file, stdout=file, env=variables)
        try:
            yield
            assert process.poll() is None, log.read_text()
        finally:
            process.terminate()
            process.wait(30)


def status_of(kubectl: Callable[..., str], namespace: str) -> dict[str, Any]:
    text = kubectl("get", "pj", "adult-income", "-n", namespace, "-o", "json")
    found: dict[str, Any] = json.loads(text).get("status", {})
    return found


def status_in(kubectl: Callable[..., str], namespace: str, phase: str) -> dict[str, Any]:
    """Return the job's status, once it is in a phase."""

    def status() -> dict[str, Any] | None:
        found = status_of(kubectl, namespace)
        return found if found.get("phase") == phase else None

    found: dict[str, Any] = until(status, phase)
    return found


def names(kubectl: Callable[..., str], namespace: str) -> set[str]:
    kinds = "jobs,pods,services,networkpolicies,pdb"
    return set(kubectl("get", kinds, "-n", namespace, "-o", "name").split())


def test_what_is_rendered_is_stored_as_it_is_and_applied_again_changes_nothing(
    kubectl: Callable[..., str], namespace: str
) -> None:
    found = document(namespace)
    _, objects = render(read_job(found), "native", kubernetes=(1, 20))
    text = as_yaml(objects)
    kubectl("apply", "-f", "-", text=text)
    again = kubectl("apply", "-f", "-", text=text).splitlines()
    assert len(again) == len(objects)
    changed = [line for line in again if not line.endswith("unchanged")]
    assert not changed
    for one in objects:
        kind, name = one["kind"], one["metadata"]["name"]
        stored = json.loads(kubectl("get", kind, name, "-n", namespace, "-o", "json"))
        # A field that this version does not know is dropped without a word.
        assert not list(lost(one, stored, kind)), name


def lost(sent: Any, stored: Any, where: str) -> Iterator[str]:
    if isinstance(sent, dict):
        for key, value in sent.items():
            if not isinstance(stored, dict) or key not in stored:
                if value not in ({}, []):
                    yield f"{where}.{key}"
            else:
                yield from lost(value, stored[key], f"{where}.{key}")
    elif isinstance(sent, list):
        if not isinstance(stored, list) or len(stored) != len(sent):
            yield where
        else:
            for number, value in enumerate(sent):
                yield from lost(value, stored[number], f"{where}[{number}]")


def test_a_job_runs_ends_and_leaves_nothing_also_if_its_operator_is_restarted(
    kubectl: Callable[..., str], namespace: str, tmp_path: Path
) -> None:
    text = yaml.safe_dump(document(namespace, after="never"))
    log = tmp_path / "operator.log"
    with operator(namespace, log):
        kubectl("apply", "-f", "-", text=text)
        status_in(kubectl, namespace, "Running")
        before = names(kubectl, namespace)
    with operator(namespace, log):
        for pod in kubectl("get", "pods", "-n", namespace, "-o", "name").split():
            kubectl("annotate", "-n", namespace, pod, "k8s-here/after=0", "--overwrite")
        found = status_in(kubectl, namespace, "Succeeded")
        assert found["restarts"] == 0
        assert found["replicaStatuses"]["nn-worker"]["succeeded"] == 2
        # The second operator created nothing that the first one had.
        assert names(kubectl, namespace) == before
    kubectl("delete", "pj", "adult-income", "-n", namespace)
    until(lambda: not names(kubectl, namespace), "everything is deleted")


def test_a_trainer_that_fails_is_named_with_its_exit_code(
    kubectl: Callable[..., str], namespace: str, tmp_path: Path
) -> None:
    found = document(namespace, after="1", exit="7")
    found["spec"]["maxRestarts"] = 1
    with operator(namespace, tmp_path / "log"):
        kubectl("apply", "-f", "-", text=yaml.safe_dump(found))
        status = status_in(kubectl, namespace, "Failed")
    assert status["restarts"] == 1
    assert "exit code 7" in status["message"]
    assert status["message"].startswith("adult-income-nn-worker-")


def test_a_quota_is_the_message_of_a_job_that_it_keeps_from_running(
    kubectl: Callable[..., str], namespace: str, tmp_path: Path
) -> None:
    kubectl("create", "quota", "team", "--hard=pods=3", "-n", namespace)
    until(
        lambda: kubectl(
            "get", "quota", "team", "-n", namespace, "-o", "jsonpath={.status.used}"
        ),
        "the quota has counted",
    )
    with operator(namespace, tmp_path / "log"):
        kubectl("apply", "-f", "-", text=yaml.safe_dump(document(namespace, after="never")))
        until(
            lambda: "exceeded quota: team" in status_of(kubectl, namespace).get("message", ""),
            "the quota in the status",
        )


def test_the_operator_works_with_its_role_and_may_do_nothing_else(
    kubectl: Callable[..., str], namespace: str, tmp_path: Path
) -> None:
    base = ROOT / "deploy" / "operator"
    role = yaml.safe_load((base / "role.yaml").read_text())
    account = f"system:serviceaccount:{namespace}:persia-operator"
    text = yaml.safe_dump_all(
        [
            {
                **role,
                "kind": "Role",
                "metadata": {"name": "persia-operator", "namespace": namespace},
            },
            {
                "apiVersion": "v1",
                "kind": "ServiceAccount",
                "metadata": {"name": "persia-operator", "namespace": namespace},
            },
        ]
    )
    kubectl("apply", "-f", "-", text=text)
    words = ("--role=persia-operator", f"--serviceaccount={namespace}:persia-operator")
    kubectl("create", "rolebinding", "persia-operator", *words, "-n", namespace)
    for verb, of, answer in (
        ("create", "secrets", "yes"),
        ("get", "secrets", "no"),
        ("list", "secrets", "no"),
        ("create", "pods", "no"),
        ("create", "pods/exec", "no"),
        ("delete", "jobs.batch", "yes"),
        ("update", "persiajobs.persia.com", "no"),
    ):
        asked = kubectl(
            "auth", "can-i", verb, of, "-n", namespace, "--as", account, check=False
        )
        assert asked.strip() == answer, (verb, of)
    with operator(namespace, tmp_path / "log", _kubeconfig_of(kubectl, namespace, tmp_path)):
        kubectl("apply", "-f", "-", text=yaml.safe_dump(document(namespace)))
        status_in(kubectl, namespace, "Succeeded")
    assert "403" not in (tmp_path / "log").read_text()


def _kubeconfig_of(kubectl: Callable[..., str], namespace: str, folder: Path) -> str:
    """Return a kubeconfig of the service account's own token."""
    account = json.loads(
        until(
            lambda: (
                (
                    found := kubectl(
                        "get", "sa", "persia-operator", "-n", namespace, "-o", "json"
                    )
                )
                and "secrets" in found
                and found
            ),
            "a token of the service account",
        )
    )
    secret = account["secrets"][0]["name"]
    token = kubectl(
        *(
            "get",
            "secret",
            secret,
            "-n",
            namespace,
            "-o",
            "go-template={{.data.token | base64decode}}",
        )
    )
    config = yaml.safe_load(kubectl("config", "view", "--raw", "-o", "yaml"))
    config["users"] = [{"name": config["users"][0]["name"], "user": {"token": token}}]
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return str(path)
