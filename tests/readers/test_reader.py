"""A run that continues from a checkpoint trains every row of the data exactly once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from persia.data import DataLoader, StreamingDataset
from persia.readers import ParquetReader
from tests.meta.sources import ROOT
from tests.readers.support import COLUMNS, write_folder
from tests.support.fixtures import Monkey
from tests.training.conftest import Net, new_ctx

SLOTS = {"slots_config": {"user": {"dim": 2}, "items": {"dim": 2}}}
SENDS = """
from pathlib import Path
from persia.ctx import DataCtx
from persia.readers import ParquetReader
from tests.readers.support import COLUMNS

with DataCtx() as ctx:
    ParquetReader(Path(__file__).parent / "data", COLUMNS, 4, shuffle_seed=9).send(ctx)
"""


def train(source: Any, folder: Path, *, stop_after: int | None, resume: bool) -> list[int]:
    """Train, from a checkpoint if asked, to one if asked to stop; returns the rows trained."""
    seen: list[int] = []
    with new_ctx(Net(2, num_dense=1, dim=2), embedding_config=SLOTS) as ctx:
        if resume:
            ctx.load_checkpoint(folder)
        # Not in order: a checkpoint knows of each batch whether it was trained.
        for number, batch in enumerate(DataLoader(source, timeout_ms=30_000), start=1):
            output, labels = ctx.forward(batch)
            assert labels is not None
            ctx.backward(output.sum())
            seen += [int(row) for row in labels[0][:, 0]]
            if number == stop_after:
                ctx.dump_checkpoint(folder)
                break
    return seen


@pytest.mark.parametrize("is_streamed", [False, True])
def test_rows_are_trained_once(tmp_path: Path, monkeypatch: Monkey, is_streamed: bool) -> None:
    data, script = tmp_path / "data", tmp_path / "data_loader.py"
    num_rows = write_folder(data, [20, 1, 33, 14])
    if is_streamed:
        script.write_text(SENDS)
        monkeypatch.setenv("PERSIA_DATALOADER_ENTRY", str(script))
        monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def source() -> Any:
        if is_streamed:
            return StreamingDataset(4)
        return ParquetReader(data, COLUMNS, 4, shuffle_seed=9)

    checkpoint = tmp_path / "checkpoint"
    first = train(source(), checkpoint, stop_after=7, resume=False)
    rest = train(source(), checkpoint, stop_after=None, resume=True)
    assert len(first) == 7 * 4
    assert sorted(first + rest) == list(range(num_rows))
