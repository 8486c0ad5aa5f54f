"""Compilers of this machine: where they are, what identifies them, and how they are run."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from persia import env
from persia.errors import ConfigError, ExtensionError

Language = Literal["c", "c++", "cuda"]
LANGUAGES: dict[str, Language] = {
    ".c": "c",
    ".cc": "c++",
    ".cpp": "c++",
    ".cxx": "c++",
    ".cu": "cuda",
}

# Seconds that a build, and the wait for another process's build, may take together.
DEADLINE_S = 1800.0
# What an error shows of a compiler's output.
_NUM_LINES = 40
_WHERE = {
    "c": "CC, or `cc` on PATH (Debian: apt install gcc)",
    "c++": "CXX, or `c++` on PATH (Debian: apt install g++)",
    "cuda": "`bin/nvcc` in CUDA_HOME, or `nvcc` on PATH (the CUDA toolkit)",
}


@dataclass(frozen=True, slots=True)
class Compiler:
    """A compiler's command, and the files behind it: another one compiles otherwise."""

    command: tuple[str, ...]
    identity: str


def default_cflags(portable: bool = False) -> list[str]:
    """Return flags for code that runs on this machine, or ``portable``: on others like it."""
    flags = ["-O3", "-Wall"]
    if not portable:
        # clang for arm64 reads the CPU from -mcpu only.
        is_x86 = platform.machine() in {"x86_64", "AMD64"}
        flags.append("-march=native" if is_x86 else "-mcpu=native")
    return flags


def language_of(source: Path) -> Language:
    """Return the language that a file's suffix stands for; ConfigError if there is none."""
    language = LANGUAGES.get(source.suffix)
    if language is None:
        known = ", ".join(LANGUAGES)
        raise ConfigError(f"source {source} must end with one of {known}")
    return language


def find_compiler(language: Language) -> Compiler | None:
    """Return the compiler of a language, or None where there is none."""
    if language == "cuda":
        home = env.cuda_home()
        folders = [home, Path("/usr/local/cuda")] if home is None else [home]
        found = [folder / "bin" / "nvcc" for folder in folders if folder is not None]
        words = [str(next((path for path in found if path.exists()), "nvcc"))]
    else:
        words = shlex.split(env.c_compiler() if language == "c" else env.cxx_compiler())
    if not words or shutil.which(words[0]) is None:
        return None
    return Compiler(tuple(words), " ".join(_identity(word) for word in words))


def need_compiler(language: Language, name: str) -> Compiler:
    """Return the compiler of a language; ExtensionError if module ``name`` cannot have it."""
    found = find_compiler(language)
    if found is None:
        raise ExtensionError(
            f"{name}: no compiler for {language}; looked for {_WHERE[language]}"
        )
    return found


def _identity(word: str) -> str:
    # Not by `--version`: a start that finds its module compiled runs no process. A program
    # that was replaced has another size or time.
    path = shutil.which(word)
    if path is None:
        return word
    real = Path(path).resolve()
    status = real.stat()
    return f"{real}:{status.st_size}:{status.st_mtime_ns}"


@functools.cache
def cpu() -> str:
    """Return what ``-march=native`` depends on: the CPU's model and its instruction sets."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part", "CPU implementer")
    lines = text.partition("\n\n")[0].splitlines()
    return "\n".join(line for line in lines if line.startswith(wanted))


def cuda_devices() -> str:
    """Return the models of the CUDA devices, for which nvcc compiles, without using them."""
    names = Path("/proc/driver/nvidia/gpus").glob("*/information")
    lines = [line for path in sorted(names) for line in path.read_text().splitlines()]
    return "\n".join(sorted({line for line in lines if line.startswith("Model")}))


def python_abi() -> str:
    """Return the ABI of this interpreter, as file names of its extensions say it."""
    return sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag or "unknown"


def module_file(name: str) -> str:
    """Return the file name of an extension module of this interpreter."""
    return name + (sysconfig.get_config_var("EXT_SUFFIX") or ".so")


def export_flags(symbols: Sequence[str], folder: Path, linker: Language) -> list[str]:
    """Write a list of exported symbols into a folder; return the flags that hide all others."""
    path = write_export_map(symbols, folder)
    if sys.platform == "darwin":
        return [f"-Wl,-exported_symbols_list,{path}"]
    script = f"--version-script={path}"
    return ["-Xlinker", script] if linker == "cuda" else [f"-Wl,{script}"]


def write_export_map(symbols: Sequence[str], folder: Path) -> Path:
    """Write the linker's list of exported symbols; every other symbol becomes local."""
    path = folder / "exports.map"
    if sys.platform == "darwin":
        path.write_text("".join(f"_{symbol}\n" for symbol in symbols), encoding="utf-8")
    else:
        listed = " ".join(f"{symbol};" for symbol in symbols)
        path.write_text(f"{{ global: {listed} local: *; }};\n", encoding="utf-8")
    return path


def run(
    command: Sequence[str],
    *,
    name: str,
    folder: Path,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Run a program in a folder; its output is appended to ``build.log`` there.

    Its standard input is a pipe that is closed when this process ends, so that a program which
    reads it can end too.

    Raises:
        ExtensionError: If it cannot be started, fails, or takes longer than ``timeout_s``
            seconds; it and what it has started are killed then.
    """
    log = folder / "build.log"
    with log.open("ab") as output:
        output.write(f"$ {shlex.join(command)}\n".encode())
        output.flush()
        try:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as exc:
            raise ExtensionError(f"{name}: {command[0]} cannot be started: {exc}") from exc
        with process:
            try:
                status = process.wait(max(timeout_s, 0.0))
            except BaseException as exc:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                if not isinstance(exc, subprocess.TimeoutExpired):
                    raise
                raise ExtensionError(
                    f"{name}: {command[0]} has not ended after {timeout_s:.0f} s:\n"
                    f"{_end_of(log)}"
                ) from None
    if status:
        raise ExtensionError(
            f"{name}: {Path(command[0]).name} ended with status {status}:\n{_end_of(log)}"
        )


def _end_of(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-_NUM_LINES:])
