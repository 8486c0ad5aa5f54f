"""Libraries with kernels of users: named by their sha256, looked for, tried out and loaded.

    native:<name>:<sha256>      names kernels, in messages and checkpoints

What is hashed is what is loaded: the bytes are read once, and loaded from memory. They are
tried out in a process of their own first, which may crash.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from persia import env
from persia._build.shared_library import compile_shared_library
from persia._build.toolchain import default_cflags
from persia._core.kernels import native
from persia.errors import ConfigError, ExtensionError

# Folder of persia_kernels.h.
INCLUDE = Path(__file__).resolve().parents[1] / "include"
# As PERSIA's own kernels are compiled: a fused multiplication, or a root that sets errno, would
# give other bits, or half the speed. The CPU is chosen by PERSIA_EACH_CPU when it is loaded.
CFLAGS = (*default_cflags(portable=True), "-ffp-contract=off", "-fno-math-errno")

_NAME = re.compile(rf"{native.PREFIX}([A-Za-z_][A-Za-z0-9_]*):([0-9a-f]{{64}})")
_TRY_OUT_S = 120.0
_lock = threading.Lock()


def compile_kernels(
    sources: str | Path | Sequence[str | Path],
    name: str,
    *,
    cflags: Sequence[str] = CFLAGS,
) -> Path:
    """Compile a library of kernels, once; see ``compile_shared_library``."""
    return compile_shared_library(
        sources,
        name=name,
        cflags=cflags,
        include_dirs=[INCLUDE],
        exports=[native.SYMBOL],
    )


def load_sources(
    owner: str, source: str | Path | Sequence[str | Path], name: str | None
) -> tuple[Path, str]:
    """Compile and load what a script names; return the library's file, and how it is named.

    Args:
        owner: What the script calls, for messages.
        source: A file or several, or the .so that one was compiled to.
        name: An identifier of ASCII letters; None is the first file's.

    Raises:
        ConfigError: If there is no file, or the name cannot be used.
        ExtensionError: If it cannot be compiled, or is not what persia_kernels.h says.
    """
    sources = [source] if isinstance(source, (str, Path)) else list(source)
    if not sources:
        raise ConfigError(f"{owner}: expected a source or a .so, got no file")
    path = Path(sources[0])
    kernels = path.stem if name is None else name
    if not kernels.isidentifier() or not kernels.isascii():
        raise ConfigError(f"{owner}: name must be an identifier in ASCII, got {kernels!r}")
    if path.suffix != ".so" or len(sources) > 1:
        path = compile_kernels(sources, kernels)
    return path, load_file(path, kernels)


def load_file(path: Path, name: str) -> str:
    """Load a library, unless it is loaded; return how optimizers and initial values name it.

    Raises:
        ConfigError: If the name is no identifier of ASCII letters.
        ExtensionError: If the file cannot be read, or is not what persia_kernels.h says.
    """
    content = _read(path)
    library = f"{native.PREFIX}{name}:{hashlib.sha256(content).hexdigest()}"
    _parts(library)
    _load(content, library)
    return library


def need(kernel: str) -> None:
    """Load the library that something is named by, unless that is none or is loaded.

    It is looked for below PERSIA_KERNEL_ROOTS as ``<name>.so`` and, as a cache of compiled
    modules has it, ``<name>/*/<name>.so``; the one with the right sha256 is loaded.

    Raises:
        ConfigError: If it begins as the name of a library and is none.
        ExtensionError: If it is not there, or is not what persia_kernels.h says.
    """
    if not native.is_native(kernel):
        return
    name, digest = _parts(kernel)
    if kernel not in native.loaded():
        _load(_find(name, digest, env.kernel_roots() or []), kernel)


def _parts(library: str) -> tuple[str, str]:
    """Return name and sha256 of a library."""
    match = _NAME.fullmatch(library)
    if match is None:
        raise ConfigError(
            f"kernels: expected {native.PREFIX}<name>:<sha256> with a name of letters, digits "
            f"and _, got {library!a:.200}"
        )
    return match[1], match[2]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as exc:
        raise ExtensionError(f"kernels {path}: {exc.strerror}") from exc


def _find(name: str, digest: str, roots: Sequence[str]) -> bytes:
    """Return the library with this sha256."""
    refused = []
    for root in roots:
        folder = Path(root).resolve()
        of_cache = sorted((folder / name).glob(f"*/{name}.so"))
        for path in (folder / f"{name}.so", *of_cache):
            if not path.is_file():
                continue
            if not path.resolve().is_relative_to(folder):
                refused.append(f"{path} leads outside of it")
                continue
            content = _read(path)
            found = hashlib.sha256(content).hexdigest()
            if found == digest:
                return content
            refused.append(f"{path} has {found[:12]}...")
    where = ", ".join(roots) or "not set, so no library is loaded"
    seen = f"; {'; '.join(refused)}" if refused else ""
    raise ExtensionError(
        f"kernels {name}: expected {name}.so with sha256 {digest} below "
        f"{env.kernel_roots.name} of the server ({where}){seen}. In embedded mode the server "
        f"is the script: set {env.kernel_roots.name} for it to the folder of {name}.so"
    )


def _load(content: bytes, library: str) -> None:
    with _lock:
        if library in native.loaded():
            return
        with _as_file(content) as (path, descriptors):
            try:
                _try_out(path, library, descriptors)
            except BaseException:
                for descriptor in descriptors:
                    os.close(descriptor)
                raise
            native.load(path, library)


@contextlib.contextmanager
def _as_file(content: bytes) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Have a path of these bytes, that no other process can change meanwhile."""
    if sys.platform == "linux":
        import fcntl

        # Open for as long as it is loaded: the loader knows libraries by their paths, and
        # another one would take the number of this one.
        descriptor = os.memfd_create("persia-kernels", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals | fcntl.F_SEAL_SEAL)
        yield f"/proc/self/fd/{descriptor}", (descriptor,)
        return
    with tempfile.NamedTemporaryFile(suffix=".so") as temporary:
        temporary.write(content)
        temporary.flush()
        yield temporary.name, ()


def _try_out(path: str, library: str, descriptors: tuple[int, ...]) -> None:
    """Load the library and call its functions in another process."""
    command = [sys.executable, "-m", "persia._build.kernel_child", path, library]
    try:
        ended = subprocess.run(
            command,
            env=env.of_child(PYTHONPATH=os.pathsep.join(filter(None, sys.path))),
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TRY_OUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ExtensionError(
            f"{library}: its kernels did not return within {_TRY_OUT_S:.0f} s when tried out"
        ) from None
    if ended.returncode == 0:
        return
    text = ended.stdout.decode(errors="replace").strip()
    if ended.returncode < 0:
        text = f"{library}: it crashed with signal {-ended.returncode} when tried out"
    if not text:
        text = f"{library}: {ended.stderr.decode(errors='replace').strip()[-2000:]}"
    raise ExtensionError(text)
