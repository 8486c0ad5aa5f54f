"""An editable install, used from beside the clone."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.support.processes import ROOT, run

# What an install reads, beside the package.
FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in")
SCRIPT = """
import persia, persia.version
from persia.embedding.optim import SGD
print(persia.__file__, repr(SGD(lr=0.5)))
"""


def site_packages() -> list[str]:
    """Return where this environment's packages are, which needs no network."""
    return [path for path in sys.path if Path(path).name == "site-packages"]


@pytest.mark.slow  # makes an environment
def test_a_clone_in_a_folder_called_persia_hides_nothing(tmp_path: Path) -> None:
    clone, environment = tmp_path / "persia", tmp_path / "environment"
    left_out = shutil.ignore_patterns("__pycache__", "*.c")
    shutil.copytree(ROOT / "persia", clone / "persia", ignore=left_out)
    for name in FILES:
        shutil.copy(ROOT / name, clone)
    made = run("-m", "venv", "--without-pip", environment)
    assert not made.returncode, made.stdout + made.stderr
    python = environment / "bin" / "python"
    paths = {"base": str(environment), "platbase": str(environment)}
    its_packages = Path(sysconfig.get_path("purelib", "venv", paths))
    (its_packages / "outer.pth").write_text("".join(f"{path}\n" for path in site_packages()))
    options = ("--no-index", "--no-deps", "--no-build-isolation", "--quiet", "-e", clone)
    variables = {**os.environ, "PERSIA_COMPILED": "1"}
    installed = run(python, "-m", "pip", "install", *options, env=variables, timeout_s=300)
    assert not installed.returncode, installed.stdout + installed.stderr
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "elsewhere").mkdir()
    found = f"{clone / 'persia' / '__init__.py'} SGD(lr=0.5"
    uses: tuple[tuple[tuple[str, ...], Path], ...] = (
        (("script.py",), tmp_path),  # the folder above: `persia` there is the clone
        (("-c", SCRIPT), tmp_path),
        (("../script.py",), tmp_path / "elsewhere"),
        (("-c", SCRIPT), tmp_path / "elsewhere"),
        (("-c", SCRIPT), clone),
    )
    for words, folder in uses:
        ran = run(python, *words, cwd=folder)
        assert ran.stdout.startswith(found), ran.stdout + ran.stderr
