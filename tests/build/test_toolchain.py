"""Compilers that are found, and programs that are run by a deadline."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import pytest

from persia._build import toolchain
from persia.errors import ConfigError, ExtensionError


def test_flags_are_for_this_cpu_unless_portable() -> None:
    assert toolchain.default_cflags(portable=True) == ["-O3", "-Wall"]
    flags = toolchain.default_cflags()
    assert flags[:2] == ["-O3", "-Wall"]
    is_x86 = platform.machine() == "x86_64"
    assert flags[2:] == ["-march=native" if is_x86 else "-mcpu=native"]


def test_a_compiler_is_found_by_its_variable_and_its_options_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "mycc"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("CC", f"{program} -m32")
    found = toolchain.find_compiler("c")
    assert found is not None
    assert found.command == (str(program), "-m32")
    monkeypatch.setenv("CC", str(program))
    plain = toolchain.find_compiler("c")
    assert plain is not None
    assert plain.identity != found.identity
    program.write_text("#!/bin/sh\n# another version\n")
    changed = toolchain.find_compiler("c")
    assert changed is not None
    assert changed.identity != plain.identity
    monkeypatch.setenv("CC", "no-such-program")
    assert toolchain.find_compiler("c") is None
    with pytest.raises(ExtensionError, match="x: no compiler for c; looked for CC"):
        toolchain.need_compiler("c", "x")


def test_nvcc_is_the_one_of_cuda_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    found = toolchain.find_compiler("cuda")
    assert found is not None
    assert found.command == (str(nvcc),)


def test_a_suffix_stands_for_a_language() -> None:
    names = ("a.c", "a.cc", "a.cpp", "a.cxx", "a.cu")
    found = [toolchain.language_of(Path(name)) for name in names]
    assert found == ["c", "c++", "c++", "c++", "cuda"]
    with pytest.raises(ConfigError, match=r"a\.py must end with one of \.c, \.cc"):
        toolchain.language_of(Path("a.py"))


def test_a_program_has_its_output_in_the_log_and_in_the_error(tmp_path: Path) -> None:
    words = [sys.executable, "-c", "import sys; print('said'); sys.exit(3)"]
    with pytest.raises(ExtensionError, match=r"(?s)x: python.* ended with status 3:.*said"):
        toolchain.run(words, name="x", folder=tmp_path, timeout_s=60.0)
    assert "said" in (tmp_path / "build.log").read_text()
    with pytest.raises(ExtensionError, match="x: /no/program cannot be started"):
        toolchain.run(["/no/program"], name="x", folder=tmp_path, timeout_s=60.0)


def test_a_program_that_takes_too_long_is_killed_with_what_it_started(tmp_path: Path) -> None:
    # Both have the pipe open as long as they live.
    os.mkfifo(tmp_path / "alive")
    reader = os.open(tmp_path / "alive", os.O_RDONLY | os.O_NONBLOCK)
    program = "exec 3>alive; tail -f /dev/null & tail -f /dev/null"
    with pytest.raises(ExtensionError, match="x: sh has not ended after 1 s"):
        toolchain.run(["sh", "-c", program], name="x", folder=tmp_path, timeout_s=1.0)
    os.set_blocking(reader, True)
    assert os.read(reader, 1) == b""  # no process is left
    os.close(reader)


def test_an_export_map_names_what_is_seen(tmp_path: Path) -> None:
    path = toolchain.write_export_map(["PyInit_x"], tmp_path)
    if sys.platform == "darwin":
        assert path.read_text() == "_PyInit_x\n"
    else:
        assert path.read_text() == "{ global: PyInit_x; local: *; };\n"


def test_the_cpu_and_the_devices_are_texts() -> None:
    assert toolchain.cpu()
    assert isinstance(toolchain.cuda_devices(), str)
    assert toolchain.module_file("x").startswith("x.")
