"""The tables that modules look up in: one object per name, shared by all modules of that name.

A table is declared by the first module that names it. This module knows names and shapes; where
rows are is in ``homes``, and what they are to be stepped by in ``lookups``.
"""

from __future__ import annotations

import itertools
import secrets
import threading
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from persia._core.kernels.optim import MAX_DIM
from persia.embedding import InitialValues, Normal
from persia.errors import ConfigError
from persia.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from persia._rpc.messages import OptimizerSettings

_logger = get_logger("persia.nn")

# By which references to tables know their process.
PROCESS = secrets.token_hex(8)


@dataclass(slots=True, eq=False)
class PendingGradients:
    """What was handed over for one table, and what shows whether it is ever stepped."""

    gradients: list[Any] = field(default_factory=list)  # ``RowGradient`` of lookups.py
    num_marks: int = 0  # in the anchor's gradient; those of a backward under way not counted
    norm: float = 0.0  # of ``gradients``, if they are in memory of the CPU
    num_lookups: int = 0  # for training
    num_followed: int = 0  # of these, up to the last gradient
    num_backwards: int = 0  # since the last step
    has_ended: bool = False  # the backward of the gradients beyond ``num_marks``

    def drop(self) -> None:
        """Forget what was handed over."""
        for gradient in self.gradients:
            if gradient.request is not None:
                gradient.detach()
        self.gradients.clear()
        self.num_marks = 0


class ModuleTable:
    """A named set of rows that modules look up and that an optimizer of ``persia.optim`` steps.

    Attributes:
        key: Its name, with a number behind ``#`` if another table has that key; operators know
            it by that. A later table may have it again: compiled code serves the next model.
        identity: What no other table of this process ever has; pickles know it by that.
        anchor: The parameter that stands for the rows in ``parameters()``, f32 [3].
        optimizer: Settings of what steps it, None before there is one. These and
            ``weight_bound`` decide in which store its rows can be.
        first_rows: To be written before its first lookup: ids u64 [n] and values f32 [n, dim].
        version: Steps and writes so far.
        num_writes: Writes and loads so far: what was looked up before one is not used after it.
        home: Where its rows are outside contexts, a ``RowHome`` of homes.py; None before its
            first use.
        has_own_rate: Whether it is stepped at another learning rate than tables like it.
        is_loaded: Whether its rows were loaded from a checkpoint.
        lacks_state: Whether that has state of an optimizer, which was left out as it had none.
        pending: Its gradients that no step has used.
    """

    def __init__(self, name: str, key: str, dim: int, initialization: InitialValues) -> None:
        self.name = name
        self.key = key
        self.identity = f"{key}@{next(_numbers)}"
        self.dim = dim
        self.initialization = initialization
        # Its last value is not 0, so that a loss that uses it has a gradient of it.
        self.anchor = torch.nn.Parameter(torch.tensor([0.0, 0.0, 2.0**-20]))
        self.optimizer: OptimizerSettings | None = None
        self.weight_bound = 0.0
        self.first_rows: list[tuple[NDArray[np.uint64], NDArray[np.float32]]] = []
        # By padding id its row, which lookups return and do not train; until it changes.
        self.padding_rows: dict[int, NDArray[np.float32]] = {}
        self.padding_place: object = None  # the home that they are of, and its loads
        self.version = self.num_writes = 0
        self.home: Any = None
        self.has_own_rate = False
        self.is_loaded = self.lacks_state = False
        self.pending = PendingGradients()
        # Modules that read its rows, whose buffer ``version`` changes with them.
        self.readers: list[weakref.ref[torch.nn.Module]] = []
        # After a backward has added to the anchor's gradient.
        self.after_backward: Callable[[ModuleTable], None] | None = None
        self._warned: set[str] = set()
        self._is_copied = False
        own = weakref.ref(self)

        def accumulated(_: torch.Tensor) -> None:
            table = own()
            if table is not None and table.after_backward is not None:
                table.after_backward(table)

        self.anchor.register_post_accumulate_grad_hook(accumulated)  # type: ignore[no-untyped-call]

    def add_reader(self, module: torch.nn.Module) -> None:
        """Show changes of rows in the buffer ``version`` of a module, from now on."""
        self.readers = [one for one in self.readers if one() not in (None, module)]
        self.readers.append(weakref.ref(module))

    def note_change(self) -> None:
        """Note that rows were written or loaded."""
        self.num_writes += 1
        note_changes([self])

    def warn(self, text: str) -> None:
        """Say once what is missing for the rows to be trained."""
        if text not in self._warned:
            self._warned.add(text)
            _logger.warning("table %r: %s (said once)", self.name, text)

    def warn_of_copy(self) -> None:
        """Say once that copies of modules have no rows of their own."""
        if not self._is_copied:
            self._is_copied = True
            _logger.warning(
                "table %r: a copy of its module reads and trains the same rows; persia.nn.save "
                "keeps rows as they are now (said once)",
                self.name,
            )


