"""Which parameters of a model stand for tables, and which are its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from persia._modules.tables import of_anchor

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch


def sparse_parameters(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Return one parameter group per table of a model, for an optimizer of ``persia.optim``.

    A group has the table's name, so that its options can be set: ``group["lr"] = 0.1``.
    """
    found = {}
    for parameter in model.parameters():
        table = of_anchor(parameter)
        if table is not None:
            found[table.key] = {"params": [parameter], "table": table.name}
    return list(found.values())


def dense_parameters(model: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """Yield the parameters of a model that stand for no table, for an optimizer of torch."""
    for parameter in model.parameters():
        if of_anchor(parameter) is None:
            yield parameter
