"""Builders of Python modules: by the compilers alone, and by PyTorch's tool chain.

A builder is a callable that takes a ``ModuleBuild`` and returns the path of a .so. It may have
an attribute ``sources``, files and folders that it reads, and a method ``flags(build)``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from persia import env
from persia._build import fingerprint, toolchain
from persia._build.cache import BuildCache
from persia._build.fingerprint import Fingerprint
from persia._build.shared_library import compile_into
from persia._build.toolchain import Language
from persia.errors import ConfigError, ExtensionError


@dataclass(frozen=True, slots=True)
class ModuleBuild:
    """What a builder is asked for.

    Attributes:
        module_name: Name of the module, which must export ``PyInit_<module_name>``.
        folder: An empty folder for the builder's files; it is removed afterwards.
        python_include_path: Folder of ``Python.h``.
        need_cuda: Whether the module has CUDA code.
        is_portable: Whether it will run on other machines: it goes into a wheel.
        library_path: Where a company's tool finds the library, if the caller has said it.
        timeout_s: Seconds that the build may take.
    """

    module_name: str
    folder: Path
    python_include_path: Path
    need_cuda: bool = False
    is_portable: bool = False
    library_path: str = ""
    timeout_s: float = toolchain.DEADLINE_S

    @property
    def file_name(self) -> str:
        """The module's file name, with the tag of this interpreter."""
        return toolchain.module_file(self.module_name)

    @property
    def export_map(self) -> Path:
        """A list for the linker by which the module shows ``PyInit_<name>`` alone.

        For GNU ld and lld it is ``-Wl,--version-script=PATH``, on macOS
        ``-Wl,-exported_symbols_list,PATH``.
        """
        return toolchain.write_export_map([f"PyInit_{self.module_name}"], self.folder)


Builder = Callable[[ModuleBuild], "str | os.PathLike[str]"]


@dataclass(frozen=True)
class CompilerBuilder:
    """Builds a Python module by the C, C++ or CUDA compiler alone.

    Sources may write ``TORCH_EXTENSION_NAME`` for the module's name, as torch's do.

    Args:
        sources: One file or several.
        cflags: By default those of ``get_default_cpp_cflags``, portable in a wheel.
        include_dirs: Folders of headers, beside Python's own.
    """

    sources: Sequence[str | Path]
    cflags: Sequence[str] | None = None
    include_dirs: Sequence[str | Path] = ()

    def flags(self, build: ModuleBuild) -> list[str]:
        """Return the compiler's flags for a build."""
        flags = (
            toolchain.default_cflags(build.is_portable) if self.cflags is None else self.cflags
        )
        return [*flags, *(f"-I{Path(one).absolute()}" for one in self.include_dirs)]

    def __call__(self, build: ModuleBuild) -> Path:
        """Return the compiled module, in the build's folder."""
        return compile_into(
            build.folder,
            fingerprint.checked_sources(self.sources),
            build.module_name,
            [*self.flags(build), f"-DTORCH_EXTENSION_NAME={build.module_name}"],
            [build.python_include_path],
            exports=[f"PyInit_{build.module_name}"],
            timeout_s=build.timeout_s,
        )


@dataclass(frozen=True)
class TorchBuilder:
    """Builds a module or a library of operators by ``torch.utils.cpp_extension``, with ninja.

    It runs in a process of its own, which is killed at the deadline or with this process.

    Args:
        sources: One file or several: .cpp, .cc, .c and .cu.
        extra_cflags: By default those of ``get_default_cpp_cflags``, portable in a wheel.
        extra_cuda_cflags: Flags of nvcc.
        extra_ldflags: Flags of the linker.
        extra_include_paths: Folders of headers, beside torch's and Python's.
        is_python_module: False for a library that registers operators and is no module.
        verbose: Whether the output of the tools is printed, once they have ended.
    """

    sources: Sequence[str | Path]
    extra_cflags: Sequence[str] | None = None
    extra_cuda_cflags: Sequence[str] = ()
    extra_ldflags: Sequence[str] = ()
    extra_include_paths: Sequence[str | Path] = ()
    is_python_module: bool = True
    verbose: bool = field(default=False, compare=False)

    needs_torch = True

    def flags(self, build: ModuleBuild) -> list[str]:
        """Return the compiler's flags for a build."""
        flags = self.extra_cflags
        flags = toolchain.default_cflags(build.is_portable) if flags is None else flags
        return [*flags, *(f"-I{Path(one).absolute()}" for one in self.extra_include_paths)]

    def parts(self) -> dict[str, object]:
        """Return what the result depends on beside sources, flags and compilers."""
        import torch

        return {
            "torch": [torch.__version__, torch.version.cuda, torch.compiled_with_cxx11_abi()],
            "nvcc": list(self.extra_cuda_cflags),
            "linker": list(self.extra_ldflags),
            "module": self.is_python_module,
        }

    def __call__(self, build: ModuleBuild) -> Path:
        """Return the compiled module, in the build's folder."""
        name, folder = build.module_name, build.folder
        sources = fingerprint.checked_sources(self.sources)
        with_cuda = build.need_cuda or any(source.suffix == ".cu" for source in sources)
        self._check_tools(name, with_cuda)
        linked = list(self.extra_ldflags)
        if self.is_python_module:
            linked += toolchain.export_flags([f"PyInit_{name}"], folder, "c++")
        request = {
            "name": name,
            "sources": [str(source) for source in sources],
            "extra_cflags": self.flags(build),
            "extra_cuda_cflags": list(self.extra_cuda_cflags),
            "extra_ldflags": linked,
            "extra_include_paths": [
                str(Path(one).absolute()) for one in self.extra_include_paths
            ],
            "build_directory": str(folder),
            "with_cuda": with_cuda,
            "is_python_module": self.is_python_module,
        }
        asked = folder / "request.json"
        asked.write_text(json.dumps(request), encoding="utf-8")
        try:
            toolchain.run(
                [sys.executable, "-m", "persia._build.torch_child", str(asked)],
                name=name,
                folder=folder,
                timeout_s=build.timeout_s,
                environment=env.of_child(
                    PATH=_path_with_scripts(),
                    PYTHONPATH=os.pathsep.join(filter(None, sys.path)),
                ),
            )
        finally:
            if self.verbose:
                log = (folder / "build.log").read_text(encoding="utf-8", errors="replace")
                print(log, file=sys.stderr)
        return folder / f"{name}.so"

    def _check_tools(self, name: str, with_cuda: bool) -> None:
        import torch

        toolchain.need_compiler("c++", name)
        if shutil.which("ninja", path=_path_with_scripts()) is None:
            raise ExtensionError(
                f"{name}: PyTorch compiles with ninja, which is not here: pip install ninja"
            )
        if with_cuda:
            toolchain.need_compiler("cuda", name)
            if torch.version.cuda is None and torch.version.hip is None:
                raise ExtensionError(
                    f"{name}: it has CUDA sources, and torch {torch.__version__} is built "
                    "without CUDA: install a torch for CUDA"
                )


