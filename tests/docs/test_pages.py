"""What the pages say is tried: code runs, commands exist, links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from persia._training.staleness import MOST
from persia.config import EmbeddingSchema, GlobalConfig
from persia.data import DataLoader
from persia.embedding.optim import Adagrad
from tests.golden.commands import without_persia
from tests.support.processes import ROOT, run

PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])

FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")
MAKE = re.compile(r"(?:^|[`$(]\s*)make ([a-z][a-z0-9-]*)", re.MULTILINE)


class Block(NamedTuple):
    """A fenced block: its language, the word after it (a file name), its text and line."""

    language: str
    file: str
    text: str
    line: int


def blocks(text: str) -> list[Block]:
    found = []
    for match in FENCE.finditer(text):
        language, _, file = match[1].strip().partition(" ")
        line = text.count("\n", 0, match.start()) + 2
        found.append(Block(language, file.strip(), match[2], line))
    return found


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def pages_with(*languages: str) -> list[Path]:
    return [p for p in PAGES if any(b.language in languages for b in blocks(p.read_text()))]


# Each is a process that loads torch; the fast tier has one of the pages with a first
# program, and the one that explains.
FIRST = {"README.md", "docs/concepts.md"}


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=() if name_of(page) in FIRST else pytest.mark.slow)
        for page in pages_with("python")
    ],
    ids=name_of,
)
def test_python_blocks_run(page: Path, tmp_path: Path) -> None:
    """In order, in one process, in a folder that holds the blocks which name a file."""
    program = ["import os, sys"]
    for block in blocks(page.read_text(encoding="utf-8")):
        if block.file:
            (tmp_path / block.file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / block.file).write_text(block.text, encoding="utf-8")
        if block.language == "python":
            # Compiled with the page's own name and lines, so that a traceback points there.
            source = "\n" * (block.line - 1) + block.text
            program.append(f"exec(compile({source!r}, {name_of(page)!r}, 'exec'), globals())")
    (tmp_path / "__page__.py").write_text("\n".join(program), encoding="utf-8")
    words = ("-W", "error", "__page__.py")
    ran = run(*words, cwd=tmp_path, env=without_persia(), timeout_s=240)
    assert ran.returncode == 0, f"{name_of(page)}:\n{ran.stdout}\n{ran.stderr}"


BOUND = f'`"{DataLoader([]).embedding_staleness}"`'  # by its own word, "auto"
ACCUMULATOR = Adagrad().initial_accumulator_value


@pytest.mark.parametrize(
    ("page", "pieces"),
    [
        ("moving-from-embeddingbag", ["`weight_bound=0`", "(loss, max_norm="]),
        (
            "moving-from-torchrec",
            ["`weight_bound=0`", "(loss, max_norm=", f"{MOST} at most by default"],
        ),
        (
            "moving-from-old-persia",
            ["initial_accumulator_value=0.01)", f"`embedding_staleness` is {BOUND} by default"],
        ),
        ("optimizers", ["`weight_bound=0`", f"*n* begins at {ACCUMULATOR:g} unless"]),
        (
            "operations",
            [f"**The default, {BOUND}**", "| AUC at 1 |", "| Avazu |", "| Criteo |"],
        ),
        ("concepts", [f"{BOUND}, the default", "hash_text"]),
    ],
)
def test_pages_say_where_defaults_give_other_numbers(page: str, pieces: list[str]) -> None:
    """Than PyTorch's or the original's, to those who come from there."""
    text = (ROOT / f"docs/{page}.md").read_text(encoding="utf-8")
    assert [piece for piece in pieces if piece not in text] == []


@pytest.mark.parametrize("page", pages_with("yaml", "yml"), ids=name_of)
def test_yaml_blocks_are_what_the_loaders_take(page: Path) -> None:
    for block in blocks(page.read_text(encoding="utf-8")):
        if block.language in {"yaml", "yml"}:
            content = yaml.safe_load(block.text)
            is_schema = bool({"slots_config", "slot_configs", "slot_config"} & content.keys())
            (EmbeddingSchema if is_schema else GlobalConfig).load(content)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_make_targets_exist_and_links_lead_to_files(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", makefile, re.MULTILINE))
    text = page.read_text(encoding="utf-8")
    named = set(re.findall(r"`make ([a-z][a-z0-9-]*)", text))
    for block in blocks(text):
        named |= set(MAKE.findall(block.text))
    assert named <= targets
    for target in LINK.findall(text):
        path = target.partition("#")[0]
        if path and "://" not in path and not path.startswith("mailto:"):
            assert (page.parent / path).exists(), target


def test_the_reader_of_blocks_reads() -> None:
    text = "# x\n\n```python\na = 1\n```\n\n```yaml c.yml\nb: 2\n```\n"
    assert blocks(text) == [
        Block("python", "", "a = 1\n", 3 + 1),
        Block("yaml", "c.yml", "b: 2\n", 8),
    ]


def test_every_old_defect_has_a_test_and_a_sentence() -> None:
    page = (ROOT / "docs/old-defects.md").read_text()
    listed = re.findall(r"^\| W-(\d\d) \| \S.* \| \S.* \|$", page, re.MULTILINE)
    named = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        for name in re.findall(r"^ *def (test_w\w+)", path.read_text(), re.MULTILINE):
            named |= set(re.findall(r"(?<=_)?w(\d\d)(?=_)", name))
    assert sorted(named) == listed


def test_the_design_names_files_that_exist() -> None:
    page = (ROOT / "docs/design.md").read_text()
    paths = re.findall(r"`((?:persia|tests)/[\w/.]+)`", page)
    assert len(paths) > 30
    assert not [path for path in paths if not (ROOT / path).exists()]
