"""What modules of ``persia.nn`` have in common: copies, pickles and state dicts without rows.

A module keeps the anchors of its tables, which carry autograd, a version, which changes with
the rows, and the tables themselves, by which it finds the rows. Rows are not in it.
"""

from __future__ import annotations

import contextlib
import copy
import json
import sys
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from persia import _context_stack, env
from persia._modules.tables import (
    PROCESS,
    ModuleTable,
    is_named,
    of_reference,
    reference_of,
)
from persia.errors import CheckpointError
from persia.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from typing_extensions import Self

_logger = get_logger("persia.nn")

_REFERENCE_SIZE = 256  # bytes, and multiples of it


class RowModule(nn.Module):
    """A module that looks up in tables."""

    version: torch.Tensor
    _tables: tuple[ModuleTable, ...]

    def _take(self, tables: Sequence[ModuleTable]) -> None:
        """Look up in these tables from now on."""
        self._tables = tuple(tables)
        version = sum(table.version for table in tables)
        self.register_buffer("version", torch.tensor(version), persistent=False)
        for table in tables:
            table.add_reader(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a module over the same rows: rows are not copied."""
        copied = type(self).__new__(type(self))
        nn.Module.__init__(copied)
        for name, value in self.__dict__.items():
            if not name.startswith("_"):
                copied.__dict__[name] = copy.deepcopy(value, memo)
        for table in self._tables:
            table.warn_of_copy()
        copied._take(self._tables)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        """Return what a pickle has: names and dims of the tables, and no rows."""
        left_out = ("_tables", "_parameters", "_buffers", "_modules")
        state = {name: value for name, value in self.__dict__.items() if name not in left_out}
        return {**state, "reference": self._reference()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Find the tables of these references, or declare them."""
        references = state.pop("reference")["tables"]
        given = {**state, "_parameters": {}, "_buffers": {}, "_modules": {}}
        super().__setstate__(given)  # type: ignore[no-untyped-call]
        self._take([of_reference(one) for one in references])
        # Modules of one pickle are of one process.
        call = sys.intern(references[0].get("process", ""))
        _warn_of_rows(self._tables, references, call)
        for table, one in zip(self._tables, references, strict=True):
            if one["is_frozen"]:
                table.anchor.requires_grad_(False)

    def get_extra_state(self) -> torch.Tensor:
        """Return the reference that a state dict has in place of rows, as JSON in bytes.

        A tensor, as safetensors and what is built on it take nothing else. It is filled with
        spaces, so that one of another table is refused for its name and not for its length.
        """
        text = json.dumps(self._reference()).encode()
        size = -(-len(text) // _REFERENCE_SIZE) * _REFERENCE_SIZE
        return torch.frombuffer(bytearray(text.ljust(size)), dtype=torch.uint8)

    def _reference(self) -> dict[str, Any]:
        return {"tables": [reference_of(table) for table in self._tables]}

    def set_extra_state(self, state: Any) -> None:
        """Check that a state dict is of the same tables."""
        self.names_there(state)

    def names_there(self, state: Any) -> list[str]:
        """Return the names that the tables have in a reference, having checked that it fits.

        Names that a user has given are the same there. Others depend on what models a process
        has had: such tables are the same if they have the same place in a model.
        """
        state = _parsed(state)
        there = [(one["name"], one["dim"]) for one in state["tables"]]
        here = [(table.name, table.dim) for table in self._tables]
        fits = [dim for _, dim in here] == [dim for _, dim in there] and not any(
            is_named(table) and table.name != name
            for table, (name, _) in zip(self._tables, there, strict=False)
        )
        if not fits:
            raise CheckpointError(
                f"the state dict is of tables (name, dim) {there}, and the module looks up in "
                f"{here}"
            )
        return [name for name, _ in there]

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        destination[f"{prefix}_extra_state"] = self.get_extra_state()

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key = f"{prefix}_extra_state"
        if key not in state_dict:
            missing_keys.append(key)
            return
        try:
            self.set_extra_state(state_dict[key])
            references = _parsed(state_dict[key])["tables"]
        except (CheckpointError, KeyError, TypeError, ValueError) as exc:
            error_msgs.append(f"{prefix.rstrip('.') or 'the module'}: {exc}")
            return
        # The list is one for all modules of a ``load_state_dict``.
        _warn_of_rows(self._tables, references, error_msgs)


class _Warned(threading.local):
    """What of this thread was warned of last, and whether there is anything to warn of."""

    of: object = None
    are_rows_loaded: bool = False


_warned = _Warned()


@contextlib.contextmanager
def with_rows() -> Iterator[None]:
    """Load state dicts whose rows are loaded as well."""
    _warned.are_rows_loaded = True
    try:
        yield
    finally:
        _warned.are_rows_loaded = False


def _parsed(state: Any) -> Any:
    """Return a reference as ``_reference`` has made it."""
    return json.loads(bytes(state.tolist())) if isinstance(state, torch.Tensor) else state


def _warn_of_rows(
    tables: Sequence[ModuleTable], references: Sequence[Mapping[str, Any]], call: object
) -> None:
    """Say, once for a call, that rows are not those that a model had when it was saved."""
    # Servers and contexts keep rows, and load those of their own checkpoints.
    if (
        _warned.are_rows_loaded
        or _warned.of is call
        or env.get_mode() == "services"
        or _context_stack.current() is not None
    ):
        return
    for table, one in zip(tables, references, strict=True):
        process = one.get("process")
        if process is None or (table.is_loaded and process != PROCESS):
            continue
        if process != PROCESS:
            reason = "it is of another process"
        elif one["key"] != table.identity:
            reason = "it is of another model"
        elif one["version"] != table.version:
            reason = "they have changed since it was made"
        else:
            continue
        _warned.of = call
        _logger.warning(
            "table %r: a state dict or pickle has no rows, and those here are not the ones of "
            "its model, as %s; write persia.nn.save(model, folder) beside it, or in its place, "
            "and then persia.nn.load(model, folder)",
            *(table.name, reason),
        )
        return
