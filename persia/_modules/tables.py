"""The tables that modules look up in: one object per name, shared by all modules of that name.

A table is declared by the first module that names it. Where its rows are, its ``RowHome``, is
decided at its first lookup, and again when a context with a slot of its name is entered.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

import torch

from persia._core.kernels.optim import MAX_DIM
from persia.embedding import InitialValues, Normal
from persia.errors import ConfigError
from persia.logger import get_logger

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from persia._modules.homes import RowHome
    from persia._modules.lookups import RowGradient
    from persia._rpc.messages import OptimizerSettings

_logger = get_logger("persia.nn")

# Training lookups and backward passes without a step after which a model is taken for one whose
# rows are forgotten. An optimizer may be made after the first forward, and a pass be a trial.
PATIENCE = 3
MANY_LOOKUPS = 50

# What an anchor's gradient has in its second place, once per gradient that was handed over. All
# that scales an anchor's gradient (GradScaler, clipping, averaging) shows in it. A power of two,
# so that it is found again exactly, and so small that it counts nothing in a norm.
MARKER = 2.0**-30
HALF_MARKER = 2.0**-10  # float16 has no number as small


def marker_of(dtype: torch.dtype) -> float:
    """Return what marks a gradient in an anchor of this dtype."""
    return HALF_MARKER if dtype is torch.float16 else MARKER


class ModuleTable:
    """A named set of rows that modules look up and that a ``persia.optim`` optimizer steps.

    Attributes:
        key: Its name, and a number behind ``#`` if a table of that name had another shape
            before; operators know it by that.
        anchor: The parameter that stands for the rows in ``parameters()``, f32 [2]. Its gradient
            has the norm of the rows' gradients, and a mark; see ``lookups``.
    """

    def __init__(self, name: str, key: str, dim: int, initialization: InitialValues) -> None:
        self.name = name
        self.key = key
        self.dim = dim
        self.initialization = initialization
        self.anchor = torch.nn.Parameter(torch.zeros(2))
        self.home: RowHome | None = None
        # Of the optimizer that steps it, and what bounds its values; they decide its home.
        self.optimizer: OptimizerSettings | None = None
        self.weight_bound = 0.0
        self.is_fused_by: weakref.ref[torch.optim.Optimizer] | None = None
        # Rows to be written before its first lookup: ids u64 [n] and values f32 [n, dim].
        self.first_rows: list[tuple[NDArray[np.uint64], NDArray[np.float32]]] = []
        self.gradients: list[RowGradient] = []  # handed over and not stepped yet
        self.num_marks = 0  # in the anchor's gradient
        self.version = 0  # steps so far
        self.versions: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # that show it
        # For the warning of rows that never step.
        self.num_lookups = self.num_backwards = 0
        self.has_warned = False

    def note_step(self) -> None:
        """Note that rows have changed: in the version of every module that reads them."""
        self.version += 1
        self.num_lookups = self.num_backwards = 0
        for module in self.versions:
            version = module.version
            if isinstance(version, torch.Tensor):
                version.add_(1)

    def warn(self, text: str) -> None:
        """Say once what is missing for the rows to be trained."""
        if not self.has_warned:
            self.has_warned = True
            _logger.warning("table %r: %s (said once)", self.name, text)


_lock = threading.Lock()  # guards the next two
_tables: dict[str, ModuleTable] = {}  # by key
_keys: dict[str, str] = {}  # by name, of the table that has it now
# By id of an anchor, whose table keeps it.
_by_anchor: dict[int, ModuleTable] = {}


def declare(name: str, dim: int, initialization: InitialValues | None = None) -> ModuleTable:
    """Return the table of a name, made if there is none yet or only one of another dim."""
    if not isinstance(name, str) or not name:
        raise ConfigError(f"table: expected a name, got {name!r}")
    if isinstance(dim, bool) or not isinstance(dim, int) or not 1 <= dim <= MAX_DIM:
        raise ConfigError(f"table {name!r}: embedding_dim must be in 1..{MAX_DIM}, got {dim!r}")
    with _lock:
        key = _keys.get(name)
        if key is not None and _tables[key].dim == dim:
            return _tables[key]
        if key is not None:
            _logger.warning(
                "table %r: it had dim %d, and begins again without rows, with dim %d; models "
                "made before keep theirs",
                *(name, _tables[key].dim, dim),
            )
        return _add(name, dim, initialization)


def declare_new(
    name: str, dim: int, initialization: InitialValues | None = None
) -> ModuleTable:
    """Return a new table, of this name or, if it is taken, of one with a number behind it."""
    with _lock:
        number, free = 1, name
        while free in _keys:
            number += 1
            free = f"{name}_{number}"
        return _add(free, dim, initialization)


def _add(name: str, dim: int, initialization: InitialValues | None) -> ModuleTable:
    number = sum(table.name == name for table in _tables.values())
    key = f"{name}#{number + 1}" if number else name
    table = ModuleTable(name, key, dim, initialization or Normal(0.0, 1.0))
    _tables[key], _keys[name] = table, key
    _by_anchor[id(table.anchor)] = table
    return table


def find(key: str) -> ModuleTable:
    """Return the table that an operator names, or raise ConfigError."""
    table = _tables.get(key)
    if table is None:
        raise ConfigError(
            f"table {key!r}: no module of this process has declared it; make its module, or "
            "persia.nn.load the model, before a program that looks it up runs"
        )
    return table


def of_anchor(parameter: torch.Tensor) -> ModuleTable | None:
    """Return the table that a parameter stands for, or None."""
    table = _by_anchor.get(id(parameter))
    return table if table is not None and table.anchor is parameter else None


def all_tables() -> list[ModuleTable]:
    """Return the tables of this process, in the order of their declaration."""
    with _lock:
        return [_tables[key] for key in _keys.values()]
