"""The stack as it is written: what Compose reads, without running it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from persia._replica_index import own_number
from tests.support.processes import ROOT, run, why_no_compose
from tests.support.role_keys import FILES

STACK = ROOT / "compose/stack.yml"
SETTINGS = ROOT / "compose/.docker.env"
DOCKERFILE = ROOT / "compose/Dockerfile"
ROLES = ("data_loader", "nn_worker", "embedding_worker", "embedding_parameter_server")
UNITS = {"m": 1 << 20, "g": 1 << 30}


def services() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(STACK.read_text())["services"]
    return found


def settings() -> dict[str, str]:
    lines = [line for line in SETTINGS.read_text().splitlines() if line and line[0] != "#"]
    return dict(line.split("=", 1) for line in lines)


def variables_read() -> set[str]:
    """The names in persia/env.py, and in the example's script."""
    code = (ROOT / "persia/env.py").read_text()
    code += (ROOT / "examples/adult_income/train.py").read_text()
    return set(re.findall(r'"([A-Z][A-Z_]+)"', code))


def test_every_variable_that_containers_get_is_read_and_has_a_value() -> None:
    stack = STACK.read_text()
    for name in settings():
        used = name in variables_read() or f"${{{name}" in stack
        assert used or name == "OMP_NUM_THREADS", name  # torch's
    for role in ROLES:
        for name in services()[role]["environment"]:
            assert name in variables_read(), name
    for name, default in re.findall(r"\$\{([A-Z_]+)(:-)?", stack):
        assert default or name in settings(), name


@pytest.mark.parametrize("role", [role for role in ROLES if role != "nn_worker"])
def test_one_value_scales_a_role(role: str) -> None:
    service = services()[role]
    value = f"${{{role.upper()}_REPLICAS}}"
    assert service["deploy"]["replicas"] == value
    assert service["environment"]["REPLICA_SIZE"] == value
    assert service["environment"]["REPLICA_INDEX"] == "auto"
    assert service["restart"].startswith("on-failure")
    assert service["environment"]["PERSIA_SUPERVISED"] == "1"
    assert services()["nn_worker"]["restart"] == "no"


@pytest.mark.parametrize("name", sorted(services()))
def test_containers_may_do_little(name: str) -> None:
    service = services()[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["init"] is True
    assert "privileged" not in service
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))


@pytest.mark.parametrize("role", ROLES)
def test_roles_are_limited_and_asked_whether_they_live(role: str) -> None:
    service = services()[role]
    assert service["networks"] == ["cluster"]
    assert all(one.endswith(":ro") or one == "rows:/dev/shm" for one in service["volumes"])
    # A stranger's connection takes one until its handshake is given up.
    assert service["ulimits"] == {"nofile": 4096}
    module, *options, asked = service["healthcheck"]["test"][3:]
    assert (module, asked) == ("persia._cli.health", role.replace("_", "-"))
    assert options == (["--ready"] if role in ("data_loader", "nn_worker") else [])
    limit = service["deploy"]["resources"]["limits"]["memory"]
    value = settings()[limit.removeprefix("${").removesuffix("}")]
    container = int(value[:-1]) * UNITS[value[-1]]
    config = yaml.safe_load(
        (ROOT / "examples/adult_income/config/global_config.yml").read_text()
    )
    # Without one it is 70 % of the container's.
    own = config["embedding_parameter_server_config"].get("memory_limit", 0)
    assert own < container


