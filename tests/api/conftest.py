"""Each test here starts outside any job, whatever the shell says, and leaves no trace."""

from __future__ import annotations

import os

import pytest

from persia import env


@pytest.fixture(autouse=True)
def _no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "REPLICA_INDEX", "REPLICA_SIZE")
    services = ("EMBEDDING_WORKER_SERVICE", "MASTER_ADDR", "MASTER_PORT")
    for name in [
        *names,
        *services,
        *(name for name in os.environ if name.startswith("PERSIA_")),
    ]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(env, "_place", None)
