"""Where the sources are, and what the tests of this folder read from them."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "persia"
CORE = PACKAGE / "_core"

# Import statements of Cython, which ast cannot read; group 1 or 2 is the module.
# Nothing may follow the module's name but an alias: a sentence may start with "import" too.
CYTHON_IMPORT = re.compile(
    r"^\s*(?:from\s+([\w.]+)\s+c?import\b|c?import\s+([\w.]+)(?:\s+as\s+\w+)?\s*(?:#.*)?$)"
)


@dataclass(frozen=True)
class Import:
    """One import: who, where, of what, and whether it runs when the importer is loaded."""

    importer: str
    path: Path
    line: int
    module: str
    at_load: bool

    def __str__(self) -> str:
        return (
            f"{self.path.relative_to(ROOT)}:{self.line}: {self.importer} imports {self.module}"
        )


def python_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def cython_files() -> list[Path]:
    return sorted([*PACKAGE.rglob("*.pyx"), *PACKAGE.rglob("*.pxd")])


def found_in_sources(
    look: Callable[[ast.AST], Iterator[tuple[int, str]]], pattern: str, *but: Path
) -> list[str]:
    """Return where Python files, but some, and Cython code have what they must not have.

    Args:
        look: Yields lines of a Python file, and what is there.
        pattern: Of lines of Cython, without their comments.
        but: Python files that may.
    """
    found = [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path in python_files()
        if path not in but
        for line, what in look(ast.parse(path.read_text(encoding="utf-8")))
    ]
    for path in cython_files():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if re.search(pattern, line.partition("#")[0]):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    return found


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def module_names() -> set[str]:
    return {module_name(path) for path in [*python_files(), *cython_files()]}


@cache
def imports_of(path: Path) -> tuple[Import, ...]:
    """All imports of a file: within functions and for type checkers too."""
    reader = _python_imports if path.suffix == ".py" else _cython_imports
    return tuple(reader(path, module_name(path), path.read_text(encoding="utf-8")))


def _python_imports(path: Path, importer: str, text: str) -> Iterator[Import]:
    package = importer if path.name == "__init__.py" else importer.rpartition(".")[0]

    def walk(node: ast.AST, at_load: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(importer, path, child.lineno, alias.name, at_load)
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    parents = package.split(".")[: len(package.split(".")) - child.level + 1]
                    base = ".".join([*parents, *([base] if base else [])])
                for alias in child.names:
                    yield Import(importer, path, child.lineno, f"{base}.{alias.name}", at_load)
            lazy = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            typing = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            yield from walk(child, at_load and not lazy and not typing)

    return walk(ast.parse(text, str(path)), at_load=True)


def _cython_imports(path: Path, importer: str, text: str) -> Iterator[Import]:
    for number, line in enumerate(text.splitlines(), start=1):
        if found := CYTHON_IMPORT.match(line):
            yield Import(importer, path, number, found[1] or found[2], at_load=True)
