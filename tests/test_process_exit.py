"""Notes that launched processes leave about their end."""

from __future__ import annotations

import os
from pathlib import Path

from persia import env
from persia._process_exit import (
    End,
    ends_slowly,
    first_failure,
    mark_participated,
    mark_slow_end,
    note_end,
    note_served,
    served,
)
from tests.support.fixtures import Monkey


def test_the_first_failure_is_the_one_noted_first(tmp_path: Path, monkeypatch: Monkey) -> None:
    with env.changed(PERSIA_RUN_DIRECTORY=tmp_path):
        for number, (pid, end) in enumerate(
            [(7, End(0)), (9, End(3, "first")), (8, End(1, "follows"))]
        ):
            monkeypatch.setattr(os, "getpid", lambda pid=pid: pid)
            note_end(end.status, end.text)
            os.utime(tmp_path / f"{pid}.json", (number, number))
    assert first_failure(tmp_path) == End(3, "first")
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"] * 3


def test_which_nn_workers_have_all_data_is_noted(tmp_path: Path) -> None:
    assert served(tmp_path) == {}
    with env.changed(PERSIA_RUN_DIRECTORY=tmp_path):
        note_served({"tcp://a:1": 5})
        note_served({"tcp://a:1": 6, "tcp://b:1": None})
    assert served(tmp_path) == {"tcp://a:1": 6, "tcp://b:1": None}
    assert first_failure(tmp_path) is None


def test_an_end_that_takes_time_is_noted(tmp_path: Path) -> None:
    assert not ends_slowly(tmp_path)
    with env.changed(PERSIA_RUN_DIRECTORY=tmp_path):
        mark_slow_end()
    assert ends_slowly(tmp_path)
    assert first_failure(tmp_path) is None


def test_without_a_launcher_nothing_is_noted(tmp_path: Path, monkeypatch: Monkey) -> None:
    monkeypatch.chdir(tmp_path)
    with env.changed(PERSIA_RUN_DIRECTORY=None):
        note_end(1, "failed")
        mark_participated()
        mark_slow_end()
        note_served({"tcp://a:1": 5})
    assert not [*tmp_path.iterdir()]
