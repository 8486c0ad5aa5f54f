"""What a compiled file depends on, as one key: equal keys may share the file."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from persia import env
from persia._build import toolchain
from persia._build.toolchain import Language
from persia.errors import ConfigError

_INCLUDE = re.compile(
    rb'^[ \t]*#[ \t]*(?:include|include_next|import)[ \t]*([<"])([^>"\n]+)[>"]', re.MULTILINE
)
_COMPILED = {".a", ".d", ".o", ".pyc", ".so"}
_FOLDER_FLAG = re.compile(r"-(?:I|isystem|iquote)")


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What decides what a build makes.

    Attributes:
        parts: All of it but the compilers.
        compilers: Identity of each compiler that the build runs; empty where it is missing.
    """

    parts: Mapping[str, object]
    compilers: tuple[str, ...]

    @property
    def key(self) -> str:
        """Two digests of 16 hexadecimal digits: of the parts, and of the compilers."""
        return f"{_digest(self.parts)}-{_digest(self.compilers)}"

    @property
    def pattern(self) -> str:
        """A pattern of ``glob`` for the keys that will do.

        Where a compiler is missing nothing can be built: what any other one has made of the
        same parts is right, such as in an image whose earlier stage had a compiler.
        """
        return self.key if all(self.compilers) else f"{_digest(self.parts)}-*"


def _digest(content: object) -> str:
    text = json.dumps(content, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def compilers_of(languages: Iterable[Language]) -> tuple[str, ...]:
    """Return the identities of the compilers of these languages."""
    found = (toolchain.find_compiler(one) for one in sorted(set(languages)))
    return tuple(compiler.identity if compiler else "" for compiler in found)


def common_parts(flags: Sequence[str] | None) -> dict[str, object]:
    """Return what every build depends on: interpreter, machine, environment, flags.

    Args:
        flags: Of the compiler; None if they are not known. The CPU counts unless they are
            known and compile for any CPU.
    """
    is_portable = flags is not None and not any("=native" in flag for flag in flags)
    return {
        "python": toolchain.python_abi(),
        "machine": f"{sys.platform} {platform.machine()}",
        "cpu": "" if is_portable else toolchain.cpu(),
        "environment": env.of_compilers(),
        "flags": list(flags or ()),
    }


def checked_sources(sources: str | Path | Sequence[str | Path]) -> list[Path]:
    """Return sources as absolute paths; ConfigError if there is none, or one is no file."""
    listed = [sources] if isinstance(sources, (str, Path)) else list(sources)
    paths = [Path(one).absolute() for one in listed]
    if not paths:
        raise ConfigError("sources must name at least one file, got none")
    for path in paths:
        toolchain.language_of(path)
        if not path.is_file():
            raise ConfigError(f"source {path} is not there, or no file")
    return paths


def include_folders(flags: Iterable[str]) -> Iterator[Path]:
    """Yield the folders that ``-I`` and the options like it name, joined or not."""
    flags = iter(flags)
    for flag in flags:
        if found := _FOLDER_FLAG.match(flag):
            yield Path(flag[found.end() :] or next(flags, "."))


def digest(sources: Sequence[Path], include_dirs: Sequence[Path] = ()) -> list[list[str]]:
    """Return name and digest of sources, and of all files that they include, directly or not.

    Includes are read from the text, within ``#if`` as well. One that is found neither beside
    the file nor in ``include_dirs`` is the system's, Python's or torch's: their versions stand
    for it. An include whose name is a macro is not seen.
    """
    found: dict[Path, list[str]] = {}

    def visit(path: Path, name: str) -> None:
        real = path.resolve()
        if real in found:
            return
        content = real.read_bytes()
        found[real] = [name, hashlib.sha256(content).hexdigest()]
        for quote, included in _INCLUDE.findall(content):
            beside = [path.parent] if quote == b'"' else []
            text = included.decode("utf-8", "replace")
            for folder in [*beside, *include_dirs]:
                if (folder / text).is_file():
                    visit(folder / text, text)
                    break

    for source in sources:
        visit(source, source.name)
    return list(found.values())


def digest_of_tree(paths: Sequence[Path]) -> list[list[str]]:
    """Return name and digest of files, and of those below folders.

    Hidden files and what compilers write (``.o``, ``.so``, ...) are left out.

    Raises:
        ConfigError: If one of the paths does not exist.
    """
    found = []
    for path in paths:
        if not path.exists():
            raise ConfigError(f"source {path} is not there")
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in files:
            name = str(file.relative_to(path if path.is_dir() else path.parent))
            is_hidden = any(part.startswith((".", "__pycache__")) for part in Path(name).parts)
            if file.is_file() and not is_hidden and file.suffix not in _COMPILED:
                found.append([name, hashlib.sha256(file.read_bytes()).hexdigest()])
    return found
