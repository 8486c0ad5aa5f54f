"""Rules that every source file of the package keeps."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.meta.sources import (
    CORE,
    PACKAGE,
    ROOT,
    cython_files,
    found_in_sources,
    imports_of,
    module_name,
    python_files,
)
from tests.support.processes import DEADLINE_S, run

ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


def reads_of_the_environment(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        name = node.attr if isinstance(node, ast.Attribute) else None
        name = node.name if isinstance(node, ast.alias) else name
        if name in ENVIRONMENT:
            yield getattr(node, "lineno", 0), name


def test_only_env_reads_the_environment() -> None:
    pattern = rf"\b({'|'.join(ENVIRONMENT)})\b"
    assert not found_in_sources(reads_of_the_environment, pattern, PACKAGE / "env.py")


def test_nothing_is_asserted_in_the_package() -> None:
    def asserts(tree: ast.AST) -> Iterator[tuple[int, str]]:
        return ((n.lineno, "assert") for n in ast.walk(tree) if isinstance(n, ast.Assert))

    assert not found_in_sources(asserts, r"^\s*assert\b")


def test_sources_are_ascii() -> None:
    suffixes = {".py", ".pyx", ".pxd", ".pyi", ".h"}
    files = [path for path in PACKAGE.rglob("*") if path.suffix in suffixes]
    assert not [str(path) for path in files if not path.read_bytes().isascii()]


def importers_of(modules: set[str], paths: list[Path]) -> dict[str, set[str]]:
    """Which of these modules are imported by the files, and by which files."""
    found: dict[str, set[str]] = {}
    for path in paths:
        for one in imports_of(path):
            # ``from persia._core.base import cpu`` is read as persia._core.base.cpu.
            for name in (one.module, one.module.rpartition(".")[0]):
                if name in modules and name != one.importer:
                    found.setdefault(name, set()).add(one.importer)
    return found


def extensions_with(suffix: str) -> set[str]:
    return {module_name(path) for path in CORE.rglob(f"*{suffix}")}


def test_declarations_and_stubs_are_there_where_others_import_an_extension() -> None:
    # Without .pxd nothing can be cimported; one that nothing cimports is a second place for
    # what the .pyx says. base.types is declarations alone.
    modules = extensions_with(".pyx")
    cimported = importers_of(modules | {"persia._core.base.types"}, cython_files())
    assert extensions_with(".pxd") == set(cimported)
    tests = [path for path in (ROOT / "tests").rglob("*.py") if path.parent.name != "meta"]
    assert extensions_with(".pyi") == set(importers_of(modules, [*python_files(), *tests]))


def test_every_kernel_says_how_it_fails() -> None:
    # A C function without a word on exceptions pays for a check after each call, or under
    # nogil may take the GIL to make one. A pointer to a function needs the word as well.
    wrong = []
    for path in cython_files():
        text = path.read_text(encoding="utf-8")
        # One declaration may span lines: join them at open brackets.
        text = re.sub(r"\(([^()]*)\)", lambda m: "(" + m[1].replace("\n", " ") + ")", text)
        for line in text.splitlines():
            code = line.partition("#")[0].rstrip()
            # With nogil at the end of the line, after the arguments of a function.
            if re.search(
                r"\bcdef\b(?!\s+extern).*\)(?!.*\bexcept\b)(?!.*\bnoexcept\b).*\bnogil:?$", code
            ):
                wrong.append(f"{path.relative_to(ROOT)}: {code.strip()}")
    assert not wrong


# --- stubs and the unbuilt tree ------------------------------------------------------------

# What Cython adds to each module and no stub names.
CYTHON_NAMES = r"""
.*\.__test__
.*\.__pyx_capi__
.*\.__reduce_cython__
.*\.__setstate_cython__
"""


def test_tests_give_up_before_they_are_stopped(pytestconfig: pytest.Config) -> None:
    """Otherwise the output of their processes is lost."""
    assert float(pytestconfig.getini("timeout")) > DEADLINE_S


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_stubs_match_the_compiled_modules(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    modules = [module_name(stub) for stub in sorted(CORE.rglob("*.pyi"))]
    allowlist = tmp_path / "allowlist"
    allowlist.write_text(CYTHON_NAMES, encoding="utf-8")
    options = ["--allowlist", allowlist, "--ignore-unused-allowlist", "--concise"]
    ran = run("-m", "mypy.stubtest", *modules, *options, timeout_s=240)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def run_in(directory: Path, code: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(directory)}
    return run("-c", code, cwd=directory, env=environment)


def test_an_unbuilt_checkout_names_the_command_and_a_half_built_one_what_is_missing(
    tmp_path: Path,
) -> None:
    # The package as a checkout has it before any build.
    built = shutil.ignore_patterns("*.so", "*.c", "*.html", "__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "persia", ignore=built)
    ran = run_in(tmp_path, "import persia, persia.errors, persia.version")
    assert ran.returncode == 0, ran.stderr
    module = module_name(next(CORE.rglob("*.pyx")))
    ran = run_in(tmp_path, f"import {module}")
    assert ran.returncode == 1
    last = ran.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: persia._core is not compiled")
    assert "`make build`" in last
    assert "`pip install -e .`" in last
    assert str(tmp_path / "persia" / "_core") in last
    for one in CORE.rglob("*.so"):
        shutil.copy2(one, tmp_path / one.relative_to(ROOT))
    (tmp_path / "persia" / "_core" / "later.pyx").touch()
    assert "no extension for later in" in run_in(tmp_path, "import persia._core").stderr


def test_importing_the_core_loads_no_extension() -> None:
    code = "import persia._core, sys; print([n for n in sys.modules if 'persia._core.' in n])"
    assert run_in(ROOT, code).stdout.strip() == "[]"
