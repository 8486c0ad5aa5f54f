"""Calls over a memory transport that loses and duplicates messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from persia._rpc.client import Client
from persia._rpc.memory_transport import MemoryTransport
from persia._rpc.server import serve
from persia._rpc.transport import Outgoing, Parts, Waiter
from persia.errors import (
    ServiceTimeout,
)
from tests.rpc.support import PATIENCE_S, TOY, ToyService


class LossyChannel:
    """Drops or doubles messages of a memory channel, by their number."""

    def __init__(self, inner: Any, fate: Callable[[int], int]) -> None:
        self.inner = inner
        self.fate = fate
        self.num_sent = 0
        self.num_received = 0

    @property
    def address(self) -> str:
        return str(self.inner.address)

    def start(self, on_message: Callable[[Parts], None], on_lost: Callable[[], None]) -> None:
        def receive(parts: Parts) -> None:
            self.num_received += 1
            for _ in range(self.fate(-self.num_received)):
                on_message(parts)

        self.inner.start(receive, on_lost)

    def send(self, outgoing: Outgoing) -> None:
        self.num_sent += 1
        copies = self.fate(self.num_sent)
        if not copies:
            outgoing.claim()  # it has left, and never arrives
        for number in range(copies):
            self.inner.send(outgoing if number == 0 else Outgoing(outgoing.parts))

    def wait(self, waiter: Waiter, seconds: float) -> None:
        self.inner.wait(waiter, seconds)

    def close(self) -> None:
        self.inner.close()


class LossyTransport(MemoryTransport):
    """``fate`` says how often message n arrives; answers have negative numbers."""

    def __init__(self, fate: Callable[[int], int]) -> None:
        super().__init__()
        self.fate = fate

    def connect(self, address: str) -> Any:
        return LossyChannel(super().connect(address), self.fate)


@pytest.mark.parametrize("lost", [1, -1])
def test_lost_messages_are_sent_again(lost: int) -> None:
    transport = LossyTransport(lambda number: 0 if number == lost else 1)
    service = ToyService()
    server = serve(transport, "a", TOY, service)
    client = Client(transport, "a", TOY, timeout_s=PATIENCE_S, attempt_s=0.01)
    assert client.call("fill", 3).signs.tolist() == [0, 1, 2]
    assert client.stats()["sent_again"] >= 1
    client.close()
    server.stop()


def test_what_may_not_be_repeated_is_sent_once() -> None:
    transport = LossyTransport(lambda number: 0 if number == 1 else 1)
    service = ToyService()
    server = serve(transport, "a", TOY, service)
    client = Client(transport, "a", TOY, timeout_s=0.1, attempt_s=0.01)
    with pytest.raises(ServiceTimeout):
        client.call("add_once", 1)
    assert client.call("add", 1) == 1
    assert service.calls == [("add", 1)]
    client.close()
    server.stop()


def test_doubled_answers_harm_nobody() -> None:
    transport = LossyTransport(lambda number: 2 if number < 0 else 1)
    server = serve(transport, "a", TOY, ToyService())
    client = Client(transport, "a", TOY, timeout_s=PATIENCE_S)
    assert [client.call("add", 1) for _ in range(3)] == [1, 2, 3]
    client.close()
    server.stop()
