"""Every way of installing gives the same package: wheel from sdist, pip install, editable.

``make wheel`` runs this on the sdist that it has made, and on the wheel built from that alone.
``make installs`` also has pip compile, which takes minutes.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from tests.meta.sources import CORE, ROOT, module_name
from tests.support import processes

BUILT, COMPILES = "PERSIA_TEST_DIST", "PERSIA_TEST_INSTALLS"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BUILT not in os.environ, reason="of what `make wheel` has built"),
]

# What only a source tree has.
SOURCE_ONLY = {".pyx", ".c", ".html", ".pyc"}
GENERATED = shutil.ignore_patterns(
    *(".git", ".venv*", ".*_cache", ".hypothesis", ".benchmarks", "__pycache__", "data"),
    *("build", "dist", "wheelhouse", "*.egg-info", "*.c", "*.html"),
)


def run(*command: str | Path, cwd: Path, **changes: str) -> str:
    ran = processes.run(*command, cwd=cwd, timeout_s=500, env=os.environ | changes)
    assert ran.returncode == 0, f"{command}\n{ran.stdout}\n{ran.stderr}"
    return ran.stdout


def built(suffix: str) -> Path:
    (found,) = Path(os.environ[BUILT]).glob(f"*{suffix}")
    return found


@pytest.fixture(scope="module")
def wheel_files() -> set[str]:
    """Names in the wheel that was built from the sdist and from nothing else."""
    with zipfile.ZipFile(built(".whl")) as wheel:
        names = wheel.namelist()
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


def checkout(folder: Path, *, is_compiled: bool) -> Path:
    """The sources as a fresh clone has them, or as `make build` leaves them."""
    target = folder / "persia"
    shutil.copytree(ROOT, target, ignore=GENERATED)
    if not is_compiled:
        for path in target.rglob("*.so"):
            path.unlink()
    return target


@pytest.mark.parametrize("how", ["wheel", "editable", "source", "editable source"])
def test_an_install_gives_the_layout_of_the_wheel(
    how: str, wheel_files: set[str], tmp_path: Path
) -> None:
    is_compiled = "source" not in how
    if not is_compiled and COMPILES not in os.environ:
        pytest.skip("compiles: `make installs`")
    python = environment(tmp_path / "venv")
    words: list[str | Path] = ["--no-deps", "--no-build-isolation", "--ignore-installed"]
    if how == "wheel":
        words.append(built(".whl"))
    else:
        words += ["-e"] * ("editable" in how)
        words.append(checkout(tmp_path, is_compiled=is_compiled))
    made = {"PERSIA_COMPILED": "1"} if is_compiled else {}  # as `make build` installs
    run(python, "-m", "pip", "install", *words, cwd=tmp_path, **made)
    # From the folder above an editable checkout: its own folder is no namespace package there.
    assert layout(python, tmp_path) == wheel_files


def test_sdist_carries_sources_and_nothing_generated() -> None:
    with tarfile.open(built(".tar.gz")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"cpp_extension_tools/__init__.py", "examples/own_operator/setup.py"} <= names
    assert {"LICENSE", "Makefile", "constraints.txt", "pyproject.toml", "setup.py"} <= names
    assert {str(source.relative_to(ROOT)) for source in CORE.rglob("*.pyx")} <= names
    assert {f"tests/meta/{path.name}" for path in Path(__file__).parent.glob("*.py")} <= names
    assert "tests/benchmarks/ceiling.c" in names
    generated = {".html", ".pyc", ".so"}
    assert not {name for name in names if Path(name).suffix in generated}
    assert not {name for name in names if name.startswith("persia/") and name.endswith(".c")}
