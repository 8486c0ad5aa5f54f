"""Five versions switched under load, while rows of a training come: no mixed answer.

    python -m tests.serving.proofs.switch [--requests 100000] [--rows 100000] [--judge]

A training writes versions and packets of its log first; they are put away, and later renamed
into place at their times, so that the machine's cores are the server's and the clients'. Rows
and weights count the steps of training: each answer is known from the version that it names and
from one number, which all rows in it have to share: not less than the version's cut, and never
less than before. Requests begin at fixed times whatever becomes of those before them.
"""

from __future__ import annotations

import argparse
import gc
import http.client
import json
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np

from persia._files import catalog
from persia._files.change_log import ChangeLog, Rows, read_packet
from persia._files.open import open_storage
from persia._rows.row_source import open_log
from persia._serving.bundle import MANIFEST, set_current
from tests.serving.proofs.support import (
    Clients,
    Cuts,
    Lines,
    ServeProcess,
    Trainer,
    percentile,
    wait_for_version,
)
from tests.serving.proofs.trainer import DIM, MODEL
from tests.support.waiting import until

FLUSH_S = 0.5
SWITCHES = 5
CLIENTS = 8
TOKEN = "asks for the index"
# Parts of a run: without deltas, with them, and with versions.
QUIET, DELTAS, SWITCHED = 0.15, 0.25, 0.6


def _num_rows(manifest: Path) -> int:
    storage = open_storage(str(manifest.parent))
    return catalog.load(storage, manifest.stem).num_rows


class _Steps:
    """Makes steps of the training in a thread, each after the packet that has the one before.

    Packets are cut by time, which may be in the midst of a step's updates: its rows are then of
    two steps, and so is what is served of them.
    """

    def __init__(self, trainer: Trainer, logs: Path, rows: int, count: int) -> None:
        self._trainer, self._rows, self._count = trainer, rows, count
        log = open_log(str(logs)).log
        assert log is not None
        self._log: ChangeLog = log
        self._made = 1
        self._pool = ThreadPoolExecutor(1)
        self._all = self._pool.submit(self._make)

    def wait_for(self, count: int) -> None:
        """Wait until there were that many, and their packets."""
        until(lambda: self._made > count or self._all.done(), 10.0 * self._count)
        if self._all.done():
            self._all.result()

    def _make(self) -> None:
        while self._made < self._count:
            self._trainer.tell("step")
            self._trainer.wait_for("step", self._made + 1)
            until(self._has_come)
            self._made += 1

    def _has_come(self) -> bool:
        """Look for the packet of the last step; an error if it was cut within one."""
        for packet in self._log.poll().packets:
            parts = [one for one in read_packet(packet) if isinstance(one, Rows)]
            self._log.applied(packet)
            if parts:  # a version waits for a packet, which may have nothing
                steps = np.unique(np.concatenate([one.values[:, :DIM] for one in parts]))
                size = sum(len(one.signs) for one in parts)
                found = size, steps.tolist()
                assert found == (self._rows, [self._made + 1]), "cut within a step"
                return True
        return False

    def close(self) -> None:
        self._count = 0
        self._pool.shutdown()


