"""Asking at addresses until a set of servers is whole.

A thread per address asks until it has an answer; a thread per name looks up its hosts. The set
is whole when each of the replica numbers that ``hello`` speaks of has answered once. Until then
a line every few seconds says which are missing and why; at the deadline an error does. Servers
that cannot be of one set are an error at once, after both were asked again: one of them may
have been replaced since it answered.

States of one address:

    ASKING    hello                          -> ANSWERED
    ASKING    another role, a bad number     -> FAILED     its error is raised by ``run``
    ANSWERED  asked again, no answer         -> CLOSED     the address is asked from the start
    any       no list entry leads there now  -> CLOSED
    any       the search ends                -> CLOSED     clients of the set stay open
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from persia._cluster.addresses import TCP, AddressList, is_name, resolve, split
from persia._cluster.monitor import start_monitor
from persia._rpc.client import Client
from persia._rpc.methods import Hello, Role
from persia._rpc.transport import Transport
from persia.config import SAME_EVERYWHERE, describe_differences
from persia.errors import (
    ConfigError,
    JobFinished,
    ServiceBusy,
    ServiceError,
    ServiceTimeout,
    ServiceUnavailable,
)

logger = logging.getLogger(__name__)

# Seconds between two lines about what is missing, and of one attempt to ask.
_LINE_S = 3.0
# Seconds between two look-ups of a name: the hosts of replicas join it one by one.
_RESOLVE_S = 1.0
# Seconds between two checks of ``should_stop``.
_STOP_S = 0.25


class ProbeState(Enum):
    """State of one address; the table is above."""

    ASKING = "asking"
    ANSWERED = "answered"
    FAILED = "failed"
    CLOSED = "closed"


class _Probe:
    """One address, and what asking there has led to. Guarded by the condition of the search."""

    def __init__(self, address: str, client: Client) -> None:
        self.address = address
        self.client = client
        self.thread: threading.Thread | None = None
        self.state = ProbeState.ASKING
        self.hello: Hello | None = None  # in ANSWERED
        self.problem = f"no connection to {address}"  # in ASKING
        self.error: BaseException | None = None  # in FAILED


@dataclass(frozen=True, slots=True)
class _Answer:
    """What the process at an address said at one time."""

    probe: _Probe
    hello: Hello

    def __str__(self) -> str:
        hello = self.hello
        return (
            f"{hello.role} {hello.replica_index} of {hello.replica_size} "
            f"at {self.probe.address}"
        )


class Discovery:
    """Finds the servers of one role, once.

    Args:
        transport: How to get there.
        role: Of the servers.
        listed: Where to ask.
        timeout_s: Seconds until all must have answered, and of each later call.
        on_restart: Called with the replica number when another process answers in its place,
            once the set was whole.
    """

    def __init__(
        self,
        transport: Transport,
        role: Role,
        listed: AddressList,
        timeout_s: float,
        on_restart: Callable[[int], None] | None,
    ) -> None:
        self._transport = transport
        self._role = role
        self._listed = listed
        self._timeout_s = timeout_s
        self._on_restart = on_restart
        self._changed = threading.Condition()  # guards all below
        self._num_changes = 0
        self._is_over = False
        self._probes: dict[str, _Probe] = {}  # by address; none is CLOSED
        # By name: its hosts, or why they are not known.
        self._names: dict[str, list[str] | str] = {
            address: f"{address} is being looked up"
            for address in listed.addresses
            if is_name(address)
        }
        self._misfit = ""  # why the ranks do not follow from the list of nodes

    def run(
        self,
        should_stop: Callable[[], bool] | None = None,
        on_wait: Callable[[str], None] | None = None,
    ) -> list[tuple[Client, Hello]]:
        """Return the servers by number, once all have answered.

        Args:
            should_stop: Asked several times a second whether to wait no longer.
            on_wait: Called with each line about what is missing.

        Raises:
            ConfigError: If the servers that answer cannot be one set.
            ServiceUnavailable: If some are missing at the deadline.
            JobFinished: If ``should_stop`` said so.
        """
        for name in self._names:
            # Not joined: only the system ends a look-up.
            threading.Thread(
                target=self._look_up, args=(name,), name=f"persia-look-up {name}", daemon=True
            ).start()
        answers: list[_Answer] = []
        try:
            answers = self._wait(should_stop, on_wait)
        finally:
            self._close(answers)
        logger.info("found %s", ", ".join(map(str, answers)))
        found = [(answer.probe.client, answer.hello) for answer in answers]
        hosts = {host for hosts in self._names.values() if len(hosts) > 1 for host in hosts}
        if any(client.address in hosts for client, _ in found):
            start_monitor(self._transport, self._role, self._listed, found)
        return found

    def _wait(
        self,
        should_stop: Callable[[], bool] | None,
        on_wait: Callable[[str], None] | None,
    ) -> list[_Answer]:
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
            if should_stop is not None and should_stop():
                raise JobFinished(f"no longer needed, {missing}", role=self._role.name)
            if now >= next_line:
                next_line = now + _LINE_S
                logger.warning("waiting: %s", missing)
                if on_wait is not None:
                    on_wait(missing)
            left = min(deadline, next_line) - now
            with self._changed:
                if self._num_changes == seen:
                    self._changed.wait(left if should_stop is None else min(left, _STOP_S))

    def _close(self, answers: Sequence[_Answer]) -> None:
        """End every thread, and every client but those of the answers."""
        kept = {answer.probe.address for answer in answers}
        with self._changed:
            self._is_over = True
            probes = list(self._probes.values())
            for probe in probes:
                probe.state = ProbeState.CLOSED
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
        """Return every address that the list leads to now."""
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

        def ask() -> None:
            while self._step(probe) is ProbeState.ASKING:
                pass

        client = Client(
            self._transport,
            address,
            self._role,
            timeout_s=self._timeout_s,
            on_restart=None if self._on_restart is None else on_restart,
        )
        probe = self._probes[address] = _Probe(address, client)
        probe.thread = threading.Thread(target=ask, name=f"persia-ask {address}", daemon=True)
        probe.thread.start()

    def _step(self, probe: _Probe) -> ProbeState:
        """Ask at an address once; return its state then."""
        state, hello, error = ProbeState.ASKING, None, None
        problem = f"no connection to {probe.address}"
        try:
            hello = probe.client.hello(_LINE_S)
            if not 0 <= hello.replica_index < hello.replica_size:
                raise ConfigError(
                    f"{probe.address}: expected a number in 0..{hello.replica_size - 1} of "
                    f"{hello.role}, got {hello.replica_index}"
                )
            state = ProbeState.ANSWERED
        except (ServiceUnavailable, ServiceBusy):
            pass
        except ServiceTimeout:
            problem = f"no answer from {probe.address}, to which there is a connection"
        except BaseException as exc:
            state, hello, error = (
                ProbeState.FAILED,
                None,
                exc,
            )  # raised by the thread that waits
        with self._changed:
            if probe.state is ProbeState.CLOSED:
                return ProbeState.CLOSED
            probe.state, probe.hello, probe.error, probe.problem = state, hello, error, problem
            self._notify()
            return state

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
        probe.state = ProbeState.CLOSED
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
        return [
            address
            for address in listed
            if (probe := self._probes.get(address)) is not None and probe.hello is None
        ]

    def _describe_missing(self, answers: Sequence[_Answer]) -> str:
        """Say which servers are missing, and why."""
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
            differences = describe_differences(
                one.hello.schema_fingerprint,
                here.schema_fingerprint,
                f"at {one.probe.address}",
                f"at {answer.probe.address}",
            )
            text = (
                f"{one} and {answer} have different embedding configs: "
                f"{differences}; {SAME_EVERYWHERE}"
            )
            return one, answer, text
        twin = by_number.setdefault(here.replica_index, answer)
        if twin is not answer:
            text = f"two servers have one number: {twin}, and another process at "
            return twin, answer, text + answer.probe.address
    return None
