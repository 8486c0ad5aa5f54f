"""The slowest stage of a job: one rule over the waits and queues of all processes.

    the training loop       rarely waits (below a quarter of its time)       nn-worker
      waits for a batch, and none is ready for its lookup, while
        data-loaders do not wait for room                                   data-loader
        there are none, and lookups and updates have time to spare          dataset
      waits otherwise: for lookups, for room of its gradients, or for
      updates that the staleness allows no more of
        more than half of their time is spent at parameter servers          parameter server
        else                                                               embedding-worker

docs/top.md says it in words.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from persia._metrics.definitions import LOADER, SERVER, TRAINER, WORKER
from persia._metrics.format import percent
from persia._metrics.scrape import Delta

DATASET = "dataset"  # of a trainer without data-loaders

# Share of the training loop's time below which waiting does not count.
RARELY = 0.25
HALF = 0.5

_WAITS_FOR_BATCH = "get_train_batch_time_cost_more_than_1ms_sec"
_WAITS_FOR_ROOM = "update_gradient_batched_time_cost_more_than_1ms_sec"


class Stage(NamedTuple):
    """The slowest stage and the reason; its name is "" before anything is known."""

    name: str
    why: str


def slowest(spans: Sequence[Delta]) -> Stage:
    """Return the stage that holds the others back."""
    ranks = [span for span in spans if span.now.role == TRAINER and span.seconds > 0]
    if not ranks:
        return Stage("", "no nn-worker was read twice")
    if not sum(span.delta("persia_steps_total") or 0 for span in ranks):
        return Stage("", "no step was made in between")
    for_batch = _mean(span.share(_WAITS_FOR_BATCH) for span in ranks)
    for_room = _mean(span.share(_WAITS_FOR_ROOM) for span in ranks)
    waits = for_batch + for_room
    if waits < RARELY:
        return Stage(TRAINER, f"its loop runs without waiting {percent(1 - waits)} of its time")
    what = "a batch" if for_batch >= for_room else "room for its gradients"
    why = f"the training loop waits for {what} {percent(max(for_batch, for_room))} of its time"
    if for_batch >= for_room:
        source = _slow_source(spans, ranks)
        if source is not None:
            return Stage(source.name, f"{why}, {source.why}")
    name, reason = _slow_server(spans)
    return Stage(name, f"{why}, {reason}" if reason else why)


def _slow_source(spans: Sequence[Delta], ranks: Sequence[Delta]) -> Stage | None:
    loaders = [span for span in spans if span.now.role == LOADER]
    if loaders:
        waiting = sum(span.now.get("persia_inbox_batches") or 0 for span in ranks)
        held_up = _mean(span.share("persia_loader_wait_seconds") for span in loaders)
        if waiting < len(ranks) and held_up < HALF:
            return Stage(LOADER, "and none is there to be looked up")
        return None
    if any(span.now.get("persia_inbox_batches") is not None for span in ranks):
        return None  # its data-loaders were not read
    busy = _mean(span.share("forward_client_time_cost_sec") for span in ranks)
    busy += _mean(span.share("backward_client_time_cost_sec") for span in ranks)
    if busy < HALF:
        return Stage(DATASET, f"and lookups and updates take {percent(busy)}")
    return None


def _slow_server(spans: Sequence[Delta]) -> Stage:
    """Return which of the two server roles takes most of the time of lookups and updates."""
    workers = [span for span in spans if span.now.role == WORKER]
    servers = [span for span in spans if span.now.role == SERVER]
    whole = sum(
        span.delta(f"{name}_sum") or 0.0
        for span in workers
        for name in (
            "lookup_preprocess_time_cost_sec",
            "lookup_total_time_cost_sec",
            "update_gradient_time_cost_sec",
        )
    )
    if not whole:
        return Stage(WORKER, "")
    there = sum(span.delta("lookup_rpc_time_cost_sec_sum") or 0.0 for span in workers)
    calls = [
        span.delta("persia_rpc_call_seconds_sum", peer=SERVER, method="update")
        for span in workers
    ]
    if all(seconds is None for seconds in calls):  # servers in the same process
        calls = [span.delta("persia_update_rows_seconds_sum") for span in servers]
    # All servers are asked at the same time.
    there += sum(seconds or 0.0 for seconds in calls) / max(1, len(servers))
    part = min(1.0, there / whole)
    why = f"and {percent(part)} of lookups and updates is spent at parameter servers"
    return Stage(SERVER if part > HALF else WORKER, why)


def _mean(shares: Iterable[float | None]) -> float:
    known = [share for share in shares if share is not None]
    return sum(known) / len(known) if known else 0.0