class Recorded:
    """Packets and versions of a training that has ended, to be published again."""

    def __init__(self, folder: Path, rows: int, packets: int) -> None:
        self._models, self._logs = folder / "models" / MODEL, folder / "log"
        self._aside = folder / "aside"
        self._train(folder, rows, packets)
        hidden = [path.name for path in self._models.iterdir() if path.name.isdigit()]
        first = (self._models / "1" / MANIFEST).stat().st_mtime
        self.versions = sorted(int(name) for name in hidden if name != "1")
        made = {
            version: (self._models / str(version) / MANIFEST).stat().st_mtime
            for version in self.versions
        }
        said = [path for path in self._logs.glob("*/*.json") if path.stat().st_mtime > first]
        self.packets = sorted(said, key=lambda path: path.stat().st_mtime)
        self.sizes = [_num_rows(path) for path in self.packets]
        times = [path.stat().st_mtime for path in self.packets]
        # Packets that have to be there before a version is: all that were when it was made.
        self.needed = {version: sum(one <= at for one in times) for version, at in made.items()}
        for version in self.versions:
            self._move(self._models / str(version), back=False)
        set_current(self._models, 1)
        for packet in self.packets:
            self._move(packet, back=False)
            self._move(packet.with_suffix(""), back=False)

    def _train(self, folder: Path, rows: int, packets: int) -> None:
        trainer = Trainer(folder, "--rows", str(rows), "--flush", str(FLUSH_S))
        try:
            trainer.wait_for("begin")
            trainer.tell("step")
            trainer.wait_for("step")
            trainer.tell("publish")
            wait_for_version(folder, 1)
            with closing(_Steps(trainer, self._logs, rows, 1 + packets)) as steps:
                for number in range(SWITCHES):
                    share = (DELTAS + SWITCHED * (number + 0.5) / SWITCHES) / (
                        DELTAS + SWITCHED
                    )
                    steps.wait_for(int(packets * share))
                    trainer.tell("publish")
                    wait_for_version(folder, number + 2)
                steps.wait_for(packets)
        finally:
            trainer.stop()

    def _move(self, path: Path, *, back: bool) -> None:
        aside = self._aside / path.name
        self._aside.mkdir(exist_ok=True)
        before, after = (aside, path) if back else (path, aside)
        if before.exists():  # a packet without rows has no folder
            before.rename(after)

    def publish_packet(self, number: int) -> None:
        packet = self.packets[number]
        self._move(packet.with_suffix(""), back=True)
        self._move(packet, back=True)

    def publish_version(self, version: int) -> None:
        self._move(self._models / str(version), back=True)
        set_current(self._models, version)


class Replay:
    """Publishes packets, each in the time for its rows, in a thread, until it is stopped."""

    def __init__(self, recorded: Recorded, rows_a_second: float) -> None:
        self._recorded, self._rows_a_second = recorded, rows_a_second
        self._end, self.published, self.num_rows = threading.Event(), 0, 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        due = time.monotonic()
        while self.published < len(self._recorded.packets):
            self._recorded.publish_packet(self.published)
            size = self._recorded.sizes[self.published]
            self.published += 1
            self.num_rows += size
            due += size / self._rows_a_second
            if self._end.wait(max(0.0, due - time.monotonic())):
                return

    def stop(self) -> None:
        self._end.set()
        self._thread.join(60)


def states(server: ServeProcess) -> list[tuple[int, str]]:
    """Return the versions that the server says it has, with their states."""
    with closing(
        http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=30)
    ) as asked:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        asked.request("POST", "/v2/repository/index", b"{}", headers)
        found = json.loads(asked.getresponse().read())
    return [(int(one["version"]), one["state"]) for one in found]


def switch(recorded: Recorded, clients: Clients, server: ServeProcess, version: int) -> float:
    """Publish a version; return when the one before was closed."""
    recorded.publish_version(version)
    clients.wait_until(lambda: all(one.versions[-1] >= version for one in clients.seen))
    clients.wait_until(lambda: states(server) == [(version, "READY")], look_s=0.05)
    return time.monotonic()


