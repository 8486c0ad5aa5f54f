"""Seconds from a step of training to the first request that sees its rows.

    python -m tests.serving.proofs.fresh [--updates 200] [--flush 1] [--judge]

Steps come at random moments, and one client asks without a pause; both are of this machine, and
so is the disk with the change log.
"""

from __future__ import annotations

import argparse
import threading
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.serving.proofs.support import (
    Clients,
    Cuts,
    Lines,
    deployment,
    percentile,
)
from tests.support.waiting import until

BOUND_S = 2.0


def run(folder: Path, updates: int, flush_s: float, *, judges: bool) -> int:
    """Measure in a folder; returns the status to exit with."""
    num_rows, rng = 8000, np.random.default_rng(0)
    pause = threading.Event()  # never set
    lines = Lines(f"update to visible, flush {flush_s:g} s", judges)
    with deployment(folder, num_rows, flush_s) as (trainer, server):
        clients = Clients(lambda: server.http_port, Cuts(folder), num_rows // 8, 1, False)
        try:
            for number in range(updates):
                made = trainer.count("step")
                trainer.tell("step")
                trainer.wait_for("step", made + 1)
                if number % 4 == 0:  # the others are of one packet with those before them
                    seen, wanted = clients.seen[0], float(made + 1)
                    until(lambda: seen.steps[-1:] >= [wanted], 60.0)  # noqa: B023
                pause.wait(rng.uniform(0.0, 1.5 * flush_s))  # anywhere between two packets
            until(lambda: clients.seen[0].steps[-1:] >= [float(updates + 1)], 60.0)
        finally:
            clients.stop()
        spent = waits(trainer.events, clients)
    lines.show("updates", str(len(spent)), str(updates), holds=len(spent) == updates)
    lines.show("p50", f"{percentile(spent, 50):.3f} s")
    lines.show_time("p99", percentile(spent, 99), "s", BOUND_S)
    lines.show("longest", f"{spent.max():.3f} s")
    for kind in ("failed", "mixed", "zeros"):
        lines.show_none(kind, clients.faults(kind))
    return lines.end()


def waits(events: list[dict[str, Any]], clients: Clients) -> NDArray[np.float64]:
    """Return the seconds from each step to the end of the first answer that has it."""
    seen = clients.seen[0]
    steps, ended = np.array(seen.steps), np.array(seen.ended)
    found = []
    for one in events:
        # The first step was made before the first version.
        if one["did"] == "step" and one["steps"] > 1:
            first = int(np.argmax(steps[: len(ended)] >= one["steps"]))
            found.append(ended[first] - one["began"])
    return np.array(found)


def main() -> int:
    """Measure and judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--flush", type=float, default=1.0)
    parser.add_argument("--judge", action="store_true", help="exit 1 for a time too long")
    given = parser.parse_args()
    with TemporaryDirectory() as name:
        return run(Path(name), given.updates, given.flush, judges=given.judge)


if __name__ == "__main__":
    raise SystemExit(main())
