"""Another name of ``persia.cpp_extension``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from persia import cpp_extension
from persia.cpp_extension import *  # noqa: F403

if TYPE_CHECKING:
    from persia.cpp_extension import BuildPrebuilt as BuildPrebuilt

__all__: list[str] = []
__all__ += cpp_extension.__all__  # without BuildPrebuilt: `import *` would load setuptools

if not TYPE_CHECKING:  # where any name would be taken for one

    def __getattr__(name: str) -> Any:
        """Have ``BuildPrebuilt`` load setuptools when it is asked for."""
        return getattr(cpp_extension, name)
