"""Kernels in C, and what compiles and loads them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from persia._build import kernel_library

FOLDER = Path(__file__).parent


def library(name: str, *flags: str) -> Path:
    """Return the compiled library of a source beside this file; skip without a compiler."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    flags = (*kernel_library.CFLAGS, *flags)
    return kernel_library.compile_kernels(FOLDER / f"{name}.c", name, cflags=flags)


def load(name: str, *flags: str) -> str:
    """Return how optimizers name the library, which is loaded."""
    return kernel_library.load_file(library(name, *flags), name)
