"""Texts and readings of metrics, of numbers that a test chooses."""

from __future__ import annotations

from persia._metrics.definitions import LOADER, SERVER, TRAINER, WORKER
from persia._metrics.scrape import Delta, Reading

NAMES = {"loader": LOADER, "worker": WORKER, "server": SERVER, "trainer": TRAINER}


def text_of(role: str, replica: int, run: str = "", **values: float) -> str:
    """Return Prometheus' text of one process."""
    labels = f'role="{role}",replica="{replica}"'
    info = f'version="1.2.3",run="{run}"'
    lines = [f"persia_info{{{labels},{info}}} 1.0", f"persia_ready{{{labels}}} 1.0"]
    lines += [f"{name}{{{labels}}} {value!r}" for name, value in values.items()]
    return "\n".join([*lines, "process_resident_memory_bytes 1e+08", ""])


def span(role: str, seconds: float, grown: dict[str, float], now: dict[str, float]) -> Delta:
    """Return a process between two readings, of counters that grew from 0."""

    def reading(at: float, values: dict[str, float]) -> Reading:
        return Reading(role, 0, at, {name: [({}, value)] for name, value in values.items()})

    return Delta(reading(0.0, dict.fromkeys(grown, 0.0)), reading(seconds, {**grown, **now}))
