"""A trainer in embedded mode shows the same of itself, and what its script reports."""

from __future__ import annotations

import math

import pytest
import torch

from persia._metrics import top_view
from persia._metrics.definitions import SERVER, TRAINER, WORKER
from persia.ctx import eval_ctx
from persia.errors import ConfigError, DataTypeError
from tests.metrics.test_contexts import SIZE, train, trained


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
        told = ctx.top()
        assert {one.role for one in told.processes} == {WORKER, SERVER, TRAINER}
        named = dict(told.headline())
        assert named["auc"] == "0.8125"
        assert named["reported loss"] == "0.25"
        assert named["ndcg"] == "nan"
        assert named["steps"] == "3"
        assert named["rows"] == str(3 * SIZE)
        assert named["misses"] == "100 %"
        text = str(told)
        assert text.splitlines()[0].startswith("PERSIA embedded mode")
        # Of what was done since then, which is nothing.
        assert dict(ctx.top().headline())["samples/s"] == "0"


def test_without_rich_a_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top_view, "find_spec", lambda name: None)
    with trained() as ctx, pytest.raises(ConfigError, match="pip install rich"):
        ctx.top()
