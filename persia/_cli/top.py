"""``persia-launcher top``: a whole job in a terminal, live.

``docs/top.md`` says where the metrics of processes are looked for. Each process is read by a
thread of its own. One that has not answered in time is shown as silent until it answers; no
thread is joined.
"""

from __future__ import annotations

import dataclasses
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from urllib.error import HTTPError
from urllib.request import ProxyHandler, build_opener

from persia import env
from persia._cluster.addresses import split
from persia._cluster.connect import current_lists
from persia._metrics.definitions import LOADER, SERVER, TRAINER, WORKER
from persia._metrics.endpoint import default_port
from persia._metrics.scrape import Delta, Reading, read
from persia._metrics.top_view import WIDTH, Frame, Watched, need_rich
from persia._rpc.zmq_transport import is_local
from persia.errors import ConfigError, DataError
from persia.utils import sleep

# Longer than ``PROBE_S``, which a process takes whose /readyz waits for silent servers.
DEADLINE_S = 5.0
_MAX_BYTES = 64 << 20
# From this machine, the address of a server that listens everywhere.
LOOPBACK_OF = {"0.0.0.0": "127.0.0.1", "::": "::1", "*": "127.0.0.1", "localhost": "127.0.0.1"}


@dataclass(frozen=True, slots=True)
class ScrapeTarget:
    """Address of a process's metrics, and the process that is expected there."""

    role: str
    index: int
    host: str
    port: int
    is_listed: bool = field(default=True, compare=False)  # else it may be absent
    has_next: bool = field(default=True, compare=False)  # another one may be at the next port

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def list_targets(named: Sequence[str] = ()) -> list[ScrapeTarget]:
    """Return the targets that the environment lists, and further ones, ``host:port``.

    Raises:
        ConfigError: If an address cannot be read, or there is none.
    """
    targets = [_named(index, text) for index, text in enumerate(named)]
    port = env.metrics_port()
    if port in (0, "off"):
        if targets:
            return targets
        raise ConfigError(
            "PERSIA_METRICS_PORT names no port at which processes serve metrics: name them, "
            "persia-launcher top HOST:PORT ...; each logs a line `metrics at`"
        )
    lists = current_lists()
    for role in (WORKER, SERVER, TRAINER):
        on_host: Counter[str] = Counter()
        for index, address in enumerate(lists[role].addresses):
            host = _host(address)
            place = on_host[host] if role == TRAINER else index
            if isinstance(port, int):
                where = port + (place if role == TRAINER else 0)
            else:
                where = default_port(role, place)
            on_host[host] += 1
            targets.append(ScrapeTarget(role, index, host, where))
    loader = port if isinstance(port, int) else default_port(LOADER, 0)
    targets.append(ScrapeTarget(LOADER, 0, metrics_host(), loader, is_listed=False))
    by_address = {(target.host, target.port): target for target in reversed(targets)}
    return list(reversed(by_address.values()))


def _named(index: int, text: str) -> ScrapeTarget:
    host, _, port = text.removeprefix("http://").removesuffix("/metrics").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"expected HOST:PORT of a process's metrics, got {text!r}")
    return ScrapeTarget(LOADER, index, host.strip("[]"), int(port))


def metrics_host() -> str:
    """Return where processes of this machine serve their metrics."""
    host = env.metrics_host().strip("[]")
    return LOOPBACK_OF.get(host, host)


def _host(address: str) -> str:
    """Return the host of a service's metrics; on this machine it is PERSIA_METRICS_HOST."""
    if is_local(address):
        return metrics_host()
    host = split(address)[0].strip("[]")
    return metrics_host() if host in LOOPBACK_OF else host


@dataclass(slots=True)
class _State:
    """State of one target. Guarded by the lock of its ``Scraper``."""

    begun_at: float | None = None  # of the request in flight; monotonic
    before: dict[tuple[str, int], Reading] = field(default_factory=dict)
    readings: list[Reading] = field(default_factory=list)  # the last; empty before any
    problem: str = ""
    remark: str = ""  # why a process that answers is not ready


