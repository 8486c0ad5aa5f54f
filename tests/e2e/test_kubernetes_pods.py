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
from tests.e2e.clusters import Kubectl, names, runs_containers, status_of, until
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
        until(has_ended, "the job has succeeded", TRAIN_S)
    except AssertionError as exc:
        log = kubectl("logs", "deployment/persia-operator", "-n", installed, check=False)
        raise AssertionError(log) from exc
    expect_trained(kubectl, adult)
    # Of connections without keys a role says that everybody may connect.
    assert "without keys" not in kubectl("logs", "job/adult-embedding-ps-0", "-n", adult)
    kubectl("delete", "pj", "adult", "-n", adult)
    until(lambda: not names(kubectl, adult), "everything is deleted", GONE_S)
