"""Native code of users, as the page has it: compiled by PyTorch's tools, once, and kept."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import cpp_extension_tools
from persia import cpp_extension, env
from persia._build.setuptools_command import BuildPrebuilt
from persia.errors import ConfigError, ExtensionError
from tests.docs.test_pages import blocks
from tests.support import kernels, native
from tests.support.native import CountingCompiler
from tests.support.processes import ROOT, run

PAGE = ROOT / "docs" / "native-code.md"
# Runs a script that may start no process.
ALONE = """
import runpy, sys
def refuse(event, arguments):
    if event in {"subprocess.Popen", "os.fork", "os.posix_spawn", "os.exec", "os.system"}:
        raise RuntimeError(f"{event} {arguments}")
sys.addaudithook(refuse)
runpy.run_path("use.py", run_name="__main__")
"""


def need_torchs_tools() -> None:
    scripts = sysconfig.get_path("scripts")
    if shutil.which("c++") is None or shutil.which("ninja", path=scripts) is None:
        pytest.skip("a C++ compiler and ninja are not installed")


def test_nothing_heavy_is_imported_before_it_is_needed() -> None:
    program = (
        "import sys, persia, persia.cpp_extension, cpp_extension_tools\n"
        "from persia.cpp_extension import *\n"
        "heavy = {'torch', 'numpy', 'setuptools', 'filelock', 'multiprocessing'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    ran = run("-c", program, env=env.of_child(PYTHONPATH=ROOT))
    assert ran.stdout == "[]\n", ran.stderr


def test_the_two_packages_have_the_same_names() -> None:
    assert cpp_extension_tools.__all__ == cpp_extension.__all__
    for name in [*cpp_extension.__all__, "BuildPrebuilt"]:
        assert getattr(cpp_extension_tools, name) is getattr(cpp_extension, name)
    assert cpp_extension.BuildPrebuilt is BuildPrebuilt
    for module in (cpp_extension, cpp_extension_tools):
        with pytest.raises(AttributeError, match=r"persia\.cpp_extension.* has no attribute"):
            module.absent  # noqa: B018


def test_sources_of_a_folder_are_sorted_and_its_subfolders_are_left_out(tmp_path: Path) -> None:
    for name in ("b.cu", "a.cc", "c.c", "b.cpp", "a.h", "a.py", "inner/d.cpp"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = cpp_extension.get_cpp_sources_list_from_folder(tmp_path)
    assert found == [str(tmp_path / name) for name in ("a.cc", "b.cpp", "b.cu", "c.c")]
    with pytest.raises(ConfigError, match="has no native source"):
        cpp_extension.get_cpp_sources_list_from_folder(ROOT / "compose")
    with pytest.raises(ConfigError, match="is not there, or no folder"):
        cpp_extension.get_cpp_sources_list_from_folder(str(tmp_path / "absent"))


def test_default_flags_are_for_this_machine_or_portable() -> None:
    portable = cpp_extension.get_default_cpp_cflags(portable=True)
    assert {"-O3", "-Wall"} <= set(portable)
    assert any("native" in flag for flag in cpp_extension.get_default_cpp_cflags())
    assert not any("native" in flag for flag in portable)


def test_kernels_are_named_by_what_they_are_compiled_to() -> None:
    path = kernels.library("scorer")
    name = cpp_extension.get_kernels_name(kernels.FOLDER / "scorer.c")
    assert name == f"native:scorer:{hashlib.sha256(path.read_bytes()).hexdigest()}"
    assert cpp_extension.get_kernels_name(path, "other").startswith("native:other:")
    with pytest.raises(ConfigError, match="get_kernels_name: expected a source or a"):
        cpp_extension.get_kernels_name([])


def test_the_other_name_hands_its_arguments_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CACHED_CPP_EXTENSION_BUILD_DIR", str(tmp_path / "cache"))
    source = native.write_module(tmp_path / "source", "by_other_names")
    builds = []

    def tool(build: cpp_extension.ModuleBuild) -> Path:
        builds.append(build)
        return cpp_extension.CompilerBuilder([source])(build)

    module = cpp_extension.cached_load_arcadia_extension(
        external_prebuilded_path=tmp_path / "prebuilt",
        arcadia_module_name="by_other_names",
        library_path_relative_to_arcadia_root="ml/ops",
        python_include_path=sysconfig.get_path("include"),
        need_cuda=False,
        builder=tool,
        sources=[source],
    )
    assert module.answer() == 42
    (build,) = builds
    assert build.library_path == "ml/ops"
    assert build.python_include_path == Path(sysconfig.get_path("include"))
    with pytest.raises(ExtensionError, match="no prebuilt module fits, and there is no"):
        cpp_extension.cached_load_arcadia_extension(tmp_path, "not_there")


ALLOCATOR = """
#include <Python.h>
#include <stdlib.h>
static long made, freed;
static void release(PyObject *capsule) {
  freed++;
  free(PyCapsule_GetPointer(capsule, NULL));
}
static PyObject *buffer(PyObject *self, PyObject *none) {
  made++;
  return PyCapsule_New(malloc(1000), NULL, release);
}
static PyObject *text(PyObject *self, PyObject *none) {
  return PyUnicode_FromFormat("%0500d", 1);
}
static PyObject *balance(PyObject *self, PyObject *none) {
  return Py_BuildValue("ll", made, freed);
}
static PyObject *wrong(PyObject *self, PyObject *none) {
  char *block = calloc(1, 4096);
  block[1024 - 8] = 'x';  /* where Python notes which allocator a block is of */
  PyObject_Free(block + 1024);
  Py_RETURN_NONE;
}
static PyMethodDef methods[] = {
  {"buffer", buffer, METH_NOARGS, 0}, {"text", text, METH_NOARGS, 0},
  {"balance", balance, METH_NOARGS, 0}, {"wrong", wrong, METH_NOARGS, 0}, {0}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "allocator", 0, -1, methods};
