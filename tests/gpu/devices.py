"""A device of a test, CUDA or CPU, and what a trace of torch.profiler says of it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
# The same test on both, so that what is tried on a CPU is all of it but the CUDA calls.
ON_EACH = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, needs_cuda])]
)


def number_of(device: str) -> int | None:
    """Return what ``device_id`` takes."""
    return 0 if device == "cuda" else None


def wait_for(device: str) -> None:
    """Wait until the device has done all that it was given."""
    if device == "cuda":
        torch.cuda.synchronize()


@contextlib.contextmanager
def without_waiting(device: str) -> Iterator[None]:
    """Have torch raise where a call waits for the device."""
    if device == "cpu":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def resident_bytes() -> int:
    """Return the memory of this process in the host."""
    fields = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return int(fields[1]) * 4096


# --- traces -----------------------------------------------------------------------------------

# Runtime calls that stop the thread which makes them until the device has come so far.
WAITS = frozenset(
    (
        "cudaDeviceSynchronize",
        "cudaStreamSynchronize",
        "cudaEventSynchronize",
        "cudaMemcpy",
        "cudaMalloc",
        "cudaFree",
        "cudaHostAlloc",
        "cudaFreeHost",
    )
)


@dataclass(frozen=True)
class Span:
    """Something that took time, in microseconds; ``lane`` is a stream, or a thread."""

    name: str
    lane: int
    begin: float
    end: float

    def overlaps(self, other: Span) -> bool:
        return self.begin < other.end and other.begin < self.end


@dataclass(frozen=True)
class Trace:
    """What ran on the device, and the runtime calls of each thread."""

    kernels: list[Span]
    copies: list[Span]  # between host and device
    calls: list[Span]
    marks: list[Span]  # of ``torch.profiler.record_function``

    def waits(self, mark: str) -> list[str]:
        """Return the calls that waited, of threads and times that have this mark."""
        marked = [span for span in self.marks if span.name == mark]
        return [
            call.name
            for call in self.calls
            if call.name in WAITS
            and any(span.lane == call.lane and span.overlaps(call) for span in marked)
        ]

    def streams(self, spans: list[Span]) -> set[int]:
        return {span.lane for span in spans}

    def hidden(self, copies: list[Span]) -> float:
        """Return the part of the copies' time in which a kernel ran beside them, 0 to 1."""
        total = sum(copy.end - copy.begin for copy in copies)
        kernels = sorted(self.kernels, key=lambda span: span.begin)
        beside = 0.0
        for copy in copies:
            reached = copy.begin
            for kernel in kernels:
                begin, end = max(kernel.begin, reached), min(kernel.end, copy.end)
                if end > begin:
                    beside += end - begin
                    reached = end
        return beside / total if total else 0.0


_KINDS = ("kernel", "gpu_memcpy", "cuda_runtime", "cuda_driver", "user_annotation")


def read_trace(path: Path) -> Trace:
    """Read a file of ``torch.profiler.profile.export_chrome_trace``."""
    found = Trace([], [], [], [])
    for event in json.loads(path.read_text(encoding="utf-8"))["traceEvents"]:
        if event.get("ph") != "X":
            continue
        kind = event.get("cat", "")
        if kind not in _KINDS:
            continue
        lane = _lane(event, kind)
        span = Span(event["name"], lane, event["ts"], event["ts"] + event.get("dur", 0))
        if kind == "kernel":
            found.kernels.append(span)
        elif kind == "gpu_memcpy" and "DtoD" not in span.name:
            found.copies.append(span)
        elif kind in ("cuda_runtime", "cuda_driver"):
            found.calls.append(span)
        elif kind == "user_annotation":
            found.marks.append(span)
    return found


def _lane(event: dict[str, Any], kind: str) -> int:
    on_device = kind in ("kernel", "gpu_memcpy")
    return int(event["args"]["stream"] if on_device else event["tid"])
