"""The pictures of docs/images, made from real runs: ``make pictures``.

python -m tests.cli.pictures docs/images
"""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import yaml
from rich.console import Console, RenderableType

from persia._cli.doctor import examine
from persia._cli.top import Scraper, frame_of, list_targets
from persia._metrics.top_view import Frame
from persia.config import EmbeddingSchema
from tests.metrics.job import training_job
from tests.support.browser import screenshot
from tests.support.processes import DEADLINE_S, ROOT, Cluster
from tests.support.waiting import until

# Seconds over which the rates of a picture are.
WINDOW_S = 2.0
# Seconds until all of them train; PyTorch is long in loading on a busy machine.
START_S = 200.0


def svg(drawn: RenderableType, title: str) -> str:
    """Return a terminal's picture, without the fonts that it would fetch."""
    console = Console(file=io.StringIO(), record=True, width=112, force_terminal=True)
    console.print(drawn)
    text = console.export_svg(title=title, unique_id="persia")
    return re.sub(r"@font-face \{.*?\}\s*", "", text, flags=re.DOTALL)


def whole_frame(cluster: Cluster) -> Frame:
    """Return a frame of a job, between two readings of each of its processes."""
    with mock.patch.dict("os.environ", cluster.environment):
        scraper = Scraper(list_targets())

    def is_whole() -> bool:
        scraper.request_all()
        scraper.wait(DEADLINE_S)
        frame = frame_of(scraper)
        spans = [one.span for one in frame.processes if one.span is not None]
        assert all(one.poll() is None for one in cluster.processes.values()), cluster.logs()
        return len(spans) == len(cluster.processes) and bool(frame.stage.name)

    until(is_whole, START_S, look_s=WINDOW_S, details=cluster.logs)
    return frame_of(scraper)


def draw_top(folder: Path) -> Path:
    """Write the picture of ``persia-launcher top``."""
    with training_job() as cluster:
        frame = whole_frame(cluster)
    path = folder / "top.svg"
    path.write_text(svg(frame, "persia-launcher top"), encoding="utf-8")
    return path


def draw_doctor(folder: Path) -> Path:
    """Write the picture of ``persia-launcher doctor``, of an example with a mistake."""
    example = ROOT / "examples/adult_income"
    slots = (example / "config/embedding_config.yml").read_text()
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)  # so that messages have short names
        Path("slots.yml").write_text(
            slots.replace("  education: {dim: 8}", "  school: {dim: 32}")
        )
        ids = np.arange(8, dtype=np.uint64)
        names = [*EmbeddingSchema.load(yaml.safe_load(slots)).slots]
        arrays: dict[str, Any] = dict.fromkeys(names, ids)
        np.savez("sample.npz", **arrays)
        rows = {"occupation": 10**8, "native_country": 10**6}
        report = examine(Path("slots.yml"), sample=Path("sample.npz"), rows=rows)
    path = folder / "doctor.svg"
    path.write_text(svg(report, "persia-launcher doctor"), encoding="utf-8")
    return path


def draw_page(path: Path, words: str, width: int, height: int) -> Path:
    """Write the picture of the page that Python, with these words, writes in SITE."""
    with tempfile.TemporaryDirectory() as directory:
        site, picture = Path(directory) / "site", Path(directory) / path.name
        command = [sys.executable, *words.replace("SITE", str(site)).split()]
        subprocess.run(command, cwd=ROOT, check=True, timeout=300)
        screenshot((site / "index.html").as_uri(), picture, width, height)
        shutil.copy(picture, path)
    return path


QUICKSTART = "examples/quickstart/train.py --quiet --samples 200000 --report SITE/index.html"
HOME = "-m mkdocs build --strict --quiet --site-dir SITE"

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    print(draw_top(folder))
    print(draw_doctor(folder))
    print(draw_page(folder / "report.png", QUICKSTART, 1240, 1950))
    print(draw_page(folder / "home.png", HOME, 1280, 960))
