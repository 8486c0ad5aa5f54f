"""One frame of ``persia-launcher top``: a whole job at a glance.

    Watched, one per process   -->   Frame   -->   str(frame), or rich's own
      (two readings, or why none)      slowest stage, headline, one table per role

A trainer in embedded mode draws itself: ``print(ctx.top())``. The slowest stage is one rule
over the waits and queues of all processes, which docs/top.md says in words.
"""

from __future__ import annotations

import io
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

from persia._metrics.definitions import EVERY, LOADER, SERVER, TRAINER, WORKER
from persia._metrics.format import byte_size, percent, plain, seconds, short
from persia._metrics.registry import Metrics
from persia._metrics.scrape import Delta, Reading, read
from persia.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table

# Columns of text that is printed without a terminal.
WIDTH = 112

Cell = Callable[[Delta], str]

DATASET = "dataset"  # of a trainer without data-loaders

# Share of the training loop's time below which waiting does not count.
RARELY = 0.25
HALF = 0.5

_WAITS_FOR_BATCH = "get_train_batch_time_cost_more_than_1ms_sec"
_WAITS_FOR_ROOM = "update_gradient_batched_time_cost_more_than_1ms_sec"


@dataclass(frozen=True, slots=True)
class Watched:
    """One process of the job: two readings of it, or why there are none."""

    role: str  # the expected one, until it has answered
    replica: int
    place: str  # address of its metrics; "" in the same process
    span: Delta | None
    problem: str = ""  # without a span: why there is none


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _share(spans: Iterable[Delta], name: str) -> float:
    return _mean(span.share(name) for span in spans) or 0.0


# --- the slowest stage ------------------------------------------------------------------------


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
    for_batch = _share(ranks, _WAITS_FOR_BATCH)
    for_room = _share(ranks, _WAITS_FOR_ROOM)
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
        held_up = _share(loaders, "persia_loader_wait_seconds")
        if waiting < len(ranks) and held_up < HALF:
            return Stage(LOADER, "and none is there to be looked up")
        return None
    if any(span.now.get("persia_inbox_batches") is not None for span in ranks):
        return None  # its data-loaders were not read
    lookups = _share(ranks, "forward_client_time_cost_sec")
    busy = lookups + _share(ranks, "backward_client_time_cost_sec")
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


# --- columns by role --------------------------------------------------------------------------


def _now(name: str, text: Callable[[float | None], str] = short, **labels: str) -> Cell:
    return lambda span: text(span.now.get(name, **labels))


def _rate(name: str, **labels: str) -> Cell:
    return lambda span: short(span.rate(name, **labels))


def _waits(name: str) -> Cell:
    return lambda span: percent(span.share(name))


def _took(name: str) -> Cell:
    return lambda span: seconds(span.mean(name))


def _of(part: str, whole: str) -> Cell:
    def text(span: Delta) -> str:
        limit = span.now.get(whole)
        return short(span.now.get(part)) + (f" of {short(limit)}" if limit else "")

    return text


_TRAINED_NOT = ("abandoned", "incomplete", "skipped", "failed")


def _not_trained(span: Delta) -> str:
    batches = span.now.by("persia_batches_total", "outcome")
    return short(_sum(batches.get(name) for name in _TRAINED_NOT))


COLUMNS: dict[str, tuple[tuple[str, Cell], ...]] = {
    LOADER: (
        ("batches/s", _rate("persia_loader_batches_total", what="sent")),
        ("waits for room", _waits("persia_loader_wait_seconds")),
        ("credits", _now("persia_loader_credits")),
        ("kept", _now("persia_loader_kept_batches")),
        ("lost", _now("persia_loader_batches_total", what="lost")),
    ),
    WORKER: (
        ("ids/s", _rate("persia_ids_total")),
        ("lookup", _took("lookup_total_time_cost_sec")),
        ("update", _took("update_gradient_time_cost_sec")),
        ("in flight", _of("persia_worker_buffer_batches", "persia_worker_buffer_capacity")),
        ("stale", _now("staleness")),
        ("not finite", _now("nan_count_total")),
    ),
    SERVER: (
        ("rows", _of("persia_rows", "persia_capacity_rows")),
        ("in bytes", _now("persia_rows_bytes", byte_size)),
        ("ids/s", _rate("persia_looked_up_ids_total")),
        ("misses", lambda span: percent(span.miss_rate())),
        ("evicted/s", _rate("persia_evicted_rows_total")),
        ("queue", _now("persia_rpc_queue_calls")),
    ),
    TRAINER: (
        ("samples/s", _rate("persia_trained_samples_total")),
        ("loss", lambda span: plain(span.now.first("persia_loss"))),
        ("waits: batch", _waits(_WAITS_FOR_BATCH)),
        ("room", _waits(_WAITS_FOR_ROOM)),
        ("staleness", _now("staleness")),
        ("missed", lambda span: short(span.mean("persia_missed_updates"))),
        ("inbox", _now("persia_inbox_batches")),
        ("updates", _now("persia_update_queue_batches")),
        ("not trained", _not_trained),
    ),
}

# --- the frame --------------------------------------------------------------------------------


