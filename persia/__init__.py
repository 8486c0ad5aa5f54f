"""PERSIA: train recommender models whose embeddings are larger than any one machine.

``import persia`` loads nothing heavy and prints nothing: ``persia.ctx`` and the other public
submodules load on first use, so that a server never pays for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from persia.version import __version__

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["__version__"]

_SUBMODULES = frozenset(
    {
        "config",
        "cpp_extension",
        "ctx",
        "data",
        "distributed",
        "embedding",
        "env",
        "errors",
        "helper",
        "launcher",
        "logger",
        "nn",
        "ops",
        "optim",
        "prelude",
        "readers",
        "service",
        "tables",
        "utils",
    }
)


def __getattr__(name: str) -> ModuleType:
    if name in _SUBMODULES:
        # import_module binds the submodule here, so this runs once per name.
        return import_module(f"persia.{name}")
    raise AttributeError(f"module 'persia' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_SUBMODULES})
