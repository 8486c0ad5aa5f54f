"""Where ranks meet, by what is given and what the launcher set."""

from __future__ import annotations

from typing import Any

import pytest

from persia.distributed import DDPOption


@pytest.mark.parametrize(
    ("options", "launcher", "context", "want"),
    [
        ({}, None, None, "tcp://127.0.0.1:0"),  # alone
        ({}, "node0:29500", None, "env://"),
        ({}, "node0", None, "tcp://node0:23456"),
        ({}, "node0", "node1", "tcp://node1:23456"),
        ({}, None, "node1", "tcp://node1:23456"),
        ({"master_port": 99}, "node0", None, "tcp://node0:99"),
        ({"master_addr": "node2"}, "node0", "node1", "tcp://node2:23456"),
    ],
)
def test_place(
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    launcher: str | None,
    context: str | None,
    want: str,
) -> None:
    if launcher is not None:
        for name, value in zip(
            ("MASTER_ADDR", "MASTER_PORT"), launcher.split(":"), strict=False
        ):
            monkeypatch.setenv(name, value)
    assert DDPOption(backend="gloo", **options)._meeting_place(1, 0, context) == want
