"""A wire of each kind, closed after the test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rpc.support import TRANSPORTS, Wire

# A test that waits for a deadline does so over one of them in the fast tier.
WAITING = pytest.mark.parametrize(
    "wire",
    [
        pytest.param(kind, marks=() if kind == "ipc" else pytest.mark.slow)
        for kind in TRANSPORTS
    ],
    indirect=True,
)


def made(kind: str, place: Path) -> Iterator[Wire]:
    wire = Wire(kind, place)
    yield wire
    wire.close()


@pytest.fixture(params=TRANSPORTS)
def wire(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Wire]:
    yield from made(request.param, tmp_path)


@pytest.fixture
def ipc_wire(tmp_path: Path) -> Iterator[Wire]:
    yield from made("ipc", tmp_path)


@pytest.fixture
def tcp_wire(tmp_path: Path) -> Iterator[Wire]:
    yield from made("tcp", tmp_path)
