"""Compiled once: by processes at the same time, by killed ones, on full and read-only disks."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import filelock
import pytest

from persia._build.cache import BuildCache
from persia._build.fingerprint import Fingerprint
from persia.errors import ConfigError, ExtensionError
from tests.support import native
from tests.support.native import CountingCompiler
from tests.support.processes import ROOT, run
from tests.support.waiting import PATIENCE_S

COUNT = 16


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CountingCompiler:
    made = CountingCompiler.make(tmp_path / "compiler")
    monkeypatch.setenv("CC", made.command)
    monkeypatch.setenv("CACHED_CPP_EXTENSION_BUILD_DIR", str(tmp_path / "cache"))
    return made


def half_built(cache: Path) -> list[Path]:
    return [path for path in cache.rglob("*") if "building" in path.name]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_processes_that_start_together_compile_once(
    method: str, compiler: CountingCompiler, tmp_path: Path
) -> None:
    source = native.write_module(tmp_path / "source", "storm_module")
    found = native.load_at_once(method, [source] * COUNT)
    assert found == [("answer", 42)] * COUNT
    assert compiler.num_compiled() == 1
    # A second start runs no compiler at all.
    calls = (compiler.folder / "calls").read_text()
    assert native.load_at_once(method, [source]) == [("answer", 42)]
    assert (compiler.folder / "calls").read_text() == calls
    assert not half_built(tmp_path / "cache")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_processes_that_start_together_compile_a_module_of_torch_once(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = sysconfig.get_path("scripts")
    if shutil.which("c++") is None or shutil.which("ninja", path=scripts) is None:
        pytest.skip("a C++ compiler and ninja are not installed")
    compiler = CountingCompiler.make(tmp_path / "compiler", "c++")
    monkeypatch.setenv("CXX", compiler.command)
    monkeypatch.setenv("CACHED_CPP_EXTENSION_BUILD_DIR", str(tmp_path / "cache"))
    source = native.write_module(tmp_path / "source", "torch_storm", suffix=".cpp")
    found = native.load_at_once(method, [source] * COUNT, timeout_s=400.0)
    assert found == [("answer", 42)] * COUNT
    assert compiler.num_compiled() == 1
    assert not half_built(tmp_path / "cache")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_two_sources_of_one_name_at_once_are_each_compiled_once(
    method: str, compiler: CountingCompiler, tmp_path: Path
) -> None:
    one = native.write_module(tmp_path / "one", "same_name", 1)
    two = native.write_module(tmp_path / "two", "same_name", 2)
    found = native.load_at_once(method, [one, two] * (COUNT // 2))
    assert sorted(found, key=str) == [("answer", 1)] * 8 + [("answer", 2)] * 8
    assert compiler.num_compiled() == 2


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_children_in_other_folders_use_the_cache_of_their_parent(
    method: str, compiler: CountingCompiler, tmp_path: Path
) -> None:
    """The parent's is the working directory's: the variable is not set."""
    source = native.write_module(tmp_path / "source", "inherited")
    folders = [tmp_path / f"folder-{number}" for number in range(3)]
    for folder in folders:
        folder.mkdir()
    program = (
        "import sys; from pathlib import Path\n"
        "from tests.support import native\n"
        "if __name__ == '__main__':\n"
        f"    assert native.load({str(source)!r}) == ('answer', 42)\n"
        f"    folders = {list(map(str, folders))!r}\n"
        f"    print(native.load_at_once({method!r}, [Path({str(source)!r})] * 3, folders))\n"
    )
    (tmp_path / "program.py").write_text(program)
    variables = dict(native.environment(tmp_path, compiler))
    del variables["CACHED_CPP_EXTENSION_BUILD_DIR"]
    ran = run(sys.executable, "program.py", cwd=tmp_path, env=variables)
    assert ran.stdout.strip() == str([("answer", 42)] * 3), ran.stdout + ran.stderr
    assert compiler.num_compiled() == 1
    assert (tmp_path / ".cached_cpp_extensions" / "inherited").is_dir()
    assert (tmp_path / ".cached_cpp_extensions" / ".gitignore").read_text() == "*\n"


def start_loading(source: Path) -> subprocess.Popen[str]:
    """Begin to load in a process that prints what it got."""
    program = f"from tests.support import native; print(native.load({str(source)!r}))"
    return subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )


def test_a_builder_that_is_killed_leaves_no_half_module(
    compiler: CountingCompiler, tmp_path: Path
) -> None:
    source = native.write_module(tmp_path / "source", "killed_module")
    compiler.hold_next()
    builder = start_loading(source)
    compiler.wait_until_held()
    assert len(half_built(tmp_path / "cache")) == 1
    waiting = [start_loading(source) for _ in range(3)]
    builder.send_signal(signal.SIGKILL)
    builder.communicate(timeout=PATIENCE_S)
    got = [process.communicate(timeout=PATIENCE_S)[0].strip() for process in waiting]
    assert got == ["('answer', 42)"] * 3
    assert compiler.num_compiled() == 2  # the killed one's, and one by those who waited
    compiler.let_go()  # the compiler that was left over finds its folder gone
    assert not half_built(tmp_path / "cache")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_of_many_the_one_that_builds_is_killed(
    method: str, compiler: CountingCompiler, tmp_path: Path
) -> None:
    source = native.write_module(tmp_path / "source", "killed_of_many")
    compiler.hold_next()
    with ThreadPoolExecutor(1) as threads:
        loading = threads.submit(native.load_at_once, method, [source] * COUNT, num_killed=1)
        waits = Path(f"/proc/{compiler.wait_until_held()}/stat").read_text()
        builder = int(waits.rpartition(")")[2].split()[1])  # its parent
        os.kill(builder, signal.SIGKILL)
        assert loading.result(2 * PATIENCE_S) == [("answer", 42)] * (COUNT - 1)
    assert compiler.num_compiled() == 2
    compiler.let_go()
    assert not half_built(tmp_path / "cache")


@contextlib.contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[Path]:
    """Yield a file system of this size."""
    folder.mkdir()
    mounted = run("mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", folder)
    if mounted.returncode:
        pytest.skip(f"no file system of its own can be mounted: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        run("umount", "--lazy", folder)


def test_a_full_disk_is_an_error_before_anything_is_compiled(
    compiler: CountingCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = native.write_module(tmp_path / "source", "full_disk")
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        monkeypatch.setenv("CACHED_CPP_EXTENSION_BUILD_DIR", str(disk / "cache"))
        (disk / "filler").write_bytes(b"x" * ((1 << 20) - (1 << 14)))
        kind, text = native.load(str(source))
        assert kind == "ExtensionError"
        assert "No space left on device" in str(text)
        assert "CACHED_CPP_EXTENSION_BUILD_DIR names another" in str(text)
        assert compiler.num_compiled() == 0
        (disk / "filler").unlink()
        assert start_loading(source).communicate(timeout=PATIENCE_S)[0] == "('answer', 42)\n"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_disk_that_fills_up_while_it_compiles_is_one_attempt_and_one_error_for_all(
    method: str, compiler: CountingCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    padding = "char large[1 << 22] = {1};"
    source = native.write_module(tmp_path / "source", "large", padding=padding)
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        monkeypatch.setenv("CACHED_CPP_EXTENSION_BUILD_DIR", str(disk))
        found = native.load_at_once(method, [source] * COUNT)
        assert {kind for kind, _ in found} == {"ExtensionError"}
        assert all("No space left on device" in str(text) for _, text in found)
        # A process that asks when the first has failed tries for itself.
        assert 1 <= compiler.num_compiled() < COUNT
        assert not half_built(disk)
        assert not list(disk.rglob("*.so"))
        run("mount", "-o", "remount,size=64m", disk)
        assert start_loading(source).communicate(timeout=PATIENCE_S)[0] == "('answer', 42)\n"


def test_a_limit_of_file_sizes_is_an_error(compiler: CountingCompiler, tmp_path: Path) -> None:
    """As a disk that is full, where no file system can be mounted."""
    padding = "char large[1 << 22] = {1};"
    source = native.write_module(tmp_path / "source", "limited", padding=padding)
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        f"from tests.support import native; print(native.load({str(source)!r}))"
    )
    ran = run("-c", program)
    assert ran.stdout.startswith("('ExtensionError', 'limited: "), ran.stdout + ran.stderr
    assert not half_built(tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.so"))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_read_only_cache_serves_what_it_has(
    method: str, compiler: CountingCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = native.write_module(tmp_path / "source", "read_only")
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        monkeypatch.setenv("CACHED_CPP_EXTENSION_BUILD_DIR", str(disk))
        assert native.load_at_once(method, [source]) == [("answer", 42)]
        assert run("mount", "-o", "remount,ro", disk).returncode == 0
        assert native.load_at_once(method, [source] * COUNT) == [("answer", 42)] * COUNT
        assert compiler.num_compiled() == 1
        other = native.write_module(tmp_path / "source", "not_there")
        found = native.load_at_once(method, [other] * COUNT)
        assert {kind for kind, _ in found} == {"ExtensionError"}
        assert all(f"folder {disk / 'not_there'} cannot be used" in str(t) for _, t in found)
        assert compiler.num_compiled() == 1


# --- the cache alone ------------------------------------------------------------------------


def fingerprint(content: object = 1) -> Fingerprint:
    return Fingerprint({"content": content}, ("cc",))


def writes(text: str) -> Callable[[Path, float], Path]:
    def build(folder: Path, _: float) -> Path:
        (folder / "made").write_text(text)
        return folder / "made"

    return build


def test_a_finished_build_is_found_and_another_fingerprint_is_another_build(
    tmp_path: Path,
) -> None:
    cache = BuildCache("x", tmp_path)
    first = cache.get(fingerprint, writes("first"), 10.0)
    assert first.read_text() == "first"
    assert cache.get(fingerprint, writes("never"), 10.0) == first
    assert first.read_text() == "first"
    second = cache.get(lambda: fingerprint(2), writes("second"), 10.0)
    assert (first.read_text(), second.read_text()) == ("first", "second")


def test_without_a_compiler_what_another_one_made_is_taken(tmp_path: Path) -> None:
    cache = BuildCache("x", tmp_path)
    made = cache.get(fingerprint, writes("made"), 10.0)
    assert cache.get(lambda: Fingerprint({"content": 1}, ("",)), writes("never"), 10.0) == made
    other = Fingerprint({"content": 1}, ("another cc",))
    assert cache.get(lambda: other, writes("other"), 10.0).read_text() == "other"


def test_sources_that_change_while_they_are_compiled_are_compiled_again(tmp_path: Path) -> None:
    content = ["old"]

    def build(folder: Path, _: float) -> Path:
        (folder / "made").write_text(content[0])
        content[0] = "new"
        return folder / "made"

    made = BuildCache("x", tmp_path).get(lambda: fingerprint(content[0]), build, 10.0)
    assert made.read_text() == "new"
    assert len(list(tmp_path.rglob("x.so"))) == 1
    steps = iter(range(100))
    with pytest.raises(ExtensionError, match="x: its sources changed while it was compiled, 3"):
        BuildCache("x", tmp_path).get(lambda: fingerprint(next(steps)), build, 10.0)
    assert not half_built(tmp_path)


def test_half_a_build_is_removed_by_the_next_one(tmp_path: Path) -> None:
    half = tmp_path / "x" / f"{fingerprint().key}.building-1-0"
    half.mkdir(parents=True)
    (half / "x.so").write_text("half")
    assert BuildCache("x", tmp_path).get(fingerprint, writes("whole"), 10.0).read_text() == (
        "whole"
    )
    assert not half.exists()


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_those_who_waited_take_the_result_of_the_attempt(
    is_known: bool, fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    building, waiting, ends = threading.Event(), threading.Event(), threading.Event()
    attempts = []

    def build(folder: Path, _: float) -> Path:
        attempts.append(folder)
        building.set()
        assert ends.wait(PATIENCE_S)
        if fails:
            raise ExtensionError("x: it does not compile \N{SNOWMAN}" + "y" * 100_000)
        (folder / "made").write_text("made")
        return folder / "made"

    acquire = filelock.FileLock.acquire

    def noted(self: filelock.FileLock, **options: float) -> object:
        if building.is_set():
            waiting.set()
        return acquire(self, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(filelock.FileLock, "acquire", noted)
    results: list[str] = []

    def get() -> None:
        try:
            found = BuildCache("x", tmp_path).get(
                lambda: fingerprint() if is_known else None, build, PATIENCE_S
            )
            results.append(found.read_text())
        except ExtensionError as exc:
            results.append(str(exc)[:30])

    threads = [threading.Thread(target=get) for _ in range(2)]
    threads[0].start()
    assert building.wait(PATIENCE_S)
    threads[1].start()
    assert waiting.wait(PATIENCE_S)
    ends.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    expected = "x: it does not compile \N{SNOWMAN}yyyyyy" if fails else "made"
    assert results == [expected, expected]
    assert len(attempts) == 1
    # A call that begins later tries again, unless there is a finished build of the sources.
    get()
    assert len(attempts) == (1 if is_known and not fails else 2)


def test_a_wait_has_a_deadline(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    with (
        filelock.FileLock(tmp_path / "x" / f"{fingerprint().key}.lock"),
        pytest.raises(
            ExtensionError, match=r"x: another process has held .* until the deadline"
        ),
    ):
        BuildCache("x", tmp_path).get(fingerprint, writes("never"), 0.1)


@pytest.mark.parametrize("name", ["", "a-b", "a.b", "../x", "1a"])
def test_a_name_is_an_identifier(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be a Python identifier"):
        BuildCache(name, tmp_path)


def test_an_error_of_the_builder_is_raised_as_it_is(tmp_path: Path) -> None:
    def build(folder: Path, _: float) -> Path:
        raise ZeroDivisionError(folder.name)

    with pytest.raises(ZeroDivisionError):
        BuildCache("x", tmp_path).get(fingerprint, build, 10.0)
    assert not half_built(tmp_path)


def test_a_caller_whose_time_is_up_leaves_no_error_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(folder: Path, seconds: float) -> Path:
        raise ExtensionError(f"x: not ended after {seconds:.0f} s")

    written: list[object] = []
    monkeypatch.setattr("persia._build.cache._write", lambda note, end: written.append(end))
    with pytest.raises(ExtensionError, match="x: not ended"):
        BuildCache("x", tmp_path).get(fingerprint, late, 0.0)
    assert not written
