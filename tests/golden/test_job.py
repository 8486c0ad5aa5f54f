"""A small job of real processes: what each serves at /metrics, its log, a server's own file."""

from __future__ import annotations

import json
import re
import struct
import tempfile
from pathlib import Path
from typing import Any

import pytest

from persia.version import __version__
from tests.golden.book import as_text, check
from tests.golden.commands import quiet_surroundings
from tests.metrics.job import standing_job
from tests.support.processes import ROOT

pytestmark = pytest.mark.slow  # torch takes seconds to load

NOTES = (8 << 10, (8 << 10) + (1 << 20))
RECENT, UPDATES, SHARDS = 4 << 20, 8 << 20, 4 << 30


def outline(text: str) -> list[str]:
    """Names, HELP, TYPE and labels of what is served, without values; sorted by metric."""
    text = text.replace(__version__, "VERSION").replace(f'run="{ROOT.name}"', 'run="RUN"')
    lines: list[str] = []
    series: list[str] = []
    for line in text.splitlines():
        if line.startswith("# HELP"):
            lines += sorted(series)
            series = []
        if line.startswith("#"):
            lines.append(line)
        elif not re.search(r'le="(?!\+Inf)', line):
            series.append(line.rpartition(" ")[0])
    return [*lines, *sorted(series)]


def buckets(text: str) -> dict[str, list[str]]:
    """The bounds of every histogram."""
    found: dict[str, list[str]] = {}
    for name, bound in re.findall(r'^(\w+)_bucket{.*?\ble="([^"]+)"', text, re.MULTILINE):
        bounds = found.setdefault(name, [])
        if bound not in bounds:
            bounds.append(bound)
    return dict(sorted(found.items()))


def log_of(text: str, place: Path) -> list[str]:
    """The lines of a role's log, sorted, without times, places, ports and counts of calls."""
    text = text.replace(str(place), "PLACE")
    for pattern, put in (
        (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}", "TIME"),
        (r"(127\.\d+\.\d+\.\d+|localhost):\d+", "HOST:PORT"),
        (r"\d+ calls served", "N calls served"),
        (r"\bpid \d+", "pid N"),
        (r"\d+(\.\d+)? s\b", "N s"),
    ):
        text = re.sub(pattern, put, text)
    # Whether a process had to wait, and for which, is chance.
    return sorted({line for line in text.splitlines() if not line.startswith("waiting:")})


def state_file(path: Path) -> dict[str, Any]:
    """The head of a server's own file, its newest note, and where its parts begin."""
    with path.open("rb") as file:
        head = file.read(32)
        file.seek(4096)
        control = file.read(8)
        notes = {}
        for place in NOTES:
            file.seek(place)
            number, length, _ = struct.unpack("<QQ16s", file.read(32))
            notes[number] = (place, file.read(length).decode())
        starts = {}
        for name, place in (("recent", RECENT), ("updates", UPDATES), ("shards", SHARDS)):
            file.seek(place)
            starts[f"{name} at {place}"] = any(file.read(1 << 20))
    newest = max(notes)
    said = json.loads(notes[newest][1]) | {"process": "PID", "parent": "PARENT"}
    return {
        "name": re.sub(r"[0-9a-f]{20}", "HASH", path.name),
        "mode": f"{path.stat().st_mode & 0o777:o}",
        "length": path.stat().st_size,
        "head": head.hex(),
        "control": control.hex(),
        "notes": {str(number): place for number, (place, _) in sorted(notes.items())},
        "newest note": said,
        "holds something": starts,
    }


def record() -> dict[str, str]:
    with tempfile.TemporaryDirectory() as directory, quiet_surroundings():
        kept = {"PERSIA_STATE_DIRECTORY": directory}
        with standing_job(kept, num_servers=2) as job:
            texts = {name: job.get(name, "/metrics")[1] for name in job.urls}
            files = [state_file(path) for path in Path(directory).glob("*.rows")]
            job.train_more()
            statuses = job.go_on()
            names = sorted(job.cluster.processes)
            logs = {name: log_of(job.cluster.log(name), job.cluster.place) for name in names}
    files.sort(key=lambda file: file["newest note"]["facts"]["replica_index"])
    found = {"job/state-files.json": as_text(files)}
    for name, text in texts.items():
        if name != "embedding-parameter-server-1":  # serves what the other one does
            page = {"series": outline(text), "buckets": buckets(text)}
            found[f"job/metrics-{name}.json"] = as_text(page)
    logged = {name: {"status": statuses[name], "lines": logs[name]} for name in names}
    return {**found, "job/logs.json": as_text(logged)}


def test_metrics_logs_and_the_files_of_servers() -> None:
    """Recorded again with every text that is put in other words."""
    check(record())
