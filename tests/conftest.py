"""What every test gets: its own copy of the environment, and a number of examples."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from persia import env
from tests.support import profiles

profiles.register()

# Seconds. A slow test loads PyTorch in several processes, and on a busy machine takes minutes.
SLOW_S = 600


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give a slow test more time, unless it says how much it needs."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_S))


def pytest_collection_finish() -> None:
    """Have what was imported out of the garbage collector's way: it is looked at no more."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _same_environment_after() -> Iterator[None]:
    before, place = dict(os.environ), env._place
    yield
    env._place = place
    if dict(os.environ) != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(autouse=True)
def _same_log_after() -> Iterator[None]:
    log = logging.getLogger("persia")  # which commands set up that run in this process
    before = log.level, [*log.handlers]
    yield
    log.setLevel(before[0])
    log.handlers[:] = before[1]


@pytest.fixture(autouse=True, scope="module")
def _no_stores_of_modules_after() -> Iterator[None]:
    """Tables that modules of persia.nn have named live as long as the process."""
    yield
    homes = sys.modules.get("persia._modules.homes")
    if homes is None or not (homes._own or homes._job):
        return
    if homes._job is not None:  # of servers that have ended, or will before the process does
        homes._own.append(vars(homes).pop("_job"))
        vars(homes)["_job"] = None
    tables = sys.modules["persia._modules.tables"]
    tables._named.clear()
    for table in tables.all_tables():
        table.home = None
    while homes._own:
        homes._own.pop().close()
    gc.collect()  # the threads of a store end with it


@pytest.fixture
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process outside any job, whatever the shell says."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "REPLICA_INDEX", "REPLICA_SIZE")
    services = ("EMBEDDING_WORKER_SERVICE", "MASTER_ADDR", "MASTER_PORT")
    ours = [name for name in os.environ if name.startswith("PERSIA_")]
    for name in (*names, *services, *ours):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(env, "_place", None)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what tests measured: ``record_property("measured", line)``, once each."""
    for report in terminalreporter.getreports("passed"):
        for name, line in report.user_properties:
            if name == "measured" and report.when == "call":
                terminalreporter.write_line(f"measured: {line}")
