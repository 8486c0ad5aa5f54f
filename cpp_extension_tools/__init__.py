"""Another name of ``persia.cpp_extension``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from persia import cpp_extension
from persia.cpp_extension import (
    CompilerBuilder,
    ModuleBuild,
    TorchBuilder,
    cached_load_arcadia_extension,
    cached_load_prebuilt_extension,
    cached_load_torch_cpp_extension,
    compile_shared_library,
    get_cpp_sources_list_from_folder,
    get_default_cpp_cflags,
)

if TYPE_CHECKING:
    from persia.cpp_extension import BuildPrebuilt as BuildPrebuilt

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
]

if not TYPE_CHECKING:  # where any name would be taken for one

    def __getattr__(name: str) -> Any:
        """Have ``BuildPrebuilt`` load setuptools when it is asked for."""
        return getattr(cpp_extension, name)
