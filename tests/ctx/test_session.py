"""What a context does at its connection; passes and batches are in tests/training."""

from __future__ import annotations

from typing import Any

from persia import env
from persia._training.inflight import InFlightTracker
from persia.ctx.connection import Connection
from persia.ctx.session import Session


def test_the_loss_is_computed_when_it_is_read() -> None:
    worker: Any = object()  # its metrics are not read here
    session = Session(Connection(worker), trains=True)
    read_at: list[int] = []

    def loss() -> float:
        read_at.append(1)
        return 0.5

    session.last_step = 7, loss
    source = session.metric_sources()[1]
    assert not read_at
    values = {sample.name: sample.value for sample in source.read()}
    assert (values["persia_steps"], values["persia_loss"]) == (7, 0.5)
    assert values["persia_update_queue_batches"] == 0


def test_sources_are_kept_while_their_component_is_there() -> None:
    env.set_env(world_size=4, rank=3, local_rank=3)
    worker: Any = object()
    session = Session(Connection(worker), trains=True)
    first = session.metric_sources()
    assert [source.part for source in first] == ["training", "steps", "reports"]
    assert {source.replica for source in first} == {3}
    assert session.metric_sources()[0] is first[0]
    session.tracker = InFlightTracker(worker)
    assert session.metric_sources()[0] is not first[0]
