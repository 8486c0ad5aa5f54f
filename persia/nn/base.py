"""What modules of ``persia.nn`` have in common: copies, pickles and state dicts without rows.

A module keeps the anchors of its tables, which carry autograd, a version, which changes with
the rows, and the tables themselves, by which it finds the rows. Rows are not in it.
"""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from persia._modules.tables import ModuleTable, declare
from persia.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Self

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
        """Find the tables of these names, or declare them."""
        references = state.pop("reference")["tables"]
        given = {**state, "_parameters": {}, "_buffers": {}, "_modules": {}}
        super().__setstate__(given)  # type: ignore[no-untyped-call]
        self._take([declare(one["name"], one["dim"]) for one in references])
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
        return {
            "tables": [
                {
                    "name": table.name,
                    "dim": table.dim,
                    "is_frozen": int(not table.anchor.requires_grad),
                }
                for table in self._tables
            ]
        }

    def set_extra_state(self, state: Any) -> None:
        """Check that a state dict is of the same tables."""
        if isinstance(state, torch.Tensor):
            state = json.loads(bytes(state.tolist()))
        there = [(one["name"], one["dim"]) for one in state["tables"]]
        here = [(table.name, table.dim) for table in self._tables]
        if here != there:
            raise CheckpointError(
                f"the state dict is of tables (name, dim) {there}, and the module looks up in "
                f"{here}"
            )

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
        except (CheckpointError, KeyError, TypeError, ValueError) as exc:
            error_msgs.append(f"{key}: {exc}")
