"""Jobs in real pods, where a cluster is given whose nodes run containers.

PERSIA_TEST_IMAGE names the images, ``persia`` if it is not set: ``:server``, ``:nn-worker`` and
``:operator`` are on the nodes. `make k8s-pods` builds them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from persia import env
from persia._k8s.render import as_yaml, render
from persia._k8s.spec import read_job
from tests.e2e.clusters import (
    Kubectl,
    k8s_utils,
    names,
    runs_containers,
    serving_objects,
    status_of,
    until,
)
from tests.support.processes import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

EXAMPLE = ROOT / "examples" / "kubernetes" / "adult.yml"
ADULT = ROOT / "examples" / "adult_income"
# Seconds; on idle cores a job takes a fifth of them.
TRAIN_S, GONE_S = 300.0, 30.0
LEAST_AUC = 0.89


@pytest.fixture(scope="module")
def image(kubectl: Kubectl) -> str:
    if not runs_containers(kubectl):
        pytest.skip("the cluster's nodes are stand-ins, which run no containers")
    return os.environ.get("PERSIA_TEST_IMAGE", "persia")


@pytest.fixture
def adult(kubectl: Kubectl, namespace: str) -> str:
    """Return a namespace with what docs/kubernetes.md puts there before the job."""
    data = env.data_dir()
    if data is None or not (data / "adult").is_dir():
        pytest.skip("PERSIA_DATA_DIR has no adult/")
    for name, folder in (
        ("adult-scripts", ADULT),
        ("adult-config", ADULT / "config"),
        ("adult-data", data / "adult"),
    ):
        kubectl("create", "configmap", name, f"--from-file={folder}", "-n", namespace)
    return namespace


def pods(kubectl: Kubectl, namespace: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(
        kubectl("get", "pods", "-n", namespace, "-l", "persia_job", "-o", "json")
    )["items"]
    return found


def phases(kubectl: Kubectl, namespace: str) -> list[str]:
    return [one["status"]["phase"] for one in pods(kubectl, namespace)]


def exit_codes(kubectl: Kubectl, namespace: str) -> dict[str, list[int]]:
    return {
        one["metadata"]["name"]: [
            found["state"]["terminated"]["exitCode"]
            for found in one["status"]["containerStatuses"]
        ]
        for one in pods(kubectl, namespace)
    }


def expect_trained(kubectl: Kubectl, namespace: str) -> None:
    """Check that each of the example's six pods has ended with 0, and what was learned."""
    logs = kubectl("logs", "job/adult-nn-worker-0", "-n", namespace)
    codes = exit_codes(kubectl, namespace)
    assert len(codes) == 6
    assert set(map(tuple, codes.values())) == {(0,)}, (codes, logs)
    auc = float(re.findall(r"AUC (\d\.\d+)", logs)[-1])
    print(f"AUC {auc:.4f}")  # pytest -rP shows it
    assert auc > LEAST_AUC, logs


def test_what_is_rendered_trains_in_pods_and_leaves_nothing(
    kubectl: Kubectl, image: str, adult: str
) -> None:
    images = {"nn-worker": f"{image}:nn-worker"}
    roles = ("embedding-parameter-server", "embedding-worker", "data-loader")
    images |= dict.fromkeys(roles, f"{image}:server")
    _, objects = render(read_job(EXAMPLE), kubernetes=(1, 20), images=images)
    kubectl("apply", "-f", "-", "-n", adult, text=as_yaml(objects))

    def has_ended() -> bool:
        found = phases(kubectl, adult)
        assert "Failed" not in found, kubectl("logs", "job/adult-nn-worker-0", "-n", adult)
        return found == ["Succeeded"] * 6

    until(has_ended, "all pods have ended", TRAIN_S)
    expect_trained(kubectl, adult)
    kinds = "jobs,services,networkpolicies,pdb"
    kubectl("delete", kinds, "-l", "persia_job=adult", "-n", adult, "--wait=false")
    until(lambda: not names(kubectl, adult), "everything is deleted", GONE_S)


