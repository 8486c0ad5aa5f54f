"""Embedded mode's data-loader: a script that runs as a child process, once for each pass."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from persia.ctx import TrainCtx
from persia.data import DataLoader, StreamingDataset
from persia.errors import ConfigError, ServiceError
from tests.cluster import ROOT
from tests.faults.job import make_ctx, occurrences, trained

SENDS = """
from persia.ctx import DataCtx
from tests.faults.job import make_batch

with DataCtx() as ctx:
    for number in range({count}):
        ctx.send_data(make_batch(number))
"""
TIMEOUT_MS = 30_000


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data-loader's script, to be written."""
    path = tmp_path / "data_loader.py"
    path.touch()
    monkeypatch.setenv("PERSIA_DATALOADER_ENTRY", str(path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return path


def train(ctx: TrainCtx, loader: DataLoader) -> list[int]:
    """Train one pass; returns the numbers of the batches."""
    seen = []
    for batch in loader:
        loss, _ = ctx.forward(batch)
        ctx.backward(loss)
        seen.append(int(batch.meta or b"-1"))
    return seen


def new_loader() -> DataLoader:
    return DataLoader(StreamingDataset(4), reproducible=True, timeout_ms=TIMEOUT_MS)


def test_each_pass_runs_the_script_though_it_may_still_be_ending(script: Path) -> None:
    # The child needs a while to end after its last batch was trained; a pass that begins
    # meanwhile must not take its end for a failure, and must not wait for it in vain.
    linger = "import atexit, time\natexit.register(time.sleep, 0.5)\n"
    script.write_text(linger + SENDS.format(count=6))
    with make_ctx() as ctx:
        loader = new_loader()
        assert [train(ctx, loader) for _ in range(2)] == [list(range(6))] * 2
        counts = trained(ctx)
    assert (counts["user"] == 2 * occurrences(6)["user"]).all()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "ended with status 0"),
        ("import os\nos.kill(os.getpid(), 9)", "died of signal 9"),
    ],
)
def test_a_script_that_sends_nothing_is_named(script: Path, text: str, error: str) -> None:
    script.write_text(text)
    with make_ctx() as ctx:
        loader = new_loader()
        with pytest.raises(ServiceError, match=rf"{script} {error} before it had ended"):
            train(ctx, loader)
        # Another pass is another run, which the failure of this one says nothing of.
        script.write_text(SENDS.format(count=2))
        assert train(ctx, loader) == [0, 1]


def test_the_traceback_of_the_script_is_raised(script: Path) -> None:
    script.write_text(SENDS.format(count=3) + "    raise KeyError('no such column')\n")
    raised = pytest.raises(ServiceError, match=r"(?s)data-loader 0 failed.*no such column")
    with raised, make_ctx() as ctx:
        train(ctx, new_loader())
    # Leaving the context waits for the updates, which the failure of a pass does not.
    assert ctx.stats()["batches"] == 3


def test_a_loop_that_is_left_ends_the_child_soon(script: Path) -> None:
    script.write_text(SENDS.format(count=100_000))
    with make_ctx() as ctx:
        for batch in new_loader():
            loss, _ = ctx.forward(batch)
            ctx.backward(loss)
            break
        begin = time.monotonic()
    assert time.monotonic() - begin < 5.0


def test_embedding_workers_that_cannot_hold_what_is_sent_are_refused(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script.write_text(SENDS.format(count=3))
    config = tmp_path / "global.yml"
    config.write_text("embedding_worker_config: {forward_buffer_size: 5}\n")
    monkeypatch.setenv("PERSIA_GLOBAL_CONFIG", str(config))
    with make_ctx() as ctx:
        loader = DataLoader(StreamingDataset(4), reproducible=True, embedding_staleness=2)
        said = r"forward_buffer_size: .* room for 5 .* at least 6, .*buffer_size 4 \+ 2 .*to 6"
        with pytest.raises(ConfigError, match=said):
            next(iter(loader))
        loader = DataLoader(StreamingDataset(4), reproducible=True, embedding_staleness=1)
        assert train(ctx, loader) == [0, 1, 2]
