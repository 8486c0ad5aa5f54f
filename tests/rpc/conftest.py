"""A wire of each kind, closed after the test."""

from __future__ import annotations

import contextlib
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


def made(kind: str, place: Path, **options: float) -> Iterator[Wire]:
    with contextlib.closing(Wire(kind, place, **options)) as wire:
        yield wire


@pytest.fixture(params=TRANSPORTS)
def wire(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Wire]:
    yield from made(request.param, tmp_path)


@pytest.fixture
def ipc_wire(tmp_path: Path) -> Iterator[Wire]:
    yield from made("ipc", tmp_path)


@pytest.fixture
def tcp_wire(tmp_path: Path) -> Iterator[Wire]:
    yield from made("tcp", tmp_path)


@pytest.fixture
def silence_wire(tmp_path: Path) -> Iterator[Wire]:
    """One that notices silence soon."""
    yield from made("tcp", tmp_path, silence_s=0.4)
