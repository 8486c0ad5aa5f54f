"""The site of the docs: built without a warning, and looked at in a browser."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.browser import pixels, screenshot
from tests.support.processes import ROOT, run


def test_the_configuration_page_is_what_the_code_says() -> None:
    checked = run(
        sys.executable, "docs/_site/configuration.py", "--check", env={"PYTHONPATH": str(ROOT)}
    )
    assert checked.returncode == 0, checked.stderr


def test_every_page_is_in_the_sites_list() -> None:
    pages = sorted(str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md"))
    listed = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split()
    assert [page for page in pages if page not in listed] == []


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_shows_its_home(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="make docs installs it")
    site = tmp_path / "site"
    words = ("-m", "mkdocs", "build", "--strict", "--site-dir", site)
    built = run(*words, timeout_s=300)
    assert built.returncode == 0, built.stderr
    home = screenshot(f"file://{site}/index.html", tmp_path / "home.png", height=960)
    assert len(home) > 1280 * 960
    assert len(set(home)) > 100  # text and a diagram, not one color
    committed = pixels((ROOT / "docs/images/home.png").read_bytes())
    assert len(committed) == len(home)
    assert len(set(committed)) > 100
    reference = (site / "api.html").read_text(encoding="utf-8")
    for name in ("persia.ctx.TrainCtx", "persia.embedding.optim.Adagrad", "persia.errors"):
        assert f'id="{name}"' in reference
