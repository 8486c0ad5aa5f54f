"""Libraries of kernels: found by their sha256, tried out, and refused."""

from __future__ import annotations

import hashlib
import shutil
import sys
from pathlib import Path

import pytest

from persia._build import kernel_library
from persia._core.kernels import native
from persia._core.kernels.optim import RowOptimizer
from persia.errors import ConfigError, ExtensionError
from tests.support import kernels

VERSION = f"-DVERSION={native.VERSION + 1}"


@pytest.fixture
def roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "roots"
    folder.mkdir()
    monkeypatch.setenv("PERSIA_KERNEL_ROOTS", str(folder))
    return folder


def named(path: Path, name: str = "faulty") -> str:
    """How an optimizer names a library, whether it is loaded or not."""
    return f"native:{name}:{hashlib.sha256(path.read_bytes()).hexdigest()}"


def test_a_library_is_found_by_its_sha256(roots: Path) -> None:
    path = kernels.library("faulty", "-DTAG=1")
    shutil.copyfile(kernels.library("adagrad"), roots / "faulty.so")  # another one
    cached = roots / "faulty" / "key" / "faulty.so"
    cached.parent.mkdir(parents=True)
    with pytest.raises(ExtensionError, match=r"faulty\.so has [0-9a-f]{12}\.\.\."):
        kernel_library.need(named(path))
    assert named(path) not in native.loaded()
    shutil.copyfile(path, cached)
    kernel_library.need(named(path))
    assert RowOptimizer(named(path), lr=0.5).state_words(8) == 9
    kernel_library.need("adagrad")  # a built-in needs no library


def test_a_library_outside_of_the_roots_is_not_loaded(
    roots: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = kernels.library("faulty", "-DTAG=2")
    outside = tmp_path / "faulty.so"
    shutil.copyfile(path, outside)
    (roots / "faulty.so").symlink_to(outside)
    with pytest.raises(ExtensionError, match="leads outside of it"):
        kernel_library.need(named(path))
    monkeypatch.delenv("PERSIA_KERNEL_ROOTS")
    with pytest.raises(ExtensionError, match=r"PERSIA_KERNEL_ROOTS of the server .not set"):
        kernel_library.need(named(path))
    for name in ("native:../x:" + "0" * 64, "native:x", "native:x:123"):
        with pytest.raises(ConfigError, match="expected native:<name>:<sha256>"):
            kernel_library.need(name)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        (VERSION, f"interface version {native.VERSION + 1}, this PERSIA has {native.VERSION}"),
        ("-DVERSION=0", "returned no kernels"),
        ("-DCRASH=1", "crashed with signal 6 when tried out"),
        ("-DEXTRA=1", "dim 1, it writes beside the row or its state"),
        (
            "-DEMPTY=1",
            "expected one of optimizer, initializer, scorer, hash, it has none",
        ),
        ("-Dpersia_kernels=other", "expected a library with a function persia_kernels"),
    ],
)
def test_what_is_no_library_of_this_interface_is_an_error(flag: str, message: str) -> None:
    path = kernels.library("faulty", flag)
    with pytest.raises(ExtensionError, match=message):
        kernel_library.load_file(path, "faulty")
    assert named(path) not in native.loaded()


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("-DBESIDE=1", "dim 1, fill writes beside the row"),
        ("-DCOUNTS=1", "dim 1, fill wrote other values for the same seed and sign"),
        ("-DFILL=NULL", "expected an initializer with .size = .* and a fill"),
        ("-DDEFAULTS=NULL", "5 parameters have no names or no defaults"),
    ],
)
def test_an_initializer_that_breaks_its_promise_is_an_error(flag: str, message: str) -> None:
    path = kernels.library("initial", flag)
    with pytest.raises(ExtensionError, match=message):
        kernel_library.load_file(path, "initial")
    assert named(path, "initial") not in native.loaded()


def test_a_library_of_version_1_is_one_without_an_initializer() -> None:
    name = kernels.load("faulty", "-DOF_VERSION_1=1")
    assert native.kernels_of(name) == {"optimizer": {}}
    assert native.kernels_of(kernels.load("initial"))["initializer"]["upper"] == 0.01
    assert native.kernels_of(kernels.load("scorer")) == {"scorer": {}}
    assert native.kernels_of(kernels.load("hash")) == {"hash": {}}


def test_an_optimizer_that_was_compiled_before_there_were_guards_has_none() -> None:
    old = kernels.load("faulty", "-DSIZE=offsetof(persia_optimizer_t, guards)", "-DGUARDS=1")
    assert not native.guards_rows(old)
    assert native.guards_rows(kernels.load("adagrad"))
    with pytest.raises(ExtensionError, match=r"expected an optimizer with .size = .* a step"):
        kernels.load("faulty", "-DSIZE=offsetof(persia_optimizer_t, step)")


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("-DGUARDS=1", "dim 1, .guards is 1, but a NaN is left in a row that had none"),
        ("-DBOUNDLESS=1", "dim 1, .guards is 1, but values are beyond the bound"),
        ("-DCODES=1", "dim 1, .guards is 1, but a row with a code is not as it was"),
        ("-DSILENT=1", r"dim 1, .guards is 1, but step returned 0, and \d+ codes"),
    ],
)
def test_an_optimizer_that_does_not_guard_as_it_says_is_an_error(
    flag: str, message: str
) -> None:
    with pytest.raises(ExtensionError, match=message):
        kernels.load("unguarded", flag)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("-DBESIDE=1", "hash writes elsewhere than to its hashes"),
        ("-DCOUNTS=1", "hash wrote other hashes for the same ids"),
        ("-DHASH=NULL", "expected a hash with .size = .* and a hash"),
    ],
)
def test_a_hash_that_breaks_its_promise_is_an_error(flag: str, message: str) -> None:
    with pytest.raises(ExtensionError, match=message):
        kernels.load("hash", flag)


def test_a_scorer_that_keeps_something_between_calls_is_an_error() -> None:
    with pytest.raises(ExtensionError, match="score returned other classes for the same use"):
        kernels.load("scorer", "-DCOUNTS=1")


def test_a_kernel_that_does_not_return_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_library, "_TRY_OUT_S", 1.0)
    with pytest.raises(ExtensionError, match="did not return within 1 s"):
        kernels.load("faulty", "-DSPIN=1")


def test_a_file_that_is_no_library_is_an_error(tmp_path: Path) -> None:
    text = tmp_path / "text.so"
    text.write_text("no library")
    with pytest.raises(ExtensionError, match="cannot be loaded"):
        kernel_library.load_file(text, "text")
    with pytest.raises(ExtensionError, match="No such file"):
        kernel_library.load_file(tmp_path / "absent.so", "absent")


@pytest.mark.skipif(sys.platform != "linux", reason="counts what /proc names")
def test_a_library_that_is_refused_leaves_nothing_open() -> None:
    path = kernels.library("faulty", "-DVERSION=0")

    def try_it() -> int:
        with pytest.raises(ExtensionError):
            kernel_library.load_file(path, "faulty")
        return sum(1 for _ in Path("/proc/self/fd").iterdir())

    assert try_it() == try_it()