def test_w70_a_pod_needs_the_image_and_no_rights_in_its_cluster() -> None:
    """The original's operator was not packaged, and might read every secret.

    What a pod has to say is in variables and its host name; its user is a number that is not
    root's; every command is in the wheel. Of the cluster only the operator knows, which comes
    by an extra, and may create secrets and read none.
    """
    project = (ROOT / "pyproject.toml").read_text()
    scripts = project.partition("[project.scripts]")[2].partition("\n[")[0]
    commands = dict(re.findall(r'^([\w-]+) = "([\w.]+):\w+"', scripts, re.MULTILINE))
    assert commands["persia-launcher"] == "persia.launcher"
    for name, module in commands.items():
        assert importlib.util.find_spec(module) is not None, name
    assert re.findall(r"^USER (\S+)$", DOCKERFILE.read_text(), re.MULTILINE) == ["10001:10001"]
    assert "uid=10001,gid=10001" in STACK.read_text()
    needed = project.partition("\ndependencies = [")[2].partition("\n]")[0]
    assert "numpy" in needed
    assert "kopf" not in needed
    role = yaml.safe_load((ROOT / "deploy/operator/role.yaml").read_text())
    verbs = {name: rule["verbs"] for rule in role["rules"] for name in rule["resources"]}
    assert verbs["secrets"] == ["create"]
    assert own_number("servers-3", lambda _: []) == 3
    # At every address of the pod, by the operator's word only (W-71).
    assert settings()["PERSIA_LISTEN_HOST"] == "0.0.0.0"


def test_images_and_packages_are_pinned() -> None:
    for name, service in services().items():
        image = service["image"]
        assert re.fullmatch(r"persia:[a-z-]+|[a-z]+/[a-z]+:v?\d+\.\d+\.\d+", image), name
    stages = re.findall(r"^FROM (\S+)", DOCKERFILE.read_text(), re.MULTILINE)
    assert set(stages) == {"python:3.11-slim-bookworm", "pip", "server", "nn-worker"}
    for name in (
        "requirements",
        "requirements-build",
        "requirements-serve",
        "requirements-torch",
    ):
        pins = (ROOT / f"compose/{name}.txt").read_text()
        requirements = re.findall(r"^([a-z0-9-]+)(\S*) \\$", pins, re.MULTILINE)
        assert all(re.fullmatch(r"==[\d.]+(\+cpu)?", version) for _, version in requirements)
        assert pins.count("--hash=sha256:") > len(requirements)
    # Each install of the image asks for hashes, but for our own wheel, and torch of other
    # builds than the one that has a hash.
    script = (ROOT / "compose/install-torch.sh").read_text()
    installs = re.findall(
        r"\binstall ([^;&\n]*(?:\\\n[^;&\n]*)*)", DOCKERFILE.read_text() + script
    )
    loose = [one for one in installs if "--require-hashes" not in one and "apt" not in one]
    assert [one.split()[-1] for one in loose if "no-install-recommends" not in one] == [
        "dist/*.whl",
        '"$wanted"',
        '"torch==$TORCH"',
    ]


def test_the_image_that_serves_has_what_the_extra_needs() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    listed = project.partition("\nserve = [\n")[2].partition("\n]\n")[0]
    needed = set(re.findall(r'^ *"([\w-]+)', listed, re.MULTILINE))
    assert "starlette" in needed
    pins = (ROOT / "compose/requirements-serve.txt").read_text()
    assert needed <= set(re.findall(r"^([a-z0-9-]+)==", pins, re.MULTILINE))
    role = services()["serve"]
    assert role["image"] == services()["trainer"]["image"] == "persia:serving"
    for server in ("row_server_0", "row_server_1"):
        assert services()[server]["volumes"][1].endswith(":ro")


def test_the_image_has_what_the_package_needs() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    listed = project.partition("\ndependencies = [\n")[2].partition("\n]\n")[0]
    needed = {name.lower() for name in re.findall(r'^ *"([\w-]+)', listed, re.MULTILINE)}
    assert "numpy" in needed
    pins = (ROOT / "compose/requirements.txt").read_text()
    # torch has a stage of its own; honcho is what Compose is instead of.
    assert needed - {"torch", "honcho"} <= set(
        re.findall(r"^([a-z0-9-]+)==", pins, re.MULTILINE)
    )
    constraint = re.search(
        r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE
    )
    assert constraint is not None
    assert f"ARG TORCH={constraint[1]}\n" in DOCKERFILE.read_text()
    pinned = (ROOT / "compose/requirements-torch.txt").read_text()
    assert f"\ntorch=={constraint[1]}+cpu " in f"\n{pinned}"


# --- as Compose reads it ----------------------------------------------------------------------


