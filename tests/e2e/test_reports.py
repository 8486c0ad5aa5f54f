"""The report of a run over services and in a browser; a config that is not the servers'."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from persia.data import DataLoader
from persia.errors import ConfigError
from tests.faults.batches import DIM, SLOTS, make_batch
from tests.faults.job import make_ctx, step
from tests.support.browser import document, screenshot
from tests.support.local_job import local_job
from tests.support.places import short_directory
from tests.support.processes import ROOT, run

COUNT = 40


def train(report: Path) -> str:
    """Train the same batches; returns what the report says below its charts."""
    with make_ctx(report=report) as ctx:
        batches = [make_batch(number) for number in range(COUNT)]
        for batch in DataLoader(batches, reproducible=True, embedding_staleness=1):
            step(ctx, batch)
            ctx.report(auc=0.5)
    return report.read_text("utf-8")


def test_services_and_an_embedded_run_write_the_same_report(tmp_path: Path) -> None:
    embedded = train(tmp_path / "embedded.html")
    with short_directory() as place, local_job(place):
        services = train(tmp_path / "services.html")
    assert "embedded mode" in embedded
    assert "services mode" in services
    for pattern in (
        r"<h1>.*?</h1>",
        r"<figcaption>.*?</figcaption>",
        r'<section class="features">.*</section>',  # with norms, and distinct ids
        r"<b>[^<]*</b><span>(?:steps|samples|rows held|auc, last)</span>",
    ):
        found = [re.findall(pattern, page, re.DOTALL) for page in (embedded, services)]
        assert found[0] == found[1] != [], pattern


def test_a_trainer_with_another_config_learns_which_slot_differs() -> None:
    slots = {**SLOTS["slots_config"], "user": {"dim": 2 * DIM}}
    said = f"slots_config.user.dim is {DIM} there and {2 * DIM} here; "
    with (
        short_directory() as place,
        local_job(place),
        pytest.raises(ConfigError, match=said),
        make_ctx({"slots_config": slots}),
    ):
        pass


# Set by the page itself, once it is drawn.
PROBE = """
<script>
const found = {
  charts: document.querySelectorAll("svg[role=img]").length,
  // A curve of readings by the clock is a larger point where a short run has one reading.
  curves: document.querySelectorAll("polyline.line, circle[r='3.5']").length,
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
    words = (script, "--quiet", "--samples", "60000", "--report", report)
    ran = run(sys.executable, *words, timeout_s=240)
    assert ran.returncode == 0, ran.stderr
    for name, width in (("wide", 1240), ("narrow", 500)):
        shown = screenshot(report.as_uri(), tmp_path / f"{name}.png", width, 1500)
        assert len(set(shown)) > 100  # a blank page has a handful of values
    probed = tmp_path / "probed.html"
    probed.write_text(report.read_text("utf-8").replace("</body>", PROBE + "</body>"), "utf-8")
    dom = document(probed)
    title = dom[dom.index("<title>") + 7 : dom.index("</title>")]
    found = json.loads(title)
    assert found == {
        "charts": 9,
        "curves": 12,
        "features": 10,
        "fetched": 0,
        "shown": True,
        "wide": True,
        "seen": True,
    }
