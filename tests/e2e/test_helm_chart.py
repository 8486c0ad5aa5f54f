"""The chart of deploy/helm, rendered and linted by Helm's own code.

`make helm` puts that into build/helm: the library is Go's, of 250 MB, and no requirement of
`make test`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from persia.version import __version__
from tests.k8s.schemas import VERSIONS, check
from tests.support.processes import ROOT

pytestmark = pytest.mark.slow

CHART = ROOT / "deploy" / "helm" / "persia"
LIBRARY = ROOT / "build" / "helm"
CHILD = Path(__file__).with_name("helm_child.py")
OPERATOR = ROOT / "deploy" / "operator"

ALL_SET: dict[str, Any] = {
    "image": {"repository": "registry.example.com/persia", "tag": "1", "pullPolicy": "Always"},
    "imagePullSecrets": [{"name": "pull"}],
    "jobImages": {"server": "registry.example.com/s:1", "nnWorker": "registry.example.com/n:1"},
    "namespaces": ["training", "research"],
    "resources": {"requests": {"cpu": 1, "memory": "1Gi"}, "limits": {"memory": "1Gi"}},
    "nodeSelector": {"pool": "system"},
    "tolerations": [{"key": "system", "operator": "Exists"}],
    "affinity": {"podAntiAffinity": {}},
    "priorityClassName": "system-cluster-critical",
    "podLabels": {"team": "a"},
    "podAnnotations": {"example.com/x": "1"},
}
REFUSED: list[dict[str, Any]] = [
    {"image": {"repository": ""}},
    {"namespaces": "training"},
    {"replicas": 2},
]


@pytest.fixture(scope="module")
def answers() -> list[Any]:
    """Return what Helm says: the report of lint, then what it renders of each of the values."""
    if not (LIBRARY / "helm_python").is_dir():
        pytest.skip("no Helm: `make helm` installs it into build/helm")
    values = [{}, ALL_SET, *REFUSED]
    ran = subprocess.run(
        [sys.executable, str(CHILD), str(CHART)],
        input="".join(json.dumps(one) + "\n" for one in values),
        env={**os.environ, "PYTHONPATH": str(LIBRARY)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


def objects(rendered: dict[str, str]) -> list[dict[str, Any]]:
    return [
        one
        for name, text in sorted(rendered.items())
        if name.endswith(".yaml")
        for one in yaml.safe_load_all(text)
        if one
    ]


def by_kind(found: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [one for one in found if one["kind"] == kind]


def test_lint_finds_nothing_but_that_there_is_no_icon(answers: list[Any]) -> None:
    report = answers[0]
    assert report["total_charts_linted"] == 1
    assert [one["error"] for one in report["messages"]] == ["icon is recommended"]


def test_by_default_it_is_what_kustomize_applies(answers: list[Any]) -> None:
    found = objects(answers[1])
    given = [
        one
        for name in ("role.yaml", "operator.yaml")
        for one in yaml.safe_load_all((OPERATOR / name).read_text(encoding="utf-8"))
    ]
    for one in found:
        check(one)
    assert {one["kind"] for one in given} - {"Namespace"} == {one["kind"] for one in found}
    for kind, key in (("ClusterRole", "rules"), ("ClusterRoleBinding", "roleRef")):
        (ours,), (theirs,) = by_kind(found, kind), by_kind(given, kind)
        assert ours[key] == theirs[key]
    (ours,), (theirs,) = by_kind(found, "Deployment"), by_kind(given, "Deployment")
    pod, want = (one["spec"]["template"]["spec"] for one in (ours, theirs))
    assert pod["containers"][0].pop("imagePullPolicy") == "IfNotPresent"
    assert pod == want
    assert ours["spec"]["strategy"] == theirs["spec"]["strategy"]
    labels = ours["spec"]["template"]["metadata"]["labels"]
    assert ours["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_every_value_has_its_place(answers: list[Any]) -> None:
    found = objects(answers[2])
    for one in found:
        check(one)
    roles, bindings = by_kind(found, "Role"), by_kind(found, "RoleBinding")
    for several in (roles, bindings):
        assert [one["metadata"]["namespace"] for one in several] == ALL_SET["namespaces"]
    assert not by_kind(found, "ClusterRole")
    (deployment,) = by_kind(found, "Deployment")
    template = deployment["spec"]["template"]
    pod = template["spec"]
    (container,) = pod["containers"]
    assert container["image"] == "registry.example.com/persia:1"
    server, trainer = ALL_SET["jobImages"].values()
    assert container["command"] == [
        *("persia-k8s-utils", "operator", "--namespace=training", "--namespace=research"),
        *(f"--server-image={server}", f"--nn-worker-image={trainer}"),
    ]
    assert container["resources"] == ALL_SET["resources"]
    for key in ("imagePullSecrets", "nodeSelector", "tolerations", "affinity"):
        assert pod[key] == ALL_SET[key]
    assert pod["priorityClassName"] == ALL_SET["priorityClassName"]
    assert template["metadata"]["annotations"] == ALL_SET["podAnnotations"]
    assert template["metadata"]["labels"].items() >= ALL_SET["podLabels"].items()


def test_a_value_that_is_none_is_refused(answers: list[Any]) -> None:
    texts = answers[3:]
    assert len(texts) == len(REFUSED)
    for text, values in zip(texts, REFUSED, strict=True):
        assert isinstance(text, str), values
        assert next(iter(values)) in text


def test_the_chart_has_the_resource_and_the_version_of_this_tree() -> None:
    name = "jobs.persia.com.yaml"
    text = (ROOT / "deploy" / "crd" / name).read_text(encoding="utf-8")
    # Otherwise: persia-k8s-utils gencrd --output deploy/helm/persia/crds/jobs.persia.com.yaml
    assert (CHART / "crds" / name).read_text(encoding="utf-8") == text
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert chart["appVersion"] == __version__
    assert {"1.25.0", "1.37.0"} <= set(VERSIONS)