class Frame:
    """State of a job; ``str()`` is plain text, and ``rich`` prints it in colour."""

    def __init__(self, processes: Sequence[Watched], title: str) -> None:
        self.processes = sorted(processes, key=lambda one: (EVERY.index(one.role), one.replica))
        self.title = title
        self.clock = time.strftime("%H:%M:%S")
        self.stage = slowest(self._spans())

    def _spans(self, *roles: str) -> list[Delta]:
        return [
            one.span
            for one in self.processes
            if one.span is not None and (not roles or one.role in roles)
        ]

    def headline(self) -> list[tuple[str, str]]:
        """Return the most important numbers, as names and texts."""
        ranks, servers = self._spans(TRAINER), self._spans(SERVER)
        looked_up = _sum(span.delta("persia_looked_up_ids_total") for span in servers)
        missed = _sum(span.delta("index_miss_count_total") for span in servers)
        misses = missed / looked_up if missed is not None and looked_up else None

        def total(spans: list[Delta], name: str) -> float | None:
            return _sum(span.now.get(name) for span in spans)

        reported = [span.now.by("persia_reported", "name") for span in ranks]
        return [
            ("samples/s", short(_sum(s.rate("persia_trained_samples_total") for s in ranks))),
            ("steps", short(_mean(s.now.get("persia_steps_total") for s in ranks))),
            ("loss", plain(_mean(s.now.first("persia_loss") for s in ranks))),
            *(
                (
                    f"reported {name}" if name == "loss" else name,
                    plain(_mean(one.get(name) for one in reported)),
                )
                for name in dict.fromkeys(itertools.chain(*reported))
            ),
            ("staleness", short(total(ranks, "staleness"))),
            ("rows", short(total(servers, "persia_rows"))),
            ("misses", percent(misses)),
            ("evicted/s", short(_sum(s.rate("persia_evicted_rows_total") for s in servers))),
            ("memory", byte_size(total(self._spans(), "process_resident_memory_bytes"))),
        ]

    def __str__(self) -> str:
        from rich.console import Console

        text = io.StringIO()
        Console(file=text, width=WIDTH).print(self)
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield what rich draws."""
        from rich.text import Text

        yield Text.assemble((f"PERSIA {self.title}", "bold"), f"  {self.clock}")
        yield Text("   ").join(
            Text.assemble((f"{name} ", "dim"), (text, "bold")) for name, text in self.headline()
        )
        name, why = self.stage
        yield Text.assemble("slowest: ", (name or "not known", "bold yellow"), f" ({why})\n")
        for role in EVERY:
            mine = [one for one in self.processes if one.role == role]
            if mine:
                yield self._fitting(role, mine, console, options)
                yield Text()
        for one in self.processes:
            if one.problem:
                where = f" at {one.place}" if one.place else ""
                yield Text(f"{one.role} {one.replica}{where}: {one.problem}", "red")

    def _fitting(
        self, role: str, mine: Sequence[Watched], console: Console, options: ConsoleOptions
    ) -> Table:
        """Return the table of a role, without the last columns if it is too wide."""
        unbound = options.update(max_width=10 * WIDTH)
        columns = COLUMNS[role]
        table = self._table(role, mine, columns)
        while columns and console.measure(table, options=unbound).maximum > options.max_width:
            columns = columns[:-1]
            table = self._table(role, mine, columns)
        return table

    def _table(
        self, role: str, processes: Sequence[Watched], columns: Sequence[tuple[str, Cell]]
    ) -> Table:
        from rich.table import Table
        from rich.text import Text

        colour = " yellow" if self.stage.name == role else ""
        table = Table(box=None, pad_edge=False, header_style=f"bold{colour}")
        name = role.removeprefix("embedding-") if role == SERVER else role
        table.add_column(name, no_wrap=True)
        table.add_column("state", no_wrap=True)
        for name in ("memory", "cpu", *(name for name, _ in columns)):
            table.add_column(name, justify="right", no_wrap=True)
        for one in processes:
            state, style = _state(one)
            cells = [Text(str(one.replica)), Text(state, style)]
            if one.span is not None:
                memory = one.span.now.get("process_resident_memory_bytes")
                cells += [Text(byte_size(memory)), Text(percent(one.span.cpu()))]
                cells += [Text(text(one.span)) for _, text in columns]
            table.add_row(*cells)
        return table


def _state(one: Watched) -> tuple[str, str]:
    """Return the state of a process, and its style."""
    if one.span is None:
        return "no answer", "bold red"
    now = one.span.now
    if now.get("persia_healthy") == 0:
        return "not well", "bold red"
    return ("not ready", "yellow") if now.get("persia_ready") == 0 else ("ready", "green")


class View:
    """Frames of this process; rates are since the frame before, or ``since`` of the clock."""

    def __init__(self, metrics: Metrics, since: float) -> None:
        self._metrics = metrics
        self._since = since
        self._before: dict[tuple[str, int], Reading] = {}

    def frame(self, title: str) -> Frame:
        """Return a frame of the time since the frame before."""
        now = {(one.role, one.replica): one for one in read(self._metrics.text())}
        before, self._before = self._before, now
        return Frame(
            [
                Watched(*who, "", Delta(before.get(who, Reading(*who, self._since, {})), one))
                for who, one in now.items()
            ],
            title,
        )


def need_rich() -> None:
    """Raise a ConfigError if rich, which draws frames, is not installed."""
    if find_spec("rich") is None:
        raise ConfigError("this view needs rich: pip install rich")
