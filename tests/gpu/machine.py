"""What ``make gpu`` runs on, what it needs there, and what it carries along.

A machine with a GPU may have no network. It needs Python, torch with CUDA, and either compiled
extensions in the tree or a compiler with Cython; the other packages may lie in a folder.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
# Beside what persia itself requires: what its tests import.
TESTED_WITH = ("pytest", "pytest-timeout", "hypothesis")
BUILT_WITH = ("cython", "numpy", "setuptools")
# Of every machine with torch; they are too large to be carried.
NOT_CARRIED = frozenset(("torch", "numpy"))


def required() -> list[str]:
    """Return the names of the packages that persia and these tests import."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = text.partition("dependencies = [")[2].partition("\n]")[0]
    return [*re.findall(r'^ *"([A-Za-z0-9_.-]+)', listed, re.MULTILINE), *TESTED_WITH]


def missing(names: Iterable[str]) -> list[str]:
    """Return those that are not installed."""
    found = []
    for name in names:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found.append(name)
    return found


def not_compiled() -> list[str]:
    """Return the extensions that this Python cannot load from the tree."""
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    sources = sorted((ROOT / "persia").rglob("*.pyx"))
    return [
        str(path.relative_to(ROOT))
        for path in sources
        if not path.with_name(path.stem + suffix).exists()
    ]


def closure(names: Iterable[str]) -> Iterator[importlib.metadata.Distribution]:
    """Yield the distributions of these names and of what they require here."""
    seen: set[str] = set(NOT_CARRIED)
    waiting = list(names)
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in seen:
            continue
        seen.add(name)
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # of another platform, or an extra
        yield distribution
        for requirement in distribution.requires or ():
            if "extra ==" not in requirement:
                waiting.append(re.split(r"[\s;<>=!~\[(]", requirement, maxsplit=1)[0])


def carry(folder: Path) -> int:
    """Copy the installed packages but torch and numpy into a folder; return its bytes."""
    shutil.rmtree(folder, ignore_errors=True)
    num_bytes = 0
    for distribution in closure(required()):
        for file in distribution.files or ():
            if ".." in file.parts or "__pycache__" in file.parts:
                continue
            source, target = Path(str(file.locate())), folder / str(file)
            if source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)
                num_bytes += target.stat().st_size
    return num_bytes


def problems() -> list[str]:
    """Return what is missing for ``make gpu``, by name; extensions can still be compiled."""
    found = []
    if absent := missing(required()):
        found.append(
            f"packages that are not installed: {', '.join(absent)}; `make gpu-site` on a "
            "machine that has them copies them into build/gpu/site"
        )
    if not_compiled():
        absent = missing(BUILT_WITH)
        compiler = os.environ.get("CC", "cc").split()[0]
        if shutil.which(compiler) is None:
            absent.append(f"a C compiler ({compiler})")
        if absent:
            found.append(
                f"extensions that are not compiled: {len(not_compiled())}, the first is "
                f"{not_compiled()[0]}; to compile them, {', '.join(absent)} would be needed"
            )
    return found


def described() -> list[str]:
    """Return the machine and its versions, one fact a line."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = re.findall(r"model name\s*: (.*)", info.read_text(encoding="utf-8"))
        cpu = models[0] if models else cpu
    lines = [
        f"CPU: {cpu}, {len(os.sched_getaffinity(0))} cores",
        f"Python {sys.version.split()[0]}, torch {torch.__version__}, "
        f"kernel {platform.release()}",
    ]
    if torch.cuda.is_available():
        of = torch.cuda.get_device_properties(0)
        lines.insert(0, f"GPU: {of.name}, {of.total_memory / 2**30:.0f} GiB")
        lines.append(f"CUDA {torch.version.cuda}, NCCL {torch.cuda.nccl.version()}")  # type: ignore[no-untyped-call]
    return lines
