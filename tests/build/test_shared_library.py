"""Shared libraries without torch: what they show, and when they are made again."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from persia._build.shared_library import compile_shared_library
from persia.errors import ConfigError, ExtensionError
from tests.support import native
from tests.support.native import CountingCompiler
from tests.support.processes import run


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CountingCompiler:
    made = CountingCompiler.make(tmp_path / "compiler")
    monkeypatch.setenv("CC", made.command)
    return made


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source" / "kernel.c"
    path.parent.mkdir()
    path.write_text(
        '#include "../common/width.h"\n#include <math.h>\n'
        "static int twice(int x) { return 2 * x; }\n"
        "int width(void) { return WIDTH; }\nint area(void) { return twice(WIDTH); }\n"
    )
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "width.h").write_text('#include "number.h"\n')
    (tmp_path / "common" / "number.h").write_text("#define WIDTH 3\n")
    return path


def test_a_library_is_compiled_once_and_again_when_a_header_or_a_flag_changes(
    source: Path, compiler: CountingCompiler, tmp_path: Path
) -> None:
    def width(*flags: str) -> int:
        path = compile_shared_library(
            source, name="kernel", cflags=flags, cache=tmp_path / "cache"
        )
        return int(ctypes.CDLL(str(path)).width())

    assert [width(), width()] == [3, 3]
    assert compiler.num_compiled() == 1
    (tmp_path / "common" / "number.h").write_text("#define WIDTH 4\n")
    assert [width(), width()] == [4, 4]
    assert compiler.num_compiled() == 2
    (tmp_path / "common" / "number.h").write_text("#ifndef WIDTH\n#define WIDTH 4\n#endif\n")
    assert [width("-DWIDTH=5"), width("-DWIDTH=6"), width("-DWIDTH=5")] == [5, 6, 5]
    assert compiler.num_compiled() == 4


def test_another_compiler_compiles_again(
    source: Path, compiler: CountingCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = compile_shared_library(source, name="kernel", cache=tmp_path / "cache")
    other = CountingCompiler.make(tmp_path / "other")
    monkeypatch.setenv("CC", other.command)
    second = compile_shared_library(source, name="kernel", cache=tmp_path / "cache")
    assert first.parent != second.parent
    assert (compiler.num_compiled(), other.num_compiled()) == (1, 1)


def test_only_the_exports_are_seen(source: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    library = compile_shared_library(source, name="k", exports=["area"], cache=cache)
    loaded = ctypes.CDLL(str(library))
    assert loaded.area() == 6
    assert not hasattr(loaded, "width")
    shown = compile_shared_library(source, name="k", cache=cache)
    assert shown != library
    assert hasattr(ctypes.CDLL(str(shown)), "width")


def test_c_and_cpp_are_linked_together_and_files_of_one_name_do_not_collide(
    tmp_path: Path,
) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    (tmp_path / "one" / "part.c").write_text("int three(void) { return 3; }\n")
    (tmp_path / "two" / "part.cpp").write_text(
        '#include <string>\n#include "dimensions.hpp"\nextern "C" int three(void);\n'
        'extern "C" int four() { return std::string(three() + Dimensions::extra, 1).size(); }\n'
    )
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "dimensions.hpp").write_text(
        "struct Dimensions { static constexpr int extra = 1; };\n"
    )
    path = compile_shared_library(
        [tmp_path / "one" / "part.c", tmp_path / "two" / "part.cpp"],
        name="mixed",
        cflags=["-O1", "-I", str(tmp_path / "include")],
        cache=tmp_path / "cache",
    )
    assert ctypes.CDLL(str(path)).four() == 4


def test_errors_say_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    (tmp_path / "wrong.c").write_text("int broken(void) { return nothing_of_this_name; }\n")
    with pytest.raises(
        ExtensionError, match=r"(?s)wrong: cc ended with status 1.*nothing_of_th"
    ):
        compile_shared_library(tmp_path / "wrong.c", name="wrong", cache=cache)
    with pytest.raises(ConfigError, match=r"source .*absent\.c is not there"):
        compile_shared_library(tmp_path / "absent.c", name="wrong", cache=cache)
    with pytest.raises(ConfigError, match=r"source .*wrong\.txt must end with one of \.c, "):
        compile_shared_library(tmp_path / "wrong.txt", name="wrong", cache=cache)
    with pytest.raises(ConfigError, match="sources must name at least one file"):
        compile_shared_library([], name="wrong", cache=cache)
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(
        ExtensionError, match="wrong: no compiler for c; looked for CC, or `cc`"
    ):
        compile_shared_library(tmp_path / "wrong.c", name="wrong", cache=cache)


def test_a_compiler_that_hangs_is_ended_at_the_deadline(
    source: Path, compiler: CountingCompiler, tmp_path: Path
) -> None:
    # The pipe's other end, without which it would wait there and not in the second.
    held = os.open(compiler.folder / "held", os.O_RDWR | os.O_NONBLOCK)
    pid = b""
    # With more time if it was not even running by the deadline.
    for timeout_s in (1, 10, 60):
        compiler.hold_next()
        ended = rf"kernel: .*compiler has not ended after {timeout_s} s"
        with pytest.raises(ExtensionError, match=ended):
            compile_shared_library(
                source, name="kernel", cache=tmp_path / "cache", timeout_s=timeout_s
            )
        with contextlib.suppress(BlockingIOError):
            pid = os.read(held, 100)
            break
    os.close(held)
    assert not Path(f"/proc/{int(pid)}").exists()
    assert compile_shared_library(source, name="kernel", cache=tmp_path / "cache").is_file()


CUDA = """
__global__ void twice(float *x, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] = 2 * x[i];
}
extern "C" int devices(void) { int n = -1; return cudaGetDeviceCount(&n) ? 0 : n; }
extern "C" void run(float *x, int n) { twice<<<1, n>>>(x, n); }
"""


@pytest.mark.slow
def test_cuda_is_compiled_where_nvcc_is(tmp_path: Path) -> None:
    if shutil.which("nvcc") is None and not Path("/usr/local/cuda/bin/nvcc").exists():
        pytest.skip("nvcc is not installed")
    (tmp_path / "kernel.cu").write_text(CUDA)
    path = compile_shared_library(
        tmp_path / "kernel.cu", name="kernel", exports=["devices"], cache=tmp_path / "cache"
    )
    loaded = ctypes.CDLL(str(path))
    assert loaded.devices() >= 0
    assert not hasattr(loaded, "run")


def test_cuda_without_nvcc_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kernel.cu").write_text(CUDA)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ExtensionError, match=r"kernel: no compiler for cuda; .*nvcc"):
        compile_shared_library(tmp_path / "kernel.cu", name="kernel", cache=tmp_path / "cache")


# --- other interpreters -----------------------------------------------------------------------


@pytest.mark.slow
def test_two_interpreters_at_once_have_a_module_each_in_one_cache(
    compiler: CountingCompiler, tmp_path: Path
) -> None:
    pythons = [sys.executable, *native.other_pythons()[:1]]
    if len(pythons) < 2:
        pytest.skip("no other Python from 3.10 on is installed")
    source = native.write_module(tmp_path / "source", "two_pythons")
    packages = native.packages_of_any_python(tmp_path / "packages")
    program = (
        "import json; from pathlib import Path\n"
        "from persia.cpp_extension import CompilerBuilder, cached_load_prebuilt_extension\n"
        f"builder = CompilerBuilder([{str(source)!r}])\n"
        "module = cached_load_prebuilt_extension(None, 'two_pythons', builder=builder)\n"
        "print(json.dumps([module.answer(), module.__file__]))"
    )
    variables = {
        **native.environment(tmp_path / "cache", compiler),
        "PYTHONPATH": str(packages),
    }

    def load(python: str) -> subprocess.CompletedProcess[str]:
        return run(python, "-B", "-c", program, cwd=tmp_path, env=variables)

    with ThreadPoolExecutor(16) as threads:
        ended = list(threads.map(load, pythons * 8))
    found = [json.loads(one.stdout) for one in ended if one.returncode == 0]
    assert [answer for answer, _ in found] == [42] * 16, [one.stderr for one in ended]
    assert len({file for _, file in found}) == 2
    assert compiler.num_compiled() == 2
