"""A real Triton, of ``make triton``, with models written by ``write_triton``."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
import torch

from persia._serving.triton import write_triton
from tests.serving.conformance.models import MODELS
from tests.support.processes import ROOT
from tests.support.waiting import until

TRITON = Path(os.environ.get("TRITON", ROOT / "build" / "triton"))


@dataclass(frozen=True)
class Host:
    """Where a server answers, as ``host:port``."""

    name: str
    http: str
    grpc: str
    # Sent with index, load and unload.
    control: Mapping[str, str] = field(default_factory=dict)


def why_no_triton() -> str:
    """Say what is missing; empty where Triton is there."""
    binary = TRITON / "pytriton" / "tritonserver" / "bin" / "tritonserver"
    return "" if os.access(binary, os.X_OK) else f"{binary} is missing: make triton"


def python_path() -> list[Path]:
    """Folders for Triton's Python: numpy 1 first, because its stubs cannot read numpy 2."""
    packages = {Path(module.__path__[0]).parent for module in (np, torch)}
    return [TRITON / "numpy1", *sorted(packages), ROOT]


def write_models(repository: Path) -> None:
    for model, versions in MODELS:
        for version in versions:
            about = model(repository / model.name / str(version)).metadata()
            factory = f"{model.__module__}:{model.__name__}"
            write_triton(
                repository, about, version=version, factory=factory, python_path=python_path()
            )


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@contextmanager
def triton_server(repository: Path, log: Path, *models: str) -> Iterator[Host]:
    """Serve the repository's models until the end."""
    folder = TRITON / "pytriton" / "tritonserver"
    http, grpc = free_ports(2)
    command = [
        *(str(folder / "bin" / "tritonserver"), f"--model-repository={repository}"),
        *(f"--backend-directory={folder / 'backends'}", "--model-control-mode=explicit"),
        *("--http-address=127.0.0.1", f"--http-port={http}", "--allow-metrics=false"),
        *("--grpc-address=127.0.0.1", f"--grpc-port={grpc}", "--exit-timeout-secs=5"),
        *(f"--load-model={name}" for name in models),
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)

    def is_ready() -> bool:
        if process.poll() is not None:
            raise AssertionError(f"tritonserver ended:\n{log.read_text()}")
        try:
            return httpx.get(f"http://127.0.0.1:{http}/v2/health/ready").is_success
        except httpx.TransportError:
            return False

    try:
        until(is_ready, details=log.read_text)
        yield Host("triton", f"127.0.0.1:{http}", f"127.0.0.1:{grpc}")
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(20)
