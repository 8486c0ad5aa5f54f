"""A report in a real browser: what its DOM holds, and that something is to be seen."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.browser import screenshot
from tests.support.processes import ROOT

# A blank page has a handful of values.
FEWEST_VALUES = 100

# Set by the page itself, once it is drawn.
PROBE = """
<script>
const found = {
  charts: document.querySelectorAll("svg[role=img]").length,
  lines: document.querySelectorAll("polyline.line").length,
  features: document.querySelectorAll(".features tbody tr").length,
  fetched: performance.getEntriesByType("resource").length,
};
const svg = document.querySelector("svg");
svg.dispatchEvent(new PointerEvent("pointermove", {clientX: 300}));
found.shown = svg.parentNode.querySelector("output").textContent.includes(": ");
const wide = document.documentElement.scrollWidth <= innerWidth;
const seen = [...document.querySelectorAll("svg, .tile, table")].every(
  one => one.getBoundingClientRect().width > 40);
document.title = JSON.stringify({...found, wide, seen});
</script>
"""


@pytest.mark.slow
def test_a_browser_shows_the_report_of_a_run(tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    script = ROOT / "examples" / "quickstart" / "train.py"
    command = [sys.executable, str(script), "--quiet", "--samples", "60000"]
    subprocess.run([*command, "--report", str(report)], check=True, timeout=240)
    for name, width in (("wide", 1240), ("narrow", 500)):
        shown = screenshot(report.as_uri(), tmp_path / f"{name}.png", width, 1500)
        assert len(set(shown)) > FEWEST_VALUES
    probed = tmp_path / "probed.html"
    probed.write_text(report.read_text("utf-8").replace("</body>", PROBE + "</body>"), "utf-8")
    dom = document(probed)
    title = dom[dom.index("<title>") + 7 : dom.index("</title>")]
    found = json.loads(title)
    # A curve of readings by the clock is a point if a short run has one reading only.
    assert found.pop("lines") in (10, 11)
    assert found == {
        "charts": 8,
        "features": 10,
        "fetched": 0,
        "shown": True,
        "wide": True,
        "seen": True,
    }


def document(page: Path) -> str:
    """Return a page as it is after its scripts have run."""
    import shutil

    browser = shutil.which("chromium") or shutil.which("google-chrome") or "chromium-browser"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1240,1500"]
    folder = f"--user-data-dir={page.parent / 'browser'}"
    ran = subprocess.run(
        [browser, *options, folder, "--dump-dom", page.as_uri()],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return ran.stdout
