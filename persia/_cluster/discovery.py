"""Asking at addresses until a set of servers is whole.

Each address is asked by a thread of its own, all at once and again and again. The set is whole
when each of the replica numbers that ``hello`` speaks of has answered once. Until then a line
every few seconds says who is missing and why; at the deadline an error does. Servers that
cannot be of one set are an error at once, after both were asked again: one of them may have
been replaced since it answered.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from persia._cluster.addresses import TCP, AddressList, is_name, resolve, split
from persia._cluster.monitor import follow
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

# Seconds between two lines about who is missing, and of one attempt to ask.
_LINE_S = 3.0
# Seconds between two looks at a name: the hosts of replicas join it one by one.
_RESOLVE_S = 1.0
# Seconds between two looks at whether waiting still makes sense.
_STOP_S = 0.25


class _Asked:
    """One address, and what asking there has led to. Guarded by the search's condition."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.client: Client | None = None
        self.thread: threading.Thread | None = None
        self.is_over = False
        self.hello: Hello | None = None
        self.why = f"no connection to {address}"  # there is no hello
        self.failure: BaseException | None = None


@dataclass(frozen=True, slots=True)
class _Answer:
    """A process that has said who it is."""

    asked: _Asked
    client: Client
    hello: Hello

    def __str__(self) -> str:
        hello = self.hello
        return (
            f"{hello.role} {hello.replica_index} of {hello.replica_size} "
            f"at {self.asked.address}"
        )