PyMODINIT_FUNC PyInit_allocator(void) { return PyModule_Create(&module); }
"""


def test_memory_is_freed_by_the_allocator_that_made_it(tmp_path: Path) -> None:
    (tmp_path / "allocator.c").write_text(ALLOCATOR)
    program = (
        "import sys\n"
        "from persia.cpp_extension import CompilerBuilder, cached_load_prebuilt_extension\n"
        "builder = CompilerBuilder(['allocator.c'])\n"
        "module = cached_load_prebuilt_extension(None, 'allocator', builder=builder)\n"
        "for _ in range(100):\n"
        "    module.buffer(), module.text()\n"
        "print(module.balance(), flush=True)\n"
        "if sys.argv[1] == 'wrong':\n"
        "    module.wrong()"
    )
    variables = env.of_child(PYTHONPATH=ROOT, PYTHONMALLOC="debug")
    kept = run("-c", program, "right", cwd=tmp_path, env=variables)
    assert (kept.returncode, kept.stdout) == (0, "(100, 100)\n"), kept.stderr
    # The check can fail: Python says so of memory that it did not allocate.
    broken = run("-c", program, "wrong", cwd=tmp_path, env=variables)
    assert broken.returncode < 0
    assert "bad ID: Allocated using API 'x', verified using API 'o'" in broken.stderr


@pytest.mark.slow
def test_the_example_of_the_page_works_as_written_and_starts_again_without_a_process(
    tmp_path: Path,
) -> None:
    need_torchs_tools()
    written = [block for block in blocks(PAGE.read_text()) if block.file]
    assert [block.file for block in written] == [
        "example/example.cpp",
        "example/__init__.py",
        "use.py",
    ]
    for block in written:
        (tmp_path / block.file).parent.mkdir(exist_ok=True)
        (tmp_path / block.file).write_text(block.text)
    compiler = CountingCompiler.make(tmp_path / "compiler", "c++")
    variables = env.of_child(
        PYTHONPATH=os.pathsep.join([str(ROOT), str(tmp_path)]),
        CXX=compiler.command,
        CACHED_CPP_EXTENSION_BUILD_DIR=None,
    )
    first = run(sys.executable, "use.py", cwd=tmp_path, env=variables, timeout_s=500)
    assert first.returncode == 0, first.stdout + first.stderr
    assert "-march=native" in first.stderr or "-mcpu=native" in first.stderr  # verbose
    assert compiler.num_compiled() == 1
    calls = (compiler.folder / "calls").read_text()
    for more in ({}, {"PYTHONMALLOC": "debug"}):
        again = run("-c", ALONE, cwd=tmp_path, env=variables | more, timeout_s=240)
        assert again.returncode == 0, again.stdout + again.stderr
    assert (compiler.folder / "calls").read_text() == calls
    (module,) = (tmp_path / ".cached_cpp_extensions" / "example_native").glob("*/*.so")
    shown = subprocess.run(
        ["nm", "-D", "--defined-only", module], check=True, capture_output=True, text=True
    )
    assert [line.split()[-1] for line in shown.stdout.splitlines()] == ["PyInit_example_native"]


OPERATORS = """
#include <torch/library.h>
int64_t plus(int64_t x) { return x + 1; }
TORCH_LIBRARY(plain_library, m) { m.def("plus(int x) -> int", &plus); }
"""


@pytest.mark.slow
def test_a_library_of_operators_is_no_module_and_a_wrong_source_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_torchs_tools()
    import torch

    source = tmp_path / "operators.cpp"
    source.write_text(OPERATORS)
    path = cpp_extension.cached_load_torch_cpp_extension(
        "operators",
        source,
        extra_cflags=["-O0"],
        is_python_module=False,
        build_directory=tmp_path / "cache",
    )
    assert Path(path).is_relative_to(tmp_path / "cache" / "operators")
    assert torch.ops.plain_library.plus(1) == 2
    source.write_text("int broken() { return nothing_of_this_name; }\n")
    with pytest.raises(ExtensionError, match=r"(?s)operators: python.*nothing_of_this_name"):
        cpp_extension.cached_load_torch_cpp_extension(
            "operators", source, build_directory=tmp_path / "cache"
        )
    with pytest.raises(ConfigError, match=r"source .*absent\.cpp is not there"):
        cpp_extension.cached_load_torch_cpp_extension("operators", tmp_path / "absent.cpp")
