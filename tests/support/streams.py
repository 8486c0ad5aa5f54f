"""The two ends that a data-loader talks to, as plain objects, and how they fail."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from persia._core.ids.feature_batch import FeatureBatch
from persia._loader.sender import BatchSender
from persia._rpc.job import JobState
from persia._rpc.messages import (
    IDFeatures,
    NamedArray,
    RemoteRef,
    StreamedBatch,
    StreamNews,
    StreamOpening,
    StreamState,
)
from persia.errors import ServiceBusy, ServiceTimeout, ServiceUnavailable, UnknownStream
from tests.support.waiting import PATIENCE_S


@dataclass
class Stream:
    """What a rank knows of one data-loader."""

    opening: StreamOpening
    next_batch_id: int
    credits: int
    num_received: int = 0
    version: int = 1
    acknowledged: dict[int, int] = field(default_factory=dict)  # id -> version
    wanted: dict[int, int] = field(default_factory=dict)
    end: int | None = None


class FakeRank:
    """An nn-worker as ``messages`` describes it; tests take and acknowledge its batches."""

    def __init__(self, rank: int = 0, world_size: int = 1, credits: int = 2) -> None:
        self.replica_index = rank
        self.replica_size = world_size
        self.incarnation = 1
        self.credits = credits
        self.changed = threading.Condition()
        self.streams: dict[int, Stream] = {}
        self.waiting: dict[int, StreamedBatch] = {}  # delivered, not taken
        self.taken: dict[int, StreamedBatch] = {}  # not acknowledged
        self.order: list[int] = []  # as delivered, without duplicates
        self.failures: list[str] = []
        self.last_epochs: list[int] = []  # of the streams that ended
        self.relocations: list[tuple[int, RemoteRef]] = []
        self.is_closed = False
        self.is_down = False
        self.most_waiting = 0

    # --- what a data-loader calls -----------------------------------------------------------

    def open_stream(self, opening: StreamOpening) -> StreamState:
        with self.changed:
            self._answer()
            old = self.streams.get(opening.loader)
            if old is not None and old.opening.incarnation == opening.incarnation:
                return StreamState(old.next_batch_id, tuple(old.wanted))
            first = opening.first_batch_id
            stream = Stream(opening, first, self.credits)
            if old is not None and old.end is None:
                stream.next_batch_id = max(first, old.next_batch_id)
                stream.wanted = dict.fromkeys(old.wanted, 1)
            elif old is not None and self._held(opening.loader, opening.num_loaders):
                raise ServiceBusy("the pass goes on")
            self.streams[opening.loader] = stream
            self.changed.notify_all()
            return StreamState(stream.next_batch_id, tuple(stream.wanted))

    def deliver(self, stream: tuple[int, int], batch: StreamedBatch) -> None:
        with self.changed:
            known = self._stream(stream)
            assert batch.batch_id % self.replica_size == self.replica_index
            assert batch.batch_id % known.opening.num_loaders == stream[0]
            if batch.batch_id < known.next_batch_id:
                return
            assert known.end is None or batch.batch_id < known.end
            assert known.num_received < known.credits
            known.num_received += 1
            known.next_batch_id = batch.batch_id + 1
            self.waiting[batch.batch_id] = batch
            self.most_waiting = max(self.most_waiting, len(self.waiting))
            self.order.append(batch.batch_id)
            self.changed.notify_all()

    def relocate(self, stream: tuple[int, int], batch_id: int, ids: RemoteRef) -> None:
        with self.changed:
            known = self._stream(stream)
            self.relocations.append((batch_id, ids))
            known.wanted.pop(batch_id, None)
            self.changed.notify_all()

    def end_stream(
        self, stream: tuple[int, int], next_batch_id: int, failure: str, epoch: int
    ) -> None:
        with self.changed:
            self._stream(stream).end = next_batch_id
            self.last_epochs.append(epoch)
            if failure:
                self.failures.append(failure)
            self.changed.notify_all()

    def poll(self, stream: tuple[int, int], seen: int) -> StreamNews:
        return self.poll_until(stream, seen, lambda: False)

    def poll_until(
        self, stream: tuple[int, int], seen: int, is_cut: Callable[[], bool]
    ) -> StreamNews:
        deadline = time.monotonic() + 0.5
        with self.changed:
            while True:
                if is_cut():
                    raise ServiceUnavailable("the line was cut")
                known = self._stream(stream)
                if known.version > seen or time.monotonic() > deadline:
                    break
                self.changed.wait(0.5)
            for batch_id, version in [*known.acknowledged.items()]:
                if version <= seen:
                    del known.acknowledged[batch_id]
            wanted = tuple(x for x, version in known.wanted.items() if version > seen)
            return StreamNews(
                known.version,
                known.credits,
                tuple(known.acknowledged),
                wanted,
                self.is_closed,
            )

    def _answer(self) -> None:
        if self.is_down:
            raise ServiceUnavailable("no process is there")

    def _stream(self, stream: tuple[int, int]) -> Stream:
        self._answer()
        known = self.streams.get(stream[0])
        if known is None or known.opening.incarnation != stream[1]:
            raise UnknownStream(f"no stream {stream}")
        return known

    def _held(self, loader: int, num_loaders: int) -> bool:
        return any(x % num_loaders == loader for x in (*self.waiting, *self.taken))

    # --- what a test does -------------------------------------------------------------------

    def take(self) -> StreamedBatch:
        """Take the oldest batch for lookup, which grants a credit."""
        with self.changed:
            self.wait_for(lambda: self.waiting)
            batch = self.waiting.pop(min(self.waiting))
            self.taken[batch.batch_id] = batch
            stream = self._of(batch.batch_id)
            stream.credits += 1
            self._news(stream)
            return batch

    def acknowledge(self, batch_id: int) -> None:
        with self.changed:
            del self.taken[batch_id]
            stream = self._of(batch_id)
            self._news(stream)
            stream.acknowledged[batch_id] = stream.version

    def want(self, batch_id: int) -> None:
        with self.changed:
            stream = self._of(batch_id)
            self._news(stream)
            stream.wanted[batch_id] = stream.version

    def train(self, num_batches: int) -> list[StreamedBatch]:
        batches = []
        for _ in range(num_batches):
            batches.append(self.take())
            self.acknowledge(batches[-1].batch_id)
        return batches

    def close(self) -> None:
        with self.changed:
            self.is_closed = True
            for stream in self.streams.values():
                self._news(stream)

    def restart(self) -> None:
        """Another process answers in its place."""
        with self.changed:
            self.incarnation += 1
            self.streams.clear()
            self.waiting.clear()
            self.taken.clear()
            self.order.clear()
            self.is_down = False
            self.changed.notify_all()

    def go_down(self) -> None:
        with self.changed:
            self.is_down = True
            self.changed.notify_all()

    def wait_for(self, is_so: Callable[[], Any]) -> None:
        with self.changed:
            assert self.changed.wait_for(is_so, PATIENCE_S), "it did not come to pass"

    def wait_for_end(self, num_loaders: int = 1) -> None:
        self.wait_for(
            lambda: sum(x.end is not None for x in self.streams.values()) == num_loaders
        )

    def _of(self, batch_id: int) -> Stream:
        return next(
            stream
            for loader, stream in self.streams.items()
            if batch_id % stream.opening.num_loaders == loader
        )

    def _news(self, stream: Stream) -> None:
        stream.version += 1
        self.changed.notify_all()


class FakeWorker:
    """An embedding-worker: refs by batch id, until it is restarted."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.refs: dict[int, int] = {}  # batch id -> ref
        self.registered: list[int] = []  # batch ids, without repetitions
        self.released: list[int] = []  # refs
        self.error: Exception | None = None  # what each call raises instead
        self.job = JobState()

    def register(self, features: IDFeatures, timeout_s: float | None = None) -> int:
        with self.lock:
            if self.error is not None:
                raise self.error
            if features.batch_id in self.refs:
                return self.refs[features.batch_id]
            self.registered.append(features.batch_id)
            self.refs[features.batch_id] = 1000 + len(self.registered)
            return self.refs[features.batch_id]

    def release(self, ref: int) -> None:
        with self.lock:
            self.released.append(ref)

    def restart(self) -> None:
        with self.lock:
            self.refs.clear()

    def job_status(self, watcher: str, timeout_s: float | None = None) -> int | None:
        if isinstance(self.error, ServiceUnavailable):
            raise self.error
        return self.job.job_status(watcher)


