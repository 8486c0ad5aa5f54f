"""A run over a stream, stopped and continued: the data-loader sends all of it again."""

from __future__ import annotations

from pathlib import Path

import pytest

from persia.ctx import TrainCtx
from persia.data import DataLoader, StreamingDataset
from persia.errors import CheckpointError, ConfigError
from tests.distributed.net import make_ctx, rows
from tests.support.processes import ROOT
from tests.training.test_checkpoints import step

COUNT = 8
SENDS = f"""
from persia.ctx import DataCtx
from tests.distributed.batches import make_batch

with DataCtx() as ctx:
    for number in range({COUNT}):
        ctx.send_data(make_batch(number))
    print("dropped", ctx.stats().get("dropped", 0), flush=True)
"""
SEEKS = f"""
from persia.ctx import DataCtx
from tests.distributed.batches import make_batch

with DataCtx() as ctx:
    first = ctx.resume_position
    ctx.seek(first)
    for number in range(first, {COUNT}):
        ctx.send_data(make_batch(number))
    print("began at", first, flush=True)
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "data_loader.py"
    path.write_text(SENDS)
    monkeypatch.setenv("PERSIA_DATALOADER_ENTRY", str(path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return path


def train(ctx: TrainCtx, dump_at: int = 0, url: Path | None = None) -> list[float]:
    losses = []
    loader = DataLoader(
        StreamingDataset(4), reproducible=True, embedding_staleness=1, timeout_ms=30_000
    )
    for number, batch in enumerate(loader, start=1):
        losses.append(step(ctx, batch))
        if number == dump_at and url is not None:
            ctx.dump_checkpoint(url)
    return losses


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param(SENDS, "dropped 3", id="drops"),
        pytest.param(SEEKS, "began at 3", id="seeks", marks=pytest.mark.slow),
    ],
)
def test_a_stream_is_continued_bit_for_bit(
    script: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    with make_ctx() as ctx:
        whole = train(ctx, 3, tmp_path / "ckpt")
        expected = rows(ctx), train(ctx)
    script.write_text(text)
    with make_ctx(seed=0) as ctx:
        ctx.load_checkpoint(tmp_path / "ckpt")
        assert ctx.resume_position.batches == 3
        assert train(ctx) == whole[3:]
        # The next pass is a whole one.
        assert (rows(ctx), train(ctx)) == expected
    assert said in capfd.readouterr().out


@pytest.mark.slow
def test_a_position_means_nothing_in_other_data(script: Path, tmp_path: Path) -> None:
    with make_ctx() as ctx:
        train(ctx, 3, tmp_path / "ckpt")
    with make_ctx() as ctx:
        ctx.load_checkpoint(tmp_path / "ckpt")
        with pytest.raises(CheckpointError, match="pass over a stream"):
            next(iter(DataLoader([])))


@pytest.mark.slow
def test_another_number_of_data_loaders_is_refused(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_ctx() as ctx:
        train(ctx, 3, tmp_path / "ckpt")
    script.write_text(
        "from persia import env\nenv.set_env(replica_size=2, replica_index=0)\n" + SENDS
    )
    with make_ctx() as ctx:
        ctx.load_checkpoint(tmp_path / "ckpt")
        with pytest.raises(ConfigError, match="made with 1 data-loaders, now there are 2"):
            train(ctx)
