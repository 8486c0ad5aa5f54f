"""Data-loaders where something starts again what has failed: not for a job that is over."""

from __future__ import annotations

import queue
from contextlib import closing
from pathlib import Path

import pytest

from persia._cli import scripts
from persia._cli.children import Child
from persia._cli.scripts import Script, _until_job_ends, _watch
from persia._cluster.job import Event, Events

Monkey = pytest.MonkeyPatch


@pytest.mark.parametrize(
    ("supervised", "job", "own", "want"),
    [
        ("1", 3, 0, 0),
        ("1", 3, 1, 0),  # the script failed because the job had
        ("1", 0, 1, 0),
        ("0", 3, 0, 3),
        ("0", 3, 1, 3),
        ("1", None, 4, 4),  # its own failure: it shall be started again
        ("0", None, 4, 4),
    ],
)
def test_the_exit_status(
    monkeypatch: Monkey, tmp_path: Path, supervised: str, job: int | None, own: int, want: int
) -> None:
    monkeypatch.setenv("PERSIA_SUPERVISED", supervised)
    monkeypatch.setattr(scripts, "GRACE_S", 0.0)  # in which no signal comes here
    path = tmp_path / "script.py"
    path.write_text(f"raise SystemExit({own})")
    script = Script(path)
    events: Events = queue.SimpleQueue()
    if job is not None:
        events.put(Event("job", job))
    with closing(Child(script.words())) as child:
        _watch(child, events)
        assert _until_job_ends(script, child, events).status == want


def test_news_that_come_behind_the_failure(monkeypatch: Monkey, tmp_path: Path) -> None:
    monkeypatch.setenv("PERSIA_SUPERVISED", "1")
    path = tmp_path / "script.py"
    path.write_text("raise SystemExit(1)")
    script = Script(path)
    events: Events = queue.SimpleQueue()
    with closing(Child(script.words())) as child:
        child.process.wait(20)
        events.put(Event("ended"))
        events.put(Event("job", 3))
        assert _until_job_ends(script, child, events).status == 0
