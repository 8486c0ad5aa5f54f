"""Spans of requests by the OpenTelemetry API, if it is installed and the caller sent one."""

from __future__ import annotations

import functools
import importlib
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from persia._serving.batcher import InferJob


_EVENTS = ("started", "decoded", "looked up", "scored", "encoded")


@functools.cache
def _tracer() -> tuple[Any, Any, Any] | None:
    """Return the module ``trace``, a tracer and a propagator; None without the API."""
    try:
        trace = importlib.import_module("opentelemetry.trace")
        w3c = importlib.import_module("opentelemetry.trace.propagation.tracecontext")
    except ImportError:
        return None
    return trace, trace.get_tracer("persia"), w3c.TraceContextTextMapPropagator()


def record_span(job: InferJob) -> None:
    """Record an answered or failed job as a child of the caller's span."""
    if not job.traceparent:
        return
    found = _tracer()
    if found is None:
        return
    trace, tracer, propagator = found
    # Stages were taken by another clock than spans have.
    offset = time.time_ns() - time.perf_counter_ns()
    parent = propagator.extract({"traceparent": job.traceparent})
    attributes = {"persia.model": job.model, "persia.version": job.served_by}
    span = tracer.start_span(
        "persia.infer",
        context=parent,
        kind=trace.SpanKind.SERVER,
        start_time=job.times[0] + offset,
        attributes=attributes,
    )
    for stage, at in zip(
        ("started", "decoded", "looked up", "scored", "encoded"), job.times[1:], strict=True
    ):
        if at:
            span.add_event(stage, timestamp=at + offset)
    if job.error is not None:
        span.record_exception(job.error)
        span.set_status(trace.Status(trace.StatusCode.ERROR))
    span.end()