def test_what_is_missing_is_found_in_every_docker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert why_no_compose() == "docker is not installed"
    for status in (1, 125, 0):
        (tmp_path / "docker").write_text(f"#!/bin/sh\nexit {status}\n")
        (tmp_path / "docker").chmod(0o755)
        assert why_no_compose() == ("docker has no Compose plugin" if status else "")


def rendered(*files: str, **changes: str) -> dict[str, Any]:
    if why := why_no_compose():
        pytest.skip(why)
    words = ["docker", "compose", *(word for file in files for word in ("-f", file))]
    own = {**os.environ, "COMPOSE_PROFILES": "train,monitoring", **changes}
    got = run(*words, "config", "--format", "json", env=own)
    assert got.returncode == 0, got.stderr
    config: dict[str, Any] = json.loads(got.stdout)
    return config


def test_compose_reads_the_stack_from_the_root_and_a_shell_variable_scales() -> None:
    config = rendered(EMBEDDING_WORKER_REPLICAS="5")
    assert config["name"] == "persia"
    assert config["services"].keys() >= {*ROLES, "data", "prometheus", "grafana"}
    assert config["services"]["embedding_parameter_server"]["deploy"]["replicas"] == 3
    assert config["networks"]["cluster"]["internal"] is True
    worker = config["services"]["embedding_worker"]
    assert worker["deploy"]["replicas"] == 5
    assert worker["environment"]["REPLICA_SIZE"] == "5"


def test_overlays_fit_the_stack() -> None:
    config = rendered("compose.yaml", "compose/gpu.yml", NPROC_PER_NODE="2")
    trainer = config["services"]["nn_worker"]
    (device,) = trainer["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["count"]) == ("nvidia", -1)  # all
    assert trainer["command"][-1] == "2"
    assert trainer["build"]["args"]["TORCH_BUILD"].startswith("cu")
    assert trainer["deploy"]["resources"]["limits"]["memory"]
    guarded = rendered("compose.yaml", "compose/keys.yml", KEYS="/some/keys")
    for role in ROLES:
        service = guarded["services"][role]
        names = {secret["source"] for secret in service["secrets"]}
        assert names == set(FILES[role.replace("_", "-")]), role
        assert service["environment"]["PERSIA_KEYS"] == "/run/secrets"
        assert service["environment"]["PERSIA_LISTEN_WITHOUT_KEYS"] == "0"
        # Under the names by which the directory is read.
        assert all(
            s.get("target", s["source"]).endswith(s["source"]) for s in service["secrets"]
        )
    assert guarded["secrets"]["server.secret"]["file"] == "/some/keys/server.secret"
    resumes = rendered("compose.yaml", "compose/resume.yml")["services"]
    assert resumes["nn_worker"]["restart"].startswith("on-failure")
    patience_s = float(resumes["nn_worker"]["environment"]["PERSIA_GRACE_PERIOD"])
    assert resumes["nn_worker"]["stop_grace_period"] == "1m0s"
    assert patience_s < 60
    # Which has torchrun wait as long: tests/e2e/test_lifecycle.py.
    assert resumes["nn_worker"]["command"][:2] == ["persia-launcher", "nn-worker"]
    for role in ("nn_worker", "data_loader"):
        assert resumes[role]["environment"]["PERSIA_RESUME_FROM"] == "/checkpoints"
        assert resumes[role]["environment"]["PERSIA_SUPERVISED"] == "1"
    for role in ("nn_worker", "embedding_parameter_server"):
        mounted = {volume["target"] for volume in resumes[role]["volumes"]}
        assert {"/checkpoints", "/workspace"} <= mounted
        assert "mkdir /workspace /data /serving /checkpoints" in DOCKERFILE.read_text()
    writes = resumes["embedding_parameter_server"]["environment"]
    assert writes["PERSIA_CHECKPOINT_ROOTS"] == "/checkpoints"
    again = rendered("compose.yaml", "tests/compose/script.yml")
    assert again["services"]["nn_worker"]["command"][:2] == ["persia-launcher", "nn-worker"]
