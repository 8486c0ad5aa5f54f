"""The site of the docs: built without a warning, and looked at in a browser."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from tests.support.browser import document, pixels, screenshot
from tests.support.processes import ROOT, run


def test_the_configuration_page_is_what_the_code_says() -> None:
    checked = run(
        sys.executable, "docs/_site/configuration.py", "--check", env={"PYTHONPATH": str(ROOT)}
    )
    assert checked.returncode == 0, checked.stderr


def test_the_menu_has_every_page_but_the_decisions_which_the_design_lists() -> None:
    pages = sorted(str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md"))
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    decisions = [page for page in pages if page.startswith("decisions/")]
    assert [page for page in pages if page not in menu.split()] == decisions
    sections = re.findall(r"^  - (.+):$", menu, re.MULTILINE)
    assert len(set(sections)) == len(sections) > 5
    design = (ROOT / "docs/design.md").read_text(encoding="utf-8")
    assert re.findall(r"^\d+\. \[.+\]\((decisions/.+)\)$", design, re.MULTILINE) == decisions


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="make docs installs it")
    folder = tmp_path_factory.mktemp("docs") / "site"
    built = run("-m", "mkdocs", "build", "--strict", "--site-dir", folder, timeout_s=300)
    assert built.returncode == 0, built.stderr
    return folder


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_shows_its_home(
    site: Path, tmp_path: Path
) -> None:
    home = screenshot(f"file://{site}/index.html", tmp_path / "home.png", height=960)
    assert len(home) > 1280 * 960
    assert len(set(home)) > 100  # text and a diagram, not one color
    committed = pixels((ROOT / "docs/images/home.png").read_bytes())
    assert len(committed) == len(home)
    assert len(set(committed)) > 100


@pytest.mark.slow
@pytest.mark.parametrize("page", ["index.html", "how-to/two-tower.html"])
def test_search_finds_pages_in_the_site_opened_as_files(site: Path, page: str) -> None:
    """Without a server a browser starts no Worker and fetches no index."""
    dom = document(site / page, "?q=quarantine-of-no-page", scripts_ms=20_000)
    assert "No matching documents" in dom
    dom = document(site / page, "?q=staleness", scripts_ms=20_000)
    assert re.search(r"\d+ matching documents", dom)
    found = re.findall(r'<a href="([^"]+)" class="md-search-result__link"', dom)
    assert any("operations.html" in link for link in found), found


@pytest.mark.slow
def test_the_api_page_has_public_names_only(site: Path) -> None:
    reference = (site / "api.html").read_text(encoding="utf-8")
    shown = set(re.findall(r'<h\d id="(persia[\w.]*)"', reference))
    modules = {name for name in shown if name.split(".")[-1].islower() and is_module(name)}
    wrong = []
    for module in modules:
        public = getattr(importlib.import_module(module), "__all__", None)
        own = {name.removeprefix(f"{module}.") for name in shown if name.startswith(module)}
        names = {name for name in own if "." not in name and f"{module}.{name}" not in modules}
        names -= {module, "PersiaTrainingBatch"}  # which persia.data has when torch is there
        wrong += [f"{module}.{name}" for name in names if public and name not in public]
    assert not wrong
    assert not [name for name in shown if "._" in name]
    for name in (
        "ctx.TrainCtx.backward",
        "embedding.optim.Adagrad",
        "sampling.NegativeSampler",
    ):
        assert f"persia.{name}" in shown
    for name in ("errors.did_you_mean", "ctx.TrainCtx.open_pass", "readers.Columns.batch_of"):
        assert f"persia.{name}" not in shown


def is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of what is no package
        return False