def note_changes(tables: Iterable[ModuleTable]) -> None:
    """Note that rows of these tables have changed; a module of several learns of it once."""
    modules = {}
    for table in tables:
        table.version += 1
        for reader in table.readers:
            module = reader()
            if module is not None:
                modules[id(module)] = module
    for module in modules.values():
        # Not by attribute, which takes as long as the rest: modules have one for each buffer.
        version = module._buffers["version"]
        if version is not None:
            version.add_(1)


_lock = threading.Lock()  # guards the tables of this process
_numbers = itertools.count(1)
# By key, and by name the one that has it now. A table goes with its last module, unless a user
# has named it: then its rows are found again by its name.
_tables: weakref.WeakValueDictionary[str, ModuleTable] = weakref.WeakValueDictionary()
_by_name: weakref.WeakValueDictionary[str, ModuleTable] = weakref.WeakValueDictionary()
_named: dict[str, ModuleTable] = {}
_by_identity: weakref.WeakValueDictionary[str, ModuleTable] = weakref.WeakValueDictionary()
# By process and identity there: tables of other processes' pickles, and those that are gone.
_of_others: weakref.WeakValueDictionary[tuple[Any, Any], ModuleTable] = (
    weakref.WeakValueDictionary()
)
_of_anchors: weakref.WeakValueDictionary[int, ModuleTable] = weakref.WeakValueDictionary()


def declare(name: str, dim: int, initialization: InitialValues | None = None) -> ModuleTable:
    """Return the table of a name, made if there is none yet, or only one of another dim."""
    if not isinstance(name, str) or not name:
        raise ConfigError(f"table: expected a name, got {name!r}")
    if isinstance(dim, bool) or not isinstance(dim, int) or not 1 <= dim <= MAX_DIM:
        raise ConfigError(f"table {name!r}: embedding_dim must be in 1..{MAX_DIM}, got {dim!r}")
    with _lock:
        known = _by_name.get(name)
        if known is not None and known.dim == dim:
            _named[name] = known
            return known
        if known is not None:
            _logger.warning(
                "table %r had dim %d, and begins again without rows, with dim %d; models made "
                "before keep theirs",
                *(name, known.dim, dim),
            )
        table = _named[name] = _add(name, dim, initialization)
        return table


def declare_new(
    name: str, dim: int, initialization: InitialValues | None = None
) -> ModuleTable:
    """Return a new table of this name, with a number behind it if the name is taken."""
    with _lock:
        number, free = 1, name
        while free in _by_name:
            number += 1
            free = f"{name}_{number}"
        return _add(free, dim, initialization)


def reference_of(table: ModuleTable) -> dict[str, Any]:
    """Return what a pickle or a state dict has in place of a table, as JSON has it."""
    return {
        "name": table.name,
        "dim": table.dim,
        "is_frozen": int(not table.anchor.requires_grad),
        "is_named": int(is_named(table)),
        "process": PROCESS,
        "key": table.identity,
        "version": table.version,
    }


def of_reference(reference: Mapping[str, Any]) -> ModuleTable:
    """Return the table of a reference: of this process, of that name, or a new one.

    In another process a name that no user has given is no sign of the same rows.
    """
    name, dim = reference["name"], reference["dim"]
    process, key = reference.get("process"), reference.get("key", "")
    known = _of_others.get((process, key))
    if process == PROCESS:
        known = _by_identity.get(key, known)
    if known is not None and known.dim == dim:
        return known
    make = declare if reference.get("is_named", True) else declare_new
    table = make(name, dim)
    if process is not None:
        _of_others[process, key] = table
    return table


def is_named(table: ModuleTable) -> bool:
    """Whether a user has named the table, so that its rows are known by the name anywhere."""
    return _named.get(table.name) is table


def _add(name: str, dim: int, initialization: InitialValues | None) -> ModuleTable:
    number, key = 1, name
    while key in _tables:
        number += 1
        key = f"{name}#{number}"
    table = ModuleTable(name, key, dim, initialization or Normal(0.0, 1.0))
    _tables[key] = _by_identity[table.identity] = _by_name[name] = table
    _of_anchors[id(table.anchor)] = table
    return table


def note_name(table: ModuleTable, before: str) -> None:
    """Have a table found by the name that it has now, and not by the one ``before``."""
    with _lock:
        if _by_name.get(before) is table:
            del _by_name[before]
        _by_name[table.name] = table


def find(key: str) -> ModuleTable:
    """Return the table that an operator names, or raise ConfigError."""
    table = _tables.get(key)
    if table is None:
        raise ConfigError(
            f"table {key!r}: no module of this process has declared it; make the model first"
        )
    return table


def of_anchor(parameter: torch.Tensor) -> ModuleTable | None:
    """Return the table that a parameter stands for, or None."""
    table = _of_anchors.get(id(parameter))
    return table if table is not None and table.anchor is parameter else None


def all_tables() -> list[ModuleTable]:
    """Return the tables of this process, in the order of their declaration."""
    with _lock:
        return list(_tables.values())
