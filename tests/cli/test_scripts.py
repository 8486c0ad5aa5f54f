"""The command that starts a script's ranks; mistakes: tests/e2e/test_command_lines.py."""

from __future__ import annotations

import signal
from pathlib import Path
from queue import SimpleQueue
from unittest.mock import Mock

import pytest

from persia._cli import scripts
from persia._cli.run import Child
from persia._cli.scripts import Script
from persia._cluster.job import Event, Events
from persia._process_exit import RUN_AGAIN, End
from persia.errors import ConfigError


def test_a_script_that_is_not_there_and_one_that_nearly_is(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    with pytest.raises(ConfigError, match=r"found none, did you mean '.*train\.py'\?"):
        Script(tmp_path / "trai.py")


def test_the_command_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    run = ["-m", "persia._cli.run", "torchrun", "--nproc-per-node=2"]
    assert scripts.torchrun(2, 0, 1, 7) == [*run, "--max-restarts=7", "--standalone"]
    run.append("--max-restarts=0")
    monkeypatch.setenv("MASTER_ADDR", "node0")
    meet = ["--nnodes=3", "--node-rank=1", "--master-addr=node0"]
    assert scripts.torchrun(2, 1, 3) == [*run, *meet]
    monkeypatch.setenv("MASTER_PORT", "5")
    assert scripts.torchrun(2, 1, 3)[-1] == "--master-port=5"
    with pytest.raises(ConfigError, match=r"--node-rank must be in 0\.\.2, got 3"):
        scripts.torchrun(2, 3, 3)


def test_a_signal_at_the_end_of_a_job_is_no_end_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As honcho sends it to all others when the trainer has ended, well or not."""
    monkeypatch.setattr(scripts, "GRACE_S", 0.0)
    (tmp_path / "load.py").touch()
    script = Script(tmp_path / "load.py")
    for status, says in ((0, 0), (3, 3), (None, 143)):
        child = Mock(spec=Child)
        child.end.return_value = End(0)
        events: Events = SimpleQueue()
        events.put(Event("ended"))
        events.put(Event("signal", signal.SIGTERM))
        if status is not None:
            events.put(Event("job", status))
        assert scripts._until_job_ends(script, child, events).status == says
        assert child.stop.called is (status is None)


def test_a_data_loader_runs_again_for_a_trainer_that_was_started_again(tmp_path: Path) -> None:
    (tmp_path / "load.py").touch()
    script = Script(tmp_path / "load.py")
    for status, others in ((RUN_AGAIN, []), (0, [Event("restarted")])):
        child = Mock(spec=Child)
        child.end.return_value = End(status)
        events: Events = SimpleQueue()
        for event in (Event("ended"), *others):
            events.put(event)
        assert scripts._until_job_ends(script, child, events) == End(RUN_AGAIN)
