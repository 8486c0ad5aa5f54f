"""Each of the newcomers' mistakes ends in one line that says what to write."""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from numpy.typing import NDArray

from persia import env
from persia.ctx import DataCtx, InferCtx, TrainCtx, eval_ctx
from persia.data import DataLoader, IterableDataset, StreamingDataset
from persia.embedding import EmbeddingConfig, optim
from persia.embedding import data as embedding_data
from persia.embedding.data import (
    IDTypeFeature,
    IDTypeFeatureWithSingleID,
    Label,
    NonIDTypeFeature,
    PersiaBatch,
)
from persia.embedding.optim import SGD, Adagrad, Adam

ENTRY = re.compile(r"(.+?)\n=> (\w+): (.+)", re.DOTALL)


def table() -> list[tuple[str, str, list[str]]]:
    """What is written, the type of its error, and pieces of the line."""
    text = Path(__file__).with_name("wrong_inputs.txt").read_text(encoding="utf-8")
    entries = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).strip().split("\n\n")
    found = []
    for entry in filter(str.strip, entries):
        match = ENTRY.fullmatch(entry.strip())
        assert match is not None, entry
        found.append((match[1], match[2], match[3].split(" | ")))
    return found


TABLE = table()
CONFIG = {"slots_config": {"user": {"dim": 4}}}


class Net(torch.nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(width, 1)

    def forward(self, dense: list[torch.Tensor], embeddings: list[torch.Tensor]) -> Any:
        return self.linear(torch.cat(embeddings, 1))


def u64(*ids: int) -> NDArray[np.uint64]:
    return np.array(ids, np.uint64)


def user(size: int, name: str = "user") -> IDTypeFeatureWithSingleID:
    return IDTypeFeatureWithSingleID(name, np.arange(size, dtype=np.uint64))


def batch(name: str = "user") -> PersiaBatch:
    return PersiaBatch([user(3, name)], labels=[Label(np.ones((3, 1), np.float32))])


def context(model: Any = None, **given: Any) -> TrainCtx:
    """What README has, but for what is given."""
    model = model or Net()
    parameters = Net().parameters() if isinstance(model, type) else model.parameters()
    settings: dict[str, Any] = {
        "embedding_optimizer": SGD(lr=0.1),
        "dense_optimizer": torch.optim.SGD(parameters, lr=0.1),
        "embedding_config": CONFIG,
        "mixed_precision": False,
    }
    return TrainCtx(model=model, **{**settings, **given})


def slot(**keys: Any) -> TrainCtx:
    return context(embedding_config={"slots_config": {"user": keys}})


def group(**settings: Any) -> TrainCtx:
    return context(embedding_config={**CONFIG, "group_settings": {"user": settings}})


def train(
    data: Any,
    loss: Any = lambda output, labels: torch.nn.functional.mse_loss(output, labels[0]),
    step: Any = lambda ctx, loss: ctx.backward(loss),
    model: Any = None,
    **options: Any,
) -> None:
    with context(model) as ctx:
        for one in DataLoader(data, **options):
            step(ctx, loss(*ctx.forward(one)))


@pytest.fixture
def namespace(no_job: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the entries may name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("persia._deprecated.used", set())
    embedding_data._warned_of_minus_one.clear()
    optim._log_new_default.cache_clear()

    def yaml(text: str) -> str:
        (tmp_path / "config.yml").write_text(text)
        return str(tmp_path / "config.yml")

    return {
        "np": np,
        "pd": pd,
        "torch": torch,
        "F": torch.nn.functional,
        "env": env,
        "monkeypatch": monkeypatch,
        "yaml": yaml,
        "model": Net(),
        "CONFIG": CONFIG,
        "DataCtx": DataCtx,
        "InferCtx": InferCtx,
        "eval_ctx": eval_ctx,
        "Net": Net,
        "DataLoader": DataLoader,
        "IterableDataset": IterableDataset,
        "StreamingDataset": StreamingDataset,
        "EmbeddingConfig": EmbeddingConfig,
        "IDTypeFeature": IDTypeFeature,
        "PersiaBatch": PersiaBatch,
        "Label": Label,
        "IDTypeFeatureWithSingleID": IDTypeFeatureWithSingleID,
        "NonIDTypeFeature": NonIDTypeFeature,
        "Adagrad": Adagrad,
        "Adam": Adam,
        "u64": u64,
        "user": user,
        "batch": batch,
        "context": context,
        "slot": slot,
        "group": group,
        "train": train,
    }


def test_the_table_is_long_enough() -> None:
    assert len({written for written, _, _ in TABLE}) == len(TABLE) >= 80


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the names of 2021
@pytest.mark.parametrize(("written", "kind", "pieces"), TABLE, ids=[one[0] for one in TABLE])
def test_one_line_says_what_to_write(
    written: str,
    kind: str,
    pieces: list[str],
    namespace: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    if kind == "warning":
        exec(written, namespace)
        lines = [line for line in caplog.messages if pieces[0] in line]
        assert len(lines) == 1, caplog.messages
    else:
        with pytest.raises(Exception) as raised:  # noqa: PT011
            exec(written, namespace)
        error = raised.value
        assert type(error).__name__ == kind, repr(error)
        if kind.startswith("Data"):  # nothing of ours or of numpy comes before it
            assert "".join(traceback.format_exception(error)).count("Traceback (") == 1
        # Errors of torch and Python have a note with what they do not name.
        is_ours = kind not in ("RuntimeError", "ValueError", "TypeError")
        lines = [str(error)] if is_ours else getattr(error, "__notes__", caplog.messages)
    (line,) = lines
    assert "\n" not in line
    assert [piece for piece in pieces if piece not in line] == [], line
