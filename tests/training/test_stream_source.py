"""A stream where data-loaders find it, and the child process that feeds it in embedded mode."""

from __future__ import annotations

import itertools
import os
import re
import time
import traceback
from functools import partial
from pathlib import Path

import pytest
import torch

from persia._rpc.messages import RemoteRef, StreamedBatch, StreamOpening
from persia._training import stream_source
from persia._training.batch import DeviceTransfer
from persia._training.queues import Finished
from persia._training.stream_source import ChildStream, Stream, StreamSource
from persia.ctx import TrainCtx
from persia.data import DataLoader, StreamingDataset
from persia.errors import ConfigError, RemoteError, ServiceError
from tests.faults.batches import occurrences
from tests.faults.job import make_ctx, step, trained
from tests.support.fixtures import Log, Monkey
from tests.support.streams import Background
from tests.support.waiting import PATIENCE_S, until


def test_a_pass_that_is_closed_waits_for_no_rest(
    tmp_path: Path, monkeypatch: Monkey, caplog: Log
) -> None:
    batch = StreamedBatch(0, 1, True, RemoteRef(0, 5), (), (), None)
    monkeypatch.setattr(stream_source, "DROP_S", 1000 * PATIENCE_S)
    served = Stream(0, 1, 4, f"ipc://{tmp_path}/nn")
    try:
        source = StreamSource(served, DeviceTransfer(torch.device("cpu")), False)
        source.start()
        served.receiver.open_stream(StreamOpening(0, 1, 7, 0))
        served.receiver.deliver((0, 7), batch)
        dropped: list[int] = []
        dropping = Background(partial(source.drop_rest, lambda: dropped.append(1)))
        until(lambda: dropped)
        source.close()
        dropping.result()
        assert "did not come" not in caplog.text
    finally:
        served.close()


def test_a_pass_that_has_failed_gives_out_nothing_more(tmp_path: Path) -> None:
    """Though other data-loaders go on: other threads look batches up as well."""
    served = Stream(0, 1, 4, f"ipc://{tmp_path}/nn")
    try:
        source = StreamSource(served, DeviceTransfer(torch.device("cpu")), False)
        source.start()
        for loader in range(2):
            served.receiver.open_stream(StreamOpening(loader, 2, 7, loader))
        served.receiver.end_stream((0, 7), 0, "no such file", 0)
        with pytest.raises(Finished):
            source.get()
        batch = StreamedBatch(1, 1, True, RemoteRef(0, 5), (), (), None)
        served.receiver.deliver((1, 7), batch)
        with pytest.raises(Finished):
            source.get()
        assert isinstance(source.failure, RemoteError)
        source.close()
    finally:
        served.close()


# --- embedded mode's data-loader: a child process, once for each pass ---------------------

SENDS = """
from persia.ctx import DataCtx
from tests.faults.batches import make_batch

with DataCtx() as ctx:
    for number in range({count}):
        ctx.send_data(make_batch(number))
"""


def train(ctx: TrainCtx, loader: DataLoader, count: int | None = None) -> list[int]:
    """Train one pass, or some batches of it; returns their numbers."""
    return [step(ctx, batch) for batch in itertools.islice(loader, count)]


def new_loader() -> DataLoader:
    return DataLoader(StreamingDataset(4), reproducible=True, timeout_ms=30_000)


def test_each_pass_runs_the_script(script: Path, tmp_path: Path, monkeypatch: Monkey) -> None:
    # The child ends only when the next pass has begun, which must not take its end for a
    # failure, and must not wait for it in vain.
    pipe = tmp_path / "pipe"  # opening one end waits for the other
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


def test_a_second_run_of_the_script_is_said(script: Path, caplog: Log) -> None:
    """One that loops over its epochs by itself would send all of them in each pass."""
    script.write_text(SENDS.format(count=2))
    with caplog.at_level("INFO", "persia"), make_ctx() as ctx:
        loader = new_loader()
        for _ in range(2):
            assert train(ctx, loader) == [0, 1]
    lines = [line for line in caplog.messages if f"{script} " in line]
    assert lines[0].endswith("is the data-loader, in a process of its own")
    assert lines[1].endswith("it calls ctx.end_epoch() after each")


@pytest.mark.parametrize(
    ("text", "error"),
    [("", "ended with status 0"), ("import os\nos.kill(os.getpid(), 9)", "died of signal 9")],
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


DIES = """
import os, pathlib
from persia.ctx import DataCtx
from tests.faults.batches import make_batch

with DataCtx() as ctx:
    ctx.send_data(make_batch(0))
    ctx.end_epoch()
    ctx.send_data(make_batch(1))
    pathlib.Path({pipe!r}).read_bytes()
    os.kill(os.getpid(), 9)
"""


def test_a_script_that_dies_in_a_later_epoch_is_not_run_again(
    script: Path, tmp_path: Path
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    script.write_text(DIES.format(pipe=str(pipe)))
    with make_ctx() as ctx:
        loader = new_loader()
        assert train(ctx, loader) == [0]
        batches = iter(loader)
        assert step(ctx, next(batches)) == 1
        pipe.write_bytes(b"")
        with pytest.raises(ServiceError, match=rf"{script} died of signal 9 before"):
            next(batches)


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
    found = re.findall(r'File "(.*)", line (\d+)', over_there)
    ours = [int(line) for file, line in found if file == str(script)]
    assert ours == frames
    assert over_there.splitlines()[-1].startswith((error, f"persia.errors.{error}"))


def test_a_loop_that_is_left_ends_the_child_soon(script: Path) -> None:
    script.write_text(SENDS.format(count=100_000))

    def took_s() -> float:
        with make_ctx() as ctx:
            train(ctx, new_loader(), 1)
            begin = time.monotonic()
        return time.monotonic() - begin

    # Several times: a busy machine may not give the child a processor in time.
    assert any(took_s() < 5.0 for _ in range(3))


def test_workers_without_room_are_refused(
    script: Path, tmp_path: Path, monkeypatch: Monkey
) -> None:
    script.write_text(SENDS.format(count=3))
    config = tmp_path / "global.yml"
    config.write_text("embedding_worker_config: {forward_buffer_size: 5}\n")
    monkeypatch.setenv("PERSIA_GLOBAL_CONFIG", str(config))
    with make_ctx() as ctx:
        loader = DataLoader(StreamingDataset(4), reproducible=True, embedding_staleness=2)
        said = r"forward_buffer_size: .* room for 5 .* at least 6, .*buffer_size 4 \+ 2 "
        with pytest.raises(ConfigError, match=said):
            next(iter(loader))
        loader = DataLoader(StreamingDataset(4), reproducible=True, embedding_staleness=1)
        assert train(ctx, loader) == [0, 1, 2]
