"""The health command of a container, and a data-loader that is started again when it fails."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from persia._cli import health, scripts
from persia._cli.run import Child
from persia._cli.scripts import Script, _until_job_ends, _watch
from persia._cluster.job import Event, Events
from persia._rpc.methods import embedding_worker, nn_worker, parameter_server
from persia.errors import ConfigError, ServiceBusy, ServiceError
from tests.cluster.place import Monkey, Place
from tests.support.waiting import PATIENCE_S, answered


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with Place(tmp_path) as made:
        yield made


def waits() -> dict[str, int]:
    raise ServiceBusy("the embedding-worker waits: no server answers")


def test_the_server_of_this_container_is_asked(place: Place, monkeypatch: Monkey) -> None:
    server = place.serve(0, 1, "tcp://127.0.0.1:0")
    port = server.address.rpartition(":")[2]
    monkeypatch.setenv("PERSIA_LISTEN_HOST", "0.0.0.0")
    monkeypatch.setenv("PERSIA_EMBEDDING_PARAMETER_SERVERS", f"servers:{port}")
    name = parameter_server().name
    server.service = SimpleNamespace(stats=dict)
    health.check(name, PATIENCE_S)
    health.check(name, PATIENCE_S, int(port))
    with pytest.raises(ConfigError, match="expected embedding-worker, found embedding-param"):
        health.check(embedding_worker().name, PATIENCE_S, int(port))
    server.service = SimpleNamespace(stats=waits)
    with pytest.raises(ServiceBusy, match="no server answers"):
        answered(lambda: health.check(name, 0.3))
    server.stop()
    with pytest.raises(ServiceError, match="no connection"):
        health.check(name, 0.2)


def test_an_nn_worker_is_there_or_not(place: Place, monkeypatch: Monkey) -> None:
    server = place.serve(0, 1, "tcp://127.0.0.1:0", role=nn_worker())
    monkeypatch.setenv("PERSIA_NN_WORKERS", server.address)
    health.check(nn_worker().name, PATIENCE_S)


# --- a data-loader where something starts again what has failed: not for a job that is over ---


@pytest.mark.parametrize(
    ("supervised", "job", "own", "is_behind", "want"),
    [
        ("1", 3, 0, False, 0),
        ("1", 3, 1, False, 0),  # the script failed because the job had
        ("1", 3, 1, True, 0),
        ("1", 0, 1, False, 0),
        ("0", 3, 0, False, 3),
        ("0", 3, 1, False, 3),
        ("1", None, 4, False, 4),  # its own failure: it shall be started again
        ("0", None, 4, False, 4),
    ],
)
def test_the_exit_status(
    monkeypatch: Monkey,
    tmp_path: Path,
    supervised: str,
    job: int | None,
    own: int,
    is_behind: bool,
    want: int,
) -> None:
    """The news of the job may come behind those of the script."""
    monkeypatch.setenv("PERSIA_SUPERVISED", supervised)
    monkeypatch.setattr(scripts, "GRACE_S", 0.0)  # in which no signal comes here
    path = tmp_path / "script.py"
    path.write_text(f"raise SystemExit({own})")
    script = Script(path)
    events: Events = queue.SimpleQueue()
    with closing(Child(script.words())) as child:
        if is_behind:
            child.process.wait(20)
            events.put(Event("ended"))
        if job is not None:
            events.put(Event("job", job))
        if not is_behind:
            _watch(child, events)
        assert _until_job_ends(script, child, events).status == want
