"""Builders as plugins: setuptools, a C compiler and CMake, and those that are wrong."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from persia._build import builders
from persia._build.builders import CompilerBuilder, ModuleBuild, TorchBuilder, build_module
from persia._build.modules import load_module
from persia.errors import ConfigError, ExtensionError
from tests.support import native
from tests.support.processes import run


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CACHED_CPP_EXTENSION_BUILD_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def exported(path: Path) -> set[str]:
    """Return the names of functions that a module shows."""
    listed = run("nm", "-D", "--defined-only", path)
    assert listed.returncode == 0, listed.stderr
    return {line.split()[-1] for line in listed.stdout.splitlines()}


SETUP = """
from setuptools import Extension, setup
setup(name="x", ext_modules=[Extension({name!r}, [{source!r}], extra_link_args=[{link!r}])])
"""


def by_setuptools(build: ModuleBuild) -> Path:
    source = str(Path(build.library_path))
    link = f"-Wl,--version-script={build.export_map}"
    (build.folder / "setup.py").write_text(
        SETUP.format(name=build.module_name, source=source, link=link)
    )
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    subprocess.run(command, cwd=build.folder, check=True)
    return build.folder / build.file_name


def by_cc(build: ModuleBuild) -> str:
    command = ["cc", "-shared", "-fPIC", f"-I{build.python_include_path}", build.library_path]
    command += [f"-Wl,--version-script={build.export_map}", "-o", "made.so"]
    subprocess.run(command, cwd=build.folder, check=True)
    return "made.so"  # in the folder


CMAKE = """
cmake_minimum_required(VERSION 3.26)
project(x C)
find_package(Python REQUIRED COMPONENTS Development.Module)
python_add_library(NAME MODULE "SOURCE")
target_link_options(NAME PRIVATE "-Wl,--version-script=EXPORTS")
"""


def by_cmake(build: ModuleBuild) -> Path:
    if shutil.which("cmake", path=sysconfig.get_path("scripts")) is None:
        pytest.skip("cmake of PyPI is not installed")
    cmake = str(Path(sysconfig.get_path("scripts"), "cmake"))
    words = {
        "NAME": build.module_name,
        "SOURCE": build.library_path,
        "EXPORTS": str(build.export_map),
    }
    text = CMAKE
    for word, value in words.items():
        text = text.replace(word, value)
    (build.folder / "CMakeLists.txt").write_text(text)
    here = ["-G", "Unix Makefiles", f"-DPython_INCLUDE_DIR={build.python_include_path}"]
    for command in ([cmake, ".", *here], [cmake, "--build", "."]):
        subprocess.run(command, cwd=build.folder, check=True, stdout=subprocess.DEVNULL)
    return build.folder / f"{build.module_name}.so"


@pytest.mark.slow
@pytest.mark.parametrize("builder", [by_setuptools, by_cc, by_cmake])
def test_a_plugin_builds_once_and_again_when_its_source_changes(
    builder: builders.Builder, tmp_path: Path
) -> None:
    name = f"{builder.__name__}_module"
    source = native.write_module(tmp_path / "source", name)
    calls = []

    def counted(build: ModuleBuild) -> object:
        calls.append(build)
        return builder(build)

    def get() -> Path:
        return build_module(
            counted,  # type: ignore[arg-type]
            name,
            sources=[source.parent],
            library_path=str(source),
        )

    first = get()
    assert get() == first
    assert len(calls) == 1
    assert load_module(name, first).answer() == 42
    assert exported(first) == {f"PyInit_{name}"}
    native.write_module(tmp_path / "source", name, 43)
    assert get() != first
    assert len(calls) == 2


def test_the_own_builder_takes_a_name_in_one_place_and_hides_the_rest(tmp_path: Path) -> None:
    text = native.MODULE.format(name="PLACE", answer=7, padding="")
    text = text.replace("PyInit_PLACE", "INIT(TORCH_EXTENSION_NAME)")
    (tmp_path / "module.c").write_text(
        "#define JOINED(a, b) a##b\n#define INIT(name) JOINED(PyInit_, name)\n" + text
    )
    path = build_module(CompilerBuilder([tmp_path / "module.c"]), "named_once")
    assert load_module("named_once", path).answer() == 7
    assert exported(path) == {"PyInit_named_once"}


def test_a_portable_build_is_another_one_without_flags_for_this_cpu(tmp_path: Path) -> None:
    source = native.write_module(tmp_path / "source", "portable")
    builder = CompilerBuilder([source])
    here = build_module(builder, "portable")
    anywhere = build_module(builder, "portable", is_portable=True)
    assert here != anywhere
    assert "native" in (here.parent / "build.log").read_text()
    assert "native" not in (anywhere.parent / "build.log").read_text()


def test_a_builder_of_which_nothing_is_known_is_called_each_time(tmp_path: Path) -> None:
    source = native.write_module(tmp_path / "source", "unknown_sources")
    calls = []

    def builder(build: ModuleBuild) -> Path:
        calls.append(build)
        return CompilerBuilder([source])(build)

    first = build_module(builder, "unknown_sources")
    assert build_module(builder, "unknown_sources") == first  # of the same content
    native.write_module(tmp_path / "source", "unknown_sources", 43)
    assert build_module(builder, "unknown_sources") != first
    assert len(calls) == 3


def test_what_a_builder_returns_is_checked(tmp_path: Path) -> None:
    source = native.write_module(tmp_path / "source", "of_another_name")
    builder = CompilerBuilder([source])
    with pytest.raises(ExtensionError, match=r"expected: .*so has no PyInit_expec"):
        build_module(builder, "expected")
    with pytest.raises(ExtensionError, match=r"x: its builder returned .*absent\.so"):
        build_module(lambda build: "absent.so", "x")
    with pytest.raises(ConfigError, match="builder of x must return the path"):
        build_module(lambda build: None, "x")  # type: ignore[arg-type, return-value]
    with pytest.raises(ExtensionError, match=r"x: its builder failed: .*no-such-tool"):
        build_module(lambda build: str(subprocess.run("no-such-tool")), "x")
    with pytest.raises(ExtensionError, match=r"python_include_path .*source has no Python\.h"):
        build_module(builder, "x", python_include_path=source.parent)
    with pytest.raises(ConfigError, match=r"source .*absent is not there"):
        build_module(lambda build: "", "x", sources=[tmp_path / "absent"])


def test_torch_needs_ninja_and_for_cuda_a_torch_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    (tmp_path / "kernel.cu").write_text("")
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\n")
    nvcc.chmod(0o755)
    monkeypatch.setattr(torch.version, "cuda", None)
    builder = TorchBuilder([tmp_path / "kernel.cu"])
    if shutil.which("ninja", path=sysconfig.get_path("scripts")):
        monkeypatch.setenv("CUDA_HOME", str(tmp_path))
        with pytest.raises(ExtensionError, match=r"torch .* is built without CUDA"):
            build_module(builder, "kernel")
        monkeypatch.setenv("CUDA_HOME", str(tmp_path / "absent"))
        monkeypatch.setenv("CXX", sys.executable)
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(ExtensionError, match="kernel: no compiler for cuda; looked for"):
            build_module(builder, "kernel")
    monkeypatch.setattr(builders, "_path_with_scripts", lambda: str(tmp_path))
    monkeypatch.setenv("CXX", sys.executable)
    with pytest.raises(ExtensionError, match="ninja, which is not here: pip install ninja"):
        build_module(builder, "kernel")
