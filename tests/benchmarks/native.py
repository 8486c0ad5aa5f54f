"""C of the benchmarks: compiled for this machine when it is first asked for."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path

BUILT = Path("build") / "benchmarks"
FLAGS = ("-std=gnu11", "-O3", "-fno-math-errno", "-shared", "-fPIC", "-pthread")


def compiler() -> list[str] | None:
    """Return the command of the C compiler, or None where there is none."""
    words = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    for command in (words, ["cc"], ["gcc"], ["clang"]):
        if shutil.which(command[0]) is not None:
            return command
    return None


def load(source: Path, flags: Sequence[str] = ()) -> ctypes.CDLL:
    """Compile a file of C where it or its flags have changed, and load it.

    Raises:
        RuntimeError: If there is no C compiler here.
    """
    command = compiler()
    if command is None:
        raise RuntimeError(f"{source.name} is compiled when it is used: no C compiler here")
    options = [*command, *FLAGS, *flags]
    key = hashlib.sha256(source.read_bytes() + repr(options).encode()).hexdigest()[:16]
    built = BUILT / f"{source.stem}-{key}.so"
    if not built.exists():
        built.parent.mkdir(parents=True, exist_ok=True)
        fresh = built.with_suffix(f".{os.getpid()}")
        arguments = [*options, "-o", str(fresh), str(source), "-lm"]
        subprocess.run(arguments, check=True, timeout=120)
        fresh.replace(built)
    return ctypes.CDLL(str(built.resolve()))
