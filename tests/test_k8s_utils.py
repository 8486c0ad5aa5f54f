"""The commands for Kubernetes, as they are typed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from persia import k8s_utils
from persia._k8s import forward
from persia._k8s.crd import crd
from persia._k8s.render import WRITERS
from persia._rpc.curve import make_keys
from tests.k8s.specs import original
from tests.support.processes import ROOT, run

EXAMPLE = ROOT / "examples/kubernetes/adult.yml"


def invoke(*words: object) -> tuple[int, str, str]:
    ran = CliRunner().invoke(k8s_utils.cli, [str(word) for word in words])
    return ran.exit_code, ran.stdout, ran.stderr


@pytest.mark.parametrize("engine", WRITERS)
def test_render_writes_objects_that_kubectl_takes(engine: str) -> None:
    status, text, notes = invoke("render", "-f", EXAMPLE, "--engine", engine)
    assert (status, notes) == (0, "")
    kinds = [one["kind"] for one in yaml.safe_load_all(text)]
    assert kinds[-1] == {"native": "Job", "jobset": "JobSet", "trainjob": "TrainJob"}[engine]


def test_render_takes_images_keys_and_the_cluster_s_version(tmp_path: Path) -> None:
    path, keys = tmp_path / "job.yml", tmp_path / "keys"
    path.write_text(yaml.safe_dump(original(engine="jobset")), encoding="utf-8")
    make_keys(keys)
    options = ("--keys", keys, "--kubernetes", "1.20", "--nn-worker-image", "r/train:2")
    status, text, notes = invoke("render", "-f", path, *options)
    assert status == 0
    assert notes == f"{path}: PERSIA_NATS_URL is ignored: there is no broker any more\n"
    objects = {one["kind"]: one for one in yaml.safe_load_all(text)}
    assert list(objects) == ["Secret", "NetworkPolicy", "PodDisruptionBudget", "JobSet"]
    assert objects["PodDisruptionBudget"]["apiVersion"] == "policy/v1beta1"
    images = {
        job["name"]: job["template"]["spec"]["template"]["spec"]["containers"][0]["image"]
        for job in objects["JobSet"]["spec"]["replicatedJobs"]
    }
    assert images == {
        "embedding-ps": "registry.local/server:1",
        "embedding-worker": "persia:server",
        "nn-worker": "r/train:2",
        "dataloader": "persia:server",
    }


def test_what_is_wrong_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "job.yml"
    text = EXAMPLE.read_text(encoding="utf-8").replace("replicas: 2", "replicas: many", 1)
    path.write_text(text, encoding="utf-8")
    line = text[: text.index("replicas: many")].count("\n") + 1
    status, _, error = invoke("render", "-f", path)
    assert status == 2
    assert error.startswith(f"{path}:{line}: spec.embeddingParameterServer.replicas: ")
    for version in ("new", "1.19", "1", "-1.31"):
        status, _, error = invoke("render", "-f", EXAMPLE, "--kubernetes", version)
        assert status == 2
        expected = "--kubernetes: expected a version as 1.31, from 1.20 on"
        assert error == f"{expected}, got {version!r}\n"
    for version in ("v1.31.2", "1.27.3-gke.100"):
        assert invoke("render", "-f", EXAMPLE, "--kubernetes", version)[0] == 0
    status, _, error = invoke("render")
    assert status == 2
    assert error.endswith("Example: persia-k8s-utils render -f job.yml --engine jobset\n")


def test_gencrd_writes_the_resource(tmp_path: Path) -> None:
    status, text, _ = invoke("gencrd")
    assert status == 0
    assert yaml.safe_load(text) == crd()
    path = tmp_path / "crd.yaml"
    assert invoke("gencrd", "--output", path)[:2] == (0, f"{path}\n")
    assert path.read_text(encoding="utf-8") == text
    status, _, error = invoke("gencrd", "--output", tmp_path / "none" / "crd.yaml")
    assert status == 2
    assert "--output: cannot write" in error


@pytest.mark.parametrize("words", [("top", "adult", "--once"), ("doctor", "adult", "--json")])
def test_a_job_in_a_cluster_is_seen_through_kubectl(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "kubectl"
    program.write_text('#!/bin/sh\necho "$@" >&2\nexit 1\n', encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(forward, "exit_on_signals", bool)  # which is for a whole process
    status, _, error = invoke(*words, "--namespace", "training")
    called = "get pods --selector=persia_job=adult --namespace=training --output=json"
    assert (status, error) == (2, f"kubectl get: {called}\n")


def test_rendering_needs_no_library_of_an_operator() -> None:
    code = (
        "import sys; from persia.k8s_utils import cli\n"
        f"cli(['render', '-f', {str(EXAMPLE)!r}], standalone_mode=False)\n"
        "print({'kopf', 'aiohttp', 'starlette', 'torch'} & sys.modules.keys())"
    )
    ran = run("-c", code)
    assert ran.stdout.splitlines()[-1] == "set()", ran.stderr
