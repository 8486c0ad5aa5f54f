"""Processes of serving and the training killed while requests come: no zeros, ever.

    python -m tests.serving.proofs.kills [--kills 50] [--seed 1]

One training publishes versions and writes its change log. Three ways lead to its rows, and a
client asks each of them all the time:

    follower     ``serve`` with the rows in its own process, which follow the log
    copies       ``serve --rows servers``, before two servers of which there are two copies each
    workers      an ``InferCtx`` over two embedding-workers, each with a set of those copies:
                 no request waits as long as one of the two sets is whole

SIGKILL hits one process after the other, at moments that a seed chooses; a supervisor starts it
again. Each id has had a row since before the first request, and no row is ever zero: a zero in
an answer is a row that was lost. Requests that fail while what they need is down are counted
apart: only a follower, of which there is one, can be down for its client.
"""

from __future__ import annotations

import argparse
import http.client
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from persia._rpc.client import Client
from persia._rpc.methods import embedding_worker
from persia._rpc.zmq_transport import ZmqTransport
from persia._serving.remote_rows import RemoteRows, RowServers
from persia.ctx import InferCtx
from persia.errors import ServiceError
from tests.serving.proofs.support import (
    START_S,
    Connection,
    Cuts,
    Lines,
    ServeProcess,
    Trainer,
    requests_of,
    wait_for_version,
)
from tests.serving.proofs.trainer import DIM, FEATURES, MODEL, SCHEMA, batch_of
from tests.support.processes import Cluster
from tests.support.waiting import until

SERVER, WORKER = "embedding-parameter-server", "embedding-worker"
NUM_ROWS, NUM_SETS, NUM_SERVERS = 8000, 2, 2
NUM_IDS = NUM_ROWS // len(FEATURES)
FLUSH_S, STEPS_A_SECOND = 0.5, 2.0
PAUSE_S = 0.01  # between two requests of a client
# Of a request while one set is whole: 0.2 s that a dead worker or server may cost it, and what
# processes that start take of the processors.
LONGEST_S = 1.0
KINDS = ("server", "worker", "follower", "training")


class Asking:
    """A client that asks until it is stopped, and says what was wrong.

    Attributes:
        zeros: Answers with a row of zeros.
        mixed: Answers that no version and moment of the rows have.
        failed: Requests that failed though what they need was there.
        num_apart: Requests that failed while it was down.
    """

    def __init__(self, name: str, ask: Callable[[], tuple[bool, str]]) -> None:
        self.name, self._ask_once = name, ask
        self.zeros: list[str] = []
        self.mixed: list[str] = []
        self.failed: list[str] = []
        self.num_apart = self.num_answers = 0
        self.longest_s = self.longest_down_s = 0.0  # without and with what it needs
        self._down_since: float | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"asking-{name}")
        self._thread.start()

    def note_kill(self) -> None:
        """Count failures apart until an answer to a request that began later than now."""
        self._down_since = time.monotonic()

    @property
    def is_up(self) -> bool:
        """Whether it has been answered since what it needs was killed last."""
        return self._down_since is None

    def _run(self) -> None:
        while not self._end.wait(PAUSE_S):
            began = time.monotonic()
            try:
                has_zeros, fault = self._ask_once()
            # Whatever it is: a client that ends would see nothing more.
            except Exception as error:
                if self._down_since is None:
                    self.failed.append(f"{error!r}")
                else:
                    self.num_apart += 1
                continue
            took_s, down = time.monotonic() - began, self._down_since
            if down is None:
                self.longest_s = max(self.longest_s, took_s)
            else:
                self.longest_down_s = max(self.longest_down_s, took_s)
            self.num_answers += 1
            if has_zeros:
                self.zeros.append(fault or "a row of zeros")
            elif fault:
                self.mixed.append(fault)
            if down is not None and began > down:
                self._down_since = None

    def await_more(self, count: int) -> None:
        """Wait until it has been answered more often."""
        wanted = self.num_answers + count
        until(lambda: self.num_answers >= wanted, START_S, details=lambda: self.failed[-3:])

    def stop(self) -> None:
        self._end.set()
        self._thread.join(START_S)


