"""A training that is stopped, and goes on; whole processes: tests/faults."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from persia import env
from persia._cli.run import _on_sigterm
from persia._training.checkpoint import CheckpointReader, CheckpointWriter
from persia._training.ranks import Ranks
from persia._worker.service import EmbeddingWorker
from persia.ctx import resuming
from persia.ctx.resuming import STATUS, Termination
from persia.data import DataLoader
from persia.errors import CheckpointError, ConfigError, ServiceUnavailable
from tests.distributed.batches import make_batch
from tests.distributed.net import make_ctx
from tests.support.fixtures import Monkey
from tests.support.waiting import until

BATCHES = [make_batch(number) for number in range(8)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: Monkey) -> Iterator[Path]:
    """Where a run is to go on from, in a process that has not gone on yet."""
    monkeypatch.setattr(resuming, "_has_resumed", False)
    monkeypatch.setenv("PERSIA_RESUME_FROM", str(tmp_path / "ckpt"))
    before = signal.getsignal(signal.SIGTERM)
    yield tmp_path / "ckpt"
    signal.signal(signal.SIGTERM, before)


def ask() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def ask_and_wait() -> None:
    """Ask, where no step comes any more."""
    ask()
    until(lambda: False)


def train(
    steps: int,
    every: int = 3,
    *,
    ask_at: int = 0,
    at_end: Callable[[], object] = bool,
    ranks: Ranks | None = None,
    folder: Path | None = None,
) -> int:
    """Train until a number of steps; returns after which step it began."""
    with make_ctx(checkpoint_every=every, checkpoint_folder=folder) as ctx:
        begun, ctx._ranks = ctx.update_times, ranks
        for batch in DataLoader(BATCHES, reproducible=True):
            if ctx.update_times + 1 == ask_at:
                ask()
            output, labels = ctx.forward(batch)
            ctx.backward((output - (labels or [])[0]).square().mean())
            if ctx.update_times == steps:
                break
        at_end()
    return begun


def test_a_run_goes_on_from_its_newest_checkpoint(folder: Path, monkeypatch: Monkey) -> None:
    assert train(5) == 0
    monkeypatch.setattr(resuming, "_has_resumed", False)  # another process
    assert train(8) == 3
    # Only the first context of a process goes on: the next one is another training.
    assert train(1) == 0


def test_a_run_that_has_no_checkpoint_yet_leaves_one_of_its_beginning(
    folder: Path, monkeypatch: Monkey, caplog: pytest.LogCaptureFixture
) -> None:
    assert train(2) == 0
    assert len([*folder.glob("*.json")]) == 1
    monkeypatch.setattr(resuming, "_has_resumed", False)
    caplog.clear()
    assert train(8) == 0
    assert "order" not in caplog.text  # of features, which it cannot have


def test_rows_that_are_older_than_a_training_are_warned_of(
    monkeypatch: Monkey, caplog: pytest.LogCaptureFixture
) -> None:
    """As servers have them that begin with packets of a start of the same name."""
    monkeypatch.setattr(resuming, "_has_begun", False)
    monkeypatch.setattr(EmbeddingWorker, "server_stats", lambda _: [{"recovered_rows": 7}, {}])
    for count in (1, 1):  # once in a process
        with make_ctx():
            assert caplog.text.count("began with 7 rows that were trained before") == count


def test_a_job_goes_on_from_the_newest_checkpoint_of_its_own(
    tmp_path: Path, monkeypatch: Monkey
) -> None:
    """As where a queue has stopped it: nothing names a folder but its script."""
    monkeypatch.delenv("PERSIA_RESUME_FROM", raising=False)
    begins = []
    for job, steps in (("monday", 5), ("monday", 6), ("tuesday", 4), (None, 1)):
        monkeypatch.setattr(resuming, "_has_resumed", False)  # another process
        monkeypatch.setattr(resuming, "_has_begun", False)
        with env.changed(PERSIA_JOB_ID=job):
            begins.append(train(steps, folder=tmp_path))
    # The third finds one of another job, and the last does not know of which job it is.
    assert begins == [0, 3, 0, 0]


def test_rows_of_a_checkpoint_are_not(
    folder: Path, monkeypatch: Monkey, caplog: pytest.LogCaptureFixture
) -> None:
    with make_ctx() as ctx:
        ctx.dump_checkpoint(folder)
    monkeypatch.setattr(resuming, "_has_resumed", False)
    monkeypatch.setattr(resuming, "_has_begun", False)
    monkeypatch.setattr(EmbeddingWorker, "server_stats", lambda _: [{"recovered_rows": 7}, {}])
    with make_ctx():
        assert "trained before" not in caplog.text


def test_sigterm_ends_a_step_writes_a_checkpoint_and_ends_the_process(
    folder: Path, monkeypatch: Monkey
) -> None:
    with pytest.raises(SystemExit) as ended:
        train(8, every=100, ask_at=5)
    assert ended.value.code == STATUS == 143
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN  # it unwinds undisturbed
    monkeypatch.setattr(resuming, "_has_resumed", False)
    assert train(8) == 5


def test_sigterm_between_two_steps_writes_a_checkpoint_as_well(
    folder: Path, monkeypatch: Monkey
) -> None:
    monkeypatch.setenv("PERSIA_GRACE_PERIOD", "0.03")
    with pytest.raises(SystemExit) as ended:
        train(2, every=100, at_end=ask_and_wait)
    assert ended.value.code == STATUS
    monkeypatch.setattr(resuming, "_has_resumed", False)
    assert train(8) == 2


class AskedInTheRound(Ranks):
    """One rank, which SIGTERM reaches while it waits for others to say what they were asked."""

    def any(self, flag: bool) -> bool:
        found = super().any(flag)
        ask()
        return found


def test_sigterm_while_ranks_wait_for_each_other_is_not_lost(
    folder: Path, monkeypatch: Monkey
) -> None:
    with pytest.raises(SystemExit):
        train(8, every=100, ranks=AskedInTheRound(1, 0))
    monkeypatch.setattr(resuming, "_has_resumed", False)
    assert train(8) == 2  # the first step to which all come knowing of it


def asked_in(monkeypatch: Monkey, owner: type[Any], name: str) -> None:
    """Ask in a method, which is left where the grace period demands it."""
    method = getattr(owner, name)

    def interrupted(*given: Any, **options: Any) -> Any:
        monkeypatch.setattr(owner, name, method)
        ask_and_wait()
        return method(*given, **options)

    monkeypatch.setattr(owner, name, interrupted)


@pytest.mark.parametrize("name", ["verify", "commit"])
def test_sigterm_while_a_checkpoint_is_loaded_leaves_that_one(
    folder: Path, monkeypatch: Monkey, name: str
) -> None:
    """What is there meanwhile is of no step: rows of one, and the net of another."""
    assert train(5) == 0
    monkeypatch.setattr(resuming, "_has_resumed", False)
    with monkeypatch.context() as patch:
        patch.setenv("PERSIA_GRACE_PERIOD", "0.03")
        asked_in(patch, CheckpointReader, name)
        with pytest.raises(SystemExit) as ended:
            train(8)
    assert ended.value.code == STATUS
    monkeypatch.setattr(resuming, "_has_resumed", False)
    assert train(8) == 3


def test_sigterm_while_the_script_loads_rows_leaves_the_checkpoint_before(
    folder: Path, monkeypatch: Monkey
) -> None:
    before: list[Path] = []

    def load() -> None:
        with make_ctx() as ctx:
            before.extend(folder.glob("*.json"))
            asked_in(monkeypatch, CheckpointReader, "verify")
            ctx.load_embedding(folder)

    monkeypatch.setenv("PERSIA_GRACE_PERIOD", "0.03")
    with pytest.raises(SystemExit):
        load()
    assert [*folder.glob("*.json")] == before


def test_a_checkpoint_that_cannot_be_loaded_is_tried_again(
    folder: Path, monkeypatch: Monkey
) -> None:
    assert train(5) == 0
    monkeypatch.setattr(resuming, "_has_resumed", False)
    (net,) = folder.glob("*/dense.pt")
    net.rename(net.with_suffix(".away"))
    with pytest.raises(CheckpointError):
        train(8)
    net.with_suffix(".away").rename(net)
    assert train(8) == 3


def test_the_last_checkpoint_is_written_where_the_one_before_was_not(
    folder: Path, monkeypatch: Monkey, caplog: pytest.LogCaptureFixture
) -> None:
    write, writes = CheckpointWriter._write, []

    def second_fails(*given: Any, **options: Any) -> None:
        writes.append(given)
        if len(writes) == 2:  # the first is that of the beginning
            raise CheckpointError("no space left")
        write(*given, **options)

    monkeypatch.setattr(CheckpointWriter, "_write", second_fails)
    with pytest.raises(SystemExit):
        train(8, ask_at=5)
    assert "no space left" in caplog.text
    monkeypatch.setattr(resuming, "_has_resumed", False)
    assert train(8) == 5


def test_sigterm_behind_the_last_step_ends_the_process_as_well(
    folder: Path, monkeypatch: Monkey
) -> None:
    with pytest.raises(SystemExit) as ended:
        train(2, every=100, at_end=ask)
    assert ended.value.code == STATUS
    monkeypatch.setattr(resuming, "_has_resumed", False)
    assert train(8) == 2


def test_sigterm_while_the_block_is_left_ends_the_process_as_well(
    folder: Path, monkeypatch: Monkey
) -> None:
    wait = CheckpointWriter.wait

    def asked(self: CheckpointWriter) -> None:
        ask()
        wait(self)

    with pytest.raises(SystemExit) as ended:
        train(5, at_end=lambda: monkeypatch.setattr(CheckpointWriter, "wait", asked))
    assert ended.value.code == STATUS
    monkeypatch.undo()
    monkeypatch.setenv("PERSIA_RESUME_FROM", str(folder))
    monkeypatch.setattr(resuming, "_has_resumed", False)
    assert train(8) == 3  # the one before, as servers may be gone when it is known


def test_sigterm_before_an_error_reaches_the_program_behind_it(
    folder: Path, monkeypatch: Monkey
) -> None:
    """The error is shown first; a program that goes on is ended all the same."""

    def fail() -> None:
        ask()
        raise KeyError("clicks")

    def go_on() -> None:
        with pytest.raises(KeyError):
            train(2, at_end=fail)
        until(lambda: False)

    monkeypatch.setenv("PERSIA_GRACE_PERIOD", "3")
    signal.signal(signal.SIGTERM, _on_sigterm)  # as in every process that is launched
    with pytest.raises(SystemExit) as ended:
        go_on()
    assert ended.value.code == STATUS


def test_an_error_of_leaving_does_not_replace_the_end(
    folder: Path, monkeypatch: Monkey, caplog: pytest.LogCaptureFixture
) -> None:
    """A script that caught it would go on, and SIGTERM would not end it any more."""

    def fail(self: CheckpointWriter) -> None:
        raise ServiceUnavailable("parameter server 0: no connection")

    assert train(5) == 0
    monkeypatch.setattr(resuming, "_has_resumed", False)
    monkeypatch.setenv("PERSIA_GRACE_PERIOD", "0.03")
    asked_in(monkeypatch, CheckpointReader, "verify")
    monkeypatch.setattr(CheckpointWriter, "wait", fail)
    with pytest.raises(SystemExit) as ended:
        train(8)
    assert ended.value.code == STATUS
    assert "parameter server 0: no connection" in caplog.text


def test_an_error_in_the_last_checkpoint_is_logged(
    folder: Path, monkeypatch: Monkey, caplog: pytest.LogCaptureFixture
) -> None:
    def spoil() -> None:
        folder.rename(folder.with_name("away"))
        folder.write_text("a file")
        ask_and_wait()

    monkeypatch.setenv("PERSIA_GRACE_PERIOD", "0.03")
    with pytest.raises(SystemExit):
        train(2, every=100, at_end=spoil)
    assert "the checkpoint before this one is the last" in caplog.text


def test_arguments_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint_every=3: expected PERSIA_RESUME_FROM"):
        make_ctx(checkpoint_every=3)
    for every in (0, -1, 1.5, True):
        with pytest.raises(ConfigError, match="checkpoint_every"):
            make_ctx(checkpoint_every=every, checkpoint_folder=tmp_path)
    with pytest.raises(ConfigError, match="checkpoint_folder: expected a folder's path or URL"):
        make_ctx(checkpoint_folder=3)


def test_without_a_folder_signals_are_the_program_s() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with make_ctx():
        assert signal.getsignal(signal.SIGTERM) is before


def test_a_request_that_is_not_met_is_raised_unless_it_is_held() -> None:
    before = signal.getsignal(signal.SIGTERM)
    asked = Termination(0.01)
    asked.listen()
    try:
        asked.held = True
        ask()
        assert asked.is_requested
        until(lambda: asked._is_overdue)
        ask()  # nothing: what is held has its end
        asked.held = False
        with pytest.raises(SystemExit):
            ask()
        ask()  # once
    finally:
        asked.close(SystemExit(STATUS))
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        signal.signal(signal.SIGTERM, before)
