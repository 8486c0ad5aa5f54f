"""Embedded mode's data-loader: a script that runs as a child process, once for each pass."""

from __future__ import annotations

import itertools
import os
import re
import time
import traceback
from pathlib import Path

import pytest

from persia._training.stream import ChildStream
from persia.ctx import TrainCtx
from persia.data import DataLoader, StreamingDataset
from persia.errors import ConfigError, RemoteError, ServiceError
from tests.faults.batches import occurrences
from tests.faults.job import make_ctx, trained
from tests.support.processes import ROOT

SENDS = """
from persia.ctx import DataCtx
from tests.faults.batches import make_batch

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


def test_each_pass_runs_the_script_though_it_may_still_be_ending(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The child ends only when the next pass has begun, which must not take its end for a
    # failure, and must not wait for it in vain.
    pipe = tmp_path / "pipe"  # whoever opens an end waits for the other
    os.mkfifo(pipe)
    linger = f"import atexit, pathlib\natexit.register(open, {str(pipe)!r})\n"
    script.write_text(linger + SENDS.format(count=6))
    begin_pass, num_begun = ChildStream.begin_pass, itertools.count()

    def begin_before_the_last_child_ends(stream: ChildStream) -> None:
        begin_pass(stream)
        if next(num_begun):
            pipe.write_bytes(b"")

    monkeypatch.setattr(ChildStream, "begin_pass", begin_before_the_last_child_ends)
    with make_ctx() as ctx:
        loader = new_loader()
        assert [train(ctx, loader) for _ in range(2)] == [list(range(6))] * 2
        pipe.write_bytes(b"")
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


OPENS = """
from persia.ctx import DataCtx
from persia.embedding.data import IDTypeFeature, PersiaBatch

def batch_of(row):
    return PersiaBatch([IDTypeFeature("user", row["user"])])

with DataCtx() as ctx:
    {line}
"""


@pytest.mark.parametrize(
    ("text", "frames", "error"),
    [
        (OPENS.format(line="batch_of({})"), [9, 6], "KeyError: 'user'"),
        # What refuses a batch is not explained by the way there.
        (OPENS.format(line="batch_of({'user': 3})"), [9, 6], "DataTypeError: feature 'user': "),
        ("rows = {}\nrows['user']", [2], "KeyError: 'user'"),  # in no context
        ("rows = {", [1], "SyntaxError: "),
    ],
)
def test_what_is_seen_last_is_the_scripts_own_error_where_it_was_raised(
    script: Path, text: str, frames: list[int], error: str
) -> None:
    script.write_text(text)
    with pytest.raises(RemoteError) as raised, make_ctx() as ctx:
        train(ctx, new_loader())
    printed = "".join(traceback.format_exception(raised.value))
    here, over_there = printed.split("data-loader 0 failed; over there:\n")
    assert f"{script}" not in here
    assert here.count(f'File "{ROOT / "persia"}') == 1  # where the loop asks for a batch
    found = re.findall(r'File "(.*)", line (\d+)', over_there)
    assert found == [(str(script), str(line)) for line in frames]
    assert over_there.splitlines()[-1].startswith((error, f"persia.errors.{error}"))


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
