"""Whole messages onto and off a ZeroMQ socket, without releasing the GIL."""

from typing import Any

import zmq

from persia._rpc.frame import Part
from persia._rpc.transport import Parts

def release() -> None: ...
def events(socket: zmq.Socket[Any]) -> int: ...
def user_of(part: Part) -> str | None: ...
def send(socket: zmq.Socket[Any], parts: Parts, copied_bytes: int) -> bool: ...
def receive(
    socket: zmq.Socket[Any],
    max_parts: int,
    max_bytes: int,
    received: list[tuple[list[Part], str]] | None = None,
) -> tuple[list[Part], str] | None: ...