def judge(
    version: int, values: NDArray[np.float32], cut: float, is_of_one_moment: bool
) -> tuple[bool, str]:
    """Return whether an answer has a row of zeros, and what is wrong of it.

    Args:
        version: That answered.
        values: [B, 1 + features]: its parameter, and the sum of each feature's row.
        cut: The step that this version is of.
        is_of_one_moment: Whether all rows have to be of one step. Servers go on with the log
            at their own time.
    """
    rows = values[:, 1:] / DIM
    steps = np.unique(rows)
    if (rows == 0).any():
        return True, f"version {version}: rows of steps {steps.tolist()}"
    if not (np.isfinite(rows) & (rows == np.round(rows))).all():  # a row of two moments
        return False, f"version {version}: rows of steps {steps.tolist()}, expected whole ones"
    if not (values[:, 0] == cut).all():
        return False, f"version {version} of step {cut}, weights {values[:3, 0].tolist()}"
    if is_of_one_moment and (len(steps) > 1 or steps[0] < cut):
        return False, f"version {version} of step {cut}: rows of {steps.tolist()}"
    return False, ""


class OverHttp:
    """Asks a ``serve`` by binary requests and checks what it says."""

    def __init__(
        self, server: ServeProcess, training: Training, *, is_of_one_moment: bool
    ) -> None:
        self._server, self._training = server, training
        self._is_of_one_moment = is_of_one_moment
        self._bodies = requests_of(NUM_IDS)
        self._connection: Connection | None = None
        self.last = (0, 0.0)  # version and step of the rows

    def __call__(self) -> tuple[bool, str]:
        try:
            self._connection = self._connection or Connection(self._server.http_port)
            version, values = self._connection.ask(*next(self._bodies))
        except (OSError, http.client.HTTPException, RuntimeError):
            if self._connection is not None:
                self._connection.close()
            self._connection = None
            raise
        has_zeros, fault = judge(
            version, values, self._training.cut_of(version), self._is_of_one_moment
        )
        if not has_zeros:
            self.last = version, float(values[:, 1:].min()) / DIM
        return has_zeros, fault

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


class OverWorkers:
    """Looks rows up by an ``InferCtx``."""

    def __init__(self, ctx: InferCtx) -> None:
        self._ctx, self._rng = ctx, np.random.default_rng(5)

    def __call__(self) -> tuple[bool, str]:
        ids = self._rng.integers(0, NUM_IDS, 100).astype(np.uint64)
        found = self._ctx.get_embedding_from_data(batch_of(ids))
        values = np.concatenate([np.asarray(one) for one in found.embedding_tensors])
        has_zeros = bool((values == 0).any())
        return has_zeros, f"rows of steps {np.unique(values).tolist()}" if has_zeros else ""