class Discovery:
    """Finds the servers of one role, once.

    Args:
        transport: How to get there.
        role: Who is wanted.
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
        self._num_news = 0
        self._is_over = False
        self._asked: dict[str, _Asked] = {}  # by address
        # By name: where it leads, or why that is not known.
        self._names: dict[str, list[str] | str] = {
            address: f"{address} is being looked up"
            for address in listed.addresses
            if is_name(address)
        }
        self._misfit = ""  # why ranks cannot be told from the list of nodes

    def run(
        self,
        should_stop: Callable[[], bool] | None = None,
        on_wait: Callable[[str], None] | None = None,
    ) -> list[tuple[Client, Hello]]:
        """Return the servers by number, once all have answered.

        Args:
            should_stop: Asked now and then whether to wait no longer.
            on_wait: Called with each line about who is missing.

        Raises:
            ConfigError: If those who answer cannot be one set.
            ServiceUnavailable: If some are missing at the deadline.
            JobFinished: If ``should_stop`` said so.
        """
        for name in self._names:
            # Only the system ends a look-up: nobody waits for this thread.
            threading.Thread(
                target=self._look_up, args=(name,), name=f"persia-look-up {name}", daemon=True
            ).start()
        answers: list[_Answer] = []
        try:
            answers = self._wait(should_stop, on_wait)
        finally:
            self._end(answers)
        logger.info("found %s", ", ".join(map(str, answers)))
        found = [(answer.client, answer.hello) for answer in answers]
        hosts = {host for led in self._names.values() if len(led) > 1 for host in led}
        if any(client.address in hosts for client, _ in found):
            follow(self._transport, self._role, self._listed, found)
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
                seen = self._num_news
                self._ask_everyone()
                answers = self._answers()
                conflict = _conflict(answers)
                is_whole = bool(answers) and not _numbers_missing(answers)
                if is_whole and not conflict and not self._unheard(answers):
                    return answers
                missing = self._missing(answers)
                is_final = not self._names and (
                    self._misfit or all(asked.hello for asked in self._asked.values())
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
                if self._num_news == seen:
                    self._changed.wait(left if should_stop is None else min(left, _STOP_S))

    def _end(self, answers: Sequence[_Answer]) -> None:
        kept = {answer.asked.address for answer in answers}
        with self._changed:
            self._is_over = True
            everyone = list(self._asked.values())
            for asked in everyone:
                asked.is_over = True
            self._changed.notify_all()
        for asked in everyone:
            if asked.client is not None and asked.address not in kept:
                asked.client.close()
        for asked in everyone:
            if asked.thread is not None:
                asked.thread.join()

    def _tell(self) -> None:
        """Wake who waits for news."""
        self._num_news += 1
        self._changed.notify_all()

    # --- who is asked -----------------------------------------------------------------------

    def _look_up(self, name: str) -> None:
        while True:
            found: list[str] | str
            try:
                found = resolve(name) or f"{name} has no host"
            except (OSError, UnicodeError) as exc:
                found = f"{name} cannot be resolved: {getattr(exc, 'strerror', None) or exc}"
            with self._changed:
                # A name that is unknown for a moment leads where it led before.
                if isinstance(found, list) or isinstance(self._names[name], str):
                    if found != self._names[name]:
                        self._tell()
                    self._names[name] = found
                if self._changed.wait_for(lambda: self._is_over, _RESOLVE_S):
                    return

    def _wanted(self) -> list[str]:
        """Return every address where it makes sense to ask."""
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

    def _ask_everyone(self) -> None:
        """Begin to ask at new addresses, and stop at those that nothing leads to any more."""
        wanted = self._wanted()
        for address in wanted:
            if address not in self._asked:
                asked = self._asked[address] = _Asked(address)
                asked.client = Client(
                    self._transport,
                    address,
                    self._role,
                    timeout_s=self._timeout_s,
                    on_restart=None if self._on_restart is None else self._teller(asked),
                )
                self._start(asked, asked.client)
        for address in self._asked.keys() - set(wanted):
            self._forget(address)
        for asked in self._asked.values():
            if asked.failure is not None:
                raise asked.failure

    def _teller(self, asked: _Asked) -> Callable[[], None]:
        def tell() -> None:
            # Nobody has relied on a process that was replaced before the set was whole.
            if self._is_over and self._on_restart is not None and asked.hello is not None:
                self._on_restart(asked.hello.replica_index)

        return tell

    def _start(self, asked: _Asked, client: Client) -> None:
        asked.thread = threading.Thread(
            target=self._ask,
            args=(asked, client),
            name=f"persia-ask {asked.address}",
            daemon=True,
        )
        asked.thread.start()

    def _ask(self, asked: _Asked, client: Client) -> None:
        while True:
            hello: Hello | None = None
            failure: BaseException | None = None
            why = f"no connection to {asked.address}"
            try:
                hello = client.hello(_LINE_S)
                if not 0 <= hello.replica_index < hello.replica_size:
                    raise ConfigError(
                        f"{asked.address}: expected a number in 0..{hello.replica_size - 1} of "
                        f"{hello.role}, got {hello.replica_index}"
                    )
            except (ServiceUnavailable, ServiceBusy):
                pass
            except ServiceTimeout:
                why = f"no answer from {asked.address}, to which there is a connection"
            except BaseException as error:
                failure = error  # raised by the thread that waits
            with self._changed:
                if asked.is_over:
                    return
                asked.hello, asked.failure, asked.why = hello, failure, why
                self._tell()
                if hello is not None or failure is not None:
                    return

    def _ask_again(self, one: _Answer, other: _Answer, conflict: str) -> None:
        """Raise the conflict, unless one of the two has gone or was replaced."""
        is_same = True
        for answer in (one, other):
            hello: Hello | None = None
            # A ConfigError: another server of the set has got the address meanwhile.
            with contextlib.suppress(ServiceError, ConfigError):
                hello = answer.client.hello(_LINE_S)
            is_same = is_same and hello == answer.hello
            with self._changed:
                answer.asked.hello = hello
                if hello is None:
                    self._forget(answer.asked.address)  # and ask who is there now
        if is_same:
            raise ConfigError(conflict)

    def _forget(self, address: str) -> None:
        asked = self._asked.pop(address)
        asked.is_over = True
        if asked.client is not None:
            asked.client.close()

    # --- who has answered -------------------------------------------------------------------

    def _answers(self) -> list[_Answer]:
        """Return who has answered, each process once, by number."""
        by_incarnation: dict[int, _Answer] = {}
        for asked in self._asked.values():
            if asked.hello is not None and asked.client is not None:
                answer = _Answer(asked, asked.client, asked.hello)
                by_incarnation.setdefault(asked.hello.incarnation, answer)
        return sorted(by_incarnation.values(), key=lambda answer: answer.hello.replica_index)

    def _unheard(self, answers: Sequence[_Answer]) -> list[str]:
        """Return listed addresses that did not answer, if those who did say they are fewer.

        Servers that were each told that they are alone must not be taken for a whole set, one
        of them here and another one there.
        """
        listed = [one for one in self._listed.addresses if one not in self._names]
        if not answers or len(listed) <= answers[0].hello.replica_size:
            return []
        return [
            address
            for address in listed
            if (asked := self._asked.get(address)) is not None and asked.hello is None
        ]

    def _missing(self, answers: Sequence[_Answer]) -> str:
        """Say who is missing, and why."""
        if self._misfit:
            return self._misfit
        who = f"no {self._role.name} answers"
        unheard = self._unheard(answers)
        if unheard:
            who = (
                f"{self._listed.variable} lists more addresses than the {len(answers)} that "
                f"{answers[0]} says there are, and {', '.join(unheard)} has not answered"
            )
        elif answers:
            numbers = ", ".join(map(str, _numbers_missing(answers)))
            who = f"{self._role.name} {numbers} of {answers[0].hello.replica_size} is missing"
        reasons = [asked.why for asked in self._asked.values() if asked.hello is None]
        reasons += [why for why in self._names.values() if isinstance(why, str)]
        if not reasons:
            reasons = [f"{self._listed.variable} leads only to {', '.join(map(str, answers))}"]
        return f"{who}: {'; '.join(reasons)}"


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
            theirs = one.hello.schema_fingerprint, here.schema_fingerprint
            places = f"at {one.asked.address}", f"at {answer.asked.address}"
            text = (
                f"{one} and {answer} have different embedding configs: "
                f"{describe_differences(*theirs, *places)}; {SAME_EVERYWHERE}"
            )
            return one, answer, text
        twin = by_number.setdefault(here.replica_index, answer)
        if twin is not answer:
            text = f"two servers have one number: {twin}, and another process at "
            return twin, answer, text + answer.asked.address
    return None
