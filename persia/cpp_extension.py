"""Native code beside a package's Python: compiled where it runs, or taken from a wheel.

A module is compiled once by the machine that runs it and kept in a cache, which is safe for
processes that start together; or it comes prebuilt in a wheel. ``cpp_extension_tools`` is
another name of this module. Nothing here loads torch before a function that needs it is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from persia._build import toolchain
from persia._build.builders import (
    Builder,
    CompilerBuilder,
    ModuleBuild,
    TorchBuilder,
    build_module,
)
from persia._build.modules import load_module, load_prebuilt_or_build
from persia._build.shared_library import compile_shared_library
from persia.errors import ConfigError, PersiaError

if TYPE_CHECKING:
    from persia._build.setuptools_command import BuildPrebuilt as BuildPrebuilt

# Without BuildPrebuilt: `import *` would load setuptools.
__all__ = [
    "CompilerBuilder",
    "ModuleBuild",
    "TorchBuilder",
    "cached_load_arcadia_extension",
    "cached_load_prebuilt_extension",
    "cached_load_torch_cpp_extension",
    "compile_shared_library",
    "get_cpp_sources_list_from_folder",
    "get_default_cpp_cflags",
    "get_kernels_include",
    "get_kernels_name",
]

if not TYPE_CHECKING:  # where any name would be taken for one

    def __getattr__(name: str) -> Any:
        """Load setuptools where its command is asked for: in a setup.py."""
        if name == "BuildPrebuilt":
            from persia._build.setuptools_command import BuildPrebuilt

            return BuildPrebuilt
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def get_kernels_include() -> str:
    """Return the folder of ``persia_kernels.h``, the interface of kernels in servers."""
    return str(Path(__file__).parent / "include")


def get_kernels_name(source: str | Path | Sequence[str | Path], name: str | None = None) -> str:
    """Compile kernels for servers, load them here, and return how configs name them.

    That is ``native:<name>:<sha256>``: as the ``policy`` of an ``eviction`` for a scorer, as
    the ``id_hash`` of a slot for a hash of ids, or as the ``method`` of its ``initialization``.

    Args:
        source: A file or several, or the .so that one was compiled to.
        name: An identifier; by default the file's.

    Raises:
        ConfigError: If there is no file, or the name cannot be used.
        ExtensionError: If it cannot be compiled, or is not what ``persia_kernels.h`` says.
    """
    # It needs numpy, which what builds modules does not.
    from persia._build import kernel_library

    return kernel_library.load_sources("get_kernels_name", source, name)[1]


_SUFFIXES = (".c", ".cc", ".cpp", ".cu")


def get_cpp_sources_list_from_folder(folder: str | Path) -> list[str]:
    """Return the .cpp, .c, .cc and .cu files of a folder, without its subfolders', sorted.

    Raises:
        ConfigError: If it is no folder, or has no such file.
    """
    place = Path(folder)
    if not place.is_dir():
        raise ConfigError(f"folder {place} of native sources is not there, or no folder")
    found = sorted(str(path) for path in place.iterdir() if path.suffix in _SUFFIXES)
    if not found:
        raise ConfigError(f"folder {place} has no native source ({', '.join(_SUFFIXES)})")
    return found


def get_default_cpp_cflags(portable: bool = False) -> list[str]:
    """Return -O3, -Wall and the flag for this machine's CPU; ``portable`` leaves that one out.

    With it the code runs only on CPUs like this one: right where it is compiled by the machine
    that runs it, wrong for a wheel.
    """
    return toolchain.default_cflags(portable)


def cached_load_torch_cpp_extension(
    name: str,
    sources: str | Path | Sequence[str | Path],
    extra_include_paths: Sequence[str | Path] = (),
    extra_cflags: Sequence[str] | None = None,
    verbose: bool = False,
    *,
    extra_cuda_cflags: Sequence[str] = (),
    extra_ldflags: Sequence[str] = (),
    with_cuda: bool = False,
    is_python_module: bool = True,
    build_directory: str | Path | None = None,
    timeout_s: float = toolchain.DEADLINE_S,
) -> Any:
    """Return a C++ or CUDA module, compiled by ``torch.utils.cpp_extension`` and then kept.

    Needs a C++ compiler and ninja, and nvcc for .cu files; where the module is in the cache,
    none of them is run. Processes that ask at the same time compile once. Another source,
    header, flag, compiler, torch, Python or CPU is another module.

    Args:
        name: The module's name, unique among the modules of a process; the sources have it as
            ``TORCH_EXTENSION_NAME``.
        sources: One file or several: .cpp, .cc, .c and .cu.
        extra_include_paths: Folders of headers, beside torch's and Python's.
        extra_cflags: Flags of the compiler; by default those of ``get_default_cpp_cflags``.
        verbose: Whether the output of the tools is printed, once they have ended.
        extra_cuda_cflags: Flags of nvcc.
        extra_ldflags: Flags of the linker.
        with_cuda: Whether to link with CUDA; .cu files do so in any case.
        is_python_module: False for a library that only registers operators by TORCH_LIBRARY:
            it is loaded, and its path returned.
        build_directory: The cache; by default the folder of CACHED_CPP_EXTENSION_BUILD_DIR,
            or ``.cached_cpp_extensions`` in the working directory, which child processes get.
        timeout_s: Seconds for compiling, or for the process that does.

    Raises:
        ConfigError: If the name is no identifier, or a source is not there.
        ExtensionError: If a tool is missing, the sources do not compile (the error ends with
            what the compiler printed), the cache cannot be written, or time is up.
    """
    import torch

    builder = TorchBuilder(
        [sources] if isinstance(sources, (str, Path)) else list(sources),
        extra_cflags,
        extra_cuda_cflags,
        extra_ldflags,
        extra_include_paths,
        is_python_module,
        verbose,
    )
    root = None if build_directory is None else Path(build_directory)
    path = build_module(builder, name, need_cuda=with_cuda, root=root, timeout_s=timeout_s)
    if is_python_module:
        return load_module(name, path)
    torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
    return path


def cached_load_prebuilt_extension(
    external_prebuilded_path: str | Path | None,
    module_name: str,
    python_include_path: str | Path | None = None,
    need_cuda: bool = False,
    builder: Builder | None = None,
    *,
    sources: Sequence[str | Path] = (),
    library_path: str = "",
    timeout_s: float = toolchain.DEADLINE_S,
) -> ModuleType:
    """Return the module that a wheel has brought, if it fits; otherwise have it built.

    It fits if its file name has the tag of this interpreter and, where ``BuildPrebuilt`` made
    it, it was built for this minor version of torch. One that cannot be imported is built too.

    Args:
        external_prebuilded_path: The folder of the prebuilt module, or its file, whether it is
            there or not; ``BuildPrebuilt`` puts it there in a wheel.
        module_name: The module's name, unique among the modules of a process.
        python_include_path: Folder of ``Python.h``, needed only where the module is built; by
            default that of this interpreter.
        need_cuda: Whether the module has CUDA code.
        builder: A callable that takes a ``ModuleBuild`` and returns the path of a .so, such as
            ``CompilerBuilder`` and ``TorchBuilder``. None is for places where the prebuilt
            module is.
        sources: Files and folders that the builder reads, if it has no attribute ``sources``:
            a change of one builds again. Without either, nothing says whether a build is up
            to date: each process calls the builder, one after the other, and processes that
            waited for a call take its result.
        library_path: Handed to the builder, whose tool may look a library up by it.
        timeout_s: Seconds for the build, or for the process that does it.

    Raises:
        ConfigError: If an argument cannot be used.
        ExtensionError: If no prebuilt module fits and there is no builder, or it fails; names
            the file, tag and ABI that were expected.
    """
    return load_prebuilt_or_build(
        None if external_prebuilded_path is None else Path(external_prebuilded_path),
        module_name,
        builder,
        sources=sources,
        python_include_path=python_include_path,
        need_cuda=need_cuda,
        library_path=library_path,
        timeout_s=timeout_s,
    )


def cached_load_arcadia_extension(
    external_prebuilded_path: str | Path | None,
    arcadia_module_name: str,
    library_path_relative_to_arcadia_root: str = "",
    python_include_path: str | Path | None = None,
    need_cuda: bool = False,
    **options: Any,
) -> ModuleType:
    """Return a module as ``cached_load_prebuilt_extension`` does, by other names of arguments.

    Args:
        external_prebuilded_path: As there.
        arcadia_module_name: Its ``module_name``.
        library_path_relative_to_arcadia_root: Its ``library_path``.
        python_include_path: As there.
        need_cuda: As there.
        options: Its ``builder``, ``sources`` and ``timeout_s``.
    """
    return cached_load_prebuilt_extension(
        external_prebuilded_path,
        arcadia_module_name,
        python_include_path,
        need_cuda,
        library_path=library_path_relative_to_arcadia_root,
        **options,
    )


def _main(argv: Sequence[str] | None = None) -> int:
    """Check kernels of servers: ``python -m persia.cpp_extension check file.c``."""
    import argparse

    from persia._build import kernel_check

    parser = argparse.ArgumentParser("python -m persia.cpp_extension")
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser(
        "check", help="whether a kernel does what persia_kernels.h says"
    )
    check.add_argument("sources", nargs="+", type=Path, help="in C or C++")
    check.add_argument("--name", help="of the library; by default the first file's")
    check.add_argument(
        "--model", type=Path, help="a Python file with step(), fill() or hash_ids() in NumPy"
    )
    check.add_argument("--tolerance", type=float, default=1e-5, help="of a difference from it")
    check.add_argument(
        "--param", action="append", default=[], metavar="NAME=NUMBER", help="if not its default"
    )
    given = parser.parse_args(argv)
    try:
        params = {name: float(value) for name, value in (x.split("=", 1) for x in given.param)}
        name = given.name or given.sources[0].stem
        for line in kernel_check.check(
            given.sources, name, given.model, given.tolerance, params
        ):
            print(line, flush=True)
    except (PersiaError, ValueError) as exc:
        print(f"not passed: {exc}")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(_main())
