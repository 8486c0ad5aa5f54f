"""Where a module looks for a name that it had in 2021: in ``persia.compat``, at first use.

    persia.ctx ---names_of---+
    persia.data -------------+--- by name, when asked ---> persia.compat ---> persia.ctx, ...
    TrainCtx ----Renewed-----+

``persia.compat`` knows every public module, so it lies above all of them; it is loaded by its
name, by whoever asks for something old, and costs nobody else anything.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

_COMPAT = "persia.compat"


def names_of(module: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module that had other names once."""

    def __getattr__(name: str) -> Any:
        if not name.startswith("__"):  # Python's own questions, such as for __path__
            return import_module(_COMPAT).find(module, name)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return __getattr__


class Renewed:
    """Base of a class that took other keywords once: with them it is its older form."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        # Not for subclasses of the user's: they are what they say.
        if kwargs and cls.__module__ == "persia.ctx":
            cls = import_module(_COMPAT).form_of(cls, kwargs)
        return super().__new__(cls)