class Training:
    """The training: killed, it goes on from the newest version."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._models = folder, folder / "models" / MODEL
        self._cuts = Cuts(folder)
        # Steps before each training, and the first version that it may write.
        self._lives = [(0, 1)]
        self.trainer = Trainer(folder, "--rows", str(NUM_ROWS), "--flush", str(FLUSH_S))
        self.trainer.wait_for("begin")
        self.trainer.tell("step")
        self.trainer.wait_for("step")
        self.trainer.tell("publish")
        wait_for_version(folder, 1)
        self.trainer.tell(f"rate {STEPS_A_SECOND}")

    def newest(self) -> int:
        """Return the newest version."""
        return max(int(one.name) for one in self._models.iterdir() if one.name.isdigit())

    def cut_of(self, version: int) -> float:
        """Return the step that a version's rows and weights are of.

        Its file counts from the start of the process that wrote it.
        """
        steps = next(steps for steps, first in reversed(self._lives) if first <= version)
        return steps + self._cuts[version]

    def kill_and_start(self) -> None:
        self.trainer.kill()
        version = self.newest()
        steps = int(self.cut_of(version))
        self._lives.append((steps, version + 1))
        self.trainer = Trainer(
            self._folder,
            *("--rows", str(NUM_ROWS), "--flush", str(FLUSH_S), "--steps", str(steps)),
            *("--from", str(self._models / str(version) / "rows")),
        )
        self.trainer.tell(f"rate {STEPS_A_SECOND}")

    def publish(self) -> None:
        with suppress(OSError):  # it has just been killed
            self.trainer.tell("publish")


class Deployment:
    """All processes, and what starts them again."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.training = Training(folder)
        stack.callback(lambda: self.training.trainer.stop())
        infer = {
            "servers": ["unused:1"],
            "embedding_checkpoint": str(folder / "models" / MODEL / "1" / "rows"),
            "incremental_dir": str(folder / "log"),
            "follow_interval_sec": 0.1,
        }
        settings = {"common_config": {"job_type": "Infer", "infer_config": infer}}
        self.sets = [
            stack.enter_context(Cluster(SCHEMA, settings, num_servers=NUM_SERVERS))
            for _ in range(NUM_SETS)
        ]
        for one in self.sets:
            one.start_servers()
        self._transport = ZmqTransport()
        stack.callback(self._transport.close)
        addresses = zip(*(one.addresses[SERVER] for one in self.sets), strict=True)
        replicas = ",".join("|".join(copies) for copies in addresses)
        self.follower = ServeProcess(folder, "--follow-interval", "0.1", name="follower")
        stack.callback(lambda: self.follower.stop())
        for which in range(NUM_SETS * NUM_SERVERS):
            self.await_rows(which)
        self.front = ServeProcess(
            folder,
            *("--rows", "servers"),
            name="front",
            variables={"PERSIA_SERVING_REPLICAS": replicas},
        )
        stack.callback(lambda: self.front.stop())
        self.follower.wait()
        self.front.wait()
        workers = [address for one in self.sets for address in one.addresses[WORKER]]
        self.ctx = InferCtx(workers, timeout_s=10.0)
        stack.callback(self.ctx.close)
        self.ctx.wait_for_serving()

    def await_rows(self, which: int) -> None:
        """Wait until a server, alone, answers with rows."""
        of, number = self.sets[which % NUM_SETS], which // NUM_SETS
        address = of.addresses[SERVER][number]
        alone = RowServers([[address]], timeout_s=1.0, connect_timeout_s=1.0)

        def has_rows() -> bool:
            try:
                RemoteRows(self._transport, alone, [DIM]).close()
            except ServiceError:
                return False
            return True

        until(has_rows, START_S, details=of.logs)

    def is_whole(self, number: int) -> bool:
        """Return whether the embedding-worker of a set, and all its servers, answer."""
        address = self.sets[number].addresses[WORKER][0]
        client = Client(self._transport, address, embedding_worker(), timeout_s=1.0)
        with closing(client), suppress(ServiceError):
            return bool(client.call("ready_for_serving"))
        return False

    def kill_server(self, which: int, note_none_whole: Callable[[], None]) -> None:
        """Kill a server whose copy has rows; note it if no other set is whole."""
        self.await_rows(which ^ 1)
        if not self.is_whole((which ^ 1) % NUM_SETS):
            note_none_whole()
        self._restart(which % NUM_SETS, SERVER, which // NUM_SETS)

    def kill_worker(self, which: int) -> None:
        """Kill an embedding-worker while the other set is whole."""
        for number in range(NUM_SERVERS):
            self.await_rows(number * NUM_SETS + 1 - which)
        self.await_worker(1 - which)
        self._restart(which, WORKER, 0)

    def await_worker(self, which: int) -> None:
        """Wait until an embedding-worker, alone, is answered for."""
        with InferCtx(self.sets[which].addresses[WORKER], timeout_s=START_S) as alone:
            alone.wait_for_serving()

    def _restart(self, which: int, role: str, number: int) -> None:
        self.sets[which].kill(f"{role}-{number}")
        self.sets[which].start_replica(role, number)

    def kill_follower(self) -> None:
        self.follower.kill()
        self.follower.start()


def order_of(kills: int, rng: random.Random) -> Iterator[str]:
    """Yield what is killed next: each kind as often as any other, in turns of all kinds."""
    left = [KINDS[number % len(KINDS)] for number in range(kills)]
    rng.shuffle(left)
    return iter(left)


def kill_all(
    deployment: Deployment, clients: dict[str, Asking], kills: int, rng: random.Random
) -> Counter[str]:
    """Kill, and return how often what was killed."""
    killed: Counter[str] = Counter()
    publish_in, pause = 2, threading.Event()  # never set
    for kind in order_of(kills, rng):
        # At any moment, also while what was killed before is starting.
        pause.wait(rng.uniform(0.0, 4.0))
        if kind == "server":
            which = rng.randrange(NUM_SETS * NUM_SERVERS)
            deployment.kill_server(which, clients["workers"].note_kill)
        elif kind == "worker":
            deployment.kill_worker(rng.randrange(NUM_SETS))
        elif kind == "follower":
            clients["follower"].note_kill()
            deployment.kill_follower()
        else:
            deployment.training.kill_and_start()
        killed[kind] += 1
        publish_in -= 1
        if not publish_in:  # it takes a moment: some versions are being written when it is hit
            deployment.training.publish()
            publish_in = rng.randrange(1, 4)
        if rng.random() < 0.5:  # the others are hit again while they start
            until(lambda: clients["follower"].is_up, START_S)
            deployment.training.trainer.wait_for("step")
    return killed


def settle(deployment: Deployment, over: list[OverHttp]) -> bool:
    """Publish once more, and wait until both servers have that version and newer rows."""
    training = deployment.training
    training.trainer.wait_for("step", 1)
    before = training.newest()
    training.trainer.tell("publish")
    until(lambda: training.newest() > before, START_S)
    version = training.newest()
    steps = training.cut_of(version)
    until(
        lambda: all(one.last[0] >= version and one.last[1] > steps for one in over),
        START_S,
        details=lambda: [one.last for one in over],
    )
    return True


def report(lines: Lines, clients: dict[str, Asking]) -> None:
    """Show what was answered; zeros, mixed rows and failures fail the proof."""
    for name, one in clients.items():
        lines.show(f"{name}: answers", str(one.num_answers), "some", holds=one.num_answers > 0)
        lines.show_none(f"{name}: with a vector of zeros", one.zeros)
        lines.show_none(f"{name}: of no version and moment", one.mixed)
        lines.show_none(f"{name}: failed", one.failed)
        lines.show(f"{name}: failed while it was down", str(one.num_apart))
        lines.show(f"{name}: the longest answer while down", f"{one.longest_down_s:.2f} s")
        if name == "workers":
            lines.show_time(f"{name}: the longest answer", one.longest_s, "s", LONGEST_S)
        else:
            lines.show(f"{name}: the longest answer", f"{one.longest_s:.2f} s")


def run(folder: Path, kills: int, seed: int, *, judges: bool) -> int:
    """Kill in a folder; returns the status to exit with."""
    rng, began = random.Random(seed), time.monotonic()
    lines = Lines(f"kills: {kills} by SIGKILL, seed {seed}", judges)
    with ExitStack() as stack:
        deployment = Deployment(folder, stack)
        training = deployment.training
        over = [
            OverHttp(deployment.follower, training, is_of_one_moment=True),
            OverHttp(deployment.front, training, is_of_one_moment=False),
        ]
        for place in over:
            stack.callback(place.close)
        asks: dict[str, Callable[[], tuple[bool, str]]] = {
            "follower": over[0],
            "copies": over[1],
            "workers": OverWorkers(deployment.ctx),
        }
        clients = {name: Asking(name, ask) for name, ask in asks.items()}
        for one in clients.values():
            stack.callback(one.stop)
            one.await_more(20)
        killing = time.monotonic()
        killed = kill_all(deployment, clients, kills, rng)
        has_settled = settle(deployment, over)
        for one in clients.values():
            one.await_more(20)
            one.stop()
        ended = time.monotonic()
    for kind in KINDS:
        lines.show(f"killed: {kind}", str(killed[kind]))
    report(lines, clients)
    lines.show("the last version reached both servers", str(has_settled), "True")
    lines.show("seconds: all, killing", f"{ended - began:.0f}, {ended - killing:.0f}")
    return lines.end()


def main() -> int:
    """Kill in a folder that is removed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="persia-kills-") as name:
        return run(Path(name), given.kills, given.seed, judges=True)


if __name__ == "__main__":
    raise SystemExit(main())
