"""The manifests of deploy/kserve: what they name exists here."""

from __future__ import annotations

from typing import Any

import yaml

from persia._cli.serve import _OPTIONS
from tests.support.processes import ROOT

FOLDER = ROOT / "deploy" / "kserve"


def read(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))


def test_the_runtime_starts_serve_with_options_that_it_has() -> None:
    runtime = read("clusterservingruntime.yaml")
    assert runtime["kind"] == "ClusterServingRuntime"
    assert runtime["spec"]["protocolVersions"] == ["v2", "grpc-v2"]
    (container,) = runtime["spec"]["containers"]
    assert container["name"] == "kserve-container"
    assert container["command"] == ["persia-launcher", "serve"]
    folder, *given = container["args"]
    assert folder == "/mnt/models"
    options = dict(one.split("=") for one in given)
    assert options.keys() <= {one[0] for one in _OPTIONS}
    (port,) = container["ports"]
    assert str(port["containerPort"]) == options["--http-port"]
    for probe in ("readinessProbe", "livenessProbe"):
        about = container[probe]["httpGet"]
        assert about["port"] == port["containerPort"]
        assert about["path"].startswith("/v2/health/")


def test_the_service_names_the_runtime() -> None:
    runtime, service = read("clusterservingruntime.yaml"), read("inferenceservice.yaml")
    model = service["spec"]["predictor"]["model"]
    assert model["runtime"] == runtime["metadata"]["name"]
    formats = {one["name"] for one in runtime["spec"]["supportedModelFormats"]}
    assert model["modelFormat"]["name"] in formats
    assert model["protocolVersion"] in runtime["spec"]["protocolVersions"]
