"""A wheel with a prebuilt module: built here, installed where there is no compiler."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from persia import env
from tests.support import native
from tests.support.processes import ROOT, run

pytestmark = pytest.mark.slow

INIT = """
from pathlib import Path
from cpp_extension_tools import CompilerBuilder, cached_load_prebuilt_extension
FOLDER = Path(__file__).parent
module = cached_load_prebuilt_extension(
    external_prebuilded_path=FOLDER / "prebuilt",
    module_name="packed_native",
    builder=CompilerBuilder([FOLDER / "packed_native.c"]),
)
"""
SETUP = """
from setuptools import setup
from cpp_extension_tools import BuildPrebuilt
setup(
    name="packed", version="1.0", packages=["packed"], package_data={"packed": ["*.c"]},
    cmdclass={"build_py": BuildPrebuilt},
)
"""
USE = "import packed; print(packed.module.answer(), packed.module.__file__)"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    native.write_module(folder / "packed", "packed_native")
    (folder / "packed" / "__init__.py").write_text(INIT)
    (folder / "setup.py").write_text(SETUP)
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
    )
    return folder


def environment(**changes: str) -> dict[str, str]:
    path = os.pathsep.join([sysconfig.get_path("scripts"), env.search_path()])
    return env.of_child(PYTHONPATH=ROOT, PATH=path, **changes)


def wheel_of(project: Path, tmp_path: Path) -> Path:
    command = ("-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w")
    ran = run(
        *(*command, tmp_path / "wheels", project),
        cwd=tmp_path,
        env=environment(CACHED_CPP_EXTENSION_BUILD_DIR=str(tmp_path / "cache")),
        timeout_s=240.0,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (wheel,) = (tmp_path / "wheels").glob("*.whl")
    return wheel


def test_a_wheel_installs_without_a_compiler_and_has_its_module(
    project: Path, tmp_path: Path
) -> None:
    wheel = wheel_of(project, tmp_path)
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    assert wheel.name.startswith(f"packed-1.0-{tag}-{tag}-")
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        record = archive.read("packed-1.0.dist-info/RECORD").decode()
    prebuilt = f"packed/prebuilt/packed_native{suffix}"
    assert {prebuilt, f"{prebuilt}.json", "packed/packed_native.c"} <= names
    assert f"\n{prebuilt},sha256=" in "\n" + record

    shutil.rmtree(tmp_path / "cache")
    venv.create(tmp_path / "clean", with_pip=True, symlinks=True)
    python = tmp_path / "clean" / "bin" / "python"
    bare = tmp_path / "bare"
    bare.mkdir()
    variables = {"PATH": str(bare), "HOME": str(tmp_path)}
    installed = run(
        *(python, "-m", "pip", "install", "--no-deps", "--no-index", wheel),
        cwd=bare,
        env=variables,
    )
    assert installed.returncode == 0, installed.stdout + installed.stderr
    packages = native.packages_of_any_python(tmp_path / "packages")
    ran = run(python, "-c", USE, cwd=bare, env={**variables, "PYTHONPATH": str(packages)})
    assert ran.stdout.startswith("42 "), ran.stderr
    assert ran.stdout.strip().endswith(prebuilt)
    assert list(bare.iterdir()) == []  # no cache was made either


def test_an_editable_install_builds_nothing_until_it_is_imported(
    project: Path, tmp_path: Path
) -> None:
    venv.create(tmp_path / "clean", symlinks=True)
    python = tmp_path / "clean" / "bin" / "python"
    cache = tmp_path / "cache"
    variables = {
        **env.of_child(PYTHONPATH=os.pathsep.join([str(ROOT), sysconfig.get_path("purelib")])),
        "CACHED_CPP_EXTENSION_BUILD_DIR": str(cache),
    }
    command = ("-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index", "-e")
    ran = run(python, *command, project, cwd=tmp_path, env=variables, timeout_s=240.0)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert not cache.exists()
    ran = run(python, "-c", USE, cwd=tmp_path, env=variables)
    assert ran.stdout.startswith(f"42 {cache}"), ran.stderr


@pytest.mark.parametrize(
    ("init", "message"),
    [
        ("", "BuildPrebuilt: no module of ['packed'] calls"),
        (INIT.replace('FOLDER / "prebuilt"', "'/elsewhere'"), "/elsewhere must be a folder in"),
        (INIT.replace('.c"', '.cpp"'), "packed_native.cpp is not there, or no file"),
    ],
)
def test_what_cannot_become_a_wheel_is_an_error(
    init: str, message: str, project: Path, tmp_path: Path
) -> None:
    (project / "packed" / "__init__.py").write_text(init)
    ran = run(
        *(sys.executable, "setup.py", "--quiet", "build_py", "--build-lib", tmp_path / "lib"),
        cwd=project,
        env=environment(CACHED_CPP_EXTENSION_BUILD_DIR=str(tmp_path / "cache")),
    )
    assert ran.returncode != 0
    assert message in ran.stderr
