"""The extension list and the compiler directives; everything else is in pyproject.toml.

Five variables choose another build than the portable one:

    NATIVE=1                 tune for this machine's CPU; the result runs nowhere else
    PERSIA_DEBUG=1           bounds checks, and the invariant walks behind this macro in C
    PERSIA_SANITIZE=a,b      sanitizers by the compiler's names, for example address,undefined
    PERSIA_ANNOTATE=1        Cython's HTML beside each .pyx: a yellow line touches Python
    PERSIA_COMPILED=1        no compiling: `build_ext --inplace` was run, and an editable
                             install, which would compile again elsewhere, takes what it made
"""

import os
import platform
import sys
from pathlib import Path

import Cython
import numpy
from Cython.Build import cythonize
from setuptools import Extension, setup

PACKAGE = Path("persia")
FOLDERS = sorted({path.parent for path in PACKAGE.rglob("*.pyx")})
DEBUG = os.environ.get("PERSIA_DEBUG") == "1"
NATIVE = os.environ.get("NATIVE") == "1"
SANITIZERS = os.environ.get("PERSIA_SANITIZE", "")
ANNOTATE = os.environ.get("PERSIA_ANNOTATE") == "1"
COMPILED = os.environ.get("PERSIA_COMPILED") == "1"
# Commands that take sources as they are: Cython would only leave its C files beside them.
OF_SOURCES = {"sdist", "egg_info"}

DIRECTIVES = {
    "language_level": 3,
    "boundscheck": DEBUG,
    "initializedcheck": DEBUG,
    "nonecheck": DEBUG,
    "wraparound": False,
    "cdivision": True,
    "binding": True,
    "show_performance_hints": not DEBUG,
}
# Built against NumPy 2, an extension runs on every NumPy from 1.23 on, if it keeps to this API.
MACROS = [("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION")]


def compile_flags() -> list[str]:
    """Flags that gcc and clang share. Nothing here may change a result between CPUs.

    Contraction into FMA changes the last bit and depends on the CPU, so it is off everywhere;
    -fno-math-errno only lets sqrt become one instruction, which is exact.
    """
    flags = ["-std=c11", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden"]
    if DEBUG or SANITIZERS:
        flags += ["-O1", "-g", "-fno-omit-frame-pointer"]
    else:
        flags.append("-O3")
    if NATIVE:
        # clang for arm64 reads the CPU from -mcpu only.
        flags.append(
            "-march=native" if platform.machine() in {"x86_64", "AMD64"} else "-mcpu=native"
        )
    if SANITIZERS:
        flags += [f"-fsanitize={SANITIZERS}", "-fno-sanitize-recover=all"]
    return flags


def settings() -> str:
    """What this build was asked for, one setting a line."""
    lines = [
        f"cython {Cython.__version__}, numpy {numpy.__version__}",
        f"directives {sorted(DIRECTIVES.items())}",
        f"flags {compile_flags()}",
        *(f"{name} {os.environ.get(name, '')}" for name in ("CC", "CFLAGS", "LDFLAGS")),
    ]
    return "\n".join(lines)


def extensions(settings_file: Path) -> list[Extension]:
    """One extension per .pyx; each is rebuilt when a header or the settings change."""
    headers = sorted(map(str, PACKAGE.rglob("*.h")))
    return [
        Extension(
            ".".join(path.with_suffix("").parts),
            [str(path)],
            include_dirs=[*map(str, FOLDERS), str(PACKAGE / "include"), numpy.get_include()],
            depends=[*headers, str(settings_file)],
            define_macros=[*MACROS, *([("PERSIA_DEBUG", "1")] if DEBUG else [])],
            extra_compile_args=compile_flags(),
            extra_link_args=[f"-fsanitize={SANITIZERS}"] if SANITIZERS else [],
        )
        for path in sorted(PACKAGE.rglob("*.pyx"))
    ]


def main() -> None:
    """Build in parallel: Cython by processes here, the C compiler by ``build_ext``."""
    if sys.platform == "win32":
        raise SystemExit("persia builds on Linux and macOS; on Windows use WSL")
    if COMPILED or OF_SOURCES & {*sys.argv}:
        setup()
        return
    jobs = os.cpu_count() or 1
    # Compilers look at times, not at flags: `NATIVE=1 make build` after `make build` would keep
    # the old objects. So the settings are a file that every extension depends on. It is written
    # once all C files are made: after a failure before that, the next build starts over too.
    settings_file = Path("build") / f"settings-{sys.implementation.cache_tag}.txt"
    changed = not settings_file.exists() or settings_file.read_text("utf-8") != settings()
    modules = cythonize(
        extensions(settings_file),
        compiler_directives=DIRECTIVES,
        nthreads=jobs,
        force=changed,
        annotate=ANNOTATE,
    )
    if changed:
        settings_file.parent.mkdir(exist_ok=True)
        settings_file.write_text(settings(), "utf-8")
    setup(ext_modules=modules, options={"build_ext": {"parallel": jobs}})


# Guarded because Cython's worker processes import this file where processes are spawned.
if __name__ == "__main__":
    main()
