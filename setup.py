"""The extension list and the compiler directives; everything else is in pyproject.toml."""

import os
import sys
from pathlib import Path

import numpy as np
from Cython.Build import cythonize
from setuptools import Extension, setup

CORE = Path("persia/_core")
DEBUG = os.environ.get("PERSIA_DEBUG") == "1"

DIRECTIVES = {
    "language_level": 3,
    "boundscheck": DEBUG,
    "wraparound": False,
    "initializedcheck": DEBUG,
    "cdivision": True,
    "binding": True,
    "embedsignature": False,
    "freethreading_compatible": False,
}

# Contraction into FMA changes the last bit and differs between CPUs, so it is off everywhere;
# -fno-math-errno only lets sqrt become one (exact) instruction.
COMPILE = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden", "-std=c11"]
LINK = []
MACROS = [("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION")]
if os.environ.get("NATIVE") == "1":
    COMPILE.append("-march=native")
if DEBUG:
    MACROS.append(("PERSIA_DEBUG", "1"))
    COMPILE += ["-O1", "-g"]
if sanitizers := os.environ.get("PERSIA_SANITIZE"):
    COMPILE += ["-O1", "-g", "-fno-omit-frame-pointer", f"-fsanitize={sanitizers}"]
    LINK += [f"-fsanitize={sanitizers}"]
if sys.platform == "win32":
    raise SystemExit("persia builds on Linux and macOS; on Windows use WSL")


def extensions() -> list[Extension]:
    headers = sorted(str(path) for path in CORE.glob("*.h"))
    return [
        Extension(
            f"persia._core.{path.stem}",
            [str(path)],
            include_dirs=[str(CORE), np.get_include()],
            depends=headers,
            define_macros=MACROS,
            extra_compile_args=COMPILE,
            extra_link_args=LINK,
        )
        for path in sorted(CORE.glob("*.pyx"))
    ]


setup(
    ext_modules=cythonize(
        extensions(),
        compiler_directives=DIRECTIVES,
        annotate=os.environ.get("PERSIA_ANNOTATE") == "1",
        compile_time_env=None,
    )
)
