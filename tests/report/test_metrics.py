"""The sources of one context: each kept as long as what it reads."""

from __future__ import annotations

from typing import Any

from persia._report.metrics import TrainingMetrics


class Component:
    """Stands for a tracker or worker whose metrics are not read here."""

    timings = None


def test_sources_are_kept_while_their_component_is_there() -> None:
    metrics = TrainingMetrics(rank=3)
    worker: Any = Component()
    one: Any = Component()
    other: Any = Component()
    first = metrics.sources(worker, one, None, None)
    assert [source.part for source in first] == ["training", "steps"]
    assert {source.replica for source in first} == {3}
    assert metrics.sources(worker, one, None, None)[0] is first[0]
    assert metrics.sources(worker, other, None, None)[0] is not first[0]


def test_the_loss_is_computed_when_it_is_read() -> None:
    metrics = TrainingMetrics(rank=0)
    worker: Any = Component()
    tracker: Any = Component()
    read_at: list[int] = []

    def loss() -> float:
        read_at.append(1)
        return 0.5

    metrics.note_step(7, loss)
    source = metrics.sources(worker, tracker, None, None)[1]
    assert not read_at
    values = {sample.name: sample.value for sample in source.read()}
    assert (values["persia_steps"], values["persia_loss"]) == (7, 0.5)
    assert values["persia_update_queue_batches"] == 0
