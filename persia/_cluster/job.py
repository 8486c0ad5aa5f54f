"""The end of the job, and what else ends a process.

The launcher of the training script announces the job's end to every server; a data-loader,
which has no address, asks an embedding-worker. A server that is not there is no error: it may
have ended before.
"""

from __future__ import annotations

import logging
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

from persia import env
from persia._cluster.addresses import hosts, resolved
from persia._cluster.connect import current_addresses
from persia._rpc.client import Client
from persia._rpc.methods import (
    Hello,
    Role,
    embedding_worker,
    nn_worker,
    parameter_server,
)
from persia.errors import (
    ConfigError,
    InternalError,
    PersiaError,
    ServiceError,
    ServiceUnavailable,
)
from persia.utils import sleep

if TYPE_CHECKING:
    from persia._rpc.zmq_transport import ZmqTransport

logger = logging.getLogger(__name__)

# Seconds after which other processes leave once the job has ended: honcho and Compose, which
# watch all of them, shall see the trainer's end first.
GRACE_S = 1.0
# Seconds between two questions whether the job goes on, and of one attempt to ask.
POLL_S = 0.25
_ATTEMPT_S = 2.0
# Seconds after a signal for a last question and its answer, on a busy machine; honcho, which
# signals all others once the trainer has ended, kills what is left after 5 s.
LAST_ASK_S = 2.5
# Seconds without an answer after which a line says so.
_LINE_S = 10.0


def announce_job_end(
    transport: ZmqTransport, status: int, timeout_s: float, took_part: bool = True
) -> list[str]:
    """Announce to every parameter server and embedding-worker that the job has ended.

    ``took_part`` says whether the script has configured servers; see ``JobState``. Returns
    the addresses without an answer within ``timeout_s``; where all answered, the servers of
    their sets that no address leads to.
    """
    deadline = time.monotonic() + timeout_s
    roles = parameter_server(), embedding_worker()
    reached: dict[str, dict[str, Hello]] = {role.name: {} for role in roles}

    def left() -> float:
        # Of one attempt: a server that is restarted may get another host.
        return min(_ATTEMPT_S, max(0.01, deadline - time.monotonic()))

    def announce(place: tuple[Role, str]) -> bool:
        role, address = place
        with closing(Client(transport, address, role)) as client:
            try:
                hello = client.hello(left())
                client.call("finish_job", status, took_part, timeout_s=left())
            except (ServiceError, ConfigError) as error:
                logger.debug("%s", error)
                return False
        reached[role.name][address] = hello
        return True

    while True:
        places = [
            (role, address)
            for role in roles
            for address in current_addresses(role, left())
            if address not in reached[role.name]
        ]
        with ThreadPoolExecutor(max(1, len(places)), "persia-announce") as pool:
            has_answered = list(pool.map(announce, places))
        silent = [x for (_, x), has in zip(places, has_answered, strict=True) if not has]
        missing = [x for role in roles for x in _unreached(role, reached[role.name].values())]
        if not (missing or silent) or time.monotonic() >= deadline:
            # A name does not lead to a server that is just being restarted.
            return silent or missing
        sleep(POLL_S)


def _unreached(role: Role, reached: Iterable[Hello]) -> list[str]:
    """Return which servers of a role are missing, by the size of the set of those reached."""
    numbers = {hello.replica_index: hello.replica_size for hello in reached}
    size = max(numbers.values(), default=0)
    return [f"{role.name} {number}" for number in range(size) if number not in numbers]


def status_after_job(status: int) -> int:
    """Return with which status a server or data-loader exits once the job has ended."""
    return 0 if env.is_supervised() else status


