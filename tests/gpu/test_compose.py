"""The overlay and the image for GPUs, as far as their files say; tests/compose renders them."""

from __future__ import annotations

import re

import yaml

from tests.support.processes import ROOT

OVERLAY = yaml.safe_load((ROOT / "compose/gpu.yml").read_text())
DOCKERFILE = (ROOT / "compose/Dockerfile").read_text()
STACK = (ROOT / "compose/stack.yml").read_text()


def test_the_overlay_changes_the_trainer_alone() -> None:
    assert list(OVERLAY["services"]) == ["nn_worker"]
    assert re.search(r"^  nn_worker:", STACK, re.MULTILINE)
    (device,) = OVERLAY["services"]["nn_worker"]["deploy"]["resources"]["reservations"][
        "devices"
    ]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}


def test_its_image_is_a_target_with_a_build_of_torch_for_cuda() -> None:
    build = OVERLAY["services"]["nn_worker"]["build"]
    stages = re.findall(r"^FROM (\S+)(?: AS (\S+))?$", DOCKERFILE, re.MULTILINE)
    by_name = {name: base for base, name in stages if name}
    assert by_name[build["target"]] == "nn-worker"
    assert stages[-1] == ("nn-worker", "")  # what a build without a target makes
    assert re.fullmatch(r"\$\{TORCH_BUILD:-cu\d+\}", build["args"]["TORCH_BUILD"])
    stage = DOCKERFILE.partition(f" AS {build['target']}\n")[2].partition("FROM")[0]
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in stage
    for argument in build["args"]:
        assert re.search(rf"^ARG {argument}=", DOCKERFILE, re.MULTILINE)