def run(
    folder: Path,
    requests: int,
    rows: int,
    rate: float,
    rows_a_second: float = 100_000,
    *,
    judges: bool,
) -> int:
    """Print the table; returns the status."""
    lines = Lines(f"switch: {requests} requests of 1 user and 100 candidates", judges)
    seconds = requests / rate
    packets = max(SWITCHES + 1, int((DELTAS + SWITCHED) * seconds * rows_a_second / rows))
    recorded = Recorded(folder, rows, packets)
    (folder / "token").write_text(TOKEN)
    server = ServeProcess(folder, "--control-token-file", str(folder / "token"))
    windows: list[tuple[float, float]] = []
    memory = [0]
    try:
        server.wait()
        gc.collect()
        gc.freeze()  # a collection would keep all clients from asking in time
        clients = Clients(
            lambda: server.http_port, Cuts(folder), rows // 8, CLIENTS, False, rate=rate
        )
        try:
            clients.wait_until(lambda: clients.count() >= rate)  # warm
            goal = clients.count() + QUIET * requests
            quiet, memory[0] = time.monotonic(), server.memory()
            clients.wait_until(lambda: clients.count() >= goal)
            deltas = time.monotonic()
            replay = Replay(recorded, rows_a_second)
            try:
                goal += DELTAS * requests
                clients.wait_until(lambda: clients.count() >= goal)
                loaded = time.monotonic()
                for version in recorded.versions:
                    until_s = recorded.needed[version]
                    clients.wait_until(lambda: replay.published >= until_s)  # noqa: B023
                    begin = time.monotonic()
                    end = switch(recorded, clients, server, version)
                    windows.append((begin, max(end, begin + 1.0)))
                    memory.append(server.memory())
                clients.wait_until(lambda: clients.count() >= requests)
                end = time.monotonic()
            finally:
                replay.stop()
        finally:
            clients.stop()
    finally:
        server.stop()
    report(lines, clients, windows, replay.num_rows / (end - deltas))
    judge_times(lines, clients, (quiet, deltas), (deltas + 1.0, loaded), windows)
    grown = max(memory) / memory[0]
    lines.show("resident memory: at first, most", f"{memory[0] >> 20}, x{grown:.2f}")
    return lines.end()


def report(
    lines: Lines, clients: Clients, windows: list[tuple[float, float]], rows_a_second: float
) -> None:
    lines.show("requests answered", str(clients.count()))
    for name, kind in (("failed", "failed"), ("mixed", "mixed"), ("with zeros", "zeros")):
        lines.show_none(name, clients.faults(kind))
    seen = {version for one in clients.seen for version in one.versions}
    holds = len(windows) == SWITCHES and len(seen) == SWITCHES + 1
    lines.show("versions switched", str(len(seen) - 1), str(SWITCHES), holds=holds)
    lines.show("rows of deltas a second", f"{rows_a_second:,.0f}")
    took = ", ".join(f"{end - begin:.1f}" for begin, end in windows)
    lines.show("seconds from current.json to closed", took)


def judge_times(
    lines: Lines,
    clients: Clients,
    quiet: tuple[float, float],
    beside: tuple[float, float],
    windows: list[tuple[float, float]],
) -> None:
    times = {
        "quiet": clients.milliseconds([quiet]),
        "beside deltas": clients.milliseconds([beside]),
        "in switches": clients.milliseconds(windows),
    }
    for name, found in times.items():
        p50, p99, p999 = (percentile(found, q) for q in (50, 99, 99.9))
        lines.show(f"{name}: p50, p99, p99.9", f"{p50:.2f}, {p99:.2f}, {p999:.2f} ms")
    single = [percentile(clients.milliseconds([one]), 99) for one in windows]
    lines.show("p99 in each switch", ", ".join(f"{one:.2f}" for one in single))
    p99 = percentile(times["quiet"], 99)
    lines.show_time(
        "p99 beside deltas / quiet", percentile(times["beside deltas"], 99) / p99, "", 1.5
    )
    lines.show_time(
        "p99 in switches / quiet", percentile(times["in switches"], 99) / p99, "", 2.0
    )


def main() -> int:
    """Run it in a folder that is removed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--rows", type=int, default=100_000, help="of each packet")
    parser.add_argument("--rate", type=float, default=400.0, help="requests a second")
    parser.add_argument("--judge", action="store_true", help="exit 1 for a time too long")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="persia-proof-") as folder:
        return run(Path(folder), given.requests, given.rows, given.rate, judges=given.judge)


if __name__ == "__main__":
    raise SystemExit(main())
