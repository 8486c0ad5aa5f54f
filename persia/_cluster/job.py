"""The end of the job, between processes: told to every server, and asked for.

Whoever ran the training script tells; a data-loader asks an embedding-worker, any that lives.
A server that is not there is no error: it may have ended before.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from persia import env
from persia._cluster.connect import current_addresses
from persia._rpc.client import Client
from persia._rpc.methods import Hello, Role, embedding_worker, parameter_server
from persia._rpc.transport import Transport
from persia.errors import ConfigError, PersiaError, ServiceError, ServiceUnavailable

logger = logging.getLogger(__name__)

# Seconds after which other processes leave once the job has ended: whoever watches all of them
# shall see the trainer's end first.
GRACE_S = 1.0
# Seconds between two questions whether the job goes on, and of one attempt to ask.
POLL_S = 0.25
# Seconds of silence after which a line says so.
_LINE_S = 10.0
_ATTEMPT_S = 2.0


def announce_job_end(
    transport: Transport, status: int, timeout_s: float, took_part: bool = True
) -> list[str]:
    """Tell every parameter server and embedding-worker that the job has ended.

    Args:
        transport: How to get there.
        status: The exit status of the training script.
        timeout_s: Seconds that servers get to be there and to answer.
        took_part: Whether the script has configured servers; see ``JobState``.

    Returns:
        The addresses where nobody answered; where all did, the servers of their sets that
        no address leads to.
    """
    deadline = time.monotonic() + timeout_s
    roles = parameter_server(), embedding_worker()
    told: dict[str, dict[str, Hello]] = {role.name: {} for role in roles}

    def left() -> float:
        # Of one attempt: a server that comes back may have another host.
        return min(_ATTEMPT_S, max(0.01, deadline - time.monotonic()))

    def tell(place: tuple[Role, str]) -> str:
        role, address = place
        client = Client(transport, address, role)
        try:
            hello = client.hello(left())
            client.call("finish_job", status, took_part, timeout_s=left())
            told[role.name][address] = hello
        except (ServiceError, ConfigError) as error:
            logger.debug("%s", error)
            return address
        finally:
            client.close()
        return ""

    while True:
        places = [
            (role, address)
            for role in roles
            for address in current_addresses(role, left())
            if address not in told[role.name]
        ]
        with ThreadPoolExecutor(max(1, len(places)), "persia-tell") as pool:
            silent = [address for address in pool.map(tell, places) if address]
        missing = [who for role in roles for who in _untold(role, told[role.name].values())]
        if not (missing or silent) or time.monotonic() >= deadline:
            # A name does not lead to a server that is just being started again.
            return silent or missing
        time.sleep(POLL_S)


def _untold(role: Role, told: Iterable[Hello]) -> list[str]:
    """Return who is missing of a role, as far as those who answered know."""
    numbers = {hello.replica_index: hello.replica_size for hello in told}
    size = max(numbers.values(), default=0)
    return [f"{role.name} {number}" for number in range(size) if number not in numbers]


def status_after_job(status: int) -> int:
    """Return with which status a server or data-loader exits once the job has ended."""
    return 0 if env.is_supervised() else status


class JobMonitor:
    """Asks, in a thread, whether the job has ended.

    Args:
        transport: How to get to the embedding-workers.
        watcher: Who asks; each of them is told the end before the servers leave.
        number: Of this one among the watchers, so that not all ask the first embedding-worker.
        on_end: Called once with the exit status, or with the error if no embedding-worker
            has answered for ``PERSIA_RPC_TIMEOUT`` seconds.
    """

    def __init__(
        self,
        transport: Transport,
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
        """Ask no more."""
        self._is_closed.set()
        client = self._client
        if client is not None:
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
        heard_at = told_at = time.monotonic()
        addresses: Sequence[str] = ()
        while not self._is_closed.is_set():
            # Anew in each round: a worker that comes back may have another host.
            addresses = current_addresses(embedding_worker(), _ATTEMPT_S)
            first = self._number % max(1, len(addresses))
            for address in (*addresses[first:], *addresses[:first]):
                client = self._client = Client(self._transport, address, embedding_worker())
                try:
                    while not self._is_closed.is_set():
                        status: int | None = client.call(
                            "job_status", self._watcher, timeout_s=_ATTEMPT_S
                        )
                        heard_at = time.monotonic()
                        if status is not None:
                            return status
                        self._is_closed.wait(POLL_S)
                except ServiceError as error:
                    logger.debug("%s", error)
                finally:
                    client.close()
            silent_s = time.monotonic() - heard_at
            if silent_s > self._timeout_s:
                return ServiceUnavailable(
                    f"no embedding-worker at {', '.join(addresses)} has said for "
                    f"{silent_s:.0f} s whether the job has ended",
                    role=embedding_worker().name,
                    method="job_status",
                )
            if silent_s > _LINE_S and time.monotonic() - told_at > _LINE_S:
                told_at = time.monotonic()
                logger.warning(
                    "waiting: no embedding-worker at %s says whether the job has ended, for "
                    "%.0f s",
                    ", ".join(addresses),
                    silent_s,
                )
            self._is_closed.wait(POLL_S)
        return None