class Line:
    """A feeder's way to a server: it can be cut, and may lose calls and answers.

    Args:
        server: Who answers.
        faults: Decides for each call; without it none is lost.
    """

    def __init__(self, server: Any, faults: random.Random | None = None) -> None:
        self._server = server
        self._faults = faults
        self._is_cut = threading.Event()

    @property
    def incarnation(self) -> int:
        return int(self._server.incarnation)

    def cut(self) -> None:
        self._is_cut.set()
        if isinstance(self._server, FakeRank):
            with self._server.changed:
                self._server.changed.notify_all()

    def __getattr__(self, method: str) -> Any:
        def call(*arguments: Any) -> Any:
            if self._is_cut.is_set():
                raise ServiceUnavailable("the line was cut")
            if method == "poll":
                function = self._server.poll_until
                arguments = (*arguments, self._is_cut.is_set)
            else:
                function = getattr(self._server, method)
            fate = 1.0 if self._faults is None else self._faults.random()
            if fate < 0.1:
                raise ServiceTimeout("the call was lost")
            if fate < 0.2 and method != "poll":
                function(*arguments)  # arrives twice
            result = function(*arguments)
            if fate < 0.4:
                raise ServiceTimeout("the answer was lost")
            return result

        return call


def send(feeder: BatchSender, number: int = 0) -> None:
    """Send a batch that is recognised by its label."""
    feeder.send(
        (FeatureBatch.from_single("user", np.array([number], np.uint64)),),
        (NamedArray("dense", np.full((1, 2), number, np.float32)),),
        (NamedArray("label", np.full((1, 1), number, np.float32)),),
        batch_size=1,
        requires_grad=True,
        meta=str(number).encode(),
    )


def number_of(batch: StreamedBatch) -> int:
    return int(batch.labels[0].array[0, 0])


class Background:
    """Runs a function in a thread; ``result`` waits, and raises what it raised."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.is_done = threading.Event()
        self._future: Future[Any] = Future()
        self._future.add_done_callback(lambda _: self.is_done.set())
        self._thread = threading.Thread(target=self._run, args=(function,), daemon=True)
        self._thread.start()

    def _run(self, function: Callable[[], Any]) -> None:
        try:
            self._future.set_result(function())
        except BaseException as exc:
            self._future.set_exception(exc)

    def result(self) -> Any:
        self._thread.join(PATIENCE_S)  # so that it is gone for who counts threads
        return self._future.result(0.0)
