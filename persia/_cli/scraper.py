"""Asking every process of a job how it is, again and again, and waiting for none of them.

Where they are, the lists of addresses and ``PERSIA_METRICS_PORT`` say, as they do to the
processes themselves:

    hosts     of the lists; PERSIA_METRICS_HOST where they name this machine. Data-loaders are
              in no list: on this machine, or as they are named to the command
    ports     PERSIA_METRICS_PORT, or the default of role and replica; and those behind it, as
              long as somebody answers

Each is asked by a thread of its own. Whoever has not answered in time is said not to, until it
does; nothing is joined.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from urllib.error import HTTPError
from urllib.request import ProxyHandler, build_opener

from persia import env
from persia._cluster.addresses import TCP, parsed, split
from persia._metrics.definitions import LOADER, SERVER, TRAINER, WORKER
from persia._metrics.endpoint import default_port
from persia._metrics.scrape import Delta, Reading, read
from persia._metrics.top_view import Watched
from persia.errors import ConfigError, DataError

# More than a process takes that asks silent ones in its turn, see persia._cluster.process_metrics.
DEADLINE_S = 5.0
_MAX_BYTES = 64 << 20
# What a server listens at when it listens everywhere, and where that is from here.
_HERE = {"0.0.0.0": "127.0.0.1", "::": "::1", "*": "127.0.0.1", "localhost": "127.0.0.1"}


@dataclass(frozen=True, slots=True)
class ScrapeTarget:
    """Where a process is asked, and who is expected there."""

    role: str
    index: int
    host: str
    port: int
    is_listed: bool = field(default=True, compare=False)  # else it may as well not be

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def next(self) -> ScrapeTarget:
        """Return where the next replica, or rank, is if there is one on the same host."""
        return ScrapeTarget(
            self.role, self.index + 1, self.host, self.port + 1, is_listed=False
        )


def listed_places(named: Sequence[str] = ()) -> list[ScrapeTarget]:
    """Return where the processes of the job are, of which this one's environment says where.

    Args:
        named: More of them, ``host:port``.

    Raises:
        ConfigError: If an address cannot be read, or nothing says where anybody is.
    """
    places = [_named(index, text) for index, text in enumerate(named)]
    port = env.metrics_port()
    if port in (0, "off"):
        if places:
            return places
        raise ConfigError(
            "PERSIA_METRICS_PORT does not say where processes tell their metrics: name them, "
            "persia-launcher top HOST:PORT ...; each logs a line `metrics at`"
        )
    for role, variable, addresses in (
        (WORKER, env.EMBEDDING_WORKERS_VARIABLE, env.embedding_worker_addresses()),
        (SERVER, env.PARAMETER_SERVERS_VARIABLE, env.parameter_server_addresses()),
        (TRAINER, env.NN_WORKERS_VARIABLE, env.nn_worker_addresses()),
    ):
        per_host: dict[str, int] = {}
        for index, address in enumerate(parsed(variable, addresses)):
            host = _host(address)
            on_host = per_host[host] = per_host.get(host, -1) + 1
            if isinstance(port, int):
                where = port + on_host if role == TRAINER else port
            else:
                where = default_port(role, on_host if role == TRAINER else index)
            places.append(ScrapeTarget(role, index, host, where))
    loader = port if isinstance(port, int) else default_port(LOADER, 0)
    places.append(ScrapeTarget(LOADER, 0, _here(), loader, is_listed=False))
    by_address = {(place.host, place.port): place for place in reversed(places)}
    return list(reversed(by_address.values()))


def _named(index: int, text: str) -> ScrapeTarget:
    host, _, port = text.removeprefix("http://").removesuffix("/metrics").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"expected HOST:PORT of a process's metrics, got {text!r}")
    return ScrapeTarget(LOADER, index, host.strip("[]"), int(port))


def _here() -> str:
    host = env.metrics_host().strip("[]")
    return _HERE.get(host, host)


def _host(address: str) -> str:
    """Return the host of a service's address, this machine's as metrics are served there."""
    if not address.startswith(TCP):
        return _here()
    host = split(address)[0].strip("[]")
    try:
        is_here = ipaddress.ip_address(_HERE.get(host, host)).is_loopback
    except ValueError:
        return host
    return _here() if is_here else host


@dataclass(slots=True)
class _State:
    """What is known of one place. Guarded by the lock of its ``Scraper``."""

    asked_at: float | None = None  # while an answer is awaited
    silent_since: float = 0.0
    before: dict[tuple[str, int], Reading] = field(default_factory=dict)
    now: list[Reading] = field(default_factory=list)
    problem: str = ""
    remark: str = ""  # of one that has answered
    has_answered: bool = False  # ever


class Scraper:
    """Asks processes, and knows their last answers.

    Args:
        places: Where they are.
        deadline_s: Seconds until one is said not to answer.
    """

    def __init__(self, places: Iterable[ScrapeTarget], deadline_s: float = DEADLINE_S) -> None:
        self._deadline_s = deadline_s
        self._answered = threading.Condition()  # guards what is below
        self._states = {place: _State() for place in places}

    def ask(self) -> None:
        """Ask everybody of whom no answer is awaited."""
        with self._answered:
            for place in list(self._states):
                self._begin(place)

    def wait(self, timeout_s: float) -> None:
        """Wait until all have answered, or have had their time."""
        with self._answered:
            self._answered.wait_for(lambda: not self._num_awaited(), timeout_s)

    def _num_awaited(self) -> int:
        return sum(state.asked_at is not None for state in self._states.values())

    def _begin(self, place: ScrapeTarget) -> None:
        state = self._states.setdefault(place, _State())
        if state.asked_at is None:
            state.asked_at = time.monotonic()
            name = f"persia-asks-{place}"
            threading.Thread(target=self._ask, args=(place,), name=name, daemon=True).start()

    def _ask(self, place: ScrapeTarget) -> None:
        readings: list[Reading] = []
        problem = remark = ""
        others: list[ScrapeTarget] = []
        try:
            host, others = _resolved(place)
            readings = read(_get(host, place.port, "/metrics", self._deadline_s))
            if any(one.get("persia_ready") == 0 for one in readings):
                remark = _get(host, place.port, "/readyz", self._deadline_s).strip()
        except DataError as error:
            problem = str(error)
        except TimeoutError:
            problem = f"no answer within {self._deadline_s:g} s"
        except OSError as error:
            problem = _reason(error)
        except Exception as error:  # what else a stranger's answer can be
            problem = f"{type(error).__name__}: {error}"
        with self._answered:
            state = self._states[place]
            state.asked_at = None
            if readings:
                state.before = {(one.role, one.replica): one for one in state.now}
                state.now, state.has_answered = readings, True
                others.append(place.next())
            state.problem, state.remark = problem, remark
            for other in others:
                if not any(
                    (one.host, one.port) == (other.host, other.port) for one in self._states
                ):
                    self._begin(other)
            self._answered.notify_all()

    def processes(self) -> list[Watched]:
        """Return what is known of each process now."""
        late = time.monotonic() - self._deadline_s
        found: list[Watched] = []
        # Several addresses may lead to one process, as to the container that this one is in.
        shown: set[tuple[str, int, float]] = set()
        with self._answered:
            for place, state in self._states.items():
                problem = state.problem
                if state.asked_at is not None and state.asked_at < late:
                    problem = f"no answer for {time.monotonic() - state.asked_at:.0f} s"
                if state.now and not problem:
                    began = state.now[0].first("process_start_time_seconds")
                    for one in state.now:
                        if began is not None and (one.role, one.replica, began) in shown:
                            continue
                        shown.add((one.role, one.replica, began or 0.0))
                        span = Delta(state.before.get((one.role, one.replica)), one)
                        found.append(
                            Watched(one.role, one.replica, str(place), span, state.remark)
                        )
                elif problem and (place.is_listed or state.has_answered or "answer" in problem):
                    who = [(one.role, one.replica) for one in state.now]
                    found += [
                        Watched(*one, str(place), None, problem)
                        for one in who or [(place.role, place.index)]
                    ]
        return found


def _resolved(place: ScrapeTarget) -> tuple[str, list[ScrapeTarget]]:
    """Return the first host to which a place leads, and those of all others."""
    found = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
    of_family = [str(where[0]) for family, *_, where in found if family == found[0][0]]
    hosts = sorted(set(of_family))
    others = [
        ScrapeTarget(place.role, place.index + 1 + n, host, place.port, place.is_listed)
        for n, host in enumerate(hosts[1:])
    ]
    return hosts[0], others


def _get(host: str, port: int, path: str, timeout_s: float) -> str:
    url = f"http://[{host}]:{port}{path}" if ":" in host else f"http://{host}:{port}{path}"
    try:
        # Not by a proxy of the environment's.
        with build_opener(ProxyHandler({})).open(url, timeout=timeout_s) as answer:
            text: bytes = answer.read(_MAX_BYTES)
    except HTTPError as error:
        with error:
            text = error.read(_MAX_BYTES)
        if path == "/metrics":
            raise DataError(
                f"another program answers there: HTTP status {error.code}"
            ) from error
    return text.decode(errors="replace")


def _reason(error: OSError) -> str:
    why = getattr(error, "reason", error)
    if isinstance(why, TimeoutError):
        return "no answer in time"
    if isinstance(why, ConnectionRefusedError):
        return "not there: connection refused"
    if isinstance(why, socket.gaierror):
        return f"its name leads nowhere: {why.strerror}"
    return str(getattr(why, "strerror", None) or why)
