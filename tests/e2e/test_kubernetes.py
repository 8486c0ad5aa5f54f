"""Jobs on a real control plane of Kubernetes, where one is given.

Pods are stood in for where its nodes are stand-ins (annotations ``k8s-here/...`` say how they
end); validation, watches, garbage collection, quotas and rights are the API server's own.
``clusters`` says which cluster; where its nodes run containers, test_kubernetes_pods is of use.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given

from persia._k8s.render import as_yaml, render
from persia._k8s.spec import read_job
from tests.e2e.clusters import (
    Kubectl,
    k8s_utils,
    names,
    operator,
    runs_containers,
    serving_objects,
    status_of,
    until,
)
from tests.k8s.specs import ROLES, jobs, original
from tests.support.processes import ROOT
from tests.support.profiles import tries

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

NAME = "adult-income"
# Seconds until nothing of a deleted job is there, and until a status has the cause.
GONE_S, CAUSE_S = 30.0, 10.0


@pytest.fixture(scope="module", autouse=True)
def stand_ins(kubectl: Kubectl) -> None:
    if runs_containers(kubectl):
        pytest.skip("the cluster's nodes run containers, and these pods are for stand-in nodes")


def document(namespace: str, name: str = NAME, **annotations: str) -> dict[str, Any]:
    found = original(
        podAnnotations={f"k8s-here/{key}": text for key, text in annotations.items()}
    )
    found["spec"] |= {"restartPolicy": "OnFailure"}
    found["metadata"] |= {"name": name, "namespace": namespace}
    return found


def status_in(kubectl: Kubectl, namespace: str, phase: str, name: str = NAME) -> dict[str, Any]:
    """Return the job's status, once it is in a phase."""

    def status() -> dict[str, Any] | None:
        found = status_of(kubectl, namespace, name)
        return found if found.get("phase") == phase else None

    found: dict[str, Any] = until(status, phase)
    return found


def test_what_is_rendered_is_stored_as_it_is_and_applied_again_changes_nothing(
    kubectl: Kubectl, namespace: str
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


def test_any_valid_job_renders_objects_that_the_api_takes_as_they_are(
    kubectl: Kubectl, namespace: str
) -> None:
    """Of a version that is older than the schemas of tests/k8s."""

    @given(jobs(needs_trainer=True))
    @tries(12)
    def take(found: dict[str, Any]) -> None:
        found["metadata"]["namespace"] = namespace
        found["spec"].pop("ttlSecondsAfterFinished", None)  # of 1.21
        for key in ROLES:  # a limit may be below its request
            (found["spec"].get(key) or {}).pop("resources", None)
        _, objects = render(read_job(found), "native", kubernetes=(1, 20))
        dry = ("apply", "--dry-run=server", "-o", "json", "-f", "-")
        stored = json.loads(kubectl(*dry, text=as_yaml(objects)))["items"]
        assert len(stored) == len(objects)
        for one, taken in zip(objects, stored, strict=True):
            assert not list(lost(one, taken, one["kind"])), one["metadata"]["name"]

    take()


def lost(sent: Any, stored: Any, where: str) -> Iterator[str]:
    if isinstance(sent, dict):
        for key, value in sent.items():
            if not isinstance(stored, dict) or key not in stored:
                if value not in ({}, [], ""):
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
    kubectl: Kubectl, namespace: str, tmp_path: Path
) -> None:
    text = yaml.safe_dump(document(namespace, after="never"))
    log = tmp_path / "operator.log"
    with operator("--namespace", namespace, log=log):
        kubectl("apply", "-f", "-", text=text)
        status_in(kubectl, namespace, "Running")
        before = names(kubectl, namespace)
    with operator("--namespace", namespace, log=log):
        for pod in kubectl("get", "pods", "-n", namespace, "-o", "name").split():
            kubectl("annotate", "-n", namespace, pod, "k8s-here/after=0", "--overwrite")
        found = status_in(kubectl, namespace, "Succeeded")
        assert found["restarts"] == 0
        assert found["replicaStatuses"]["nn-worker"]["succeeded"] == 2
        # The second operator created nothing that the first one had.
        assert names(kubectl, namespace) == before
    kubectl("delete", "pj", "adult-income", "-n", namespace, "--wait=false")
    until(lambda: not names(kubectl, namespace), "everything is deleted", GONE_S)


def test_two_jobs_in_a_namespace_leave_each_other_alone(
    kubectl: Kubectl, namespace: str, tmp_path: Path
) -> None:
    several = [document(namespace, name, after="never") for name in (NAME, "other")]
    with operator("--namespace", namespace, log=tmp_path / "log"):
        kubectl("apply", "-f", "-", text=yaml.safe_dump_all(several))
        for name in (NAME, "other"):
            status_in(kubectl, namespace, "Running", name)
        both = names(kubectl, namespace)
        kubectl("delete", "pj", NAME, "-n", namespace, "--wait=false")
        left = {one for one in both if one.partition("/")[2].startswith("other")}
        until(lambda: names(kubectl, namespace) == left, "one is deleted", GONE_S)
        assert len(left) == len(both) / 2
        for pod in (one for one in left if one.startswith("pod/")):
            kubectl("annotate", "-n", namespace, pod, "k8s-here/after=0", "--overwrite")
        assert status_in(kubectl, namespace, "Succeeded", "other")["restarts"] == 0


