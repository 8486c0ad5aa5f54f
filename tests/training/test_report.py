"""The report of a run, its curves, and TensorBoard's files."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from persia._report import charts, tensorboard
from persia._report.curves import MOST, Curve
from persia.ctx import TrainCtx, eval_ctx
from persia.data import DataLoader, IterableDataset
from persia.embedding import EmbeddingConfig
from persia.embedding.data import (
    IDTypeFeature,
    IDTypeFeatureWithSingleID,
    Label,
    NonIDTypeFeature,
    PersiaBatch,
)
from persia.embedding.optim import Adagrad
from persia.errors import ConfigError

SLOTS = {"slots_config": {"user": {"dim": 4}, "tags": {"dim": 8}}}
STEPS, SIZE = 40, 32


class Clicks(IterableDataset):
    def __iter__(self):  # type: ignore[no-untyped-def]
        rng = np.random.default_rng(1)
        for _ in range(STEPS):
            tags = [rng.integers(0, 50, n).astype(np.uint64) for n in rng.integers(0, 3, SIZE)]
            users = rng.integers(0, 300, SIZE).astype(np.uint64)
            yield PersiaBatch(
                [IDTypeFeatureWithSingleID("user", users), IDTypeFeature("tags", tags)],
                non_id_type_features=[NonIDTypeFeature(rng.random((SIZE, 2), np.float32))],
                labels=[Label((users % 2).astype(np.float32).reshape(-1, 1))],
                requires_grad=True,
            )


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.top = torch.nn.Linear(14, 1)

    def forward(
        self, dense: list[torch.Tensor], embeddings: list[torch.Tensor]
    ) -> torch.Tensor:
        output: torch.Tensor = self.top(torch.cat([*dense, *embeddings], dim=1))
        return output


def build(**options: object) -> TrainCtx:
    torch.manual_seed(0)
    model = Net()
    return TrainCtx(
        model=model,
        embedding_optimizer=Adagrad(lr=0.1),
        dense_optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        embedding_config=EmbeddingConfig(schema=SLOTS),
        mixed_precision=False,
        **options,  # type: ignore[arg-type]
    )


def train(ctx: TrainCtx, spoiled: int = -1) -> None:
    loss_fn = torch.nn.BCEWithLogitsLoss()
    for step, batch in enumerate(DataLoader(Clicks(), reproducible=True)):
        if step == 3:
            continue  # no backward: abandoned
        output, labels = ctx.forward(batch)
        assert labels is not None
        loss = loss_fn(output, labels[0])
        ctx.backward(loss * math.nan if step == spoiled else loss)
        if step % 10 == 0:
            ctx.report(auc=0.5 + step / 100)


class Reader(HTMLParser):
    """What a page shows, and what it would fetch."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.headings: list[str] = []
        self.fetched: list[str] = []
        self.num_charts = 0
        self._open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open.append(tag)
        self.num_charts += tag == "svg"
        self.fetched += [str(value) for key, value in attrs if key in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self._open):
            self.words.append(data)
            if self._open and self._open[-1] in ("h1", "h2", "figcaption"):
                self.headings.append(data.strip())

    @property
    def text(self) -> str:
        return " ".join(self.words)


