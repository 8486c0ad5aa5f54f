"""``persia-launcher report``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from click.testing import CliRunner

from persia._report import run
from persia._report.run import Chart, ChartSeries, Run
from persia.launcher import cli
from tests.report.runs import Reader
from tests.support.processes import run as run_process

if TYPE_CHECKING:
    import pytest


def write(path: Path, lr: str) -> Path:
    loss = ChartSeries("loss", [(1.0, 0.5), (2.0, 0.25)])
    one = Run("Net", "", {"lr": lr}, charts=[Chart("Loss", "", (loss,))])
    run.save(path, run.as_json(one) if path.suffix == ".json" else run.embedded(one))
    return path


def test_two_reports_become_one_page(tmp_path: Path) -> None:
    one, two = write(tmp_path / "monday.json", "0.1"), write(tmp_path / "tuesday.html", "0.2")
    target = tmp_path / "new" / "both.htm"
    ran = CliRunner().invoke(cli, ["report", str(one), str(two), "-o", str(target)])
    assert (ran.exit_code, ran.output) == (0, f"{target}\n")
    read = Reader(target.read_text())
    assert "monday: loss tuesday: loss" in read.text
    assert "lr 0.1 0.2" in read.text


def test_runs_of_one_name_are_shown_by_their_paths(tmp_path: Path) -> None:
    paths = [str(write(tmp_path / day / "run.json", "1")) for day in ("monday", "tuesday")]
    target = tmp_path / "both.html"
    assert not CliRunner().invoke(cli, ["report", *paths, "-o", str(target)]).exit_code
    text = Reader(target.read_text()).text
    assert all(f"{path}: loss" in text for path in paths)


def test_a_command_line_that_cannot_be_used_is_one_line_and_writes_nothing(
    tmp_path: Path,
) -> None:
    good = str(write(tmp_path / "run.json", "1"))
    target = str(tmp_path / "page.html")
    many = [str(write(tmp_path / f"{number}.json", "1")) for number in range(9)]
    for words, says in (
        ((good, str(tmp_path / "none.json"), "-o", target), "report: cannot read"),
        ((good, "-o", str(tmp_path / "page.json")), "expected -o to name a page"),
        ((*many, "-o", target), "expected at most 8 runs, got 9"),
        ((good, f"{tmp_path}/x/../run.json", "-o", target), "run.json is given twice"),
        ((str(tmp_path), "-o", target), f"report: cannot read {tmp_path}: Is a directory\n"),
        ((good, "-o", f"{good}/page.html"), "report: cannot write"),
        (("-o", target), "Missing argument 'FILES...'"),
    ):
        ran = CliRunner().invoke(cli, ["report", *words])
        assert (ran.exit_code, ran.output.count("\n")) == (2, 1), ran.output
        assert says in ran.output
        assert not list(tmp_path.glob("page*"))


def test_without_a_name_the_page_is_runs_html(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = CliRunner().invoke(cli, ["report", str(write(tmp_path / "run.json", "1"))])
    assert (ran.exit_code, ran.output) == (0, "runs.html\n")
    assert Reader(Path("runs.html").read_text()).headings[0] == "Net"


def test_a_report_is_not_replaced_by_the_page_it_is_shown_in(tmp_path: Path) -> None:
    one, two = write(tmp_path / "one.html", "1"), write(tmp_path / "two.json", "2")
    before = one.read_text()
    ran = CliRunner().invoke(cli, ["report", str(one), str(two), "-o", str(one)])
    assert (ran.exit_code, one.read_text()) == (2, before)
    assert f"-o {one} is one of the reports" in ran.output


def test_it_loads_no_torch(tmp_path: Path) -> None:
    good = write(tmp_path / "run.json", "1")
    code = (
        "import sys; from persia._cli.report import combine; from pathlib import Path; "
        f"combine([Path({str(good)!r})], Path({str(tmp_path / 'page.html')!r})); "
        "print('torch' in sys.modules)"
    )
    ran = run_process(sys.executable, "-c", code)
    assert ran.stdout == "False\n", ran.stderr
