"""Draws the diagrams of the docs: docs/images/{sign,life-of-a-batch,staleness,serving}.svg.

python docs/_site/diagrams.py
"""

from __future__ import annotations

from pathlib import Path

IMAGES = Path(__file__).resolve().parents[1] / "images"

HEAD = """\
<defs><marker id="m" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"
 orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" fill="#546e7a"/></marker></defs>
<style>
text{font-family:Roboto,Helvetica,Arial,sans-serif;fill:#263238;text-anchor:middle}
.t{font-size:14px;font-weight:600}.s{font-size:12px;fill:#455a64}.l{font-size:12px}
.b{fill:#e8eaf6;stroke:#3f51b5;stroke-width:1.4}.c{fill:#e0f2f1;stroke:#00897b;stroke-width:1.4}
.d{fill:#fff3e0;stroke:#fb8c00;stroke-width:1.4}
.g{fill:#fafafa;stroke:#b0bec5;stroke-dasharray:4 4}
.a{stroke:#546e7a;stroke-width:1.6;fill:none}
</style>
<rect width="100%" height="100%" fill="#ffffff"/>
"""


def text(x: float, y: float, words: str, style: str = "l") -> str:
    """One line, centered."""
    return f'<text class="{style}" x="{x:g}" y="{y:g}">{words}</text>\n'


def box(x: float, y: float, w: float, h: float, style: str, title: str, *lines: str) -> str:
    """A box with a title and lines below it."""
    drawn = f'<rect class="{style}" x="{x}" y="{y}" width="{w}" height="{h}" rx="6"/>\n'
    top = y + h / 2 - 8.5 * len(lines) + 5
    drawn += text(x + w / 2, top, title, "t" if lines else "l")
    for number, line in enumerate(lines, 1):
        drawn += text(x + w / 2, top + 17 * number + 1, line, "s")
    return drawn


def arrow(path: str) -> str:
    """A line with a head."""
    return f'<path class="a" d="{path}" marker-end="url(#m)"/>\n'


def sign() -> str:
    """The bits of a sign."""
    return (
        '<rect class="d" x="40" y="50" width="130" height="56"/>\n'
        '<rect class="b" x="170" y="50" width="590" height="56"/>\n'
        + text(105, 74, "group + 1", "t")
        + text(105, 94, "8 bits", "s")
        + text(465, 74, "id", "t")
        + text(465, 94, "its lowest 56 bits", "s")
        + text(48, 42, "63")
        + text(160, 42, "56")
        + text(182, 42, "55")
        + text(754, 42, "0")
        + text(
            400,
            134,
            "sign = (id &amp; (2^56 - 1)) | (group + 1) &lt;&lt; 56, with "
            "feature_index_prefix_bit: 8",
        )
    )


def life_of_a_batch() -> str:
    """Roles, and what goes between them."""
    return (
        '<rect class="g" x="10" y="62" width="620" height="248" rx="10"/>\n'
        + text(118, 298, "no PyTorch in here", "s")
        + box(30, 90, 160, 84, "d", "data-loader", "your data code")
        + box(
            390, 90, 190, 84, "b", "embedding-worker", "distinct ids, signs,", "pooling, sums"
        )
        + box(790, 90, 180, 84, "c", "nn-worker", "your model, loss, loop", "PyTorch, DDP")
        + "".join(
            box(250 + 125 * n, 236, 115, 50, "b", f"server {n}", "rows, their state")
            for n in range(3)
        )
        + arrow("M190 132 H390")
        + text(290, 124, "1  ids")
        + arrow("M110 90 C 130 10, 800 10, 860 90")
        + text(480, 26, "1  dense features, labels, a reference")
        + arrow("M790 110 H580")
        + text(710, 103, "2  lookup, ahead")
        + arrow("M580 132 H790")
        + text(710, 127, "3  rows, pooled")
        + arrow("M790 156 H580")
        + text(710, 171, "4  gradients")
        + arrow("M440 174 C 430 200, 330 200, 308 236")
        + arrow("M485 174 L 433 236")
        + arrow("M530 174 C 545 195, 558 210, 558 236")
        + text(370, 196, "signs", "s")
        + text(590, 215, "sums", "s")
        + text(880, 200, "at most embedding_staleness", "s")
        + text(880, 217, "batches between 2 and 4", "s")
    )


def staleness() -> str:
    """Batches that overlap."""
    drawn = ""
    for number, start in enumerate((100, 212, 385, 498)):
        top = 24 + 40 * number
        drawn += text(50, top + 19, f"batch {number + 1}", "s")
        drawn += box(start, top, 90, 28, "b", "lookup")
        drawn += box(start + 90, top, 110, 28, "c", "dense net")
        drawn += box(start + 200, top, 70, 28, "d", "update")
    return (
        drawn
        + arrow("M371 38 H378 V118 H384")
        + text(300, 122, "batch 3 waits for batch 1", "s")
        + arrow("M100 200 H790")
        + text(
            445, 220, "time, with embedding_staleness=2: at most two between lookup and update"
        )
    )


def serving() -> str:
    """Versions and rows, from training to a request."""
    drawn = "".join(
        box(300, 40 + 62 * n, 170, 50, style, f"version {n + 1}", "dense net, rows")
        for n, style in enumerate("ggb")
    )
    drawn += "".join(box(242 + 82 * n, 266, 74, 38, "d", f"packet {n + 7}") for n in range(3))
    return (
        '<rect class="g" x="600" y="20" width="240" height="300" rx="10"/>\n'
        + text(720, 44, "persia-launcher serve", "t")
        + box(20, 150, 150, 84, "c", "training", "model, rows,", "optimizer state")
        + drawn
        + text(385, 30, "models/clicks", "s")
        + text(365, 326, "change log: new, changed, deleted rows", "s")
        + arrow("M170 175 C 230 160, 240 190, 300 189")
        + text(226, 158, "publish", "s")
        + arrow("M130 234 C 140 275, 190 285, 242 285")
        + text(120, 276, "flush", "s")
        + box(620, 70, 200, 50, "g", "version 2", "ends its requests")
        + box(620, 150, 200, 50, "b", "version 3: dense net", "answers new requests")
        + box(620, 240, 200, 50, "b", "version 3: rows", "without optimizer state")
        + arrow("M470 189 C 540 189, 560 175, 620 175")
        + text(536, 172, "switch", "s")
        + arrow("M480 285 C 540 285, 560 265, 620 265")
        + text(556, 296, "follow", "s")
        + arrow("M720 240 V200")
        + arrow("M960 162 H820")
        + arrow("M820 188 H960")
        + text(900, 154, "ids")
        + text(900, 206, "scores")
    )


def main() -> None:
    """Write all of them."""
    for name, width, height, title, drawn in (
        ("sign", 800, 150, "The 64 bits of a sign: group, then id", sign()),
        ("life-of-a-batch", 985, 320, "What goes between the roles", life_of_a_batch()),
        ("staleness", 830, 232, "With staleness 2, batch 3 waits for batch 1", staleness()),
        ("serving", 980, 340, "Versions and rows, from training to a request", serving()),
    ):
        (IMAGES / f"{name}.svg").write_text(
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">\n'
            f"<title>{title}</title>\n{HEAD}{drawn}</svg>\n",
            encoding="utf-8",
        )


if __name__ == "__main__":
    main()
