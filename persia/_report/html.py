"""A run's report as one HTML file: nothing is fetched, and nothing but text is run.

The page is light or dark as the reader's system is. What is drawn and told comes in as plain
values; who gathers them is ``persia._report.summary``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from persia._report.charts import Chart, draw, short


@dataclass(frozen=True, slots=True)
class FeatureRow:
    """One line of the table of features."""

    name: str
    dim: int
    distinct: float  # estimated
    num_ids: int
    ids_a_sample: float
    missing: float  # share of samples without an id
    vector_norm: float  # NaN where no step had it
    gradient_norm: float


@dataclass(frozen=True, slots=True)
class Warn:
    """Something that the reader should know."""

    what: str
    num: int
    why: str


@dataclass(frozen=True, slots=True)
class Page:
    """All that a report says."""

    title: str
    facts: str  # one line below the title
    tiles: Sequence[tuple[str, str]]  # what, and its value
    warnings: Sequence[Warn]
    charts: Sequence[Chart]
    features: Sequence[FeatureRow]
    note: str  # below the features


def render(page: Page) -> str:
    """Return the file's text."""
    tiles = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(what)}</span></div>'
        for what, value in page.tiles
    )
    charts = "".join(draw(chart) for chart in page.charts)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(page.title)}</title><style>{_STYLE}</style></head><body><main>"
        f"<header><h1>{escape(page.title)}</h1><p>{escape(page.facts)}</p></header>"
        f'<section class="tiles">{tiles}</section>'
        f"{_warnings(page.warnings)}"
        f'<section class="charts">{charts}</section>'
        f"{_features(page.features, page.note)}"
        f"</main><script>{_SCRIPT}</script></body></html>\n"
    )


def _warnings(found: Sequence[Warn]) -> str:
    if not found:
        return '<p class="fine">No warnings: nothing was skipped, lost, masked or evicted.</p>'
    rows = "".join(
        f'<tr><td class="num">{one.num:,}</td><td><b>{escape(one.what)}</b></td>'
        f"<td>{escape(one.why)}</td></tr>"
        for one in found
    )
    return f'<section class="warnings"><h2>Warnings</h2><table>{rows}</table></section>'


def _features(rows: Sequence[FeatureRow], note: str) -> str:
    if not rows:
        return ""
    most = max(max(row.distinct for row in rows), 1.0)
    lines = "".join(
        f'<tr><th scope="row">{escape(row.name)}</th><td class="num">{row.dim}</td>'
        f"{_bar(row.distinct / most, short(round(row.distinct)))}"
        f'<td class="num">{short(row.distinct * row.dim * 4, "B")}</td>'
        f'<td class="num">{short(row.num_ids)}</td>'
        f'<td class="num">{short(row.ids_a_sample)}</td>'
        f"{_bar(row.missing, _percent(row.missing))}"
        f'<td class="num">{short(row.vector_norm)}</td>'
        f'<td class="num">{short(row.gradient_norm)}</td></tr>'
        for row in sorted(rows, key=lambda row: -row.distinct)
    )
    heads = (
        *("feature", "dim", "distinct ids", "vectors", "ids", "ids a sample"),
        *("samples without id", "norm of a vector", "norm of gradient"),
    )
    head = "".join(
        f'<th scope="col"{"" if number in {0, 2, 6} else " class=num"}>{name}</th>'
        for number, name in enumerate(heads)
    )
    return (
        '<section class="features"><h2>Features by size</h2><div class="scroll"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>"
        f'<p class="note">{escape(note)}</p></section>'
    )


def _bar(share: float, text: str) -> str:
    width = 0 if not math.isfinite(share) else round(100 * min(max(share, 0), 1), 1)
    return (
        f'<td class="bar"><span class="track"><i style="width:{width}%"></i></span>'
        f"<span>{text}</span></td>"
    )


def _percent(share: float) -> str:
    if share and share < 0.001:
        return "< 0.1 %"
    return f"{100 * share:.1f} %" if share else "0"


