"""Modules of wheels that fit, and those that do not: which file, tag and ABI were expected."""

from __future__ import annotations

import json
import shutil
import sys
import sysconfig
from pathlib import Path

import pytest

from persia._build import modules, toolchain
from persia._build.builders import CompilerBuilder, build_module
from persia._build.modules import PrebuiltRecord, find_prebuilt, load_module
from persia.cpp_extension import cached_load_prebuilt_extension
from persia.errors import ConfigError, ExtensionError
from tests.support import native
from tests.support.processes import run

TAG = toolchain.module_file("")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CACHED_CPP_EXTENSION_BUILD_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def compiled(folder: Path, name: str, answer: int = 42) -> Path:
    source = native.write_module(folder / "source", name, answer)
    return build_module(CompilerBuilder([source]), name)


def prebuilt(folder: Path, name: str, tag: str = TAG, answer: int = 42) -> Path:
    """Put a module where a wheel has it; returns the folder."""
    place = folder / "prebuilt"
    place.mkdir(exist_ok=True)
    shutil.copyfile(compiled(folder, name, answer), place / f"{name}{tag}")
    return place


def test_a_module_is_imported_once_and_no_other_build_of_it(tmp_path: Path) -> None:
    first = compiled(tmp_path, "loaded_once")
    module = load_module("loaded_once", first)
    assert load_module("loaded_once", first) is module
    assert sys.modules["loaded_once"] is module
    assert module.__file__ == str(first)
    second = compiled(tmp_path, "loaded_once", 43)
    with pytest.raises(ExtensionError, match=r"this process has loaded .*start the p"):
        load_module("loaded_once", second)


def test_a_module_does_not_take_the_name_of_another(tmp_path: Path) -> None:
    path = compiled(tmp_path, "colorsys")  # the standard library has one
    import colorsys

    assert load_module("colorsys", path).answer() == 42
    assert sys.modules["colorsys"] is colorsys


def test_a_file_that_is_no_module_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x.so").write_text("no library")
    with pytest.raises(ExtensionError, match=r"x: .*x\.so cannot be imported"):
        load_module("x", tmp_path / "x.so")


def test_a_prebuilt_module_that_fits_needs_no_builder(tmp_path: Path, cache: Path) -> None:
    place = prebuilt(tmp_path, "fits")
    shutil.rmtree(cache)
    module = cached_load_prebuilt_extension(place, "fits")
    assert module.__file__ == str(place / f"fits{TAG}")
    assert cached_load_prebuilt_extension(place / f"fits{TAG}", "fits") is module
    assert not cache.exists()


