"""Where a module looks for a name that it had in 2021: in ``persia.compat``, at first use.

    persia.ctx ---names_of---+
    persia.data -------------+--- by name, when asked ---> persia.compat ---> persia.ctx, ...
    TrainCtx ----Renewed-----+

``persia.compat`` imports the public modules, so it lies above all of them; it is imported by
its name, at the first use of something old.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

_COMPAT = "persia.compat"

# Old names that this process has used: defaults that have changed are logged for such scripts.
used: set[str] = set()


def names_of(module: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module that had other names once."""

    def __getattr__(name: str) -> Any:
        if not name.startswith("__"):  # Python asks for __path__ and the like
            return import_module(_COMPAT).find(module, name)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return __getattr__


class Renewed:
    """Base of a class that took other keywords once: with them it is its older form."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        # A user's subclass keeps its own class.
        if kwargs and cls.__module__ == "persia.ctx":
            cls = import_module(_COMPAT).form_of(cls, kwargs)
        return super().__new__(cls)
