"""A server behind a network of its own, which can be cut in two while a job trains.

    python -m tests.faults.apart SECONDS

                this namespace                    |        namespace "far"
    trainer, data-loader, embedding-worker,       |   embedding-parameter-server 1
    embedding-parameter-server 0      near --- bridge --- far
                                       namespace "between"

A cut takes a cable out of the bridge: packets vanish, both ends keep their link and see
nothing. Needs root, and `ip` with network namespaces.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from persia import env
from persia.data import DataLoader, StreamingDataset
from tests.faults.batches import SLOTS
from tests.faults.job import LOADER, assert_each_once, make_ctx, step
from tests.support.processes import LISTS, Cluster

COUNT, CUT_AT = 400, 100
FAR = "embedding-parameter-server-1"
PORT = 8888
# Longer than a call may go unanswered, and a silent connection is kept, together.
BACK_S = 30.0


class Cable:
    """Two namespaces beside this one, and what leads from here to the farther."""

    def __init__(self) -> None:
        number = os.getpid()
        self.far, self._between = f"far-{number}", f"between-{number}"
        # Names of interfaces have 15 characters at most. Addresses: those that are not routed.
        self._near = f"near{number}"
        first = 4 * (number // 250 % 63)
        self.here, self.there = (f"169.254.{1 + number % 250}.{first + n}" for n in (1, 2))

    def lay(self) -> None:
        """Make all of it; CalledProcessError if that is not allowed here."""
        far, between, near = self.far, self._between, self._near
        for line in (
            f"netns add {far}",
            f"netns add {between}",
            f"-n {between} link add bridge type bridge",
            f"-n {between} link set bridge up",
            f"link add {near} type veth peer name to-near netns {between}",
            f"-n {far} link add far type veth peer name to-far netns {between}",
            f"-n {between} link set to-near master bridge up",
            f"-n {between} link set to-far master bridge up",
            f"address add {self.here}/30 dev {near}",
            f"link set {near} up",
            f"-n {far} address add {self.there}/30 dev far",
            f"-n {far} link set far up",
            f"-n {far} link set lo up",
        ):
            _ip(line)

    def cut(self) -> None:
        _ip(f"-n {self._between} link set to-far nomaster")

    def mend(self) -> None:
        _ip(f"-n {self._between} link set to-far master bridge")

    def remove(self) -> None:
        """Remove what there is of it; interfaces go with their namespaces."""
        for name in (self.far, self._between):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def _ip(line: str) -> None:
    subprocess.run(["ip", *line.split()], check=True, capture_output=True)


@contextmanager
def cable() -> Iterator[Cable]:
    made = Cable()
    try:
        made.lay()
        yield made
    finally:
        made.remove()


def can_be_laid() -> bool:
    """Whether this machine lets this user do it."""
    try:
        with cable():
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


def start(cluster: Cluster, wire: Cable) -> None:
    """Start everything, server 1 on the other side."""
    role = "embedding-parameter-server"
    cluster.variables |= {LISTS[role]: f"{cluster.addresses[role][0]},{wire.there}:{PORT}"}
    cluster.prefixes[FAR] = ["ip", "netns", "exec", wire.far]
    cluster.start_replica(role)
    own = {"PERSIA_LISTEN_HOST": wire.there, "PERSIA_LISTEN_WITHOUT_KEYS": "1"}
    cluster.start_replica(role, 1, **own)
    cluster.start_replica("embedding-worker")
    cluster.start_loaders(LOADER, 1, str(COUNT))


def part(seconds: float) -> dict[str, float]:
    """Cut the network for so long in the middle of training; returns what happened."""
    with ExitStack() as stack:
        wire = stack.enter_context(cable())
        cluster = stack.enter_context(Cluster(SLOTS, transport="tcp", num_servers=2))
        start(cluster, wire)
        stack.enter_context(env.changed(**cluster.variables))
        ctx = stack.enter_context(make_ctx())
        mended: list[float] = []

        def mend() -> None:
            wire.mend()
            mended.append(time.monotonic())

        healer = threading.Timer(seconds, mend)
        stack.callback(healer.cancel)
        seen: list[int] = []
        while_cut = 0
        back_s = 0.0
        for batch in DataLoader(StreamingDataset(6), embedding_staleness=3):
            if len(seen) == CUT_AT:
                wire.cut()
                healer.start()
            seen.append(step(ctx, batch))
            if len(seen) > CUT_AT:
                while_cut += not mended
                if mended and not back_s:
                    back_s = time.monotonic() - mended[0]
        assert_each_once(ctx, seen, COUNT)
        stats = ctx.stats()
        assert stats["batches"] == COUNT, stats
        lost = {name: stats.get(name, 0) for name in ("failed", "abandoned", "missing")}
        assert not any(lost.values()), lost
        # Only what was looked up before could be trained on while it was cut off.
        assert while_cut <= 20, while_cut
        assert back_s < BACK_S, back_s
        servers = ctx.server_stats()
        assert not any(one.get("update_missing", 0) for one in servers), servers
        repeated = sum(one.get("repeated_updates", 0) for one in servers)
    return {"cut_s": seconds, "back_s": back_s, "while_cut": while_cut, "repeated": repeated}


if __name__ == "__main__":
    print(json.dumps(part(float(sys.argv[1]))))
