"""Keys change with what a build depends on, and with nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from persia._build import fingerprint, toolchain
from persia._build.fingerprint import Fingerprint, common_parts, digest, digest_of_tree
from persia.errors import ConfigError


def test_a_key_depends_on_parts_and_compilers() -> None:
    one = Fingerprint({"a": 1, "b": 2}, ("cc",))
    assert one.key == Fingerprint({"b": 2, "a": 1}, ("cc",)).key == one.pattern
    others = [Fingerprint({"a": 1}, ("cc",)), Fingerprint({"a": 1, "b": 2}, ("clang",))]
    assert len({one.key, *(other.key for other in others)}) == 3
    # The second half is the compilers': the first is enough where there is none.
    missing = Fingerprint({"a": 1, "b": 2}, ("",))
    assert missing.pattern == one.key.partition("-")[0] + "-*"


def test_the_cpu_counts_unless_flags_compile_for_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "cpu", lambda: "this CPU")
    assert common_parts(["-O3"])["cpu"] == ""
    assert common_parts(["-O3", "-march=native"])["cpu"] == "this CPU"
    assert common_parts(["-mcpu=native"])["cpu"] == "this CPU"
    assert common_parts(None)["cpu"] == "this CPU"


def test_variables_of_compilers_count(monkeypatch: pytest.MonkeyPatch) -> None:
    before = common_parts([])
    monkeypatch.setenv("CPATH", "/elsewhere")
    assert common_parts([]) != before


def test_includes_are_followed_as_compilers_do(tmp_path: Path) -> None:
    files = {
        "src/a.cpp": '#include "b.h"\n#  include <c.h>\n#include <vector>\n'
        '#if 0\n#import "d.h"\n#endif\n',
        "src/b.h": '#include "../other/e.h"\n',
        "src/c.h": "not this one: it is beside, and the name is in angle brackets\n",
        "src/d.h": '#include "a_macro.h" // and a circle\n#include "a.cpp"\n',
        "other/e.h": "e\n",
        "include/c.h": "c\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    source, folders = tmp_path / "src/a.cpp", [tmp_path / "include"]
    found = digest([source], folders)
    assert [name for name, _ in found] == ["a.cpp", "b.h", "../other/e.h", "c.h", "d.h"]
    for name in files:
        (tmp_path / name).write_text(files[name] + "\n")
        assert (digest([source], folders) != found) == (name != "src/c.h"), name
        (tmp_path / name).write_text(files[name])
    assert digest([source], folders) == found
    os.utime(source, (0, 0))  # times do not count, nor does the place of a checkout
    (tmp_path / "src").rename(tmp_path / "moved")
    assert digest([tmp_path / "moved" / "a.cpp"], folders) == found


def test_folders_of_headers_are_read_from_flags() -> None:
    flags = ["-O3", "-Ia", "-I", "b", "-isystem", "c", "-iquoted", "-Dx=-I"]
    found = list(map(str, fingerprint.include_folders(flags)))
    assert found == ["a", "b", "c", "d"]


def test_a_tree_is_its_files_but_those_that_compilers_write(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "CMakeLists.txt").write_text("x")
    (tmp_path / "inner" / "a.c").write_text("a")
    before = digest_of_tree([tmp_path])
    assert [name for name, _ in before] == ["CMakeLists.txt", "inner/a.c"]
    for name in ("a.o", "lib.so", ".hidden"):
        (tmp_path / name).write_text("x")
    assert digest_of_tree([tmp_path]) == before
    (tmp_path / "inner" / "b.h").write_text("b")
    assert digest_of_tree([tmp_path]) != before
    assert digest_of_tree([tmp_path / "inner" / "a.c"])[0][0] == "a.c"
    with pytest.raises(ConfigError, match="is not there"):
        digest_of_tree([tmp_path / "absent"])