def test_top_and_doctor_find_the_pods_and_the_keys_and_say_what_kubectl_says(
    kubectl: Kubectl, namespace: str, tmp_path: Path
) -> None:
    """No container runs, so there is nothing that could be forwarded to."""
    with operator("--namespace", namespace, log=tmp_path / "log"):
        kubectl("apply", "-f", "-", text=yaml.safe_dump(document(namespace, after="never")))
        status_in(kubectl, namespace, "Running")
    top = k8s_utils("top", "--once", NAME, "--namespace", namespace)
    assert top.returncode == 1, top
    assert "0 of 9 processes answer" in top.stdout
    for process in ("data-loader 0", "embedding-parameter-server 1", "nn-worker 3"):
        assert f"{process} in pod {NAME}-" in top.stderr, top.stderr
    assert "error upgrading connection" in top.stderr
    doctor = k8s_utils("doctor", NAME, "--namespace", namespace, "--json")
    assert doctor.returncode == 1, doctor
    assert "error upgrading connection" in doctor.stdout
    assert doctor.stdout.count("kubectl describe pod") == 8  # the loader has no port for calls
    for command in (["top", "--once"], ["doctor"]):
        ran = k8s_utils(*command, "another", "--namespace", namespace)
        assert ran.returncode == 2, ran
        assert "expected pods of a job another" in ran.stderr


def test_a_trainer_that_fails_is_named_with_its_exit_code(
    kubectl: Kubectl, namespace: str, tmp_path: Path
) -> None:
    found = document(namespace, after="1", exit="7")
    found["spec"]["maxRestarts"] = 1
    with operator("--namespace", namespace, log=tmp_path / "log"):
        kubectl("apply", "-f", "-", text=yaml.safe_dump(found))
        status = status_in(kubectl, namespace, "Failed")
    assert status["restarts"] == 1
    assert "exit code 7" in status["message"]
    assert status["message"].startswith("adult-income-nn-worker-")


def test_a_quota_is_the_message_of_a_job_that_it_keeps_from_running(
    kubectl: Kubectl, namespace: str, tmp_path: Path
) -> None:
    kubectl("create", "quota", "team", "--hard=pods=3", "-n", namespace)
    until(
        lambda: kubectl(
            "get", "quota", "team", "-n", namespace, "-o", "jsonpath={.status.used}"
        ),
        "the quota has counted",
    )
    with operator("--namespace", namespace, log=tmp_path / "log"):
        kubectl("apply", "-f", "-", text=yaml.safe_dump(document(namespace, after="never")))
        until(
            lambda: (
                "exceeded quota: team" in status_of(kubectl, namespace, NAME).get("message", "")
            ),
            "the quota in the status",
            CAUSE_S,
        )


def test_the_operator_works_with_its_role_and_may_do_nothing_else(
    kubectl: Kubectl, namespace: str, tmp_path: Path
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
    with pytest.raises(AssertionError, match="Forbidden"):
        kubectl("get", "secrets", "-n", namespace, "--as", account)
    with operator(
        *("--namespace", namespace),
        log=tmp_path / "log",
        kubeconfig=_kubeconfig_of(kubectl, namespace, tmp_path),
    ):
        kubectl("apply", "-f", "-", text=yaml.safe_dump(document(namespace)))
        status_in(kubectl, namespace, "Succeeded")
    assert "403" not in (tmp_path / "log").read_text()


def test_serving_is_stored_as_it_is_and_its_pods_are_ready(
    kubectl: Kubectl, namespace: str
) -> None:
    objects = serving_objects(kubectl)
    kubectl("apply", "-n", namespace, "-f", "-", text=yaml.safe_dump_all(objects))

    def ready() -> bool:
        path = "jsonpath={.items[*].status.readyReplicas}"
        found = kubectl("get", "statefulset,deployment", "-n", namespace, "-o", path)
        return found.split() == ["2", "1"]  # what scales the second has no metric here

    until(ready, "servers of rows and of requests are ready")
    for one in objects:
        kind, name = one["kind"], one["metadata"]["name"]
        kind = (
            f"{kind}.{one['apiVersion'].partition('/')[0]}"
            if "/" in one["apiVersion"]
            else kind
        )
        stored = json.loads(kubectl("get", kind, name, "-n", namespace, "-o", "json"))
        if kind.startswith("Horizontal"):  # read in its first version, with other fields
            assert "persia_serving_request_seconds_p99" in json.dumps(stored)
        else:
            assert not list(lost(one, stored, kind)), name
    # Each server of rows has the number that is in its name.
    pods = kubectl("get", "pods", "-n", namespace, "-l", "role=rows", "-o", "name")
    assert set(pods.split()) == {"pod/clicks-rows-0", "pod/clicks-rows-1"}


def _kubeconfig_of(kubectl: Kubectl, namespace: str, folder: Path) -> str:
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
