"""A trace is read as torch.profiler writes it: streams, overlap, and who waited."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.gpu.devices import Trace, read_trace, resident_bytes

USER, WORKER = 11, 12  # threads
DENSE, UP, DOWN = 7, 13, 17  # streams


def event(cat: str, name: str, ts: float, dur: float, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": USER, **more}


EVENTS = [
    {"ph": "M", "name": "process_name"},
    event("user_annotation", "step", 100, 100),
    event("kernel", "gemm", 100, 50, args={"stream": DENSE}),
    event("kernel", "relu", 150, 30, args={"stream": DENSE}),
    event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 120, 40, args={"stream": UP}),
    event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 170, 20, args={"stream": DOWN}),
    event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 170, 20, args={"stream": DENSE}),
    event("cuda_runtime", "cudaLaunchKernel", 101, 2),
    event("cuda_runtime", "cudaStreamSynchronize", 90, 5),  # before the step
    event("cuda_runtime", "cudaEventSynchronize", 110, 80, tid=WORKER),
]


def written(tmp_path: Path, events: list[dict[str, Any]]) -> Trace:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return read_trace(path)


def test_a_trace_has_streams_overlap_and_waits(tmp_path: Path) -> None:
    trace = written(tmp_path, EVENTS)
    assert trace.streams(trace.kernels) == {DENSE}
    assert trace.streams(trace.copies) == {UP, DOWN}
    up, down = trace.copies
    assert trace.hidden([up]) == 1.0
    assert trace.hidden([down]) == 0.5
    assert trace.hidden([]) == 0.0
    assert trace.waits("step") == []
    waiting = event("cuda_runtime", "cudaStreamSynchronize", 199, 5)
    assert written(tmp_path, [*EVENTS, waiting]).waits("step") == ["cudaStreamSynchronize"]


def test_a_trace_of_the_profiler_is_read(tmp_path: Path) -> None:
    with torch.profiler.profile() as profile, torch.profiler.record_function("step"):
        torch.ones(3).sum()
    profile.export_chrome_trace(str(tmp_path / "own.json"))
    trace = read_trace(tmp_path / "own.json")
    assert [mark.name for mark in trace.marks] == ["step"]
    assert trace.waits("step") == []


def test_resident_bytes_are_this_process_s() -> None:
    before = resident_bytes()
    kept = bytearray(64 << 20)
    assert resident_bytes() - before > len(kept) // 2
