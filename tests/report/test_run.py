"""A report's data, written and read again."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from persia._report import run
from persia._report.run import Chart, ChartSeries, FeatureRow, Mark, Run
from persia.errors import ConfigError

RUN = Run(
    "</script>",
    "facts",
    {"lr": "0.1"},
    [("steps", "3")],
    [("rows evicted", 2, "why")],
    [Chart("Loss", "", (ChartSeries("loss", [(1.0, 0.5), (2.0, 0.25)]),))],
    [Mark("checkpoint", 2, 1.5)],
    [FeatureRow("user", 8, 3.0, 4, 1.0, 0.0, None, 0.5)],
)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "run.json"
    run.save(path, run.as_json(RUN))
    assert run.load(path) == RUN
    path.write_text(f"<html>{run.embedded(RUN)}</html>")
    assert run.load(path) == RUN
    assert [one.name for one in path.parent.iterdir()] == ["run.json"]


def test_what_could_not_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "run.json").mkdir()
    with pytest.raises(OSError, match="directory"):
        run.save(tmp_path / "run.json", run.as_json(RUN))
    assert [one.name for one in tmp_path.iterdir()] == ["run.json"]


def test_numbers_that_are_not_finite_are_not_known(tmp_path: Path) -> None:
    feature = FeatureRow("user", 8, 3.0, 4, 1.0, 0.0, math.nan, math.inf)
    path = tmp_path / "run.json"
    path.write_text(run.as_json(Run("", "", features=[feature])))
    found = run.load(path).features[0]
    assert (found.vector_norm, found.gradient_norm) == (None, None)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "cannot read .*run.json"),
        ("", "got .*run.json: Expecting value"),
        ("[" * 100_000, "got .*run.json: "),
        (r'{"title": "\ud800", "facts": ""}', "surrogates not allowed"),
        ("<!doctype html><html></html>", "run.json has no run's data.*the report of each run"),
        ("{}", "got .*run.json: title: the key is required"),
        ('{"title": "", "facts": "", "version": 2}', "version: expected 1, got 2"),
        ('{"title": "", "facts": "", "marks": [1]}', r"marks\[0\]: expected a mapping, got 1"),
        ('{"title": "", "facts": "", "tiles": [["a", 1]]}', r"tiles\[0\]\[1\]: expected a str"),
        (
            '{"title":"","facts":"","charts":[{"title":"","unit":"",'
            '"series":[{"name":"","points":[[0,NaN]]}]}]}',
            r"charts\[0\].series\[0\].points\[0\]\[1\]: expected a finite number, got nan",
        ),
        # Its range with another such number would be none.
        (
            '{"title":"","facts":"","marks":[{"kind":"checkpoint","step":1,"seconds":1e308}]}',
            r"marks\[0\].seconds: expected a finite number, got 1e\+308",
        ),
    ],
)
def test_another_file_is_refused_by_name(tmp_path: Path, text: str | None, says: str) -> None:
    path = tmp_path / "run.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        run.load(path)
