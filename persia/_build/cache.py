"""Compiled files on disk, made once however many processes ask at the same time.

    <root>/<name>/<key>/                 a finished build; appears by one rename, never changes
    <root>/<name>/<key>.building-.../    one that is being made, or whose maker was killed
    <root>/<name>/<key>.lock             held, by ``flock``, by the process that builds
    <root>/<name>/<key>.last             how the last attempt ended

A finished build is found without the lock, so a cache that cannot be written serves what it
has.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from persia import env
from persia._build import toolchain
from persia._build.fingerprint import Fingerprint
from persia.errors import ConfigError, ExtensionError

# Bytes of the note of how an attempt ended. They are written before it begins: a disk that is
# full then is an error at once, and one that is full later still takes the note.
_NOTE_BYTES = 1 << 16
_ERROR_CHARACTERS = 5000  # of 12 bytes at most, as JSON
_NUM_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class Attempt:
    """How a build ended: with a file, or with the text of an error."""

    number: str = ""  # a random one for each attempt
    file: str = ""
    error: str = ""


class BuildCache:
    """The folder of finished builds of one module.

    Args:
        name: The module's name; a Python identifier.
        root: Folder of all modules; if None that of CACHED_CPP_EXTENSION_BUILD_DIR.
    """

    def __init__(self, name: str, root: Path | None = None) -> None:
        if not name.isidentifier():
            raise ConfigError(f"name of a module must be a Python identifier, got {name!r}")
        self.name = name
        self._folder = (root.absolute() if root else env.extension_cache_folder()) / name

    def get(
        self,
        fingerprint: Callable[[], Fingerprint | None],
        build: Callable[[Path, float], Path],
        timeout_s: float,
    ) -> Path:
        """Return the finished file with this fingerprint; build it if there is none.

        Args:
            fingerprint: Called before the build and after it: if the sources changed
                meanwhile, the result is thrown away and built again. If it returns None, it
                is not known what the file depends on, and each call builds.
            build: Called with an empty folder and the seconds left; returns the file.
            timeout_s: Seconds for the wait and the build.

        Raises:
            ExtensionError: If the folder cannot be written, time is up, or the build failed,
                here or in the process that this one waited for.
        """
        deadline = time.monotonic() + timeout_s
        for _ in range(_NUM_ATTEMPTS):
            wanted = fingerprint()
            # Another interpreter's attempt must not be taken for this one's.
            key = wanted.key if wanted else f"unkeyed-{toolchain.python_abi()}"
            pattern = f"{wanted.pattern if wanted else key}/{self.name}.so"
            finished = next(iter(sorted(self._folder.glob(pattern))), None)
            if finished is not None:
                return finished
            try:
                path = self._wait_or_build(key, wanted, fingerprint, build, deadline)
            except OSError as exc:
                raise ExtensionError(
                    f"{self.name}: it is not compiled yet, and folder {self._folder} cannot be "
                    f"used: {exc}; {env.extension_cache.name} names another"
                ) from exc
            if path is not None:
                return path
        raise ExtensionError(
            f"{self.name}: its sources changed while it was compiled, {_NUM_ATTEMPTS} times; "
            "they must not lie in a folder that a build writes to"
        )

    def _wait_or_build(
        self,
        key: str,
        wanted: Fingerprint | None,
        fingerprint: Callable[[], Fingerprint | None],
        build: Callable[[Path, float], Path],
        deadline: float,
    ) -> Path | None:
        """Return the file, or None if the sources changed while it was made."""
        import filelock

        note = self._folder / f"{key}.last"
        if not self._folder.parent.exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            # It may be in a checkout.
            (self._folder.parent / ".gitignore").write_text("*\n", encoding="utf-8")
        self._folder.mkdir(exist_ok=True)
        before = _read(note)
        lock = filelock.FileLock(
            self._folder / f"{key}.lock", timeout=max(deadline - time.monotonic(), 0.0)
        )
        try:
            lock.acquire()
        except filelock.Timeout:
            raise ExtensionError(
                f"{self.name}: another process has held {lock.lock_file} until the deadline; "
                "it compiles the module, or hangs"
            ) from None
        try:
            finished = self._folder / key / f"{self.name}.so"
            if finished.is_file():
                return finished
            # An attempt that ended while this process waited was made from the same sources:
            # a second one would fail as well.
            last = _read(note)
            if last.number != before.number:
                if last.error:
                    raise ExtensionError(last.error)
                if (self._folder / last.file).is_file():
                    return self._folder / last.file
            return self._attempt(key, note, wanted, fingerprint, build, deadline)
        finally:
            lock.release()

    def _attempt(
        self,
        key: str,
        note: Path,
        wanted: Fingerprint | None,
        fingerprint: Callable[[], Fingerprint | None],
        build: Callable[[Path, float], Path],
        deadline: float,
    ) -> Path | None:
        for half in self._folder.glob(f"{key}.building-*"):
            shutil.rmtree(half, ignore_errors=True)
        if not note.exists() or note.stat().st_size < _NOTE_BYTES:
            note.write_bytes(b" " * _NOTE_BYTES)
        number = uuid.uuid4().hex
        folder = self._folder / f"{key}.building-{os.getpid()}-{number[:8]}"
        folder.mkdir()
        try:
            built = build(folder, deadline - time.monotonic())
            if wanted is not None:
                now = fingerprint()
                if now is None or now.key != wanted.key:
                    return None
            finished = self._publish(key, wanted, folder, built)
            _write(note, Attempt(number, file=str(finished.relative_to(self._folder))))
            return finished
        except ExtensionError as exc:
            # That this caller's time was up is no error of those who have more of it.
            if time.monotonic() < deadline:
                _write(note, Attempt(number, error=str(exc)))
            raise
        except OSError as exc:
            _write(note, Attempt(number, error=f"{self.name}: {exc}"))
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _publish(self, key: str, wanted: Fingerprint | None, folder: Path, built: Path) -> Path:
        """Keep the file, what it was made of and the log; name them by one rename."""
        aside = folder / ".publish"
        aside.mkdir()
        file = aside / f"{self.name}.so"
        shutil.copyfile(built, file)
        file.chmod(0o755)
        if (log := folder / "build.log").exists():
            shutil.copyfile(log, aside / log.name)
        parts = {**wanted.parts, "compilers": wanted.compilers} if wanted else {}
        (aside / "build.json").write_text(json.dumps(parts, indent=1), encoding="utf-8")
        if wanted is None:
            content = hashlib.sha256(file.read_bytes()).hexdigest()
            key = f"{key}-{content[:24]}"
        target = self._folder / key
        if not (target / file.name).exists():
            # Otherwise a machine that loses power may keep the name and lose the bytes.
            for path in (file, aside):
                _sync(path)
            shutil.rmtree(target, ignore_errors=True)
            aside.rename(target)
            _sync(self._folder)
        return target / file.name


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(note: Path) -> Attempt:
    try:
        return Attempt(**json.loads(note.read_bytes()))
    except (OSError, ValueError, TypeError):  # none yet, or its writer was killed
        return Attempt()


def _write(note: Path, attempt: Attempt) -> None:
    error = attempt.error[:_ERROR_CHARACTERS]
    text = json.dumps({"number": attempt.number, "file": attempt.file, "error": error})
    try:
        with note.open("r+b") as file:  # in place: these bytes are on the disk already
            file.write(text.encode()[:_NOTE_BYTES].ljust(_NOTE_BYTES))
    except OSError:
        # Those who wait try themselves, and meet the same error.
        return
