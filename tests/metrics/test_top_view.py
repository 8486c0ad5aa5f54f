"""Frames of a job, of readings that a test makes up, and of an embedded trainer."""

from __future__ import annotations

import io
import math

import pytest
import torch

from persia._metrics import top_view
from persia._metrics.definitions import LOADER, SERVER, TRAINER, WORKER
from persia._metrics.scrape import Delta, Reading, read
from persia._metrics.top_view import DATASET, Frame, Watched, slowest
from persia.ctx import eval_ctx
from persia.errors import ConfigError, DataTypeError
from tests.metrics.job import text_of
from tests.support.contexts import SIZE, train, trained


def test_a_frame_shows_who_is_there_and_who_is_not() -> None:
    numbers = {"persia_loss": math.nan, "persia_steps_total": math.inf}
    before = read(text_of(TRAINER, 0, persia_trained_samples_total=0.0))[0]
    now = read(text_of(TRAINER, 0, "", persia_trained_samples_total=50000.0, **numbers))[0]
    shown = Delta(Reading(TRAINER, 0, now.at - 2.0, before.samples), now)
    frame = Frame(
        [
            Watched(TRAINER, 0, "127.0.0.1:9700", shown),
            Watched(SERVER, 1, "10.0.0.7:9601", None, "no answer for 12 s"),
        ],
        "a job",
    )
    text = str(frame)
    lines = text.splitlines()
    assert lines[0].startswith("PERSIA a job")
    assert "samples/s 25.0k" in lines[1]
    assert "loss nan" in lines[1]
    assert [line.split()[:4] for line in lines if line.startswith("1 ")] == [
        ["1", "no", "answer"]
    ]
    assert "embedding-parameter-server 1 at 10.0.0.7:9601: no answer for 12 s" in lines
    assert all(len(line) <= 112 for line in lines)
    tables = [line.split()[0] for line in lines if " state " in line]
    assert tables == ["parameter-server", "nn-worker"]


def test_a_narrow_terminal_loses_columns_and_no_digits() -> None:
    from rich.console import Console

    shown = Delta(None, read(text_of(TRAINER, 0, persia_loss=0.6931))[0])
    frame = Frame([Watched(TRAINER, 0, "", shown)], "a job")
    console = Console(file=io.StringIO(), width=60, record=True)
    console.print(frame)
    text = console.export_text()
    assert "0.6931" in text
    assert "not trained" not in text
    assert max(map(len, text.splitlines())) <= 60


def test_report_and_top() -> None:
    with trained() as ctx:
        train(ctx, 3)
        ctx.report(auc=0.5, loss=torch.tensor(0.25).item())
        with eval_ctx(model=ctx.model) as evaluation:
            evaluation.report(auc=torch.tensor([0.8125]))  # type: ignore[arg-type]
            evaluation.report(ndcg=math.nan)
        with pytest.raises(DataTypeError, match="expected a number for auc, got str"):
            ctx.report(auc="good")  # type: ignore[arg-type]
        assert ctx.metrics().value("persia_reported", name="auc") == 0.8125
        shown = ctx.top()
        assert {one.role for one in shown.processes} == {WORKER, SERVER, TRAINER}
        named = dict(shown.headline())
        assert named["auc"] == "0.8125"
        assert named["reported loss"] == "0.25"
        assert named["ndcg"] == "nan"
        assert named["steps"] == "3"
        assert named["rows"] == str(3 * SIZE)
        assert named["misses"] == "100 %"
        text = str(shown)
        assert text.splitlines()[0].startswith("PERSIA embedded mode")
        # Of what was done since then, which is nothing.
        assert dict(ctx.top().headline())["samples/s"] == "0"


def test_without_rich_a_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top_view, "find_spec", lambda name: None)
    with trained() as ctx, pytest.raises(ConfigError, match="pip install rich"):
        ctx.top()


# --- the slowest stage -----------------------------------------------------------------------

BATCH, ROOM = (
    "get_train_batch_time_cost_more_than_1ms_sec_sum",
    "update_gradient_batched_time_cost_more_than_1ms_sec_sum",
)
STEPS = {"persia_steps_total": 100.0}


def span(role: str, grown: dict[str, float], now: dict[str, float] | None = None) -> Delta:
    """Return a process between two readings 10 s apart, of counters that grew from 0."""
    labels = {"peer": SERVER, "method": "update"} if role == WORKER else {}

    def reading(at: float, values: dict[str, float]) -> Reading:
        return Reading(role, 0, at, {name: [(labels, value)] for name, value in values.items()})

    before = reading(0.0, dict.fromkeys(grown, 0.0))
    return Delta(before, reading(10.0, {**grown, **(now or {})}))


def _trainer(batch: float, room: float = 0.0, inbox: float | None = 0.0) -> Delta:
    now = {} if inbox is None else {"persia_inbox_batches": inbox}
    return span(TRAINER, {**STEPS, BATCH: batch, ROOM: room}, now)


def _loader(waits: float) -> Delta:
    return span(LOADER, {"persia_loader_wait_seconds_sum": waits})


def _worker(**seconds: float) -> Delta:
    names = {
        "rpc": "lookup_rpc_time_cost_sec_sum",
        "lookup": "lookup_total_time_cost_sec_sum",
        "update": "update_gradient_time_cost_sec_sum",
        "calls": "persia_rpc_call_seconds_sum",
    }
    return span(WORKER, {names[name]: value for name, value in seconds.items()})


SERVERS = span(SERVER, {"persia_update_rows_seconds_sum": 0.5})


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([_trainer(2.0, 0.4)], TRAINER),
        ([_trainer(6.0), _loader(1.0)], LOADER),
        # The inbox is full, or data-loaders wait for room: what comes after them is slow.
        ([_trainer(6.0, inbox=5.0), _loader(1.0)], WORKER),
        ([_trainer(6.0), _loader(9.0)], WORKER),
        ([_trainer(6.0, inbox=None)], DATASET),
        ([_trainer(1.0, 5.0), _worker(lookup=2.0, rpc=0.5, update=4.0), SERVERS], WORKER),
        ([_trainer(1.0, 5.0), _worker(lookup=2.0, rpc=1.9, update=1.0), SERVERS], SERVER),
        (
            [
                *(_trainer(5.0, inbox=3.0), SERVERS, SERVERS),
                _worker(lookup=2.0, rpc=0.5, update=4.0, calls=6.4),
            ],
            SERVER,
        ),
    ],
)
def test_the_slowest_stage(spans: list[Delta], expected: str) -> None:
    stage = slowest(spans)
    assert stage.name == expected
    assert "nn-worker" not in stage.why


def test_no_stage_is_named_before_anything_is_known() -> None:
    assert slowest([]).name == ""
    assert slowest([span(TRAINER, {"persia_steps_total": 0.0})]).name == ""
