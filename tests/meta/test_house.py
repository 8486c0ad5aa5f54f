"""What the layout promises; ``python -m tests.meta.house`` prints the counts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.meta import house
from tests.meta.sources import CORE, PACKAGE, ROOT, python_files
from tests.support.processes import run

# Protocol and implementation.
TWICE = {"ParameterServer", "EmbeddingWorker"}
# Settings of an optimizer of rows, and the optimizer of torch's kind that has them.
TWICE |= {"SGD", "Adagrad", "Adam", "RMSprop", "FTRL", "Lion", "RowwiseAdagrad", "RowwiseAdam"}
TWICE |= {"AMSGrad", "Adadelta", "AdamW", "LAMB"}
# Folders of tests that mirror no folder of the package.
FREE = {
    *("benchmarks", "compat", "compose", "distributed", "docs", "e2e", "examples", "faults"),
    *("fuzz", "golden", "gpu", "load", "meta", "recovery", "reference", "support", "zoo"),
    *("serving/conformance", "serving/proofs"),
}
# Modules that hold names or data and no logic of their own.
WITHOUT_TEST = {
    *("version", "backend", "error", "wrapper", "sparse/emb", "sparse/optim"),
}


def test_functions_and_classes_are_short() -> None:
    limits = house.MOST_FUNCTION_LINES, house.MOST_CLASS_LINES
    assert not [str(d) for d in house.definitions() if d.num_lines > limits[d.is_class]]


def test_a_class_has_its_name_alone() -> None:
    twice = {name for name, count in house.class_names().items() if count > 1}
    assert twice == TWICE


def modules() -> list[Path]:
    found = [path for path in python_files() if path.name != "__init__.py"]
    return [*found, *sorted(CORE.parent.rglob("*.pyx"))]


def test_each_module_has_its_test() -> None:
    missing = []
    for path in modules():
        name = str(path.relative_to(PACKAGE).with_suffix(""))
        # tests/compat has a file for what old scripts do, not for each module.
        is_free = name in WITHOUT_TEST or name.startswith("compat/")
        if not is_free and not house.mirrored(path).exists():
            missing.append(f"{name}: {house.mirrored(path).relative_to(ROOT)}")
    assert not missing


def test_each_test_has_its_module() -> None:
    wanted = {house.mirrored(path) for path in [*modules(), *python_files()]}
    packages = {path.parent for path in python_files() if path.name == "__init__.py"}
    wanted |= {house.mirrored(path / "init") for path in packages}
    alone = []
    for path in house.test_files():
        place = path.relative_to(ROOT / "tests").parts
        is_free = place[0] in FREE or "/".join(place[:2]) in FREE
        if path.name.startswith("test_") and not is_free and path not in wanted:
            alone.append("/".join(place))
    assert not alone


@pytest.mark.parametrize("room", ["_core", "_rpc"])
def test_rooms_that_are_hard_to_read_have_comments(room: str) -> None:
    assert house.comment_share(room) >= 0.08


def tracked(*patterns: str) -> list[Path]:
    ran = run("git", "ls-files", "-z", "--", *patterns)
    if ran.returncode:
        pytest.skip("no git checkout")
    return [ROOT / name for name in ran.stdout.split("\0") if name]


def test_words_are_plain() -> None:
    files = tracked(
        *("persia/*", "tests/*.py", "docs/*.md", "docs/_site/*.py", "*.md", "examples/*"),
        *("compose/*", "Makefile", "Procfile", "setup.py", "pyproject.toml", ".ci/*"),
    )
    itself = {Path(house.__file__), Path(__file__)}
    found = []
    for path in files:
        if path in itself or not path.is_file():
            continue
        text = path.read_bytes().decode("utf-8", "replace")
        for match in house.DIALECT.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(f"{path.relative_to(ROOT)}:{line}: {match[0]}")
    assert not found


def test_pages_name_no_private_module() -> None:
    # The second names the modules whose .pxd files Cython users may cimport.
    allowed = {ROOT / "docs" / "design.md", ROOT / "docs" / "own-optimizers.md"}
    found = [
        f"{path.relative_to(ROOT)}: {match}"
        for path in tracked("docs/*.md", "README.md")
        if path not in allowed and "decisions" not in path.parts
        for match in re.findall(r"persia\._\w+", path.read_text(encoding="utf-8"))
    ]
    assert not found
