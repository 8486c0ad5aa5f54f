"""One rank of two that tries ``Ranks``; rank 0 writes what both saw.

Usage: forked.py meetings.py OUTPUT.json
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from persia._training.ranks import Ranks
from persia.errors import PersiaError

warnings.simplefilter("error")

TIMEOUT_S = 1.0


def outcome(call: Callable[[], Any]) -> dict[str, Any]:
    """Return what a call gave or raised, and whether it took the whole timeout."""
    begin = time.monotonic()
    try:
        found: dict[str, Any] = {"result": call()}
    except Exception as exc:
        found = {"type": type(exc).__name__, "text": str(exc)}
        if isinstance(exc, PersiaError):
            found["replica"] = getattr(exc, "replica", None)
    return found | {"seconds": time.monotonic() - begin}


class Script:
    """What both ranks do, in order; ``main`` calls each method on both."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.store = dist.distributed_c10d._get_default_store()

    def ranks(self, timeout_s: float = 60.0) -> Ranks:
        return Ranks(2, self.rank, timeout_s=timeout_s)

    def say(self, name: str) -> None:
        self.store.set(name, "1")

    def hear(self, name: str) -> None:
        self.store.wait([name], timedelta(seconds=60))

    def agreement(self) -> Any:
        with closing(self.ranks()) as ranks:
            return [ranks.agree(step * 10 + self.rank) for step in (-1, 0, 1)]

    def either(self) -> Any:
        with closing(self.ranks()) as ranks:
            return [ranks.any(flag) for flag in (False, True, self.rank == 1)]

    def turns(self) -> Any:
        with closing(self.ranks()) as ranks:

            def action() -> int:
                return int(self.store.add("turns", 1))

            return [ranks.in_turn(action) for _ in range(3)]

    def turns_at_once_with_agreement(self) -> Any:
        """The groups do not wait for each other: here each rank begins with another one."""
        with closing(self.ranks()) as ranks:
            agreed: list[list[int]] = []
            loader = threading.Thread(target=lambda: agreed.append(ranks.agree(7)))
            if self.rank == 0:
                loader.start()
            done = ranks.in_turn(lambda: True)
            if self.rank == 1:
                loader.start()
            loader.join(60)
            return [done, agreed]

    def failing_turn(self) -> Any:
        return [self.failing_turn_of(rank) for rank in range(2)]

    def failing_turn_of(self, failing: int) -> Any:
        with closing(self.ranks()) as ranks:

            def action() -> str:
                if self.rank == failing:
                    raise KeyError("lost")
                return "fine"

            first = outcome(lambda: ranks.in_turn(action))
            return [first, outcome(lambda: ranks.in_turn(lambda: "again"))]

    def leaving(self) -> Any:
        """Rank 1 goes while rank 0 waits, and lives on until rank 0 has heard of it."""
        ranks = self.ranks()
        if self.rank == 1:
            ranks.close()
            self.hear("left")
            return outcome(lambda: ranks.agree(1))
        found = [
            outcome(lambda: ranks.agree(1)),
            outcome(lambda: ranks.in_turn(lambda: 1)),
            outcome(lambda: ranks.any(True)),
        ]
        self.say("left")
        ranks.close()
        return found

    def timeout(self) -> Any:
        """Rank 1 hangs until rank 0 has given up."""
        ranks = self.ranks()  # to make the groups takes a busy machine longer
        for each in (ranks._batches, ranks._updates, ranks._steps):
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT_S), each._group)
            each._timeout_s = TIMEOUT_S
        if self.rank == 1:
            self.hear("gave up")
            found = outcome(lambda: ranks.agree(1))
        else:
            found = outcome(lambda: ranks.agree(1))
            self.say("gave up")
        begin = time.monotonic()
        ranks.close()
        return found | {"closing": time.monotonic() - begin}

    def cycles(self) -> Any:
        """Return threads and open files after some cycles, and after ten times as many."""
        counts = []
        for number in (2, 20):
            for _ in range(number):
                with closing(self.ranks()) as ranks:
                    ranks.agree(1)
            # Of the process, not of Python: gloo's threads count.
            own = Path("/proc/self")
            counts.append([len(list((own / what).iterdir())) for what in ("task", "fd")])
        return counts

    def death(self) -> Any:
        """Rank 1 ends while rank 0 waits. The last of all."""
        ranks = self.ranks()
        if self.rank == 1:
            self.hear("waiting")
            os._exit(0)
        self.say("waiting")
        found = [outcome(lambda: ranks.in_turn(lambda: 1)), outcome(lambda: ranks.agree(1))]
        begin = time.monotonic()
        ranks.close()
        return [*found, {"closing": time.monotonic() - begin}]


def main(output: Path) -> None:
    dist.init_process_group("gloo")
    script = Script(dist.get_rank())
    found: dict[str, list[Any]] = {}
    for name in (
        "agreement",
        "either",
        "turns",
        "turns_at_once_with_agreement",
        "failing_turn",
        "leaving",
        "timeout",
        "cycles",
    ):
        mine = getattr(script, name)()
        found[name] = [None, None]
        dist.all_gather_object(found[name], mine)
    found["death"] = [script.death()]
    output.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
