"""The slowest stage, of readings that a test makes up."""

from __future__ import annotations

import pytest

from persia._metrics.bottleneck import DATASET, slowest
from persia._metrics.definitions import LOADER, SERVER, TRAINER, WORKER
from persia._metrics.scrape import Delta
from tests.metrics.texts import span

BATCH, ROOM = (
    "get_train_batch_time_cost_more_than_1ms_sec_sum",
    "update_gradient_batched_time_cost_more_than_1ms_sec_sum",
)
STEPS = {"persia_steps_total": 100.0}


def _trainer(batch: float, room: float = 0.0, inbox: float | None = 0.0) -> Delta:
    now = {} if inbox is None else {"persia_inbox_batches": inbox}
    return span(TRAINER, 10.0, {**STEPS, BATCH: batch, ROOM: room}, now)


def _loader(waits: float) -> Delta:
    return span(LOADER, 10.0, {"persia_loader_wait_seconds_sum": waits}, {})


def _worker(**seconds: float) -> Delta:
    names = {
        "rpc": "lookup_rpc_time_cost_sec_sum",
        "lookup": "lookup_total_time_cost_sec_sum",
        "update": "update_gradient_time_cost_sec_sum",
        "calls": "persia_rpc_call_seconds_sum",
    }
    return span(WORKER, 10.0, {names[name]: value for name, value in seconds.items()}, {})


def _labelled(worker: Delta) -> Delta:
    """Give calls the labels that they are asked for."""
    labels = {"peer": SERVER, "method": "update"}
    for one in (worker.now, worker._before):
        assert one is not None
        found = one.samples["persia_rpc_call_seconds_sum"]
        one.samples["persia_rpc_call_seconds_sum"] = [(labels, found[0][1])]
    return worker


SERVERS = span(SERVER, 10.0, {"persia_update_rows_seconds_sum": 0.5}, {})


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([_trainer(2.0, 0.4)], TRAINER),
        ([_trainer(6.0), _loader(1.0)], LOADER),
        # The inbox is full, or data-loaders wait for room: what comes after them is slow.
        ([_trainer(6.0, inbox=5.0), _loader(1.0)], WORKER),
        ([_trainer(6.0), _loader(9.0)], WORKER),
        ([_trainer(6.0, inbox=None)], DATASET),
        ([_trainer(1.0, 5.0), _worker(lookup=2.0, rpc=0.5, update=4.0), SERVERS], WORKER),
        ([_trainer(1.0, 5.0), _worker(lookup=2.0, rpc=1.9, update=1.0), SERVERS], SERVER),
        (
            [
                _trainer(5.0, inbox=3.0),
                _labelled(_worker(lookup=2.0, rpc=0.5, update=4.0, calls=6.4)),
                SERVERS,
                SERVERS,
            ],
            SERVER,
        ),
    ],
)
def test_the_slowest_stage(spans: list[Delta], expected: str) -> None:
    stage = slowest(spans)
    assert stage.name == expected
    assert "nn-worker" not in stage.why


def test_no_stage_is_named_before_anything_is_known() -> None:
    assert slowest([]).name == ""
    assert slowest([span(TRAINER, 10.0, {"persia_steps_total": 0.0}, {})]).name == ""
