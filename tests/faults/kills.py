"""Kills of a trainer in a container, at random moments, and what it has at its end.

The same scripts and config are for containers of Compose and for pods. Nothing is imported
here but Python's own library: ``python -m tests.compose`` has no more.
"""

from __future__ import annotations

import hashlib
import json
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.support.waiting import until

# By their place in the workspace, where they are in this repository.
FILES = {
    "train.py": "tests/faults/scripts/killed.py",
    "data_loader.py": "tests/faults/scripts/resumed_loader.py",
    "config/embedding_config.yml": "tests/faults/scripts/config/embedding_config.yml",
    "config/global_config.yml": "tests/faults/scripts/config/global_config.yml",
    "tests/distributed/batches.py": "tests/distributed/batches.py",
    "tests/distributed/net.py": "tests/distributed/net.py",
}
SIGNALS = ("SIGKILL", "SIGTERM")
# Of the job that is killed, so that there is time for it: seconds after each step.
PACE_S = 0.05
# Seconds: from a step to a kill, at most, and until a trainer is there again.
_MOST_S, _PATIENCE_S = 6.0, 420.0
# Each fifth kill comes before the first step, while it starts or loads: seconds at most.
_EARLY, _START_S = 5, 12.0


def steps_for(count: int) -> int:
    """Return of how many steps some are left behind the last kill, however fast they are."""
    longest_s = count * _MOST_S + count // _EARLY * _START_S
    return 60 + round(longest_s / PACE_S)


def last_progress(log: str) -> int:
    """Return the last step that a trainer has printed; 0 before any."""
    found = [line.split()[1] for line in log.splitlines() if line.startswith("progress ")]
    return int(found[-1]) if found else 0


def end_in(log: str) -> dict[str, Any]:
    """Return what a trainer had at its end."""
    (line,) = (one for one in log.splitlines() if one.startswith("end "))
    found: dict[str, Any] = json.loads(line.partition(" ")[2])
    return found


def kill_again_and_again(
    count: int,
    seed: int,
    signals: Sequence[str],
    running: Callable[[], Mapping[str, str]],
    kill: Callable[[str, str], object],
    details: Callable[[], object] = str,
) -> None:
    """Kill a trainer ``count`` times, by these signals in turn.

    Args:
        count: How often.
        seed: Of the moments.
        signals: Names of signals.
        running: Returns, of the processes that run, the last lines of the log by name; no two
            starts have one name.
        kill: Takes such a name and a signal.
        details: What to say if no trainer comes back.
    """
    dice, gone = random.Random(seed), set[str]()
    for number in range(count):
        is_early = number % _EARLY == _EARLY - 1
        found: list[tuple[str, int]] = []

        def is_there(is_early: bool = is_early, found: list[Any] = found) -> bool:
            steps = {one: last_progress(log) for one, log in running().items()}
            found += [
                (one, step)
                for one, step in steps.items()
                if one not in gone and (step or is_early)
            ]
            return bool(found)

        until(is_there, _PATIENCE_S, look_s=0.5, details=details)
        name, step = found[0]
        threading.Event().wait(dice.uniform(0.0, _START_S if is_early else _MOST_S))
        signal = signals[number % len(signals)]
        kill(name, signal)
        gone.add(name)
        print(f"{time.strftime('%X')} {number + 1}: {signal} after step {step}", flush=True)


def judge(killed: Mapping[str, Any], whole: Mapping[str, Any], count: int, steps: int) -> str:
    """Return what to say if both ends are one; AssertionError if they are not."""
    assert whole["steps"] == steps, whole
    assert killed == whole, f"after {count} kills {killed}, and undisturbed {whole}"
    digest = hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()
    return f"{count} kills, {steps} steps: net and rows are bit-equal (sha256 {digest:.16})"
