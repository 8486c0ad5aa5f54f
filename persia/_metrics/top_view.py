"""One frame of ``persia-launcher top``: a whole job at a glance.

    Watched, one per process   -->   Frame   -->   str(frame), or rich's own
      (two readings, or why none)      stage, headline, one table per role

A trainer in embedded mode draws itself: ``print(ctx.top())``.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from persia._metrics.bottleneck import slowest
from persia._metrics.definitions import LOADER, SERVER, TRAINER, WORKER
from persia._metrics.format import byte_size, percent, plain, seconds, short
from persia._metrics.registry import Metrics
from persia._metrics.scrape import Delta, Reading, read
from persia.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table

# The order in which a batch passes them.
ORDER = (LOADER, WORKER, SERVER, TRAINER)

# Columns of text that is printed without a terminal.
WIDTH = 112

Cell = Callable[[Delta], str]


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
    return short(
        _sum(span.now.get("persia_batches_total", outcome=name) for name in _TRAINED_NOT)
    )


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
        ("waits: batch", _waits("get_train_batch_time_cost_more_than_1ms_sec")),
        ("room", _waits("update_gradient_batched_time_cost_more_than_1ms_sec")),
        ("staleness", _now("staleness")),
        ("inbox", _now("persia_inbox_batches")),
        ("updates", _now("persia_update_queue_batches")),
        ("not trained", _not_trained),
    ),
}

# --- the frame --------------------------------------------------------------------------------


class Frame:
    """State of a job; ``str()`` is plain text, and ``rich`` prints it in colour.

    Args:
        processes: Those of the job.
        title: Before the time of day.
    """

    def __init__(self, processes: Sequence[Watched], title: str) -> None:
        self.processes = sorted(processes, key=lambda one: (ORDER.index(one.role), one.replica))
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

        found = [
            ("samples/s", short(_sum(s.rate("persia_trained_samples_total") for s in ranks))),
            ("steps", short(_mean(s.now.get("persia_steps_total") for s in ranks))),
            ("loss", plain(_mean(s.now.first("persia_loss") for s in ranks))),
        ]
        reported: dict[str, list[float | None]] = {}
        for span in ranks:
            for name, value in span.now.by("persia_reported", "name").items():
                reported.setdefault(name, []).append(value)
        found += [
            (f"reported {name}" if name == "loss" else name, plain(_mean(values)))
            for name, values in reported.items()
        ]
        return [
            *found,
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
        for role in ORDER:
            mine = [one for one in self.processes if one.role == role]
            if mine:
                yield self._fitting(role, mine, console, options)
                yield Text()
        for one in self.processes:
            if one.problem:
                where = f" at {one.place}" if one.place else ""
                yield Text(f"{one.role} {one.replica}{where}: {one.problem}", "red")

    def _fitting(
        self,
        role: str,
        processes: Sequence[Watched],
        console: Console,
        options: ConsoleOptions,
    ) -> Table:
        """Return the table of a role, without the last columns if it is too wide."""
        unbound = options.update(max_width=10 * WIDTH)
        num_columns = len(COLUMNS[role])
        while num_columns:
            table = self._table(role, processes, COLUMNS[role][:num_columns])
            if console.measure(table, options=unbound).maximum <= options.max_width:
                return table
            num_columns -= 1
        return self._table(role, processes, ())

    def _table(
        self, role: str, processes: Sequence[Watched], columns: Sequence[tuple[str, Cell]]
    ) -> Table:
        from rich.table import Table
        from rich.text import Text

        colour = " yellow" if self.stage.name == role else ""
        table = Table(box=None, pad_edge=False, header_style=f"bold{colour}")
        table.add_column(
            role.removeprefix("embedding-") if role == SERVER else role, no_wrap=True
        )
        table.add_column("state", no_wrap=True)
        for name in ("memory", "cpu", *(name for name, _ in columns)):
            table.add_column(name, justify="right", no_wrap=True)
        for one in processes:
            state, style = _state(one)
            cells = [Text(str(one.replica)), Text(state, style)]
            if one.span is not None:
                memory = one.span.now.get("process_resident_memory_bytes")
                cells += [
                    Text(byte_size(memory)),
                    Text(percent(one.span.cpu())),
                    *(Text(text(one.span)) for _, text in columns),
                ]
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
    """Frames of this process; rates are since the frame before.

    Args:
        metrics: Of this process.
        since: Start of the first frame's rates, as ``time.monotonic()``.
    """

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