def test_a_run_ends_with_its_report(tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.html"
    with build(report=path) as ctx:
        train(ctx)
        ctx.write_report(tmp_path / "before.html")
        assert not path.exists()
        with eval_ctx(model=ctx.model) as evaluation:
            evaluation.report(gauc=0.625)
    page = path.read_text("utf-8")
    read = Reader(page)
    assert read.headings == [
        *("Training report: Net", "Warnings", "Loss", "AUC", "Throughput", "Staleness"),
        *("Rows", "Memory", "Gradients", "Embeddings", "Features by size"),
    ]
    assert read.num_charts == 8
    assert not read.fetched
    assert not re.search(r"https?:|@import|url\(", page)
    for said in (
        "0.6250 gauc, last",
        "0.8000 auc, last",
        "39 steps",
        "embedded mode",
        "Adagrad",
    ):
        assert said in read.text
    assert "1 batches without a backward" in re.sub(r"\s+", " ", read.text)
    assert "samples without id" in read.text
    # A third of the samples have no tag.
    missing = re.search(r"tags.*?(\d+\.\d) %", read.text)
    assert missing is not None
    assert 25.0 < float(missing[1]) < 42.0
    assert "gauc, last" not in (tmp_path / "before.html").read_text("utf-8")
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["report.html"]


def test_losses_that_are_not_finite_are_counted_and_a_failed_run_is_reported(
    tmp_path: Path,
) -> None:
    path = tmp_path / "report.html"

    def fail() -> None:
        with build(report=path) as ctx:
            train(ctx, spoiled=STEPS - 1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    text = re.sub(r"\s+", " ", Reader(path.read_text("utf-8")).text)
    assert "1 losses not finite NaN or infinity." in text
    assert f"{SIZE} gradient rows not finite: user" in text
    assert re.search(r"\d+ gradient rows not finite: tags", text)


def test_only_a_recorded_run_can_be_reported(tmp_path: Path) -> None:
    with build() as ctx, pytest.raises(ConfigError, match=r"TrainCtx\(report='report.html'\)"):
        ctx.write_report(tmp_path / "report.html")
    recorded = build(report=tmp_path / "report.html")
    with pytest.raises(ConfigError, match="inside its `with`"):
        recorded.write_report()


def test_a_report_that_could_not_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, says in (
        (tmp_path / "file" / "report.html", "cannot make the folder .*file"),
        (tmp_path, "expected a file, got the folder .*; give .*report.html"),
    ):
        with pytest.raises(ConfigError, match=f"report: {says}"):
            build(report=path)


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with build(tensorboard=tmp_path / "run") as ctx:
        train(ctx)
    reader = events.EventAccumulator(str(tmp_path / "run"))
    reader.Reload()
    assert {
        *("loss", "auc", "rows", "embedding_bytes", "staleness", "update_queue"),
        *("gradient_norm_dense", "gradient_norm_embeddings", "embedding_norm"),
    } <= set(reader.Tags()["scalars"])
    auc = reader.Scalars("auc")
    assert [one.step for one in auc] == [1, 10, 20, 30]
    assert [one.value for one in auc] == pytest.approx([0.5, 0.6, 0.7, 0.8])
    losses = reader.Scalars("loss")
    assert len(losses) == 3  # 16, 16 and 7 steps
    assert losses[-1].value < losses[0].value
    assert reader.Scalars("rows")[-1].value > 100


def test_without_tensorboard_a_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tensorboard, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'persia\[tensorboard\]'"):
        build(tensorboard=tmp_path)


@pytest.mark.parametrize("number", [0, 1, MOST - 1, MOST, MOST + 1, 3 * MOST + 5])
def test_a_curve_stays_small_and_keeps_the_mean(number: int) -> None:
    curve = Curve()
    for x in range(number):
        curve.add(x, 2.0 * x)
        curve.add(x, math.nan)
    points = curve.points()
    assert len(points) < MOST + 1
    assert curve.num_not_finite == number
    assert all(y == 2 * x for x, y in points)
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    whole, rest = divmod(number, curve.every)
    weights = [curve.every] * whole + [rest] * bool(rest)
    assert len(points) == len(weights)
    if number:
        mean = sum(x * w for (x, _), w in zip(points, weights, strict=True)) / number
        assert mean == pytest.approx((number - 1) / 2)


FLOATS = st.floats(-1e30, 1e30)


@given(FLOATS, FLOATS, st.sampled_from(["", "B"]))
@example(0.0, 5e-324, "")
def test_ticks_are_few_and_span_the_range(one: float, other: float, unit: str) -> None:
    low, high = min(one, other), max(one, other)
    if unit:
        low, high = 0.0, abs(high)
    found = charts.ticks(low, high, unit)
    width = (found[-1] - found[0]) * 1e-9
    assert 2 <= len(found) <= 9
    assert found[0] <= low + width
    assert found[-1] >= high - width
    assert found == sorted(set(found))


def test_numbers_are_short() -> None:
    told = {0: "0", 12: "12", 1500: "1,500", 0.00123: "0.00123", 12_345: "12.3 k"}
    assert {value: charts.short(value) for value in told} == told
    assert charts.short(3 * 2**30, "B") == "3 GiB"
    assert charts.short(1000, "B") == "1000 B"
    assert len(charts.short(math.nan)) == 1


def test_a_chart_of_nothing_says_so_and_names_are_escaped() -> None:
    empty = charts.draw(charts.Chart("<b>", "", "step", (charts.ChartSeries("x", ()),)))
    assert "nothing was recorded" in empty
    assert "<b>" not in empty
    one = charts.draw(
        charts.Chart("t", "", "step", (charts.ChartSeries("<i>", ((3.0, 2.0),)),))
    )
    assert "<circle" in one
    assert "<i>:" not in one