def test_the_file_of_this_interpreter_comes_first(tmp_path: Path) -> None:
    place = prebuilt(tmp_path, "several", ".so")
    prebuilt(tmp_path, "several", ".abi3.so")
    assert find_prebuilt(place, "several")[0] == place / "several.abi3.so"
    prebuilt(tmp_path, "several")
    assert find_prebuilt(place, "several")[0] == place / f"several{TAG}"


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ({"module": "other"}, "of another module (other)"),
        ({"abi": "cpython-39-x"}, "of another interpreter (ABI cpython-39-x)"),
        ({"torch": "1.2.3"}, "for torch 1.2.3, here is "),
        ({"torch": "2.13.0+cu130"}, "for torch 2.13.0+cu130, here is "),
        ({"unknown": 1}, "with a record that cannot be read"),
    ],
)
def test_a_record_that_does_not_fit_says_why(
    record: dict[str, str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch, "__version__", "2.13.5+cpu")
    place = prebuilt(tmp_path, "recorded")
    path = place / f"recorded{TAG}"
    PrebuiltRecord("recorded", toolchain.python_abi(), "2.13.0").write(path)
    assert find_prebuilt(place, "recorded") == (path, "")
    written = json.loads((place / f"{path.name}.json").read_text())
    (place / f"{path.name}.json").write_text(json.dumps(written | record))
    found, reason = find_prebuilt(place, "recorded")
    assert found is None
    assert why in reason


def test_without_a_builder_the_error_names_file_tag_and_abi(tmp_path: Path) -> None:
    place = prebuilt(tmp_path, "elsewhere", ".cpython-39-x86_64-linux-gnu.so")
    version = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    with pytest.raises(ExtensionError) as caught:
        cached_load_prebuilt_extension(place, "elsewhere")
    abi = toolchain.python_abi()
    assert str(caught.value) == (
        "elsewhere: no prebuilt module fits, and there is no builder: expected "
        f"elsewhere{TAG} (tag {version}, ABI {abi}) in {place}, found "
        "elsewhere.cpython-39-x86_64-linux-gnu.so of another interpreter "
        "(ABI cpython-39-x86_64-linux-gnu)"
    )
    with pytest.raises(ExtensionError, match="found none"):
        cached_load_prebuilt_extension(tmp_path / "absent", "elsewhere")
    with pytest.raises(ExtensionError, match="external_prebuilded_path names none"):
        cached_load_prebuilt_extension(None, "elsewhere")


def test_one_that_does_not_fit_or_cannot_be_imported_is_built(tmp_path: Path) -> None:
    place = tmp_path / "prebuilt"
    place.mkdir()
    (place / f"broken{TAG}").write_text("for a newer libc, say")
    with pytest.raises(ExtensionError, match=r"broken: .* cannot be imported: "):
        cached_load_prebuilt_extension(place, "broken")
    source = native.write_module(tmp_path / "source", "broken")
    built = cached_load_prebuilt_extension(place, "broken", builder=CompilerBuilder([source]))
    assert built.answer() == 42

    def fails(build: object) -> str:
        raise ExtensionError("no_luck: the company's tool is not here")

    with pytest.raises(ExtensionError, match=r"not here\nno_luck: no prebuilt .* none$"):
        cached_load_prebuilt_extension(place, "no_luck", builder=fails)


def test_arguments_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="module_name must be a Python identifier, got 'a-b'"):
        cached_load_prebuilt_extension(tmp_path, "a-b")
    with pytest.raises(ConfigError, match="builder must be a callable that ret"):
        cached_load_prebuilt_extension(tmp_path, "x", builder="make")  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_module_of_another_python_is_built_again_or_says_what_is_missing(
    tmp_path: Path,
) -> None:
    pythons = native.other_pythons()
    if not pythons:
        pytest.skip("no other Python from 3.10 on is installed")
    place = prebuilt(tmp_path, "moved")
    packages = native.packages_of_any_python(tmp_path / "packages")
    program = (
        "from persia.cpp_extension import CompilerBuilder, cached_load_prebuilt_extension\n"
        "import sys\n"
        f"builder = CompilerBuilder([{str(tmp_path / 'source' / 'moved.c')!r}])\n"
        f"builder = builder if sys.argv[1] == 'build' else None\n"
        f"module = cached_load_prebuilt_extension({str(place)!r}, 'moved', builder=builder)\n"
        "print(module.answer())"
    )
    variables = {"PYTHONPATH": str(packages), "PATH": "/usr/bin:/bin"}
    built = run(pythons[0], "-B", "-c", program, "build", cwd=tmp_path, env=variables)
    assert built.stdout == "42\n", built.stderr
    refused = run(pythons[0], "-B", "-c", program, "take", cwd=tmp_path, env=variables)
    last = refused.stderr.splitlines()[-1]
    abi = sysconfig.get_config_var("SOABI")
    assert last.startswith("persia.errors.ExtensionError: moved: no prebuilt module fits")
    assert last.endswith(f"found moved{TAG} of another interpreter (ABI {abi})")


def test_modules_for_a_wheel_are_collected(tmp_path: Path) -> None:
    source = native.write_module(tmp_path / "source", "collected")
    with modules.collected_for_wheel() as built:
        cached_load_prebuilt_extension(
            tmp_path / "place", "collected", builder=CompilerBuilder([source])
        )
    (one,) = built
    assert one.place == tmp_path / "place"
    assert one.record == PrebuiltRecord("collected", toolchain.python_abi())
    assert "native" not in (one.path.parent / "build.log").read_text()
    with (
        modules.collected_for_wheel(),
        pytest.raises(ConfigError, match="a wheel needs external_prebuilded_path"),
    ):
        cached_load_prebuilt_extension(None, "collected", builder=CompilerBuilder([source]))
