"""Native modules for tests, compilers that count, and processes that load at the same time."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from persia import env
from persia.errors import PersiaError
from tests.support.processes import ROOT, run
from tests.support.waiting import PATIENCE_S

MODULE = """
#include <Python.h>
#ifdef HEADER
#include HEADER
#endif
static PyObject *answer(PyObject *self, PyObject *none) {{ return PyLong_FromLong({answer}); }}
static PyMethodDef methods[] = {{{{"answer", answer, METH_NOARGS, 0}}, {{0}}}};
static struct PyModuleDef module = {{PyModuleDef_HEAD_INIT, "{name}", 0, -1, methods}};
{padding}
PyMODINIT_FUNC PyInit_{name}(void) {{ return PyModule_Create(&module); }}
int left_visible(void) {{ return 1; }}
"""

# Logs each call. A call that takes the file `hold` says so in the pipe `held`, and goes on when
# a line comes from the pipe `go`: only one call can take it.
COMPILER = """#!/bin/sh
echo "$@" >> "{folder}/calls"
if mv "{folder}/hold" "{folder}/taken" 2>/dev/null; then
  echo $$ > "{folder}/held"
  read _ < "{folder}/go"
fi
exec {real} "$@"
"""


def write_module(
    folder: Path, name: str, answer: int = 42, padding: str = "", suffix: str = ".c"
) -> Path:
    """Write a module whose function ``answer`` returns a number; returns its file."""
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / f"{name}{suffix}"
    source.write_text(MODULE.format(name=name, answer=answer, padding=padding))
    return source


@dataclass(frozen=True)
class CountingCompiler:
    """A C compiler, for CC, that logs its calls and can be made to wait."""

    folder: Path

    @classmethod
    def make(cls, folder: Path, language: str = "cc") -> CountingCompiler:
        folder.mkdir(parents=True)
        (folder / "compiler").write_text(
            COMPILER.format(folder=folder, real=shutil.which(language))
        )
        (folder / "compiler").chmod(0o755)
        os.mkfifo(folder / "held")
        os.mkfifo(folder / "go")
        return cls(folder)

    @property
    def command(self) -> str:
        return str(self.folder / "compiler")

    def hold_next(self) -> None:
        (self.folder / "hold").touch()

    def wait_until_held(self) -> int:
        """Return the process that waits; the test's own limit of time bounds it."""
        return int((self.folder / "held").read_text())

    def let_go(self) -> None:
        (self.folder / "go").write_text("go\n")

    def num_compiled(self) -> int:
        """How many sources it was asked to compile."""
        calls = self.folder / "calls"
        return calls.read_text().count(" -c ") if calls.exists() else 0


def load(source: str, timeout_s: float = PATIENCE_S) -> tuple[str, object]:
    """Load a module of ``write_module``; returns what it answers, or its error.

    One in C++ is loaded by torch's tools.
    """
    from persia import cpp_extension

    name = Path(source).stem
    try:
        if source.endswith(".cpp"):
            module = cpp_extension.cached_load_torch_cpp_extension(
                name, source, extra_cflags=["-O0"], timeout_s=timeout_s
            )
        else:
            builder = cpp_extension.CompilerBuilder(
                [source], include_dirs=[Path(source).parent]
            )
            module = cpp_extension.cached_load_prebuilt_extension(
                None, name, builder=builder, timeout_s=timeout_s
            )
    except PersiaError as exc:
        return type(exc).__name__, str(exc)
    return "answer", module.answer()


def _load_with_others(
    barrier: Any,
    results: Any,
    source: str,
    cwd: str,
    variables: Mapping[str, str],
    timeout_s: float,
) -> None:
    os.chdir(cwd)
    os.environ.update(variables)
    barrier.wait(PATIENCE_S)
    results.put(load(source, timeout_s))


def load_at_once(
    method: str,
    sources: list[Path],
    folders: list[Path] | None = None,
    num_killed: int = 0,
    timeout_s: float = PATIENCE_S,
) -> list[tuple[str, object]]:
    """Load one source in each of as many processes, which begin at the same time.

    ``method`` is how they are started; ``folders`` are their working directories. Where these
    are not given, the processes get this one's variables: pytest's forkserver has those of the
    test that started it. Of those that the test kills there is no result.
    """
    names = () if folders else ("CC", "CXX", "CACHED_CPP_EXTENSION_BUILD_DIR")
    variables = {name: os.environ[name] for name in names if name in os.environ}
    context: Any = multiprocessing.get_context(method)
    barrier, results = context.Barrier(len(sources)), context.Queue()
    places = folders or [Path.cwd()] * len(sources)
    processes = [
        context.Process(
            target=_load_with_others,
            args=(barrier, results, str(source), str(place), variables, timeout_s),
        )
        for source, place in zip(sources, places, strict=True)
    ]
    for process in processes:
        process.start()
    try:
        found = [results.get(timeout=timeout_s) for _ in processes[num_killed:]]
    finally:
        for process in processes:
            process.join(PATIENCE_S)
            process.kill()
        results.close()
        results.join_thread()
    return found


def environment(cache: Path, compiler: CountingCompiler, **more: str) -> Mapping[str, str]:
    """Return variables of a process that compiles into ``cache``."""
    return env.of_child(
        CACHED_CPP_EXTENSION_BUILD_DIR=cache,
        CC=compiler.command,
        PYTHONPATH=os.pathsep.join([str(ROOT), sysconfig.get_path("purelib")]),
        **more,
    )


def other_pythons() -> list[str]:
    """Return interpreters of other versions from 3.10 on: those on PATH, and pyenv's."""
    this = ".".join(map(str, sys.version_info[:2]))
    names = [f"python3.{minor}" for minor in range(14, 9, -1)]
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    found = [shutil.which(name) for name in names]
    found += [str(path) for name in names for path in sorted(versions.glob(f"*/bin/{name}"))]
    # pyenv puts programs on PATH that say no more than that a version is not chosen; and this
    # interpreter's filelock may be too new for another one.
    packages = {"PYTHONPATH": sysconfig.get_path("purelib"), "PATH": os.environ["PATH"]}
    return [
        python
        for python in found
        if python
        and not python.endswith(this)
        and run(python, "-B", "-c", "import filelock", env=packages).returncode == 0
    ]


def packages_of_any_python(folder: Path) -> Path:
    """Make a folder for PYTHONPATH of what the loader imports, compiled for no interpreter."""
    import filelock

    folder.mkdir()
    (folder / "filelock").symlink_to(Path(filelock.__file__).parent)
    for name in ("persia", "tests", "cpp_extension_tools"):
        (folder / name).symlink_to(ROOT / name)
    return folder
