"""The installation, and the machine that it is on."""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from persia import _core, _rpc, env
from persia._cli.checks.findings import Finding, error, ok, warning
from persia._core.base import cpu
from persia.errors import ConfigError
from persia.utils import total_memory_bytes
from persia.version import __version__

# Seconds that PyTorch gets to load; it takes a few on a quiet machine.
_TORCH_S = 120.0
_TORCH = (
    "import torch; print(torch.__version__, torch.version.cuda or '-', "
    "torch.cuda.device_count() if torch.cuda.is_available() else 0)"
)
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def check_machine(*, huge_pages: Path = _HUGE_PAGES) -> Iterator[Finding]:
    """Yield what is found of the build, the processor, PyTorch and huge pages."""
    yield _build()
    yield _kernels()
    yield _torch()
    yield _pages(huge_pages)
    gib = total_memory_bytes() / 2**30
    yield ok("memory", f"{gib:.1f} GiB that a process here may use")


def _build() -> Finding:
    suffixes = tuple(importlib.machinery.EXTENSION_SUFFIXES)
    num_loaded = 0
    for package in (_core, _rpc):
        for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            spec = found.module_finder.find_spec(found.name, None)
            if spec is None or not (spec.origin or "").endswith(suffixes):
                continue
            try:
                importlib.import_module(found.name)
            except ImportError as exc:
                return error("build", f"{found.name}: {exc}", "build again: pip install .")
            num_loaded += 1
    version = ".".join(map(str, sys.version_info[:3]))
    text = f"PERSIA {__version__} on Python {version}, {num_loaded} compiled modules load"
    return ok("build", text)


def _kernels() -> Finding:
    here = ", ".join(cpu.available())
    asked = env.isa()
    if asked is not None:
        try:
            cpu.select(asked)
        except ConfigError as exc:
            return error(
                "processor", f"PERSIA_ISA: {exc}", "unset PERSIA_ISA, or name one of these"
            )
    num = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    text = f"{num} processors; kernels for {cpu.selected()} ({here} run here)"
    if asked is not None and cpu.selected() != cpu.available()[-1]:
        return warning(
            "processor", text, "unset PERSIA_ISA: the results are the same, and faster"
        )
    return ok("processor", text)


def _torch() -> Finding:
    """Ask a process of its own: nothing here loads PyTorch."""
    try:
        ran = subprocess.run(
            [sys.executable, "-c", _TORCH],
            capture_output=True,
            text=True,
            check=False,
            timeout=_TORCH_S,
        )
    except subprocess.TimeoutExpired:
        return warning(
            "torch", f"did not load within {_TORCH_S:g} s", "is the machine, or its disk, busy?"
        )
    if ran.returncode:
        why = (ran.stderr.strip().splitlines() or ["it does not load"])[-1]
        return warning(
            "torch",
            f"cannot be used: {why}",
            "pip install torch; nn-workers need it, others do not",
        )
    version, cuda, num = ran.stdout.split()[-3:]
    devices = f"{num} CUDA devices" if int(num) else "no CUDA device, trains on the processor"
    built = "" if cuda == "-" else f", built for CUDA {cuda}"
    return ok("torch", f"{version}{built}; {devices}")


def _pages(place: Path) -> Finding:
    try:
        text = place.read_text().strip()
    except OSError:
        return ok("huge pages", "this system does not say; rows are on pages of the usual size")
    chosen = text.partition("[")[2].partition("]")[0]
    if chosen == "never":
        return warning(
            "huge pages",
            f"{place}: never; large tables miss the processor's page cache more often",
            f"echo madvise | sudo tee {place}",
        )
    return ok("huge pages", f"{chosen}: rows are on huge pages where the kernel has some")
