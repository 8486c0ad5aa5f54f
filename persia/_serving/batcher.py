"""Threads that score requests, the queue before them, and joining what waits there.

A request never waits for another: joining takes only what is queued already, and a queue exists
only while every thread is busy. Joined are requests of one model and version whose inputs have
the same names, dtypes and shapes behind the first dimension.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from persia._core.base.threads import prefer_thread
from persia._serving.request import DecodedRequest, InferOutcome
from persia.errors import InternalError, ServiceBusy, ServiceTimeout, ServiceUnavailable

_logger = logging.getLogger(__name__)

Arrays = Mapping[str, NDArray[Any]]
# Elements of an input of one row, repeated for the others of its request, up to which it is
# joined: alone it is not repeated.
_MOST_REPEATED = 1 << 20


@dataclass(slots=True, eq=False)
class InferJob:
    """A request on its way; ``decode`` and ``encode`` run in the thread that scores it.

    Attributes:
        decode: Reads the message; sets ``model`` and ``version`` where only it names them.
        encode: Makes the answer of the outcome.
        notify: Called once, in any thread, when ``answer`` or ``error`` is set.
        deadline: ``time.monotonic`` seconds; not begun afterwards.
        num_bytes: Of the message.
    """

    decode: Callable[[InferJob], DecodedRequest]
    encode: Callable[[InferOutcome], Any]
    notify: Callable[[InferJob], None]
    deadline: float
    num_bytes: int
    model: str = ""
    version: str = ""
    traceparent: str = ""
    is_cancelled: bool = False
    request: DecodedRequest | None = None
    served_by: str = ""  # version
    answer: Any = None
    error: BaseException | None = None
    # ``time.perf_counter_ns`` at arrival, start, decoded, looked up, scored, encoded; 0: not
    # reached.
    times: list[int] = field(default_factory=lambda: [time.perf_counter_ns(), 0, 0, 0, 0, 0])

    def check_deadline(self) -> None:
        """Raise ``ServiceTimeout`` if the caller has stopped waiting."""
        if self.is_cancelled or time.monotonic() >= self.deadline:
            waited = (time.perf_counter_ns() - self.times[0]) / 1e6
            raise ServiceTimeout(
                f"expected to answer within the deadline, waited {waited:.0f} ms"
            )


class BatchShape(NamedTuple):
    """What two requests must have in common to be joined, and the rows of one."""

    signature: tuple[Any, ...]
    num_rows: int


class ModelThreads:
    """Threads that take jobs from a bounded queue.

    Args:
        serve: Finishes the job, and those that it takes by ``take_waiting``.
        max_waiting: Jobs in the queue; beyond it ``ServiceBusy``.
        max_waiting_bytes: Bytes of their messages.
    """

    def __init__(
        self,
        serve: Callable[[InferJob], None],
        *,
        num_threads: int,
        max_waiting: int = 1024,
        max_waiting_bytes: int = 256 << 20,
    ) -> None:
        self._serve = serve
        self._max_waiting, self._max_waiting_bytes = max_waiting, max_waiting_bytes
        lock = threading.Lock()  # guards all below
        # Threads wait for the first. What is notified there wakes one of them, so that who
        # waits for the end has a condition of its own.
        self._changed, self._ended = threading.Condition(lock), threading.Condition(lock)
        self._waiting: deque[InferJob] = deque()
        self._waiting_bytes = 0
        self._num_idle = 0
        self._num_taken = 0
        # By model: threads that score for it, and jobs that wait until it has fewer.
        self._threads_of: Counter[str] = Counter()
        self._held: dict[str, deque[InferJob]] = {}
        self._num_held = 0
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"persia-model-{number}", daemon=True)
            for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_waiting(self) -> int:
        """Jobs in the queue now."""
        return len(self._waiting) + self._num_held

    @property
    def num_in_flight(self) -> int:
        """Jobs in the queue and in threads now."""
        with self._changed:
            return len(self._waiting) + self._num_held + self._num_taken

    def submit(self, job: InferJob) -> None:
        """Queue a job whose message is whole.

        Raises:
            ServiceBusy: The queue is full.
            ServiceUnavailable: It was closed.
        """
        with self._changed:
            if self._is_closed:
                raise ServiceUnavailable("expected a server that takes requests, it is closing")
            num_bytes = self._waiting_bytes + job.num_bytes
            # One that an idle thread takes at once does not wait.
            is_waiting = len(self._waiting) >= self._num_idle
            if is_waiting and (
                self.num_waiting >= self._max_waiting or num_bytes > self._max_waiting_bytes
            ):
                raise ServiceBusy(
                    f"expected at most {self._max_waiting} requests of "
                    f"{self._max_waiting_bytes} bytes in the queue: it is full"
                )
            self._waiting.append(job)
            self._waiting_bytes = num_bytes
            self._changed.notify()

    def enter(self, job: InferJob, num_spare: int) -> bool:
        """Begin to score for the job's model; False: the job waits until it has a thread less.

        Args:
            job: What is scored next.
            num_spare: Threads that are left to other models.
        """
        with self._changed:
            most = max(1, len(self._threads) - num_spare)
            if self._threads_of[job.model] < most or self._is_closed:
                self._threads_of[job.model] += 1
                return True
            job.times[1] -= time.perf_counter_ns()  # what it waits now is time in the queue
            job.times[2] -= time.perf_counter_ns()
            self._held.setdefault(job.model, deque()).append(job)
            self._waiting_bytes += job.num_bytes
            self._num_held += 1
            self._num_taken -= 1
            return False

    def leave(self, model: str) -> None:
        """End what ``enter`` began; one that waits for it is next."""
        with self._changed:
            self._threads_of[model] -= 1
            if not self._threads_of[model]:
                del self._threads_of[model]
            job = self._take_held(model)
            if job is not None:
                self._num_taken -= 1
                self._waiting_bytes += job.num_bytes
                self._waiting.appendleft(job)
                self._changed.notify()

    def take_waiting(self, model: str = "") -> InferJob | None:
        """Take one that waits for the model, else the first of the queue, for a batch.

        None if there is none, or while another thread is idle.
        """
        with self._changed:
            held = self._take_held(model)
            if held is not None:
                return held
            if self._num_idle or not self._waiting:
                return None
            return self._take()

    def put_back(self, job: InferJob) -> None:
        """Make a job that was taken the first of the queue again."""
        with self._changed:
            self._waiting.appendleft(job)
            self._waiting_bytes += job.num_bytes
            self._num_taken -= 1
            self._changed.notify()

    def mark_finished(self) -> None:
        """Count one job that was taken as answered."""
        with self._changed:
            self._num_taken -= 1
            if not self._num_taken and not self.num_waiting:
                self._ended.notify_all()

    def drain(self, timeout_s: float) -> bool:
        """Wait until no job waits or runs; False if that takes longer."""
        with self._ended:
            return self._ended.wait_for(
                lambda: not self.num_waiting and not self._num_taken, timeout_s
            )

    def close(self, timeout_s: float) -> bool:
        """Answer what waits with an error and end the threads; False if one runs on."""
        with self._changed:
            self._is_closed = True
            left = [*self._waiting, *(job for held in self._held.values() for job in held)]
            self._waiting.clear()
            self._held.clear()
            self._num_held = 0
            self._waiting_bytes = 0
            self._changed.notify_all()
            self._ended.notify_all()
        for job in left:
            job.error = ServiceUnavailable("expected an answer, the server has ended")
            job.notify(job)
        end = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _take_held(self, model: str) -> InferJob | None:
        held = self._held.get(model)
        if not held:
            return None
        job = held.popleft()
        if not held:
            del self._held[model]
        job.times[1] += time.perf_counter_ns()
        job.times[2] += time.perf_counter_ns()
        self._waiting_bytes -= job.num_bytes
        self._num_held -= 1
        self._num_taken += 1
        return job

    def _take(self) -> InferJob:
        job = self._waiting.popleft()
        self._waiting_bytes -= job.num_bytes
        self._num_taken += 1
        return job

    def _run(self) -> None:
        prefer_thread()
        while True:
            with self._changed:
                while not self._waiting:
                    if self._is_closed:
                        return
                    self._num_idle += 1
                    self._changed.wait()
                    self._num_idle -= 1
                job = self._take()
            try:
                self._serve(job)
            except BaseException:
                # ``serve`` answers every error itself; this thread must live on all the same.
                _logger.exception("a request was not answered")
                if job.answer is None and job.error is None:
                    job.error = InternalError("expected an answer, see the log of the server")
                    job.notify(job)
                    self.mark_finished()


def batch_shape(request: DecodedRequest) -> BatchShape | None:
    """Return what a request can be joined by; None: it is scored alone.

    Every input has the first dimension B, or 1 for one user beside B candidates. Ragged inputs
    whose offsets are no offsets stay alone: joined, they would move the rows of others. So does
    a user with a long history, which would be repeated, and a body that is read only by the
    model's metadata.
    """
    inputs = request.inputs
    if not inputs or request.read_raw is not None:
        return None
    num_rows, largest = 1, 0  # elements of one row
    parts: list[Any] = []
    for name, values in sorted(inputs.items()):
        base, _, kind = name.rpartition(".")
        is_ragged = bool(base) and f"{base}.offsets" in inputs and f"{base}.values" in inputs
        if kind == "pad" and base in inputs:
            parts.append((name, values.tolist()))
            continue
        if name == "batch" or values.ndim == 0:
            return None
        parts.append((name, values.dtype.str, values.shape[1:]))
        if is_ragged and kind in ("values", "weights"):
            if values.shape != inputs[f"{base}.values"].shape or values.ndim != 1:
                return None
            largest = max(largest, len(values))
            continue
        rows = len(values)
        largest = max(largest, values.size // max(rows, 1))
        if is_ragged and kind == "offsets":
            ids = inputs[f"{base}.values"]
            if ids.ndim != 1 or not _are_offsets(values, len(ids)):
                return None
            rows -= 1
        if rows == 0 or (rows != num_rows and 1 not in (rows, num_rows)):
            return None
        num_rows = max(num_rows, rows)
    if num_rows * largest > _MOST_REPEATED:
        return None
    return BatchShape(tuple(map(repr, parts)), num_rows)


def _are_offsets(offsets: NDArray[Any], num_values: int) -> bool:
    return (
        offsets.ndim == 1
        and offsets.dtype.kind in "iu"
        and len(offsets) >= 1
        and bool(offsets[0] == 0)
        and bool(offsets[-1] == num_values)
        and bool((offsets[1:] >= offsets[:-1]).all())
    )


def join_inputs(many: Sequence[Arrays], sizes: Sequence[int]) -> dict[str, NDArray[Any]]:
    """Return the inputs of several requests with the same signature as one request's.

    Where one row stands for a whole request, it is repeated.
    """
    joined: dict[str, NDArray[Any]] = {}
    for name in many[0]:
        base, _, kind = name.rpartition(".")
        is_ragged = f"{base}.offsets" in many[0] and f"{base}.values" in many[0]
        parts = []
        if kind == "pad" and base in many[0]:
            joined[name] = many[0][name]
        elif is_ragged and kind in ("values", "weights"):
            for inputs, size in zip(many, sizes, strict=True):
                is_repeated = len(inputs[f"{base}.offsets"]) - 1 != size
                parts.append(np.tile(inputs[name], size) if is_repeated else inputs[name])
            joined[name] = np.concatenate(parts)
        elif is_ragged and kind == "offsets":
            for inputs, size in zip(many, sizes, strict=True):
                lengths = np.diff(inputs[name])
                parts.append(np.repeat(lengths, size) if len(lengths) != size else lengths)
            total = np.concatenate(parts)
            joined[name] = np.concatenate([np.zeros(1, total.dtype), np.cumsum(total)]).astype(
                many[0][name].dtype
            )
        else:
            for inputs, size in zip(many, sizes, strict=True):
                values = inputs[name]
                parts.append(np.repeat(values, size, axis=0) if len(values) != size else values)
            joined[name] = np.concatenate(parts)
    return joined


def split_outputs(
    outputs: Arrays, sizes: Sequence[int]
) -> list[dict[str, NDArray[Any]]] | None:
    """Return each request's part; None if an output has not one row for each of the inputs'."""
    total = sum(sizes)
    if any(values.ndim == 0 or len(values) != total for values in outputs.values()):
        return None
    found: list[dict[str, NDArray[Any]]] = []
    start = 0
    for size in sizes:
        found.append({name: one[start : start + size] for name, one in outputs.items()})
        start += size
    return found