class Scraper:
    """Reads the metrics of processes, and keeps their last answers.

    A process counts as silent after ``deadline_s``.
    """

    def __init__(self, targets: Iterable[ScrapeTarget], deadline_s: float = DEADLINE_S) -> None:
        self._deadline_s = deadline_s
        self._changed = threading.Condition()  # guards what is below
        self._states = {target: _State() for target in targets}

    def request_all(self) -> None:
        with self._changed:
            for target in list(self._states):
                self._begin(target)

    def wait(self, timeout_s: float) -> None:
        with self._changed:
            states = self._states.values()
            self._changed.wait_for(lambda: all(x.begun_at is None for x in states), timeout_s)

    def _begin(self, target: ScrapeTarget) -> None:
        state = self._states.setdefault(target, _State())
        if state.begun_at is None:
            state.begun_at = time.monotonic()
            name, words = f"persia-scrape-{target}", (target,)
            threading.Thread(None, self._request, name, words, daemon=True).start()

    def _request(self, target: ScrapeTarget) -> None:
        readings: list[Reading] = []
        problem = remark = ""
        others: list[ScrapeTarget] = []
        try:
            host, others = _resolve(target)
            status, text = fetch(host, target.port, "/metrics", self._deadline_s)
            if status != HTTPStatus.OK:
                raise DataError(f"another program answers there: HTTP status {status}")
            readings = read(text)
            if any(one.get("persia_ready") == 0 for one in readings):
                remark = fetch(host, target.port, "/readyz", self._deadline_s)[1].strip()
        except DataError as error:
            problem = str(error)
        except OSError as error:
            problem = _reason(error)
        except Exception as error:  # of an answer that is no HTTP, or another program's
            problem = f"{type(error).__name__}: {error}"
        with self._changed:
            state = self._states[target]
            state.begun_at = None
            if readings:
                state.before = {(one.role, one.replica): one for one in state.readings}
                state.readings = readings
                if target.has_next:  # the next replica, or rank, on the same host
                    index, port = target.index + 1, target.port + 1
                    others.append(ScrapeTarget(target.role, index, target.host, port, False))
            state.problem, state.remark = problem, remark
            known = {(one.host, one.port) for one in self._states}
            for other in others:
                if (other.host, other.port) not in known:
                    self._begin(other)
            self._changed.notify_all()

    def processes(self) -> list[Watched]:
        late = time.monotonic() - self._deadline_s
        found: list[Watched] = []
        # Several addresses may be of one process, such as the container that this one is in.
        shown: set[tuple[str, int, float]] = set()
        with self._changed:
            for target, state in self._states.items():
                problem = state.problem
                if state.begun_at is not None and state.begun_at < late:
                    problem = f"no answer for {time.monotonic() - state.begun_at:.0f} s"
                if problem:
                    who = [(one.role, one.replica) for one in state.readings]
                    if not who and (target.is_listed or "answer" in problem):
                        who = [(target.role, target.index)]
                    found += [Watched(*one, str(target), None, problem) for one in who]
                    continue
                for one in state.readings:
                    key = one.role, one.replica
                    began = state.readings[0].first("process_start_time_seconds")
                    if began is None or (*key, began) not in shown:
                        shown.add((*key, began or 0.0))
                        span = Delta(state.before.get(key), one)
                        found.append(Watched(*key, str(target), span, state.remark))
        return found


def _resolve(target: ScrapeTarget) -> tuple[str, list[ScrapeTarget]]:
    """Return the first host of a target's name, and targets of its other hosts."""
    found = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    of_family = [str(where[0]) for family, *_, where in found if family == found[0][0]]
    hosts = sorted(set(of_family))
    others = [
        ScrapeTarget(target.role, target.index + 1 + n, host, target.port, target.is_listed)
        for n, host in enumerate(hosts[1:])
    ]
    return hosts[0], others


def fetch(host: str, port: int, path: str, timeout_s: float) -> tuple[int, str]:
    """Return status and text of an HTTP page, by no proxy."""
    url = f"http://[{host}]:{port}{path}" if ":" in host else f"http://{host}:{port}{path}"
    try:
        with build_opener(ProxyHandler({})).open(url, timeout=timeout_s) as answer:
            return int(answer.status), answer.read(_MAX_BYTES).decode(errors="replace")
    except HTTPError as error:
        with error:
            return error.code, error.read(_MAX_BYTES).decode(errors="replace")


def _reason(error: OSError) -> str:
    why = getattr(error, "reason", error)
    if isinstance(why, TimeoutError):
        return "no answer in time"
    if isinstance(why, ConnectionRefusedError):
        return "not running: connection refused"
    if isinstance(why, socket.gaierror):
        return f"its name cannot be resolved: {why.strerror}"
    return str(getattr(why, "strerror", None) or why)


# --- the screen ------------------------------------------------------------------------------

_TODO = (
    "start the job, or name its processes, persia-launcher top HOST:PORT ... (each logs a "
    "line `metrics at`)"
)


def run_top(
    targets: Iterable[ScrapeTarget],
    *,
    interval_s: float,
    deadline_s: float,
    is_once: bool,
    todo: str = _TODO,
) -> int:
    """Show the job until Ctrl-C, or one frame of it; returns the exit status.

    ``todo`` is printed where no process answers.
    """
    need_rich()
    scraper = Scraper(targets, deadline_s)
    if is_once:
        return _show_once(scraper, interval_s, deadline_s, todo)
    with suppress(KeyboardInterrupt):
        _show(scraper, interval_s)
    return 0


def frame_of(scraper: Scraper) -> Frame:
    """Return a frame of the last answers, of the run of ``PERSIA_RUN_ID`` if that is set."""
    wanted, processes = env.run_id(), []
    for one in scraper.processes():
        run = "" if one.span is None else one.span.now.run
        if wanted and run not in ("", wanted):
            problem = f"is of another run, {run}, and PERSIA_RUN_ID is {wanted}"
            one = dataclasses.replace(one, span=None, problem=problem)
        processes.append(one)
    spans = [one.span for one in processes if one.span is not None]
    title = f"{len(spans)} of {len(processes)} processes answer"
    runs = sorted({span.now.run for span in spans} - {""})
    if runs:
        title = f"run {', '.join(runs)}: {title}"
    if len(runs) > 1:
        title += " (of one job? PERSIA_RUN_ID names it)"
    return Frame(processes, title)


def _show_once(scraper: Scraper, interval_s: float, deadline_s: float, todo: str) -> int:
    scraper.request_all()
    scraper.wait(deadline_s)
    sleep(interval_s)  # rates are of this time
    scraper.request_all()
    scraper.wait(deadline_s)
    frame = frame_of(scraper)
    print(frame)
    if any(one.span is not None for one in frame.processes):
        return 0
    print(f"no process answers: {todo}", file=sys.stderr)
    return 1


def _show(scraper: Scraper, interval_s: float) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
        while True:
            begin = time.monotonic()
            scraper.request_all()
            scraper.wait(interval_s)
            frame = frame_of(scraper)
            if console.is_terminal:
                live.update(frame, refresh=True)
            else:
                console.print(frame)
            sleep(max(0.0, begin + interval_s - time.monotonic()))
