"""Every way of installing gives the same package: wheel from sdist, pip install, editable."""

from __future__ import annotations

import shutil
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from tests.meta.sources import CORE, ROOT, module_name
from tests.support import processes

pytestmark = pytest.mark.slow

# What only a source tree has.
SOURCE_ONLY = {".pyx", ".c", ".html", ".pyc"}
NEEDED = ("build", "Cython", "setuptools")


def run(*command: str | Path, cwd: Path) -> str:
    ran = processes.run(*command, cwd=cwd, timeout_s=500)
    assert ran.returncode == 0, f"{command}\n{ran.stdout}\n{ran.stderr}"
    return ran.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources as a fresh clone has them."""
    for module in NEEDED:
        pytest.importorskip(module)
    target = tmp_path_factory.mktemp("checkout") / "persia"
    generated = shutil.ignore_patterns(
        *(".git", ".venv*", ".*_cache", ".hypothesis", ".benchmarks", "__pycache__", "data"),
        *("build", "dist", "wheelhouse", "*.egg-info", "*.so", "*.c", "*.html"),
    )
    shutil.copytree(ROOT, target, ignore=generated)
    return target


@pytest.fixture(scope="module")
def sdist(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sdist")
    build = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", str(out)]
    run(*build, cwd=checkout)
    (archive,) = out.glob("*.tar.gz")
    return archive


@pytest.fixture(scope="module")
def wheel_files(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names in the wheel that is built from the sdist and from nothing else."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        if hasattr(tarfile, "data_filter"):
            archive.extractall(folder, filter="data")
        else:
            archive.extractall(folder)
    (unpacked,) = folder.iterdir()
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir"]
    run(*build, folder, cwd=unpacked)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive_of_wheel:
        names = archive_of_wheel.namelist()
    packages = {name.split("/")[0].split("-")[0] for name in names}
    assert packages == {"persia", "cpp_extension_tools"}
    assert {"cpp_extension_tools/__init__.py", "cpp_extension_tools/py.typed"} <= set(names)
    return {name for name in names if name.startswith("persia/")}


def environment(folder: Path) -> Path:
    """An empty environment that sees this one's libraries, but not its persia; its Python."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    site = run(
        python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder
    )
    # Named in a .pth file, a folder joins sys.path, but its own .pth files are not read: an
    # editable persia in it stays out of sight.
    Path(site.strip(), "outer.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    return python


def layout(python: Path, where: Path) -> set[str]:
    """Files of the persia that ``python`` imports, after importing all of its core."""
    modules = [module_name(source) for source in sorted(CORE.rglob("*.pyx"))]
    code = "\n".join([*(f"import {module}" for module in modules), "print(persia.__file__)"])
    package = Path(run(python, "-c", code, cwd=where).strip()).parent
    return {
        f"persia/{path.relative_to(package)}"
        for path in package.rglob("*")
        if path.is_file() and path.suffix not in SOURCE_ONLY
    }


def test_wheel_from_sdist_has_everything(wheel_files: set[str]) -> None:
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    wanted = {"persia/py.typed"}
    wanted |= {str(header.relative_to(ROOT)) for header in CORE.rglob("*.h")}
    for source in CORE.rglob("*.pyx"):
        name = str(source.relative_to(ROOT).with_suffix(""))
        wanted.add(f"{name}{suffix}")
    declared = [*CORE.rglob("*.pxd"), *CORE.rglob("*.pyi")]
    wanted |= {str(path.relative_to(ROOT)) for path in declared}
    assert wanted <= wheel_files
    assert not {name for name in wheel_files if Path(name).suffix in SOURCE_ONLY}


@pytest.mark.parametrize("is_editable", [False, True])
def test_an_install_gives_the_layout_of_the_wheel(
    is_editable: bool, checkout: Path, wheel_files: set[str], tmp_path: Path
) -> None:
    python = environment(tmp_path / "venv")
    options = ("--no-deps", "--no-build-isolation", "--ignore-installed")
    words: list[str | Path] = [*options, checkout]
    if is_editable:
        source = tmp_path / "persia"
        shutil.copytree(checkout, source, ignore=shutil.ignore_patterns("build", "*.c"))
        words[-1:] = ["-e", source]
    run(python, "-m", "pip", "install", *words, cwd=tmp_path)
    # From the folder above an editable checkout: its own folder is no namespace package there.
    assert layout(python, tmp_path) == wheel_files


def test_sdist_carries_sources_and_nothing_generated(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"cpp_extension_tools/__init__.py", "examples/own_operator/setup.py"} <= names
    assert {"LICENSE", "Makefile", "constraints.txt", "pyproject.toml", "setup.py"} <= names
    assert {str(source.relative_to(ROOT)) for source in CORE.rglob("*.pyx")} <= names
    assert {f"tests/meta/{path.name}" for path in Path(__file__).parent.glob("*.py")} <= names
    assert not {name for name in names if Path(name).suffix in SOURCE_ONLY - {".pyx"} | {".so"}}