@pytest.fixture
def installed(kubectl: Kubectl, image: str) -> Iterator[str]:
    """Have the operator run in a pod, as deploy/ says; yields its namespace."""
    objects = list(yaml.safe_load_all(kubectl("kustomize", str(ROOT / "deploy"))))
    (deployment,) = (one for one in objects if one["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    container["image"] = f"{image}:operator"
    container["command"] += [f"--server-image={image}:server"]
    container["command"] += [f"--nn-worker-image={image}:nn-worker"]
    kubectl("apply", "-f", "-", text=yaml.safe_dump_all(objects))
    yield deployment["metadata"]["namespace"]
    # The resource stays: other tests have applied it, too.
    kubectl("delete", "namespace", deployment["metadata"]["namespace"], "--wait=false")
    kubectl("delete", "clusterrole,clusterrolebinding", "persia-operator")


def expect_seen(namespace: str) -> None:
    """Check that the job is seen from here: its metrics, and its servers by their keys."""
    job = ("adult", "--namespace", namespace)
    until(
        lambda: "6 of 6 processes answer" in k8s_utils("top", *job, "--once").stdout,
        "top shows every process",
    )
    config = str(ADULT / "config" / "embedding_config.yml")
    ran = k8s_utils("doctor", *job, "--embedding-config", config, "--json")
    findings = json.loads(ran.stdout)["findings"]
    servers = [one["text"] for one in findings if one["check"] == "versions"]
    assert len(servers) == 5, ran
    assert all("runs: replica" in text for text in servers), ran


def test_an_operator_in_a_pod_trains_with_keys_that_it_made(
    kubectl: Kubectl, installed: str, adult: str
) -> None:
    kubectl("apply", "-f", str(EXAMPLE), "-n", adult)

    def has_ended() -> bool:
        status = status_of(kubectl, adult, "adult")
        assert status.get("phase") != "Failed", status
        return status.get("phase") == "Succeeded" and phases(kubectl, adult) == [
            "Succeeded"
        ] * len(phases(kubectl, adult))

    try:
        until(lambda: status_of(kubectl, adult, "adult").get("phase") == "Running", "it runs")
        expect_seen(adult)
        until(has_ended, "the job has succeeded", TRAIN_S)
    except AssertionError as exc:
        log = kubectl("logs", "deployment/persia-operator", "-n", installed, check=False)
        raise AssertionError(log) from exc
    expect_trained(kubectl, adult)
    # Of connections without keys a role says that everybody may connect.
    assert "without keys" not in kubectl("logs", "job/adult-embedding-ps-0", "-n", adult)
    kubectl("delete", "pj", "adult", "-n", adult)
    until(lambda: not names(kubectl, adult), "everything is deleted", GONE_S)


# --- serving ----------------------------------------------------------------------------------

SCRIPTS = ROOT / "examples" / "serving"
# A volume of a directory is root's, whatever group a pod asks for.
OPEN: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "open"},
    "spec": {
        "restartPolicy": "Never",
        "securityContext": {"runAsUser": 0},
        "containers": [
            {
                "name": "open",
                "command": ["chmod", "0777", "/serving"],
                "volumeMounts": [{"name": "serving", "mountPath": "/serving"}],
            }
        ],
        "volumes": [{"name": "serving", "persistentVolumeClaim": {"claimName": "clicks"}}],
    },
}
ASK = """
import json, urllib.request
inputs = [
    {"name": "user", "datatype": "INT64", "shape": [1], "data": [7]},
    {"name": "item", "datatype": "INT64", "shape": [2], "data": [1, 2]},
    {"name": "seen_items", "datatype": "INT64", "shape": [1, 2], "data": [2, 3]},
    {"name": "hour", "datatype": "FP32", "shape": [1, 1], "data": [0.5]},
]
url = "http://clicks:8080/v2/models/clicks/infer"
with urllib.request.urlopen(url, json.dumps({"inputs": inputs}).encode(), timeout=10) as reply:
    print(json.dumps(json.load(reply)["outputs"][0]["data"]))
"""


def test_pods_serve_what_a_job_publishes_also_when_a_server_of_rows_is_replaced(
    kubectl: Kubectl, image: str, namespace: str
) -> None:
    objects = serving_objects(kubectl)
    for one in [*objects, OPEN]:
        pod = one["spec"].get("template", one)["spec"]
        for container in pod.get("containers", ()):
            container["image"] = f"{image}:serving"
    (train,) = (one for one in objects if one["kind"] == "Job")
    train["spec"]["template"]["spec"]["containers"][0]["args"] = [
        *("--seconds", "20", "--publish-every", "5")
    ]
    claims = [one for one in objects if one["kind"] == "PersistentVolumeClaim"]
    kubectl("apply", "-n", namespace, "-f", "-", text=yaml.safe_dump_all([*claims, OPEN]))
    words = ("get", "pod", "open", "-n", namespace, "-o", "jsonpath={.status.phase}")
    until(lambda: kubectl(*words) == "Succeeded", "the volume is open")
    for name, folder in (("scripts", SCRIPTS), ("config", SCRIPTS / "config")):
        given = ("create", "configmap", f"clicks-{name}", f"--from-file={folder}")
        kubectl(*given, "-n", namespace)
    kubectl("apply", "-n", namespace, "-f", "-", text=yaml.safe_dump_all(objects))

    def succeeded() -> bool:
        path = "jsonpath={.status.succeeded} {.status.failed}"
        found = kubectl("get", "job", "clicks-train", "-n", namespace, "-o", path).split()
        assert found in ([], ["1"]), kubectl("logs", "job/clicks-train", "-n", namespace)
        return found == ["1"]

    until(succeeded, "training has ended", TRAIN_S)
    ask = ("exec", "-n", namespace, "deployment/clicks", "--", "python", "-c", ASK)

    def scores() -> list[float]:
        text = kubectl(*ask, check=False)
        found: list[float] = json.loads(text) if text else []
        return found

    before = until(scores, "the service answers", TRAIN_S)
    assert len(before) == 2
    assert all(0 < score < 1 for score in before)
    kubectl("delete", "pod", "clicks-rows-1", "-n", namespace, "--grace-period=5")
    waits = ("wait", "--for=condition=Ready", "pod/clicks-rows-1", "--timeout=50s")
    until(lambda: kubectl(*waits, "-n", namespace, check=False), "it is replaced", TRAIN_S)
    assert until(scores, "the service answers again", TRAIN_S) == before
