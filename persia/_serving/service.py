"""Scoring of requests, whichever protocol they came by.

    frontend: whole message -> InferJob -> ModelThreads -> decode -> join -> model -> encode

The event loop of a frontend only moves bytes; all else happens in the model threads.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from persia._metrics.registry import Sample
from persia._serving.batcher import (
    InferJob,
    ModelThreads,
    batch_shape,
    join_inputs,
    split_outputs,
)
from persia._serving.request import DecodedRequest, InferOutcome
from persia._serving.servable import Servable
from persia._serving.serving_metrics import (
    STAGES,
    ServingStatistics,
    row_samples,
    version_samples,
)
from persia._serving.tracing import record_span
from persia.errors import DataError, InternalError, PersiaError, ServiceBusy, ServiceTimeout

_logger = logging.getLogger(__name__)

Arrays = Mapping[str, NDArray[Any]]
# Seconds between two lines of slow requests.
_SLOW_EVERY_S = 1.0


class ModelSource(Protocol):
    """The models that a server has; of ``persia._serving.versions``."""

    def use(
        self, model: str, version: int | str | None = None
    ) -> AbstractContextManager[Servable]: ...
    def models(self) -> list[str]: ...
    def versions(self, model: str) -> list[int]: ...
    def metadata(self, model: str, version: int | str | None = None) -> Mapping[str, Any]: ...
    def is_ready(self, model: str | None = None, version: int | str | None = None) -> bool: ...
    def index(self, *, ready: bool = False) -> Sequence[Any]: ...
    def load(self, model: str, timeout_s: float = 600.0) -> None: ...
    def unload(self, model: str, timeout_s: float = 30.0) -> None: ...


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """How requests are queued, joined and reported."""

    num_threads: int = 1
    max_batch_size: int = 1024  # rows of joined requests
    max_waiting: int = 1024
    max_waiting_bytes: int = 256 << 20
    timeout_s: float = 30.0  # of a request that names no deadline
    slow_s: float = 1.0


class InferenceService:
    """Models behind a queue; frontends submit jobs, and ask for metadata and statistics.

    Args:
        record: Called with the model and the inputs of every answered request.
    """

    def __init__(
        self,
        repository: ModelSource,
        settings: ServiceSettings,
        *,
        record: Callable[[str, Arrays], None] | None = None,
    ) -> None:
        self.repository = repository
        self.settings = settings
        self.statistics = ServingStatistics()
        self.is_draining = False
        self._record = record
        self._slow_logged_at = -_SLOW_EVERY_S
        self._num_slow = 0
        # Versions that were found not to have one output row for each input row.
        self._never_joined: set[tuple[str, str]] = set()
        self._threads = ModelThreads(
            self._serve,
            num_threads=settings.num_threads,
            max_waiting=settings.max_waiting,
            max_waiting_bytes=settings.max_waiting_bytes,
        )

    @property
    def is_ready(self) -> bool:
        """Whether every model has a version, and no end has been asked for."""
        return not self.is_draining and self.repository.is_ready()

    def submit(self, job: InferJob) -> None:
        """Queue a job; see ``ModelThreads.submit``."""
        try:
            self._threads.submit(job)
        except ServiceBusy:
            self.statistics.add_refused("busy")
            raise

    def drain(self, timeout_s: float) -> bool:
        """Stop to be ready and wait for the requests in flight; False if they take longer."""
        self.is_draining = True
        return self._threads.drain(timeout_s)

    def close(self, timeout_s: float) -> bool:
        """End the threads; False if a model does not return."""
        self.is_draining = True
        return self._threads.close(timeout_s)

    def samples(self) -> Iterable[Sample]:
        """Return the samples of /metrics."""
        lines = self.repository.index()
        yield Sample("persia_serving_in_flight", self._threads.num_in_flight)
        yield from self.statistics.samples()
        yield from version_samples(lines)
        for line in lines:
            if line.state == "READY":
                # It may be gone in the meantime.
                with (
                    contextlib.suppress(PersiaError),
                    self.repository.use(line.model, line.version) as model,
                ):
                    labels = {"model": line.model, "version": str(line.version)}
                    yield from row_samples(labels, getattr(model, "stats", dict)())

    def read_statistics(self, model: str = "", version: str = "") -> list[dict[str, Any]]:
        """Return the statistics of the versions that are ready."""
        found = []
        for name in [model] if model else self.repository.models():
            ready = [str(one) for one in self.repository.versions(name)]
            if version:
                self.repository.metadata(name, version)  # raises if there is none
                ready = [version]
            found += [self.statistics.read(name, one) for one in ready]
        return found

    def _serve(self, job: InferJob) -> None:
        if job.request is None and not self._start(job):
            return
        if not self._threads.enter(job, self._num_spare()):
            return
        model_name = job.model
        try:
            self._serve_entered(job)
        finally:
            self._threads.leave(model_name)

    def _num_spare(self) -> int:
        """Threads that one model leaves to the others."""
        num_threads = self.settings.num_threads
        return int(num_threads > 1 and len(self.repository.models()) > 1)

    def _serve_entered(self, job: InferJob) -> None:
        jobs = [job]
        try:
            with self.repository.use(job.model, job.version or None) as model:
                if model.is_batch_independent:
                    jobs += self._take_alike(job, str(model.version))
                self._score(model, jobs)
        except BaseException as error:
            for one in jobs:
                if one.answer is None and one.error is None:
                    self._fail(one, error)

    def _start(self, job: InferJob) -> bool:
        """Decode a job that was taken; False if it has been answered with an error."""
        job.times[1] = time.perf_counter_ns()
        try:
            job.check_deadline()
            job.request = request = job.decode(job)
            timeout_us = request.parameters.get("timeout")
            if timeout_us is not None:
                if type(timeout_us) is not int or timeout_us < 0:
                    raise DataError(
                        f"parameter timeout: expected microseconds, got {timeout_us!r}"
                    )
                arrived = time.monotonic() - (time.perf_counter_ns() - job.times[0]) / 1e9
                if timeout_us:
                    job.deadline = min(job.deadline, arrived + timeout_us / 1e6)
                job.check_deadline()
        except BaseException as error:
            self._fail(job, error)
            return False
        job.times[2] = time.perf_counter_ns()
        return True

    def _take_alike(self, first: InferJob, version: str) -> list[InferJob]:
        """Take what waits and can be joined, in the order of arrival, up to the batch size."""
        if not self._threads.num_waiting or (first.model, version) in self._never_joined:
            return []
        shape = batch_shape(_request_of(first))
        if shape is None:
            return []
        taken: list[InferJob] = []
        num_rows = shape.num_rows
        while num_rows < self.settings.max_batch_size:
            other = self._threads.take_waiting(first.model)
            if other is None:
                break
            if other.request is None and not self._start(other):
                continue
            try:
                theirs = batch_shape(_request_of(other))
            except BaseException as error:  # those that were taken go on
                self._fail(other, error)
                continue
            if (
                theirs is None
                or (other.model, other.version) != (first.model, first.version)
                or theirs.signature != shape.signature
                or num_rows + theirs.num_rows > self.settings.max_batch_size
            ):
                self._threads.put_back(other)
                break
            taken.append(other)
            num_rows += theirs.num_rows
        return taken

    def _score(self, model: Servable, jobs: list[InferJob]) -> None:
        for job in jobs:
            job.served_by = str(model.version)
        if len(jobs) > 1 and self._score_joined(model, jobs):
            return
        for job in jobs:
            try:
                job.check_deadline()
                request = _request_of(job)
                if request.read_raw is not None:
                    request.inputs = request.read_raw(model.metadata())
                started = time.perf_counter_ns()
                outputs = model(request.inputs)
                _note_scored([job], model, started)
                self._count(job, model, started, _num_rows(request))
                self._finish(job, model, outputs)
            except BaseException as error:
                self._fail(job, error)

    def _score_joined(self, model: Servable, jobs: list[InferJob]) -> bool:
        """Score jobs by one call; False if each has to be scored alone, for its own error."""
        many = [_request_of(job).inputs for job in jobs]
        sizes = [_num_rows(_request_of(job)) for job in jobs]
        try:
            for job in jobs:
                job.check_deadline()
            inputs = join_inputs(many, sizes)
            started = time.perf_counter_ns()
            outputs = model(inputs)
            _note_scored(jobs, model, started)
        except Exception:
            return False
        parts = split_outputs(outputs, sizes)
        if parts is None:
            self._never_joined.add((jobs[0].model, str(model.version)))
            return False
        self._count(jobs[0], model, started, sum(sizes))
        for job, part in zip(jobs, parts, strict=True):
            try:
                self._finish(job, model, part)
            except BaseException as error:
                self._fail(job, error)
        return True

    def _count(self, job: InferJob, model: Servable, started: int, num_rows: int) -> None:
        spent = time.perf_counter_ns() - started
        self.statistics.of(job.model, str(model.version)).add_execution(num_rows, spent)

    def _finish(self, job: InferJob, model: Servable, outputs: Arrays) -> None:
        request = _request_of(job)
        if request.outputs:
            unknown = [one.name for one in request.outputs if one.name not in outputs]
            if unknown:
                raise DataError(
                    f"model {job.model!r}: expected outputs of {', '.join(outputs)}, got "
                    f"unexpected inference output {unknown[0]!r}"
                )
            chosen = [(name, outputs[name], binary) for name, binary in request.outputs]
        else:
            chosen = [(name, values, request.is_binary) for name, values in outputs.items()]
        answer = job.encode(InferOutcome(job.model, job.served_by, request.id, chosen))
        job.times[5] = time.perf_counter_ns()
        self._threads.mark_finished()
        job.answer = answer
        job.notify(job)
        statistics = self.statistics.of(job.model, job.served_by)
        statistics.add_answer(job.times)
        self._report(job)
        if self._record is not None:
            self._record(job.model, request.inputs)

    def _fail(self, job: InferJob, error: BaseException) -> None:
        if job.answer is not None or job.error is not None:
            _logger.error("after the answer to a request of %s: %r", job.model, error)
            return
        spent = time.perf_counter_ns() - job.times[0]
        if isinstance(error, ServiceTimeout):
            self.statistics.add_refused("deadline")
        if job.served_by:
            self.statistics.of(job.model, job.served_by).add_failure(spent)
        if not isinstance(error, PersiaError):
            _logger.error("model %s failed", job.model, exc_info=error)
        self._threads.mark_finished()
        job.error = error
        job.notify(job)
        record_span(job)

    def _report(self, job: InferJob) -> None:
        record_span(job)
        seconds = (job.times[5] - job.times[0]) / 1e9
        if seconds < self.settings.slow_s:
            return
        self._num_slow += 1
        now = time.monotonic()
        if now - self._slow_logged_at < _SLOW_EVERY_S:
            return
        num_more, self._num_slow, self._slow_logged_at = self._num_slow - 1, 0, now
        stages = ", ".join(
            f"{stage} {(end - start) / 1e6:.1f}"
            for stage, start, end in zip(STAGES, job.times, job.times[1:], strict=False)
        )
        _logger.warning(
            "slow request %r of model %s version %s, %d rows: %.1f ms (%s)%s",
            *(_request_of(job).id, job.model, job.served_by, _num_rows(_request_of(job))),
            *(seconds * 1e3, stages, f", and {num_more} more" if num_more else ""),
        )


def _request_of(job: InferJob) -> DecodedRequest:
    if job.request is None:
        raise InternalError("a request is scored before it was decoded")
    return job.request


def _note_scored(jobs: Sequence[InferJob], model: Servable, started: int) -> None:
    """Note the end of a call; what was neither lookup nor forward is of the stage before."""
    ended = time.perf_counter_ns()
    lookup, forward = getattr(model, "spent_ns", (0, ended - started))
    for job in jobs:
        job.times[2:5] = ended - forward - lookup, ended - forward, ended


def _num_rows(request: DecodedRequest) -> int:
    """Rows of a request, for statistics, and of one that is joined."""
    inputs = request.inputs
    num_rows = 1
    for name, values in inputs.items():
        if values.ndim == 0 or len(values) <= num_rows:
            continue
        base, _, kind = name.rpartition(".")
        if kind not in ("values", "weights") or f"{base}.offsets" not in inputs:
            num_rows = max(num_rows, len(values) - (kind == "offsets"))
    return num_rows
