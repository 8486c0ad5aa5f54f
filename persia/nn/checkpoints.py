"""``save`` and ``load`` of a model and the rows of its modules, as one checkpoint.

The format is that of contexts: the model's state dict, in which each module has a reference to
its tables, is a dense file beside the rows. Tables whose optimizers differ are in several
stores; the first one's checkpoint is in the folder, others' are below it. They are written
before and named in it, so that a save that is cut short leaves the one before it whole.

Of several ranks all call it, as rows are what all of them have trained: rank 0 writes or loads
the rows when the updates of all are applied, and none goes on before.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from persia import env
from persia._files import catalog
from persia._files.open import folder_url, open_storage
from persia._files.writer_lock import sole_writer
from persia._modules.homes import RowHome, home_of, renamed
from persia._modules.tables import ModuleTable
from persia._training import checkpoint
from persia._training.ranks import DEFAULT_TIMEOUT_S, RankGroup
from persia.errors import CheckpointError, ConfigError, ServiceError, ServiceTimeout
from persia.nn.base import RowModule, with_rows

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping

    import torch

    from persia._rpc.messages import LoadNote

_Place = tuple[str, str]  # a folder, and the id of a checkpoint in it

_MODEL = "dense.pt"
_OPTIMIZER = "opt{}.pt"
_STORES = "stores.pt"  # of each folder: the checkpoint's id, "" for the first, and its tables


def save(
    model: torch.nn.Module,
    path: str | os.PathLike[str],
    *optimizers: torch.optim.Optimizer,
    keep_last: int = 1,
) -> None:
    """Write a model, optimizers and the rows of its tables, all of this moment.

    Each of several ranks calls it, and rank 0 writes; see the module.

    Args:
        model: A model with modules of ``persia.nn``.
        path: A folder, or a URL that fsspec knows.
        *optimizers: Whose state is written too, in this order.
        keep_last: How many checkpoints of the folder to keep.

    Raises:
        ConfigError: If the model has no tables, or ranks have no process group.
        CheckpointError: If a file cannot be written.
        ServiceError: If another rank failed, has gone or did not come.
    """
    keep_last = checkpoint.check_keep_last(keep_last)
    url = folder_url(path, "path")
    stores = stores_of(model)
    names = [[table.name for table in tables] for _, tables in stores]
    dense: dict[str, Any] = {_MODEL: model}
    dense |= {_OPTIMIZER.format(place): one for place, one in enumerate(optimizers)}

    def files() -> dict[str, bytes]:
        return {name: checkpoint.state_of(one) for name, one in dense.items()}

    def write() -> None:
        writers = [checkpoint.CheckpointWriter(home.worker) for home, _ in stores]
        frozen: list[checkpoint.Frozen] = []
        ids = [""] * len(stores)
        try:
            for place, writer in enumerate(writers):
                frozen.append(writer.begin(0, dict if place else files))
            while len(frozen) > 1:
                place, one = len(frozen) - 1, frozen.pop()
                folder = _folder(url, place)
                # Until the first one names it, all before it stay: the last save needs its own.
                ids[place] = writers[place].finish(one, folder, sys.maxsize, blocking=True)
            first = frozen.pop()
            written = checkpoint.serialized([*zip(ids, names, strict=True)])
            first = replace(first, dense={**first.dense, _STORES: written})
            writers[0].finish(first, url, keep_last, blocking=True)
        finally:
            for writer, one in zip(writers, frozen, strict=False):
                writer.drop(one)
        for place in range(1, len(stores)):
            _keep_named(url, place)

    by_rank_0("save", lambda: await_updates(stores), write)


def _keep_named(url: str, place: int) -> None:
    """Remove the checkpoints of a store before the first that one of the folder names.

    Not by their number: saves that were cut short have left some that none names.
    """
    for identity in catalog.ids(open_storage(url)):
        named = checkpoint.Checkpoint(url, identity).state(_STORES) or ()
        if len(named) > place:
            storage = open_storage(_folder(url, place))
            with sole_writer(storage):
                catalog.drop_before(storage, named[place][0])
            return


def load(
    model: torch.nn.Module,
    path: str | os.PathLike[str],
    *optimizers: torch.optim.Optimizer,
    map_location: Any = None,
) -> None:
    """Load what ``save`` wrote, into a model with the same tables.

    Tables that no user has named, as those of ``convert``, are the same if they have the same
    place in the model; they then have the names that they have in the checkpoint.

    Make the optimizers of ``persia.optim`` before: rows have the state of theirs.

    Raises:
        CheckpointError: If there is no checkpoint, or it does not fit.
        ConfigError: If ranks have no process group.
        ServiceError: If another rank failed, has gone or did not come.
    """
    url = folder_url(path, "path")
    dense: dict[str, Any] = {_MODEL: model}
    dense |= {_OPTIMIZER.format(place): one for place, one in enumerate(optimizers)}
    states: dict[str, Any] = {}
    places: dict[str, _Place] = {}
    names: dict[ModuleTable, str] = {}
    stores = stores_of(model)

    def prepare() -> None:
        opened = checkpoint.Checkpoint(url)
        files = opened.manifest.files
        count = sum(_OPTIMIZER.format(place) in files for place in range(len(files)))
        if optimizers and _MODEL in files and count != len(optimizers):
            raise CheckpointError(
                f"{url}: expected as many optimizers as were saved, {count} in this order, or "
                f"none, got {len(optimizers)}"
            )
        states.update(opened.fitting(dense, map_location))
        names.update(_new_names(model, states.get(_MODEL, {}), url))
        places.update(_places_of(opened, url))
        await_updates(stores)

    def read() -> None:
        with renamed(names), _held(now := stores_of(model)):
            _load_rows(now, places, url)

    with _held(stores):
        by_rank_0("load", prepare, read)
    for _, tables in stores:
        for table in tables:
            table.padding_rows.clear()
            table.note_change()
            table.is_loaded = True
    with with_rows():
        for name, state in states.items():
            checkpoint.put_dense(dense[name], state, name)


@contextlib.contextmanager
def _held(stores: list[tuple[RowHome, list[ModuleTable]]]) -> Iterator[None]:
    """Have lookups ahead wait."""
    with contextlib.ExitStack() as stack:
        for home in sorted([home for home, _ in stores], key=id):  # as other threads do
            stack.enter_context(home.load_lock)
        yield


def _new_names(
    model: torch.nn.Module, state: Mapping[str, Any], url: str
) -> dict[ModuleTable, str]:
    """Return the names that a checkpoint has for tables of other names here, by their place."""
    found: dict[ModuleTable, str] = {}
    for path, module in checkpoint.unwrap_all(model).named_modules(remove_duplicate=False):
        reference = state.get(f"{path}._extra_state".lstrip("."))
        if not isinstance(module, RowModule) or reference is None:
            continue
        try:
            names = module.names_there(reference)
        except CheckpointError as exc:
            raise CheckpointError(f"{url}: {path}: {exc}") from exc
        for table, name in zip(module._tables, names, strict=True):
            if found.setdefault(table, name) != name:
                raise CheckpointError(
                    f"{url}: modules share table {table.name!r} here, and have "
                    f"{found[table]!r} and {name!r} there"
                )
    if len(set(found.values())) < len(found):
        raise CheckpointError(
            f"{url}: modules that share a table there have one each here: "
            f"{', '.join(f'{one.name!r} is {name!r} there' for one, name in found.items())}"
        )
    return {table: name for table, name in found.items() if table.name != name}


def _load_rows(
    stores: list[tuple[RowHome, list[ModuleTable]]], places: Mapping[str, _Place], url: str
) -> None:
    readers: list[tuple[checkpoint.CheckpointReader, list[ModuleTable]]] = []
    try:
        for home, tables in stores:
            by_place: dict[_Place, list[ModuleTable]] = {}
            for table in tables:
                if table.name not in places:
                    known = ", ".join(map(repr, sorted(places)))
                    raise CheckpointError(
                        f"{url}: it has no rows of table {table.name!r}, but of {known}"
                    )
                by_place.setdefault(places[table.name], []).append(table)
            for (folder, identity), there in by_place.items():
                reader = checkpoint.CheckpointReader(home.worker)
                reader.verify(identity, folder, tuple(table.name for table in there))
                readers.append((reader, [] if home.optimizer is not None else there))
                if len(by_place) > 1:  # a server has one load at a time
                    _commit(*readers.pop())
        for reader, unstepped in readers:
            _commit(reader, unstepped)
    finally:
        for reader, _ in readers:
            reader.drop()


def _commit(reader: checkpoint.CheckpointReader, unstepped: list[ModuleTable]) -> None:
    """Load, and warn of what a user of modules has decided: seeds are drawn by torch.

    Args:
        reader: Has verified the rows.
        unstepped: Tables without an optimizer, which know then that state was left out.
    """

    def level_of(note: LoadNote) -> int:
        is_usual = note.kind == "seed" or (note.kind == "optimizer" and unstepped)
        return logging.INFO if is_usual else logging.WARNING

    notes = reader.commit(blocking=True, level_of=level_of)
    for table in unstepped:
        table.lacks_state = any(note.kind == "optimizer" for note in notes)


def by_rank_0(what: str, prepare: Callable[[], None], act: Callable[[], None]) -> None:
    """Prepare on every rank, then act on rank 0; return when it has, on every rank."""
    rank, world_size = env.get_rank() or 0, env.get_world_size() or 1
    if world_size > 1 and not dist.is_initialized():
        raise ConfigError(
            f"persia.nn.{what}: this is rank {rank} of {world_size}, without a process group; "
            "write torch.distributed.init_process_group() first"
        )
    try:
        group = RankGroup(world_size, rank, DEFAULT_TIMEOUT_S)
    except RuntimeError as exc:
        raise ServiceTimeout(
            f"persia.nn.{what}: rank {rank} waited {DEFAULT_TIMEOUT_S:g} s for the others: all "
            "ranks call it, not rank 0 alone",
            role="nn-worker",
        ) from exc
    try:
        _in_step(group, f"until all can {what}", prepare)
        _in_step(group, f"until rank 0 has done its {what}", act if rank == 0 else None)
    finally:
        group.leave()


def _in_step(group: RankGroup, purpose: str, action: Callable[[], None] | None) -> None:
    """Run an action, of ranks that have one; fail on all ranks where it fails on one."""
    failure: BaseException | None = None
    try:
        if action is not None:
            action()
    except BaseException as exc:  # raised below, when the others know
        failure = exc
    try:
        codes = group.meet(int(failure is not None), purpose)
    except ServiceError:
        if failure is None:
            raise
        codes = []
    if failure is not None:
        raise failure
    failed = [rank for rank, code in enumerate(codes) if code]
    if failed:
        raise ServiceError(
            f"persia.nn: waited {purpose}, and rank {failed[0]} failed; its output says why",
            role="nn-worker",
            replica=failed[0],
        )


def await_updates(stores: list[tuple[RowHome, list[ModuleTable]]]) -> None:
    """Wait until the updates of all tables are acknowledged."""
    for home, _ in stores:
        home.wait()


def stores_of(model: torch.nn.Module) -> list[tuple[RowHome, list[ModuleTable]]]:
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
    names: set[str] = set()
    for _, tables in found.values():
        for table in tables:
            if table.name in names:
                raise ConfigError(
                    f"two tables of the model are both named {table.name!r}, as it is made of "
                    "models that were loaded one by one; save these one by one"
                )
            names.add(table.name)
    return list(found.values())


def _folder(url: str, place: int) -> str:
    return f"{url}/stores/{place}" if place else url


def _places_of(opened: checkpoint.Checkpoint, url: str) -> Mapping[str, _Place]:
    """Return folder and id of each table's rows; a context's checkpoint has all in one."""
    stores = opened.state(_STORES)
    if stores is None:
        return dict.fromkeys(opened.manifest.schema.features, (url, opened.id))
    return {
        name: (_folder(url, place), identity or opened.id)
        for place, (identity, tables) in enumerate(stores)
        for name in tables
    }
