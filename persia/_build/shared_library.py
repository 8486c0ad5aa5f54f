"""C, C++ and CUDA sources to a shared library, by the compilers alone: no torch, no ninja."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from persia._build import fingerprint, toolchain
from persia._build.cache import BuildCache
from persia._build.fingerprint import Fingerprint
from persia._build.toolchain import Language


def compile_shared_library(
    sources: str | Path | Sequence[str | Path],
    *,
    name: str,
    cflags: Sequence[str] | None = None,
    include_dirs: Sequence[str | Path] = (),
    cache: Path | None = None,
    exports: Sequence[str] | None = None,
    timeout_s: float = toolchain.DEADLINE_S,
) -> Path:
    """Return the path of a shared library made of sources, compiled once and then kept.

    Needs a compiler for the languages of the sources (.c, .cc, .cpp, .cxx, .cu) and nothing
    else; where the library is in the cache, not even that is run. Processes that ask at the
    same time compile once.

    Args:
        sources: One file or several.
        name: A Python identifier, which names the folder in the cache and the file.
        cflags: Flags of every compilation; by default those for this machine.
        include_dirs: Folders in which headers are looked for. A change of a header that the
            sources include from there, or from beside them, compiles again.
        cache: Folder of all compiled code; by default that of CACHED_CPP_EXTENSION_BUILD_DIR.
        exports: Symbols that the library shows; None shows all.
        timeout_s: Seconds for compiling, or for the process that does.

    Raises:
        ConfigError: If a source is not there or of no known language, or the name is none.
        ExtensionError: If there is no compiler, or it refuses the sources (the error ends with
            its last lines), the cache cannot be written, or time is up.
    """
    paths = fingerprint.checked_sources(sources)
    flags = list(toolchain.default_cflags() if cflags is None else cflags)
    folders = [Path(one).absolute() for one in include_dirs]

    def what() -> Fingerprint:
        parts = fingerprint.common_parts(flags)
        parts["sources"] = fingerprint.digest(
            paths, [*folders, *fingerprint.include_folders(flags)]
        )
        parts["exports"] = None if exports is None else list(exports)
        languages = map(toolchain.language_of, paths)
        return Fingerprint(parts, fingerprint.compilers_of(languages))

    def build(folder: Path, seconds: float) -> Path:
        return compile_into(
            folder, paths, name, flags, folders, exports=exports, timeout_s=seconds
        )

    return BuildCache(name, cache).get(what, build, timeout_s)


def compile_into(
    folder: Path,
    sources: Sequence[Path],
    name: str,
    flags: Sequence[str],
    include_dirs: Sequence[Path],
    *,
    exports: Sequence[str] | None = None,
    timeout_s: float = toolchain.DEADLINE_S,
) -> Path:
    """Compile and link in a folder, past the cache; returns the library there."""
    deadline = time.monotonic() + timeout_s
    objects = []
    for number, source in enumerate(sources):
        language = toolchain.language_of(source)
        compiler = toolchain.need_compiler(language, name)
        words = [*flags, "-fPIC"]
        if language == "cuda":  # nvcc hands to the host's compiler what it does not know itself
            words = [f"-Xcompiler={word}" for word in words]
        included = [f"-I{one}" for one in include_dirs]
        # Numbered: two folders may have a file of one name.
        made = folder / f"{number}.{source.stem}.o"
        command = [*compiler.command, *words, *included, "-c", str(source), "-o", str(made)]
        left = deadline - time.monotonic()
        toolchain.run(command, name=name, folder=folder, timeout_s=left)
        objects.append(str(made))
    linker = _linker(sources)
    library = folder / f"{name}.so"
    hidden = [] if exports is None else toolchain.export_flags(exports, folder, linker)
    if sys.platform == "darwin":  # symbols of Python are the interpreter's own
        hidden += ["-undefined", "dynamic_lookup"]
    command = [*toolchain.need_compiler(linker, name).command, "-shared", *objects, *hidden]
    left = deadline - time.monotonic()
    toolchain.run([*command, "-o", str(library)], name=name, folder=folder, timeout_s=left)
    return library


def _linker(sources: Sequence[Path]) -> Language:
    languages = {toolchain.language_of(source) for source in sources}
    order: tuple[Language, ...] = ("cuda", "c++", "c")
    return next(language for language in order if language in languages)
