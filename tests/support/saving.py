"""Rows that are dumped and loaded, also in steps, and the changes that servers write."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from persia._files import catalog
from persia._files.part_writer import PartWriter
from persia._files.parts import read_part
from persia._files.rows import rows_of as rows_of_parts
from persia._files.storage import LocalStorage
from persia._rpc.messages import LoadRequest
from persia._server import restore
from persia._server.service import ParameterServer
from persia._training.checkpoint import CheckpointReader, CheckpointWriter
from persia._worker.service import EmbeddingWorker
from persia.config import EmbeddingSchema
from tests.support.fixtures import Monkey
from tests.support.services import (
    ADAGRAD,
    SCHEMA,
    features,
    gradient,
    make_servers,
    make_worker,
    read_rows,
    sign,
)
from tests.support.waiting import PATIENCE_S, until

FEATURES = ("sum", "max", "stack_mean", "sqrt", "raw")
IDS = {name: [[x, x + 1] for x in range(1, 60)] for name in FEATURES}

Trained = tuple[EmbeddingWorker, list[ParameterServer]]


def train(worker: EmbeddingWorker, first: int, count: int) -> None:
    for number in range(first, first + count):
        batch = {name: [[x + 7 * number for x in s] for s in IDS[name]] for name in FEATURES}
        result = worker.lookup_direct(features(batch, number))
        worker.update(gradient(result, (1, number)))


def rows_of(
    servers: list[ParameterServer], schema: EmbeddingSchema = SCHEMA
) -> dict[int, bytes]:
    """Every row that training may have made, whole, by sign."""
    wanted: dict[int, set[int]] = {}
    for name in FEATURES:
        slot = schema.slots[name]
        wanted.setdefault(slot.table, set()).update(sign(name, x) for x in range(2000))
    found = read_rows(servers, {table: sorted(signs) for table, signs in wanted.items()})
    return {key: row.tobytes() for key, row in found.items()}


def assert_alike(one: Trained, two: Trained, first: int, count: int) -> None:
    """The rows are the same, and stay so in these batches."""
    assert rows_of(two[1]) == rows_of(one[1])
    for worker, _ in (one, two):
        train(worker, first, count)
    assert rows_of(two[1]) == rows_of(one[1])


# --- dumps and loads ------------------------------------------------------------------------


def dump(worker: EmbeddingWorker, url: str | Path, keep_last: int = 1) -> None:
    saver = CheckpointWriter(worker)
    saver.finish(saver.begin(3, dict), str(url), keep_last, blocking=True)


def load(worker: EmbeddingWorker, url: str | Path, *names: str) -> list[str]:
    loader = CheckpointReader(worker)
    identity = catalog.load(LocalStorage(url)).id
    loader.verify(identity, str(url), names or None)
    return [note.text for note in loader.commit(blocking=True)]


def is_in(server: ParameterServer, request: LoadRequest, state: str) -> bool:
    return server.load(request).state == state


def verified(
    server: ParameterServer, url: Path, *features: str, number: int = 1
) -> LoadRequest:
    """Let a server verify a load, of all features if none is named; returns its request."""
    request = LoadRequest(number, "verify", str(url), "", features or None)
    until(lambda: is_in(server, request, "verified"))
    return request


def committed(server: ParameterServer, request: LoadRequest) -> None:
    """Let it replace its rows; no server has finished."""
    until(lambda: is_in(server, replace(request, step="commit"), "loaded"))


def add_part(url: Path, name: str, change: Callable[[Any], Any]) -> tuple[Any, str]:
    """Add what is made of the first part's block; returns it and the name of its table."""
    storage = LocalStorage(url)
    manifest = catalog.load(storage)
    part = manifest.parts[0]
    block = change(read_part(storage, part))
    with PartWriter(storage, f"{manifest.id}/{name}", server=part.server) as writer:
        writer.add(part.table, block)
        parts = (*manifest.parts, *writer.finish())
    catalog.publish(storage, replace(manifest, parts=parts))
    return block, part.table


class Slow:
    """Stops a load at its first part until it is let go."""

    def __init__(self, patch: Monkey) -> None:
        self.is_there, self.may_go = threading.Event(), threading.Event()
        self._rows_of = rows_of_parts
        patch.setattr(restore, "rows_of", self._wait)

    def _wait(self, *arguments: Any, **options: Any) -> Any:
        self.is_there.set()
        assert self.may_go.wait(PATIENCE_S)
        return self._rows_of(*arguments, **options)


@contextmanager
def held_load(
    worker: EmbeddingWorker, url: Path, patch: Monkey
) -> Iterator[tuple[Slow, CheckpointReader]]:
    """A load that has dropped the rows and restored none; it goes on at the end."""
    slow, loader = Slow(patch), CheckpointReader(worker)
    loader.verify("", str(url), None)  # the newest one
    loader.commit(blocking=False)
    assert slow.is_there.wait(PATIENCE_S)
    try:
        yield slow, loader
    finally:
        slow.may_go.set()
        loader.wait()


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


# --- changes --------------------------------------------------------------------------------


def writing_changes(
    folder: Path, count: int = 1, buffer_size: int = 1 << 40
) -> list[ParameterServer]:
    """Servers that write what changes into a folder, by themselves only if there is so much."""
    return make_servers(
        count,
        optimizer=ADAGRAD,
        enable_incremental_update=True,
        incremental_buffer_size=buffer_size,
        incremental_dir=str(folder),
    )


def load_changes(
    folder: Path, servers: list[ParameterServer]
) -> tuple[CheckpointReader, list[ParameterServer]]:
    """Load what they have written into others: the same rows; returns loader and others."""
    fresh = make_servers(len(servers) + 1, optimizer=ADAGRAD)
    loader = CheckpointReader(make_worker(fresh))
    loader.verify("", str(folder), None)
    loader.commit(blocking=True)
    assert rows_of(fresh) == rows_of(servers)
    return loader, fresh
