"""What both protocols answer to an error, and how a frontend waits for a job."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any, NamedTuple

from persia._serving.batcher import InferJob
from persia._serving.service import InferenceService
from persia.errors import (
    ConfigError,
    DataError,
    NotAllowed,
    PersiaError,
    ProtocolError,
    ServiceBusy,
    ServiceTimeout,
    ServiceUnavailable,
)

NAME = "persia"
EXTENSIONS = ("binary_tensor_data", "model_repository", "statistics")


class Status(NamedTuple):
    """An error as HTTP and gRPC say it."""

    http: int
    grpc: str  # name of a grpc.StatusCode
    message: str


_BY_CLASS: tuple[tuple[type[BaseException], int, str], ...] = (
    (NotAllowed, 403, "PERMISSION_DENIED"),
    (ServiceTimeout, 504, "DEADLINE_EXCEEDED"),
    (ServiceBusy, 429, "RESOURCE_EXHAUSTED"),
    (ServiceUnavailable, 503, "UNAVAILABLE"),
    (DataError, 400, "INVALID_ARGUMENT"),
    (ProtocolError, 400, "INVALID_ARGUMENT"),
    (ConfigError, 400, "INVALID_ARGUMENT"),
)


def status_of(error: BaseException) -> Status:
    """Return what is answered; of an error that is none of ours only its first line."""
    text = str(error)
    for kind, http, grpc in _BY_CLASS:
        if isinstance(error, kind):
            return Status(http, grpc, text)
    if isinstance(error, PersiaError):
        if isinstance(error, LookupError):
            return Status(404, "NOT_FOUND", text)
        return Status(500, "INTERNAL", text)
    first = (text.splitlines() or [""])[0][:500]
    return Status(500, "INTERNAL", f"the model failed: {type(error).__name__}: {first}")


async def answer_of(service: InferenceService, job: InferJob) -> Any:
    """Queue a job made by ``new_notify`` and wait for its answer until its deadline.

    Raises what the job raised. A caller that has gone cancels the job, if it has not begun.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def set_done() -> None:
        if not done.done():
            done.set_result(None)

    def notify(job: InferJob) -> None:
        # The loop may have ended before a model returned: then there is no caller any more.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(set_done)

    job.notify = notify
    service.submit(job)
    timer = loop.call_later(max(0.0, job.deadline - time.monotonic()), set_done)
    try:
        await done
    except asyncio.CancelledError:
        job.is_cancelled = True
        raise
    finally:
        timer.cancel()
    if job.error is not None:
        raise job.error
    if job.answer is None:
        job.is_cancelled = True
        job.check_deadline()  # raises
    return job.answer


def ignore_answer(job: InferJob) -> None:
    """Be a job's ``notify`` until ``answer_of`` sets its own."""
