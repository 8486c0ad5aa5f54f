"""``save`` and ``load`` of a model and the rows of its modules, as one checkpoint.

The format is that of contexts: the model's state dict, in which each module has a reference to
its tables, is a dense file beside the rows. Tables whose optimizers differ are in several
stores; the first one's checkpoint is in the folder, others' are below it, written before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from persia._files.open import folder_url
from persia._modules.homes import RowHome, home_of
from persia._modules.tables import ModuleTable
from persia._training import checkpoint
from persia.errors import CheckpointError, ConfigError
from persia.nn.base import RowModule

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    import torch

_MODEL = "dense.pt"
_OPTIMIZER = "opt{}.pt"
_STORES = "stores.pt"  # which tables are in which folder


def save(
    model: torch.nn.Module,
    path: str | os.PathLike[str],
    *optimizers: torch.optim.Optimizer,
    keep_last: int = 1,
) -> None:
    """Write a model, optimizers and the rows of its tables, all of this moment.

    Args:
        model: A model with modules of ``persia.nn``.
        path: A folder, or a URL that fsspec knows.
        *optimizers: Whose state is written too, in this order.
        keep_last: How many checkpoints of the folder to keep.

    Raises:
        ConfigError: If the model has no tables.
        CheckpointError: If a file cannot be written.
    """
    keep_last = checkpoint.check_keep_last(keep_last)
    url = folder_url(path, "path")
    stores = _stores_of(model)
    names = [[table.name for table in tables] for _, tables in stores]
    dense: dict[str, Any] = {_MODEL: model}
    dense |= {_OPTIMIZER.format(place): one for place, one in enumerate(optimizers)}

    def files() -> dict[str, bytes]:
        found = {name: checkpoint.state_of(one) for name, one in dense.items()}
        return {**found, _STORES: checkpoint.serialized(names)}

    writers = [checkpoint.CheckpointWriter(home.worker) for home, _ in stores]
    for home, _ in stores:
        home.wait()
    frozen = [writer.begin(0, dict if place else files) for place, writer in enumerate(writers)]
    for place in reversed(range(len(writers))):  # the one with the dense files last
        writers[place].finish(frozen[place], _folder(url, place), keep_last, blocking=True)


def load(
    model: torch.nn.Module,
    path: str | os.PathLike[str],
    *optimizers: torch.optim.Optimizer,
    map_location: Any = None,
) -> None:
    """Load what ``save`` wrote, into a model with the same tables.

    Make the optimizers of ``persia.optim`` before: rows have the state of theirs.

    Raises:
        CheckpointError: If there is no checkpoint, or it does not fit.
    """
    url = folder_url(path, "path")
    opened = checkpoint.Checkpoint(url)
    dense: dict[str, Any] = {_MODEL: model}
    dense |= {_OPTIMIZER.format(place): one for place, one in enumerate(optimizers)}
    states = opened.fitting(dense, map_location)
    folders = _folders_of(opened, url)
    readers = []
    try:
        for home, tables in _stores_of(model):
            home.wait()
            by_folder: dict[str, list[str]] = {}
            for table in tables:
                if table.name not in folders:
                    raise CheckpointError(f"{url}: it has no rows of table {table.name!r}")
                by_folder.setdefault(folders[table.name], []).append(table.name)
            for folder, names in by_folder.items():
                reader = checkpoint.CheckpointReader(home.worker)
                reader.verify(checkpoint.Checkpoint(folder).id, folder, tuple(names))
                readers.append(reader)
                if len(by_folder) > 1:  # a server has one load at a time
                    readers.pop().commit(blocking=True)
        for reader in readers:
            reader.commit(blocking=True)
    finally:
        for reader in readers:
            reader.drop()
    for _, tables in _stores_of(model):
        for table in tables:
            table.padding_rows.clear()
            table.note_change()
    for name, state in states.items():
        checkpoint.put_dense(dense[name], state, name)


def _stores_of(model: torch.nn.Module) -> list[tuple[RowHome, list[ModuleTable]]]:
    """Return the stores of a model's tables, in the order of its modules."""
    found: dict[int, tuple[RowHome, list[ModuleTable]]] = {}
    for module in model.modules():
        for table in module._tables if isinstance(module, RowModule) else ():
            home = home_of(table)
            tables = found.setdefault(id(home), (home, []))[1]
            if table not in tables:
                tables.append(table)
    if not found:
        raise ConfigError(
            f"expected a model with modules of persia.nn, got {type(model).__name__} with none"
        )
    return list(found.values())


def _folder(url: str, place: int) -> str:
    return f"{url}/stores/{place}" if place else url


def _folders_of(opened: checkpoint.Checkpoint, url: str) -> Mapping[str, str]:
    """Return the folder of each table; a context's checkpoint has all rows in one."""
    names = opened.state(_STORES)
    if names is None:
        return dict.fromkeys(opened.manifest.schema.features, url)
    return {name: _folder(url, place) for place, tables in enumerate(names) for name in tables}