def _path_with_scripts() -> str:
    """Return PATH with the environment's programs first: ninja is one that pip installs."""
    return os.pathsep.join([sysconfig.get_path("scripts"), env.search_path()])


def build_module(
    builder: Builder,
    name: str,
    *,
    sources: Sequence[str | Path] = (),
    python_include_path: str | Path | None = None,
    need_cuda: bool = False,
    is_portable: bool = False,
    library_path: str = "",
    root: Path | None = None,
    timeout_s: float = toolchain.DEADLINE_S,
) -> Path:
    """Return the module's file from the cache, where ``builder`` puts it if it is not there.

    Raises:
        ConfigError: If a source is not there, or the folder of Python's headers has none.
        ExtensionError: If the module cannot be built.
    """
    headers = Path(python_include_path or sysconfig.get_path("include")).absolute()

    def request(folder: Path, seconds: float) -> ModuleBuild:
        return ModuleBuild(
            name, folder, headers, need_cuda, is_portable, library_path, timeout_s=seconds
        )

    def what() -> Fingerprint | None:
        return _fingerprint(builder, request(Path(), timeout_s), sources)

    def build(folder: Path, seconds: float) -> Path:
        # Where the module is there already, no headers are needed.
        if not (headers / "Python.h").is_file():
            raise ExtensionError(f"{name}: python_include_path {headers} has no Python.h")
        return _checked_result(builder, request(folder, seconds))

    return BuildCache(name, root).get(what, build, timeout_s)


def _fingerprint(
    builder: Builder, build: ModuleBuild, sources: Sequence[str | Path]
) -> Fingerprint | None:
    """Return None if nothing says what a builder reads."""
    languages: set[Language]
    files = [Path(one).absolute() for one in sources]
    if isinstance(builder, (CompilerBuilder, TorchBuilder)):
        flags = builder.flags(build)
        parts = fingerprint.common_parts(flags)
        included = list(fingerprint.include_folders(flags))
        own = fingerprint.checked_sources(builder.sources)
        parts["sources"] = fingerprint.digest(own, included)
        languages = {toolchain.language_of(source) for source in own}
        if isinstance(builder, TorchBuilder):
            parts["torch"] = builder.parts()
            languages = {"c++", *languages} - {"c"}
    else:
        files += [Path(one).absolute() for one in getattr(builder, "sources", ())]
        if not files:
            return None
        parts = fingerprint.common_parts(None)
        parts["builder"] = getattr(builder, "__qualname__", type(builder).__qualname__)
        parts["library"] = build.library_path
        languages = {"c", "c++"}
    if build.need_cuda:
        languages.add("cuda")
    parts["files"] = fingerprint.digest_of_tree(files)
    parts["headers"] = str(build.python_include_path)
    parts["wheel"] = build.is_portable
    parts["cuda"] = toolchain.cuda_devices() if build.need_cuda else ""
    return Fingerprint(parts, fingerprint.compilers_of(languages))


def _checked_result(builder: Builder, build: ModuleBuild) -> Path:
    name = build.module_name
    try:
        returned = builder(build)
    except (OSError, subprocess.SubprocessError) as exc:  # its tool is missing, or refuses
        raise ExtensionError(f"{name}: its builder failed: {exc}") from exc
    if not isinstance(returned, (str, os.PathLike)):
        raise ConfigError(
            f"builder of {name} must return the path of a .so, got {type(returned).__name__}"
        )
    path = Path(build.folder, returned)
    if not path.is_file():
        raise ExtensionError(f"{name}: its builder returned {path}, which is no file")
    is_module = not isinstance(builder, TorchBuilder) or builder.is_python_module
    if is_module and f"PyInit_{name}".encode() not in path.read_bytes():
        raise ExtensionError(
            f"{name}: {path} has no PyInit_{name}; a module's name must be the same in its "
            "sources and in the call that loads it"
        )
    return path