_STYLE = """
:root{color-scheme:light dark;--paper:#f6f7f9;--card:#fff;--ink:#1b2330;--soft:#5d6878;
--line:#e3e7ed;--s0:#2563c9;--s1:#c8681a;--s2:#1f8a62;--s3:#8646b8;--bar:#b9cdf0;
--warn:#fff6e0;--edge:#e6c46a}
@media (prefers-color-scheme:dark){:root{--paper:#12161c;--card:#1b2129;--ink:#e6eaf0;
--soft:#98a4b5;--line:#2d3641;--s0:#7aa7f5;--s1:#f0a35e;--s2:#5fcf9f;--s3:#c39be8;
--bar:#35507e;--warn:#2e2717;--edge:#7a6427}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);
font:14px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main{max-width:1220px;margin:0 auto;padding:26px 22px 40px}
h1{font-size:23px;margin:0}h2{font-size:16px;margin:0 0 10px}
header p{color:var(--soft);margin:4px 0 18px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(112px,1fr));gap:12px}
.tile,.chart,.features,.warnings{background:var(--card);border:1px solid var(--line);
border-radius:9px;padding:12px 13px}
.tile b{display:block;font-size:18px;font-variant-numeric:tabular-nums;white-space:nowrap}
.tile span,.note,.none,.legend,small{color:var(--soft)}.tile span{font-size:12px}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(440px,100%),1fr));
gap:14px;margin:14px 0}
.chart{margin:0}.chart svg{display:block;width:100%;height:auto;overflow:visible}
figcaption{font-weight:600;font-size:15px}small{font-weight:400;font-size:12.5px}
.legend{font-size:12.5px;min-height:20px;display:flex;gap:14px;align-items:center}
.legend output{margin-left:auto;font-variant-numeric:tabular-nums}
.key i{display:inline-block;width:14px;height:3px;border-radius:2px;margin-right:5px;
vertical-align:middle}
.grid{stroke:var(--line)}.pointer{stroke:var(--soft);stroke-dasharray:3 3;opacity:0}
.tick,.axis{fill:var(--soft);font-size:12px;font-variant-numeric:tabular-nums}
.end{text-anchor:end}.mid{text-anchor:middle}
.line{fill:none;stroke-width:1.8;stroke-linejoin:round;vector-effect:non-scaling-stroke}
.line.s0{stroke:var(--s0)}.line.s1{stroke:var(--s1)}.line.s2{stroke:var(--s2)}
.line.s3{stroke:var(--s3)}.dot.s0{fill:var(--s0)}.dot.s1{fill:var(--s1)}
.dot.s2{fill:var(--s2)}.dot.s3{fill:var(--s3)}
.key .s0{background:var(--s0)}.key .s1{background:var(--s1)}.key .s2{background:var(--s2)}
.key .s3{background:var(--s3)}.faint{opacity:.38}.line.faint{stroke-width:1.1}
.warnings{background:var(--warn);border-color:var(--edge);margin-top:14px}
.fine{color:var(--soft);margin:14px 2px 0}
table{border-collapse:collapse;width:100%}.scroll{overflow-x:auto}
td,th{padding:6px 10px;text-align:left;border-top:1px solid var(--line);white-space:nowrap}
.warnings td:last-child{white-space:normal;width:70%}
thead th{border-top:0;color:var(--soft);font-weight:500;font-size:12.5px}
th[scope=row]{font-weight:600}.num{text-align:right;font-variant-numeric:tabular-nums}
thead th.num{text-align:right}.bar span{font-variant-numeric:tabular-nums}
.track{display:inline-block;width:88px;height:9px;background:var(--line);border-radius:5px;
overflow:hidden;margin-right:9px}.track i{display:block;height:100%;background:var(--s0)}
.note{font-size:12.5px;margin:10px 2px 0;max-width:100ch}
"""

_SCRIPT = """
for (const svg of document.querySelectorAll("svg[data-points]")) {
  const lines = JSON.parse(svg.dataset.points), told = svg.parentNode.querySelector("output");
  const pointer = svg.querySelector(".pointer"), width = svg.viewBox.baseVal.width;
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect(), x = (event.clientX - box.left) / box.width * width;
    const near = lines.map(line => line.at.reduce(
      (a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a));
    pointer.setAttribute("x1", near[0][0]); pointer.setAttribute("x2", near[0][0]);
    pointer.style.opacity = 1;
    told.textContent = near.map((one, i) =>
      lines.length > 1 ? lines[i].name + " " + one[1] : one[1]).join("   ");
  });
  svg.addEventListener("pointerleave", () => {
    pointer.style.opacity = 0; told.textContent = "";
  });
}
"""
