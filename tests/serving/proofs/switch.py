"""Five versions switched under load, while rows of a training come: no mixed answer.

    python -m tests.serving.proofs.switch [--requests 100000] [--rows 50000] [--short]

Rows and weights count the steps of training, so each answer is known from the version that it
names and from one number, which all rows in it have to share: not less than the version's cut,
and never less than before. Times are compared to those before training went on.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

from tests.serving.proofs.support import (
    Clients,
    Cuts,
    Lines,
    deployment,
    percentile,
    wait_for_version,
)
from tests.serving.proofs.trainer import FEATURES

FLUSH_S = 0.5
SWITCHES = 5
# Seconds of each part of a run, at least.
PHASE_S = 4.0


def switched_at(clients: Clients) -> list[float]:
    """Return when each version after the first was first answered."""
    first: dict[int, float] = {}
    for seen in clients.seen:
        for version, ended in zip(seen.versions, seen.ended, strict=False):
            first[version] = min(ended, first.get(version, ended))
    return [first[version] for version in sorted(first)[1:]]


def has_phase(clients: Clients, goal: int, begin: float) -> bool:
    """Whether that number of requests was answered, and long enough for several deltas."""
    return clients.count() >= goal and time.monotonic() >= begin + PHASE_S


def rows_a_second(clients: Clients, rows: int, begin: float, end: float) -> float:
    """Return how many rows of deltas were seen to be replaced, a second."""
    moments: set[float] = set()
    for seen in clients.seen:
        found = zip(seen.steps, seen.ended, strict=False)
        moments |= {steps for steps, ended in found if begin <= ended <= end}
    return rows * max(0, len(moments) - 1) / (end - begin)


def run(folder: Path, requests: int, rows: int, num_clients: int, *, judges: bool) -> int:
    """Print the table; returns the status."""
    lines = Lines(f"switch: {requests} requests of 1 user and 100 candidates", judges)
    with deployment(folder, rows, FLUSH_S) as (trainer, server):
        clients = Clients(
            lambda: server.http_port, Cuts(folder), rows // len(FEATURES), num_clients, False
        )
        try:
            share = requests // (SWITCHES + 2)
            clients.wait_until(lambda: clients.count() >= share // 10)  # warm
            quiet = time.monotonic()
            goal = clients.count() + share
            clients.wait_until(lambda: has_phase(clients, goal, quiet))
            deltas = time.monotonic()
            trainer.tell(f"rate {1 / FLUSH_S}")
            later = clients.count() + share
            clients.wait_until(lambda: has_phase(clients, later, deltas))
            loaded = time.monotonic()
            for number in range(SWITCHES):
                trainer.tell("publish")
                wait_for_version(folder, number + 2)
                goal = clients.count() + share // 2
                version = number + 2
                clients.wait_until(
                    lambda: (
                        clients.count() >= goal  # noqa: B023
                        and all(one.versions[-1] >= version for one in clients.seen)  # noqa: B023
                    )
                )
            clients.wait_until(lambda: clients.count() >= requests, 3600)
            end = time.monotonic()
        finally:
            clients.stop()
    switches = switched_at(clients)
    lines.show("requests answered", str(clients.count()))
    lines.show_none("failed", clients.faults("failed"))
    lines.show_none("mixed", clients.faults("mixed"))
    lines.show_none("with zeros", clients.faults("zeros"))
    lines.show(
        "versions switched", str(len(switches)), str(SWITCHES), holds=len(switches) == SWITCHES
    )
    rate = rows_a_second(clients, rows, deltas, end)
    lines.show("rows of deltas a second", f"{rate:,.0f}", "above 0", holds=rate > 0)
    before = clients.milliseconds([(quiet, deltas)])
    beside = clients.milliseconds([(deltas + FLUSH_S, loaded)])
    during = clients.milliseconds([(at - 0.5, at + 0.5) for at in switches])
    for name, found in (("quiet", before), ("beside deltas", beside), ("in switches", during)):
        p50, p99 = percentile(found, 50), percentile(found, 99)
        lines.show(f"{name}: p50, p99", f"{p50:.2f}, {p99:.2f} ms")
    worst = [percentile(clients.milliseconds([(at - 0.5, at + 0.5)]), 99) for at in switches]
    lines.show("worst p99 in the second of one switch", f"{np.max(worst, initial=0):.2f} ms")
    quiet_p99 = percentile(before, 99)
    lines.show_time("p99 beside deltas / quiet", percentile(beside, 99) / quiet_p99, "", 1.5)
    lines.show_time("p99 in switches / quiet", percentile(during, 99) / quiet_p99, "", 2.0)
    return lines.end()


def main() -> int:
    """Run it in a folder that is removed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--short", action="store_true", help="1,500 requests; times not judged")
    given = parser.parse_args()
    requests = 1500 if given.short else given.requests
    rows = 8000 if given.short else given.rows
    with tempfile.TemporaryDirectory(prefix="persia-proof-") as folder:
        return run(Path(folder), requests, rows, given.clients, judges=not given.short)


if __name__ == "__main__":
    raise SystemExit(main())
