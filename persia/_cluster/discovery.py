"""Asking at addresses until a set of servers is whole, and finding those that have moved.

A thread per address asks until it has an answer; a thread per name looks up its hosts. The set
is whole when each of the replica numbers that ``hello`` speaks of has answered once. Until then
a line every few seconds says which are missing and why; at the deadline an error does. Servers
that cannot be of one set are an error at once, after both were asked again: one of them may
have been replaced since it answered.

A name of one host is left to ZeroMQ afterwards, which looks it up at each connection. One of
several does not say which replica is where, so each server is called at its host, and a thread
checks every few seconds that it is there. If not, it is sought among the hosts of the name.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from persia._cluster.addresses import TCP, AddressList, is_name, resolve, resolved, split
from persia._rpc.client import Client
from persia._rpc.methods import Hello, Role
from persia._rpc.stubs import describe_wire
from persia.config import SAME_EVERYWHERE, describe_differences
from persia.errors import (
    ConfigError,
    JobFinished,
    ServiceBusy,
    ServiceError,
    ServiceTimeout,
    ServiceUnavailable,
)

if TYPE_CHECKING:
    from persia._rpc.zmq_transport import ZmqTransport

logger = logging.getLogger(__name__)

# Seconds between two lines about what is missing, and of one attempt to ask.
_LINE_S = 3.0
# Seconds between two look-ups of a name: the hosts of replicas join it one by one.
_RESOLVE_S = 1.0
# Seconds between two checks of ``should_stop``.
_STOP_S = 0.25
# Seconds between two checks of servers that were found, and of each call.
_CHECK_S = 3.0


@dataclass(eq=False, slots=True)
class _Probe:
    """One address, which is asked until there is ``hello`` or ``error``, or it is closed.

    Guarded by the condition of the search. It is closed when no list entry leads there any
    more, when it is asked again and does not answer, and when the search ends: then clients
    of the set stay open.
    """

    address: str
    client: Client
    problem: str  # while there is neither
    hello: Hello | None = None
    error: BaseException | None = None  # another role's server: raised by ``run``
    is_closed: bool = False
    thread: threading.Thread | None = None


@dataclass(frozen=True, slots=True)
class _Answer:
    probe: _Probe
    hello: Hello

    def __str__(self) -> str:
        one = self.hello
        which = f"{one.role} {one.replica_index} of {one.replica_size}"
        return f"{which} at {self.probe.address}"


class Discovery:
    """Finds the servers of one role, once; ``connect`` says what its arguments are."""

    def __init__(
        self,
        transport: ZmqTransport,
        role: Role,
        listed: AddressList,
        timeout_s: float,
        on_restart: Callable[[int], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
        on_wait: Callable[[str], None] | None = None,
    ) -> None:
        self._transport = transport
        self._role = role
        self._listed = listed
        self._timeout_s = timeout_s
        self._on_restart = on_restart
        self._should_stop = should_stop
        self._on_wait = on_wait
        self._changed = threading.Condition()  # guards all below
        self._num_changes = 0
        self._is_over = False
        self._probes: dict[str, _Probe] = {}  # by address; none is closed
        # By name: its hosts, or why they are not known.
        self._names: dict[str, list[str] | str] = {
            address: f"{address} is being looked up"
            for address in listed.addresses
            if is_name(address)
        }
        self._misfit = ""  # why the ranks do not follow from the list of nodes

    def run(self) -> list[tuple[Client, Hello]]:
        """Return the servers by number, once all have answered."""
        for name in self._names:
            # Not joined: only the system ends a look-up.
            _start(f"persia-look-up {name}", self._look_up, name)
        answers: list[_Answer] = []
        try:
            answers = self._wait()
        finally:
            self._close(answers)
        logger.info("found %s", ", ".join(map(str, answers)))
        found = [(answer.probe.client, answer.hello) for answer in answers]
        hosts = {host for hosts in self._names.values() if len(hosts) > 1 for host in hosts}
        if any(client.address in hosts for client, _ in found):
            Monitor(self._transport, self._role, self._listed, found)
        return found

    def _wait(self) -> list[_Answer]:
        now = time.monotonic()
        deadline, next_line = now + self._timeout_s, now + _LINE_S
        while True:
            with self._changed:
                seen = self._num_changes
                self._update_probes()
                answers = self._answers()
                conflict = _conflict(answers)
                is_whole = bool(answers) and not _numbers_missing(answers)
                if is_whole and not conflict and not self._silent_addresses(answers):
                    return answers
                missing = self._describe_missing(answers)
                is_final = not self._names and (
                    self._misfit or all(probe.hello for probe in self._probes.values())
                )
            if conflict:
                self._ask_again(*conflict)
                continue
            if is_final:
                raise ConfigError(missing)
            now = time.monotonic()
            if now >= deadline:
                raise ServiceUnavailable(
                    f"{missing}; waited {self._timeout_s:g} s",
                    role=self._role.name,
                    replica=next(iter(_numbers_missing(answers)), None),
                    method="hello",
                )
            if self._should_stop is not None and self._should_stop():
                raise JobFinished(f"no longer needed, {missing}", role=self._role.name)
            if now >= next_line:
                next_line = now + _LINE_S
                logger.warning("waiting: %s", missing)
                if self._on_wait is not None:
                    self._on_wait(missing)
            left = min(deadline, next_line) - now
            if self._should_stop is not None:
                left = min(left, _STOP_S)
            with self._changed:
                if self._num_changes == seen:
                    self._changed.wait(left)

    def _close(self, answers: Sequence[_Answer]) -> None:
        """End every thread, and every client but those of the answers."""
        kept = {answer.probe.address for answer in answers}
        with self._changed:
            self._is_over = True
            probes = list(self._probes.values())
            for probe in probes:
                probe.is_closed = True
            self._changed.notify_all()
        for probe in probes:
            if probe.address not in kept:
                probe.client.close()
        for probe in probes:
            if probe.thread is not None:
                probe.thread.join()

    def _notify(self) -> None:
        self._num_changes += 1
        self._changed.notify_all()

    # --- asking ------------------------------------------------------------------------------

    def _look_up(self, name: str) -> None:
        while True:
            found: list[str] | str
            try:
                found = resolve(name) or f"{name} has no host"
            except (OSError, UnicodeError) as exc:
                found = f"{name} cannot be resolved: {getattr(exc, 'strerror', None) or exc}"
            with self._changed:
                # A name that is unknown for a moment keeps its hosts.
                if isinstance(found, list) or isinstance(self._names[name], str):
                    if found != self._names[name]:
                        self._notify()
                    self._names[name] = found
                if self._changed.wait_for(lambda: self._is_over, _RESOLVE_S):
                    return

    def _addresses(self) -> list[str]:
        hosts: list[str] = []
        for address in self._listed.addresses:
            found = self._names.get(address, [address])
            hosts += [] if isinstance(found, str) else found
        hosts = list(dict.fromkeys(hosts))
        self._misfit = ""
        answers = self._answers()
        size = answers[0].hello.replica_size if answers else 0
        if not self._listed.is_by_node or size <= len(hosts):
            return hosts
        if size % len(hosts) or not all(host.startswith(TCP) for host in hosts):
            self._misfit = (
                f"{self._listed.variable}: expected an address for each of {size} ranks, or a "
                f"host and port for each of the nodes that share them evenly, got {len(hosts)}"
            )
            return hosts
        ranks = []
        for host, port in map(split, hosts):
            ranks += [f"{TCP}{host}:{port + place}" for place in range(size // len(hosts))]
        return ranks

    def _update_probes(self) -> None:
        """Begin to ask at new addresses, and stop at those that nothing leads to any more."""
        addresses = self._addresses()
        for address in addresses:
            if address not in self._probes:
                self._start_probe(address)
        for address in self._probes.keys() - set(addresses):
            self._close_probe(address)
        for probe in self._probes.values():
            if probe.error is not None:
                raise probe.error

    def _start_probe(self, address: str) -> None:
        def on_restart() -> None:
            # A process that was replaced before the set was whole served no caller of ours.
            if self._is_over and self._on_restart is not None and probe.hello is not None:
                self._on_restart(probe.hello.replica_index)

        client = Client(
            *(self._transport, address, self._role),
            timeout_s=self._timeout_s,
            on_restart=None if self._on_restart is None else on_restart,
        )
        probe = self._probes[address] = _Probe(address, client, _no_connection(address))
        probe.thread = _start(f"persia-ask {address}", self._ask, probe)

    def _ask(self, probe: _Probe) -> None:
        """Ask at an address until there is an answer, or an error that asking does not mend."""
        hello: Hello | None = None
        error: BaseException | None = None
        while hello is None and error is None:
            problem = _no_connection(probe.address)
            try:
                hello = probe.client.hello(_LINE_S)
                if not 0 <= hello.replica_index < hello.replica_size:
                    raise ConfigError(f"{_Answer(probe, hello)}: its number is outside the set")
            except (ServiceUnavailable, ServiceBusy):
                pass
            except ServiceTimeout:
                problem = f"no answer from {probe.address}, to which there is a connection"
            except BaseException as exc:
                hello, error = None, exc  # raised by the thread that waits
            with self._changed:
                if probe.is_closed:
                    return
                probe.hello, probe.error, probe.problem = hello, error, problem
                self._notify()

    def _ask_again(self, one: _Answer, other: _Answer, conflict: str) -> None:
        """Raise the conflict, unless one of the two has gone or was replaced."""
        is_same = True
        for answer in (one, other):
            hello: Hello | None = None
            # A ConfigError: another server of the set has got the address meanwhile.
            with contextlib.suppress(ServiceError, ConfigError):
                hello = answer.probe.client.hello(_LINE_S)
            is_same = is_same and hello == answer.hello
            with self._changed:
                if hello is None:
                    self._close_probe(answer.probe.address)  # the next round starts another
                answer.probe.hello = hello
        if is_same:
            raise ConfigError(conflict)

    def _close_probe(self, address: str) -> None:
        probe = self._probes.pop(address)
        probe.is_closed = True
        probe.client.close()

    # --- answers ----------------------------------------------------------------------------

    def _answers(self) -> list[_Answer]:
        """Return what servers answered, each process once, by number."""
        by_incarnation: dict[int, _Answer] = {}
        for probe in self._probes.values():
            if probe.hello is not None:
                by_incarnation.setdefault(probe.hello.incarnation, _Answer(probe, probe.hello))
        return sorted(by_incarnation.values(), key=lambda answer: answer.hello.replica_index)

    def _silent_addresses(self, answers: Sequence[_Answer]) -> list[str]:
        """Return listed addresses without an answer, if the set that answers is smaller.

        Servers that were each configured as the only one must not be taken for a whole set,
        one of them here and another one there.
        """
        listed = [one for one in self._listed.addresses if one not in self._names]
        if not answers or len(listed) <= answers[0].hello.replica_size:
            return []
        probes = [self._probes[one] for one in listed if one in self._probes]
        return [probe.address for probe in probes if probe.hello is None]

    def _describe_missing(self, answers: Sequence[_Answer]) -> str:
        if self._misfit:
            return self._misfit
        what = f"no {self._role.name} answers"
        silent = self._silent_addresses(answers)
        if silent:
            what = (
                f"{self._listed.variable} lists more addresses than the {len(answers)} that "
                f"{answers[0]} says there are, and {', '.join(silent)} has not answered"
            )
        elif answers:
            numbers = ", ".join(map(str, _numbers_missing(answers)))
            what = f"{self._role.name} {numbers} of {answers[0].hello.replica_size} is missing"
        reasons = [x.problem for x in self._probes.values() if x.hello is None]
        reasons += [problem for problem in self._names.values() if isinstance(problem, str)]
        if not reasons:
            reasons = [f"{self._listed.variable} leads only to {', '.join(map(str, answers))}"]
        return f"{what}: {'; '.join(reasons)}"


def _no_connection(address: str) -> str:
    return f"no connection to {address}"


def _numbers_missing(answers: Sequence[_Answer]) -> list[int]:
    if not answers:
        return []
    here = {answer.hello.replica_index for answer in answers}
    return sorted(set(range(answers[0].hello.replica_size)) - here)


def _conflict(answers: Sequence[_Answer]) -> tuple[_Answer, _Answer, str] | None:
    """Return two that cannot be of one set, and why, if there are any."""
    by_number: dict[int, _Answer] = {}
    for answer in answers:
        one, here = answers[0], answer.hello
        if here.replica_size != one.hello.replica_size:
            return one, answer, f"two sets of servers are mixed: {one}, and {answer}"
        if here.schema_fingerprint != one.hello.schema_fingerprint:
            fingerprints = one.hello.schema_fingerprint, here.schema_fingerprint
            places = f"at {one.probe.address}", f"at {answer.probe.address}"
            differences = describe_differences(*fingerprints, *places)
            text = f"{one} and {answer} have different embedding configs: {differences}; "
            return one, answer, text + SAME_EVERYWHERE
        if here.wire != one.hello.wire:
            dtypes = [describe_wire(wire) for wire in (one.hello.wire, here.wire)]
            text = f"{one} and {answer} have different wire_config: {', and '.join(dtypes)}"
            return one, answer, text
        twin = by_number.setdefault(here.replica_index, answer)
        if twin is not answer:
            text = f"two servers have one number: {twin}, and another process at "
            return twin, answer, text + answer.probe.address
    return None


def _start(name: str, target: Callable[..., object], *arguments: object) -> threading.Thread:
    thread = threading.Thread(None, target, name, arguments, daemon=True)
    thread.start()
    return thread


class Monitor:
    """Checks servers in a thread until their clients are closed.

    Clients are closed together, and before their transport is.
    """

    def __init__(
        self,
        transport: ZmqTransport,
        role: Role,
        listed: AddressList,
        found: Sequence[tuple[Client, Hello]],
    ) -> None:
        self._transport, self._role, self._listed, self._found = transport, role, listed, found
        self._restarts: dict[int, threading.Thread] = {}
        _start(f"persia-monitor {role.name}", self._run)

    def _run(self) -> None:
        client = self._found[0][0]
        while not client.wait_closed(_CHECK_S):
            try:
                self._check_all()
            except Exception:
                if not client.wait_closed(0.0):
                    raise

    def _check_all(self) -> None:
        found = self._found
        lost = {x.replica_index: client for client, x in found if not self._is_there(client, x)}
        if lost:
            taken = {client.address for client, _ in found if client not in lost.values()}
            for address in resolved(self._listed.addresses, _CHECK_S):
                if address not in taken:
                    self._seek(address, lost)

    def _is_there(self, client: Client, hello: Hello) -> bool:
        try:
            now = client.probe(_CHECK_S)
            if now.incarnation != client.incarnation:
                self._report_restart(client, hello.replica_index)
            return now.replica_size == hello.replica_size
        except ServiceTimeout:
            return True  # there is a connection: a process that hangs has not moved
        except ServiceUnavailable:
            return client.wait_closed(0.0)
        except ConfigError:
            return False  # another server has got its host

    def _report_restart(self, client: Client, number: int) -> None:
        """Let the client find another process, which calls ``on_restart``.

        In a thread of its own: that may take long, the process may be gone again meanwhile, and
        only the monitor finds out where it is then.
        """

        def say_hello() -> None:
            with contextlib.suppress(ServiceError, ConfigError):
                client.hello(_CHECK_S)

        if number not in self._restarts or not self._restarts[number].is_alive():
            self._restarts[number] = _start(f"persia-restart {number}", say_hello)

    def _seek(self, address: str, lost: dict[int, Client]) -> None:
        """Ask at an address, and move a lost server's client there if it is that server."""
        probe = Client(self._transport, address, self._role)
        with contextlib.closing(probe), contextlib.suppress(ServiceError, ConfigError):
            hello = probe.hello(_CHECK_S)
            client, size = lost.get(hello.replica_index), self._found[0][1].replica_size
            if client is None or hello.replica_size != size or client.wait_closed(0.0):
                return
            if client.address != address:
                who, before = f"{self._role.name} {hello.replica_index}", client.address
                logger.warning("%s is now at %s, and no more at %s", who, address, before)
                client.move(address)
            del lost[hello.replica_index]
