"""One frame of ``persia-launcher top``: what a whole job does, at a glance.

    Watched, of each process   -->   Frame   -->   str(frame), or rich's own
      (two readings, or why none)      stage, headline, a table of each role

A trainer in embedded mode draws the same of itself: ``print(ctx.top())``.
"""

from __future__ import annotations

import io
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from persia._metrics.bottleneck import slowest
from persia._metrics.definitions import LOADER, SERVER, TRAINER, WORKER
from persia._metrics.registry import Metrics
from persia._metrics.scrape import Delta, Reading, read
from persia.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table

# The way of a batch.
ORDER = (LOADER, WORKER, SERVER, TRAINER)

# Of what is printed where no terminal says how wide it is.
WIDTH = 112
_NONE = "-"

_Text = Callable[[Delta], str]


@dataclass(frozen=True, slots=True)
class Watched:
    """One process: what it told, or why it did not."""

    role: str  # as expected, until it has said so
    replica: int
    place: str  # where it was asked; "" in the same process
    span: Delta | None
    problem: str = ""  # without a span: why there is none


# --- numbers as text --------------------------------------------------------------------------


def _short(value: float | None, unit: str = "") -> str:
    """``12345`` -> ``12.3k``."""
    if value is None or not math.isfinite(value):
        return _NONE if value is None else str(value)
    for letter, size in (("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.1f}{letter}{unit}"
    return f"{value:.0f}{unit}" if value == int(value) or abs(value) >= 100 else f"{value:.2g}"


def _bytes(value: float | None) -> str:
    if value is None:
        return _NONE
    for name, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if value >= size:
            return f"{value / size:.1f} {name}"
    return f"{value / 1024:.0f} KiB"


def _percent(value: float | None) -> str:
    return _NONE if value is None else f"{100 * value:.0f} %"


def _milliseconds(value: float | None) -> str:
    return (
        _NONE
        if value is None
        else f"{1000 * value:.2g} ms"
        if value < 0.1
        else f"{value:.2f} s"
    )


def _plain(value: float | None) -> str:
    return _NONE if value is None else f"{value:.4g}"


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


# --- columns by role --------------------------------------------------------------------------


def _now(name: str, text: Callable[[float | None], str] = _short, **labels: str) -> _Text:
    return lambda span: text(span.now.get(name, **labels))


def _rate(name: str, **labels: str) -> _Text:
    return lambda span: _short(span.rate(name, **labels))


def _waits(name: str) -> _Text:
    return lambda span: _percent(span.share(name))


def _took(name: str) -> _Text:
    return lambda span: _milliseconds(span.mean(name))


def _of(part: str, whole: str) -> _Text:
    def text(span: Delta) -> str:
        limit = span.now.get(whole)
        return _short(span.now.get(part)) + (f" of {_short(limit)}" if limit else "")

    return text


_TRAINED_NOT = ("abandoned", "incomplete", "skipped", "failed")


def _not_trained(span: Delta) -> str:
    return _short(
        _sum(span.now.get("persia_batches_total", outcome=name) for name in _TRAINED_NOT)
    )


COLUMNS: dict[str, tuple[tuple[str, _Text], ...]] = {
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
        ("in bytes", _now("persia_rows_bytes", _bytes)),
        ("ids/s", _rate("persia_looked_up_ids_total")),
        ("misses", lambda span: _percent(span.miss_rate())),
        ("evicted/s", _rate("persia_evicted_rows_total")),
        ("queue", _now("persia_rpc_queue_calls")),
    ),
    TRAINER: (
        ("samples/s", _rate("persia_trained_samples_total")),
        ("loss", lambda span: _plain(span.now.first("persia_loss"))),
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
    """What a job does; ``str()`` is plain text, and ``rich`` prints it in colour.

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
        """Return what counts most, as names and texts."""
        ranks, servers = self._spans(TRAINER), self._spans(SERVER)
        looked_up = _sum(span.delta("persia_looked_up_ids_total") for span in servers)
        missed = _sum(span.delta("index_miss_count_total") for span in servers)
        misses = missed / looked_up if missed is not None and looked_up else None

        def total(spans: list[Delta], name: str) -> float | None:
            return _sum(span.now.get(name) for span in spans)

        found = [
            ("samples/s", _short(_sum(s.rate("persia_trained_samples_total") for s in ranks))),
            ("steps", _short(_mean(s.now.get("persia_steps_total") for s in ranks))),
            ("loss", _plain(_mean(s.now.first("persia_loss") for s in ranks))),
        ]
        reported: dict[str, list[float | None]] = {}
        for span in ranks:
            for name, value in span.now.by("persia_reported", "name").items():
                reported.setdefault(name, []).append(value)
        found += [
            (f"reported {name}" if name == "loss" else name, _plain(_mean(values)))
            for name, values in reported.items()
        ]
        return [
            *found,
            ("staleness", _short(total(ranks, "staleness"))),
            ("rows", _short(total(servers, "persia_rows"))),
            ("misses", _percent(misses)),
            ("evicted/s", _short(_sum(s.rate("persia_evicted_rows_total") for s in servers))),
            ("memory", _bytes(total(self._spans(), "process_resident_memory_bytes"))),
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
        """Return the table of a role, without the last columns where it is too wide."""
        unbound = options.update(max_width=10 * WIDTH)
        num_columns = len(COLUMNS[role])
        while num_columns:
            table = self._table(role, processes, COLUMNS[role][:num_columns])
            if console.measure(table, options=unbound).maximum <= options.max_width:
                return table
            num_columns -= 1
        return self._table(role, processes, ())

    def _table(
        self, role: str, processes: Sequence[Watched], columns: Sequence[tuple[str, _Text]]
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
                    Text(_bytes(memory)),
                    Text(_percent(one.span.cpu())),
                    *(Text(text(one.span)) for _, text in columns),
                ]
            table.add_row(*cells)
        return table


def _state(one: Watched) -> tuple[str, str]:
    """Return how a process is, and how that is drawn."""
    if one.span is None:
        return "no answer", "bold red"
    now = one.span.now
    if now.get("persia_healthy") == 0:
        return "not well", "bold red"
    return ("not ready", "yellow") if now.get("persia_ready") == 0 else ("ready", "green")


class View:
    """Frames of one process, drawn by itself; rates are since the frame before.

    Args:
        metrics: What it tells.
        since: Of the first frame's rates; ``time.monotonic()``.
    """

    def __init__(self, metrics: Metrics, since: float) -> None:
        self._metrics = metrics
        self._since = since
        self._before: dict[tuple[str, int], Reading] = {}

    def frame(self, title: str) -> Frame:
        """Return what was done since the frame before."""
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
    """Raise a ConfigError if what draws frames is not installed."""
    if find_spec("rich") is None:
        raise ConfigError("to draw this view rich is needed: pip install rich")