class JobMonitor:
    """Asks, in a thread, whether the job has ended.

    Args:
        transport: How to get to the embedding-workers.
        watcher: Name of this process; servers leave once every watcher knows the end.
        on_end: Called once with the exit status, or with the error if no embedding-worker
            has answered for ``PERSIA_RPC_TIMEOUT`` seconds.
        number: Of this watcher: not all ask the first embedding-worker.
    """

    def __init__(
        self,
        transport: ZmqTransport,
        watcher: str,
        on_end: Callable[[int | PersiaError], None],
        number: int = 0,
    ) -> None:
        self._transport = transport
        self._watcher = watcher
        self._number = number
        self._on_end = on_end
        self._timeout_s = env.rpc_timeout_s()
        self._is_closed = threading.Event()
        self._client: Client | None = None  # replaced by the thread, closed by anyone
        self._thread = threading.Thread(target=self._run, name="persia-job-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closed.set()
        if (client := self._client) is not None:
            client.close()  # ends a question that waits for its answer
        self._thread.join()

    def _run(self) -> None:
        try:
            end = self._watch()
        except PersiaError as error:
            end = error
        if end is not None:
            self._on_end(end)

    def _watch(self) -> int | PersiaError | None:
        answered_at = logged_at = time.monotonic()
        addresses: Sequence[str] = ()
        while not self._is_closed.is_set():
            # In each round: a worker that is restarted may get another host.
            addresses = current_addresses(embedding_worker(), _ATTEMPT_S)
            first = self._number % max(1, len(addresses))
            for address in (*addresses[first:], *addresses[:first]):
                status, last_answer = self._poll(address)
                if status is not None:
                    return status
                answered_at = max(answered_at, last_answer)
            silent_s = time.monotonic() - answered_at
            silent = (
                f"no embedding-worker at {', '.join(addresses)} has said for {silent_s:.0f} s "
                "whether the job has ended"
            )
            if silent_s > self._timeout_s:
                role = embedding_worker().name
                return ServiceUnavailable(silent, role=role, method="job_status")
            if silent_s > _LINE_S and time.monotonic() - logged_at > _LINE_S:
                logged_at = time.monotonic()
                logger.warning("waiting: %s", silent)
            self._is_closed.wait(POLL_S)
        return None

    def _poll(self, address: str) -> tuple[int | None, float]:
        """Ask one embedding-worker until it fails; return the status and the last answer."""
        answered_at = 0.0  # monotonic seconds
        with closing(Client(self._transport, address, embedding_worker())) as client:
            self._client = client
            try:
                while not self._is_closed.is_set():
                    words = "job_status", self._watcher
                    status: int | None = client.call(*words, timeout_s=_ATTEMPT_S)
                    answered_at = time.monotonic()
                    if status is not None:
                        return status, answered_at
                    self._is_closed.wait(POLL_S)
            except ServiceError as error:
                logger.debug("%s", error)
        return None, answered_at


class TrainerWatch:
    """Asks, in a thread, whether an nn-worker is another process than a data-loader has served.

    Args:
        transport: How to get to them.
        served: The incarnation of each, by address.
        events: Get one of the kind ``restarted``, once.
    """

    def __init__(
        self, transport: ZmqTransport, served: Mapping[str, int | None], events: Events
    ) -> None:
        self._transport, self._served, self._events = transport, served, events
        self._is_closed = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="persia-trainer-watch", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._is_closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_closed.is_set():
            for address, incarnation in self._served.items():
                found = self._ask(address)
                if found not in (None, incarnation):
                    logger.info("the nn-worker at %s was started again", address)
                    self._events.put(Event("restarted"))
                    return
            self._is_closed.wait(4 * POLL_S)

    def _ask(self, address: str) -> int | None:
        """Return which process answers at an address; None if none does."""
        # Not by libzmq: where the host is gone, as at the end of a job, it would take so long
        # that the job's watch, by the same transport, does not learn of the end.
        for found in resolved([address], _ATTEMPT_S, hosts):
            with closing(Client(self._transport, found, nn_worker())) as client:
                try:
                    return client.hello(_ATTEMPT_S).incarnation
                except (ServiceError, ConfigError) as error:
                    logger.debug("%s", error)
        return None


# --- the events of a process ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Event:
    """A reason to end; ``restarted`` is one to begin again.

    ``kind`` is ``signal``, ``job``, ``ended`` (a child), ``failure``, or ``restarted`` (a
    trainer whose data was sent).
    """

    kind: str
    number: int = 0  # of the signal, or the job's exit status
    error: BaseException | None = None  # of a thread, or why the status cannot be known


Events = queue.SimpleQueue[Event]  # put() is allowed in a signal handler


@contextmanager
def watched_process() -> Iterator[Events]:
    """Turn SIGTERM, SIGINT, and exceptions that end a thread, into events.

    A signal handler may run between any two instructions, so it only puts the event into a
    queue; the main thread takes it out where it waits anyway.
    """
    events: Events = queue.SimpleQueue()

    def on_signal(number: int, frame: FrameType | None) -> None:
        events.put(Event("signal", number))

    def on_failure(failure: threading.ExceptHookArgs) -> None:
        error = failure.exc_value or InternalError(f"a thread ended by {failure.exc_type}")
        events.put(Event("failure", error=error))

    hook = threading.excepthook
    signals = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, on_signal) for number in signals}
    threading.excepthook = on_failure
    try:
        yield events
    finally:
        threading.excepthook = hook
        for number, handler in before.items():
            signal.signal(number, handler)
