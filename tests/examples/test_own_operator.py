"""The operator in C++: compiled into a wheel, equal to its formula, and part of a model."""

from __future__ import annotations

import os
import shutil
import sysconfig
import zipfile
from pathlib import Path

import pytest

from persia import env
from tests.support.processes import ROOT, run

EXAMPLE = ROOT / "examples" / "own_operator"
pytestmark = pytest.mark.slow  # compiles with PyTorch's headers, for most of a minute

CHECK = """
import torch
from own_operator import interaction
import own_operator_native

vectors = torch.randn(5, 4, 3, dtype=torch.float64, requires_grad=True)
pairs = sum(vectors[:, i] * vectors[:, j] for i in range(4) for j in range(i))
torch.testing.assert_close(interaction(vectors), pairs)
assert torch.autograd.gradcheck(interaction, [vectors])
large = torch.randn(1000, 7, 8).transpose(0, 1).contiguous().transpose(0, 1)
wanted = (large.sum(1).square() - large.square().sum(1)) / 2
torch.testing.assert_close(interaction(large), wanted, rtol=1e-4, atol=1e-4)
torch.library.opcheck(torch.ops.own_operator.interaction.default, (vectors,))
class Layer(torch.nn.Module):
    def forward(self, x):
        return interaction(x)

exported = torch.export.export(Layer(), (vectors.detach(),))
torch.testing.assert_close(exported.module()(vectors.detach()), pairs.detach())
try:
    interaction(torch.zeros(3))
except RuntimeError as exc:
    assert "vectors must be [B, F, D]" in str(exc)
else:
    raise SystemExit("a vector was taken")
print(own_operator_native.__file__)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds what the wheel has: an install without a compiler."""
    scripts = sysconfig.get_path("scripts")
    if shutil.which("c++") is None or shutil.which("ninja", path=scripts) is None:
        pytest.skip("a C++ compiler and ninja are not installed")
    folder = tmp_path_factory.mktemp("own_operator")
    shutil.copytree(EXAMPLE, folder / "source")
    command = ("-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w")
    ran = run(
        *(*command, folder / "wheels", folder / "source"),
        cwd=folder,
        env=env.of_child(
            PYTHONPATH=ROOT, CACHED_CPP_EXTENSION_BUILD_DIR=folder / "cache", PIP_NO_CACHE_DIR=1
        ),
        timeout_s=500,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (wheel,) = (folder / "wheels").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def variables(installed: Path, folder: Path) -> dict[str, str]:
    """Of a process that finds no compiler."""
    return env.of_child(
        PYTHONPATH=os.pathsep.join([str(installed), str(ROOT)]),
        PATH=folder,
        CACHED_CPP_EXTENSION_BUILD_DIR=folder / "cache",
    )


@pytest.mark.timeout(900)
def test_the_prebuilt_operator_is_its_formula_with_gradient_and_shape(
    installed: Path, tmp_path: Path
) -> None:
    ran = run("-c", CHECK, cwd=tmp_path, env=variables(installed, tmp_path), timeout_s=240)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert Path(ran.stdout.strip()).parent == installed / "own_operator" / "prebuilt"
    assert not (tmp_path / "cache").exists()


@pytest.mark.timeout(900)
def test_a_model_with_the_operator_learns(installed: Path, tmp_path: Path) -> None:
    """Of clicks that only pairs explain: without interactions there is nothing to learn."""
    shutil.copytree(EXAMPLE / "config", tmp_path / "config")
    shutil.copy(EXAMPLE / "train.py", tmp_path)
    ran = run(
        *("-W", "error", "train.py", "--samples", "60000"),
        cwd=tmp_path,
        env=variables(installed, tmp_path),
        timeout_s=240,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert float(ran.stdout.split()[-1]) > 0.85
