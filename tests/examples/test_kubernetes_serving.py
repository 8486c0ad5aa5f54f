"""The manifests of examples/kubernetes/serving: what they say fits together, and to PERSIA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from persia import env
from persia._metrics.definitions import METRICS
from persia.launcher import cli
from tests.k8s.schemas import check
from tests.support.fixtures import Monkey
from tests.support.processes import ROOT

FOLDER = ROOT / "examples" / "kubernetes" / "serving"
SCRIPTS = ROOT / "examples" / "serving"


def read(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8")))


RESOURCES: list[str] = read("kustomization.yaml")[0]["resources"]
OBJECTS = [one for name in RESOURCES for one in read(name)]
TEMPLATES = {
    one["metadata"]["name"]: one["spec"]["template"]
    for one in OBJECTS
    if "template" in one["spec"]
}


def of(kind: str) -> dict[str, dict[str, Any]]:
    return {one["metadata"]["name"]: one for one in OBJECTS if one["kind"] == kind}


def container(name: str) -> dict[str, Any]:
    (found,) = TEMPLATES[name]["spec"]["containers"]
    return dict(found)


def variables(name: str) -> dict[str, str]:
    return {one["name"]: one["value"] for one in container(name)["env"]}


@pytest.mark.parametrize("one", OBJECTS, ids=lambda one: one["kind"])
def test_every_version_of_kubernetes_accepts_them(one: dict[str, Any]) -> None:
    check(one)


def test_kustomize_applies_every_file_that_is_of_the_cluster() -> None:
    rest = {"kustomization.yaml", "prometheus-adapter.yaml"}
    assert {path.name for path in FOLDER.iterdir()} == {*RESOURCES, *rest}


def test_selectors_find_pods_and_names_of_ports_are_theirs() -> None:
    for kind in ("Service", "PodDisruptionBudget", "NetworkPolicy"):
        for name, one in of(kind).items():
            spec = one["spec"]
            wanted = spec.get("selector") or spec.get("podSelector")
            labels = wanted.get("matchLabels", wanted)
            found = [
                template
                for template in TEMPLATES.values()
                if labels.items() <= template["metadata"]["labels"].items()
            ]
            assert len(found) == 1, (kind, name)
            ports = {
                port["containerPort"] for port in found[0]["spec"]["containers"][0]["ports"]
            }
            assert {port["port"] for port in spec.get("ports", ())} <= ports
    for name in ("clicks", "clicks-rows"):
        one = container(name)
        named = {port["name"]: port["containerPort"] for port in one["ports"]}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert one[probe]["httpGet"]["port"] in named
        annotations = TEMPLATES[name]["metadata"]["annotations"]
        assert int(annotations["prometheus.io/port"]) == named["metrics"]
        assert variables(name)["PERSIA_METRICS_PORT"] == str(named["metrics"])


def test_rows_are_asked_of_each_server_by_its_pod_s_name(monkeypatch: Monkey) -> None:
    (servers,) = of("StatefulSet").values()
    name, count = servers["metadata"]["name"], servers["spec"]["replicas"]
    assert variables(name)["REPLICA_SIZE"] == str(count)
    assert variables(name)["REPLICA_INDEX"] == "auto"
    variable = env.serving_replicas
    monkeypatch.setenv(variable.name, variables("clicks")[variable.name])
    service = servers["spec"]["serviceName"]
    assert variable() == [[f"{name}-{number}.{service}:8888"] for number in range(count)]
    assert of("Service")[service]["spec"]["clusterIP"] == "None"
    config = yaml.safe_load((SCRIPTS / "config" / "rows.yml").read_text(encoding="utf-8"))
    assert config["common_config"]["infer_config"]["incremental_dir"].startswith("/serving/")


def test_options_variables_and_files_are_those_that_there_are() -> None:
    options = {one.partition("=")[0] for one in container("clicks")["args"]}
    assert options <= {name for one in cli.commands["serve"].params for name in one.opts}
    for name in ("clicks", "clicks-rows"):
        unknown = {one for one in variables(name) if one not in env.VARIABLES}
        assert not unknown
    for template in TEMPLATES.values():
        (one,) = template["spec"]["containers"]
        volumes = {volume["name"] for volume in template["spec"]["volumes"]}
        assert {mount["name"] for mount in one["volumeMounts"]} == volumes
    assert Path(container("clicks-train")["command"][1]).name in {
        path.name for path in SCRIPTS.iterdir()
    }


def test_pods_are_scaled_by_a_metric_that_serve_has() -> None:
    (scaler,) = of("HorizontalPodAutoscaler").values()
    spec = scaler["spec"]
    assert spec["scaleTargetRef"]["name"] in of("Deployment")
    (metric,) = spec["metrics"]
    (adapter,) = read("prometheus-adapter.yaml")
    (rule,) = adapter["rules"]["custom"]
    assert rule["name"]["as"] == metric["pods"]["metric"]["name"]
    series = rule["seriesQuery"].partition("{")[0]
    histograms = {name for name, one in METRICS.items() if one.kind == "histogram"}
    assert series.removesuffix("_bucket") in histograms
    query = rule["metricsQuery"].replace("<<.Series>>", series)
    query = query.replace("<<.GroupBy>>", "pod").replace("<<.LabelMatchers>>", 'pod=~"a|b"')
    assert query == (
        f'histogram_quantile(0.99, sum by (le, pod) (rate({series}{{pod=~"a|b"}}[2m])))'
    )
