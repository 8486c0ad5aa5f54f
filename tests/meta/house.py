"""What the layout promises, counted: ``python -m tests.meta.house`` prints the table."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.meta.sources import PACKAGE, ROOT, python_files

SUFFIXES = {".py", ".pyx", ".pxd", ".pyi", ".h"}
MOST_FUNCTION_LINES = 60
MOST_CLASS_LINES = 450

# Classes and dataclasses that one batch passes through, from the user's features to the
# acknowledged update. A ``LoaderStream`` is the receiver's state of one data-loader, and no
# form of a batch.
FORMS_OF_A_BATCH = frozenset(
    (
        *("IDTypeFeature", "FeatureBatch", "PersiaBatch", "IDFeatures", "StreamedBatch"),
        *("PackedBatch", "LookupRequest", "LookupReply", "LookupResult"),
        *("InFlightBatch", "PersiaTrainingBatch"),
        *("BatchGradients", "UpdateRequest", "UpdateReport"),
    )
)

# Words of no programmer's English; each as a whole word.
DIALECT = re.compile(
    r"\b(whoever|whomever|whom|nobody|somebody|anew|told|tells|heeds?|so many)\b", re.IGNORECASE
)


@dataclass(frozen=True)
class Definition:
    """A class or function: where it begins, and how long it is."""

    path: Path
    name: str
    line: int
    num_lines: int
    is_class: bool

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.name}, {self.num_lines} lines"


def package_files() -> list[Path]:
    """The package's own sources: nothing compiled, nothing generated."""
    return sorted(path for path in PACKAGE.rglob("*") if path.suffix in SUFFIXES)


def test_files() -> list[Path]:
    return sorted((ROOT / "tests").rglob("*.py"))


def num_lines(paths: list[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def definitions() -> Iterator[Definition]:
    """Every class and function of the package's Python modules, nested ones too."""
    for path in python_files():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                is_class = isinstance(node, ast.ClassDef)
                yield Definition(path, node.name, node.lineno, lines, is_class)


CYTHON_CLASS = re.compile(r"^(?:cdef\s+)?class\s+(\w+)", re.MULTILINE)


def class_names() -> Counter[str]:
    """How often each name is a class of the package, in Python and Cython."""
    names = Counter(found.name for found in definitions() if found.is_class)
    for path in sorted(PACKAGE.rglob("*.pyx")):
        names.update(set(CYTHON_CLASS.findall(path.read_text(encoding="utf-8"))))
    return names


def comment_share(room: str) -> float:
    """Comment lines of a room by its physical lines; a docstring is no comment."""
    comments = total = 0
    for path in package_files():
        if path.relative_to(PACKAGE).parts[0] != room or path.suffix == ".pyi":
            continue
        is_c, inside = path.suffix == ".h", False
        for line in path.read_text(encoding="utf-8").splitlines():
            total += 1
            text = line.strip()
            if is_c:
                inside = inside or text.startswith("/*")
                comments += inside or text.startswith("//") or "/*" in text
                inside = inside and "*/" not in text
            else:
                # Behind code, a comment is one too: two blanks and a sign.
                comments += text.startswith("#") or "  # " in line
    return comments / total


def mirrored(path: Path) -> Path:
    """Where the test of a module is: its path, without leading underscores."""
    parts = [part.lstrip("_") for part in path.relative_to(PACKAGE).with_suffix("").parts]
    return ROOT.joinpath("tests", *parts[:-1], f"test_{parts[-1]}.py")


def rows() -> Iterator[tuple[str, str, str]]:
    """Yield what is counted, its number and its bound."""
    files = package_files()
    names = class_names()
    found = list(definitions())
    from tests.meta import step  # loads torch

    calls, modules = step.count()
    longest = max(d.num_lines for d in found if not d.is_class)
    yield "physical lines of persia/", str(num_lines(files)), "46500"
    yield "files of persia/", str(len(files)), "245"
    yield "physical lines of tests/", str(num_lines(test_files())), "42000"
    yield "forms of one batch", str(len(FORMS_OF_A_BATCH & set(names))), "14"
    yield "Python calls of one embedded step", str(calls), "200"
    yield "modules of one embedded step", str(modules), "20"
    yield "lines of the longest function", str(longest), str(MOST_FUNCTION_LINES)
    largest = max(d.num_lines for d in found if d.is_class)
    yield "lines of the largest class", str(largest), str(MOST_CLASS_LINES)
    for room in ("_core", "_rpc"):
        yield f"comment lines in {room}", f"{comment_share(room):.1%}", "8 %"


if __name__ == "__main__":
    for what, number, bound in rows():
        print(f"{what:36} {number:>8}  (bound {bound})")
