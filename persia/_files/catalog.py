"""The checkpoints of one folder: what exists, what follows from what, what goes.

    <folder>/
      00000007-5e0c91d2.json     a manifest: since it is there, checkpoint 7 exists
      00000007-5e0c91d2/         its files, all of them
      00000008-03bb6a1f.json     a delta to 7
      00000008-03bb6a1f/
      00000009-aa20c4e7/         being written, or left by a writer that died

A checkpoint begins to exist with one rename, of its manifest, and ends to exist when the
manifest is unlinked, before its files are. So at any moment every manifest has its files. The
number in an id grows, even if the clock was set back. Rows that servers write by themselves as
training goes on are in catalogs of their own, ``<folder>/s0``, ``<folder>/s1``.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from persia._files.manifest import ID, MAX_MANIFEST_BYTES, Manifest, number_of
from persia._files.open import open_storage
from persia._files.storage import LocalStorage, Storage
from persia.errors import CheckpointError, ConfigError
from persia.logger import get_logger

# A server's own catalog below the job's folder.
_SERVER = re.compile(r"s(0|[1-9]\d{0,4})")

_logger = get_logger("persia.checkpoints")


def new_id(storage: Storage) -> str:
    """Return an id beyond all that are in use, published or not."""
    numbers = [int(name.partition("-")[0]) for name in storage.list() if ID.match(name)]
    return id_of(max(numbers, default=0) + 1)


def id_of(number: int, token: int | None = None) -> str:
    """Return the id of a number and a token of 32 bits; without that, one that no other has."""
    return f"{number:08}-{secrets.randbits(32) if token is None else token:08x}"


def ids(storage: Storage) -> list[str]:
    """Return the ids of the checkpoints that exist, oldest first."""
    found = [
        name.removesuffix(".json")
        for name in storage.list()
        if name.endswith(".json") and ID.fullmatch(name.removesuffix(".json"))
    ]
    return sorted(found, key=number_of)


def publish(storage: Storage, manifest: Manifest) -> None:
    """Make a checkpoint exist, its files being durable already; if it fails there is none."""
    data = manifest.encode()
    for file in manifest.all_files():
        size = storage.size(file.path)
        if size != file.num_bytes:
            raise CheckpointError(
                f"{storage.at(file.path)}: expected {file.num_bytes} bytes, got {size}"
            )
    storage.publish(f"{manifest.id}.json", data)


def discard(storage: Storage, identity: str) -> bool:
    """Remove what was written of a checkpoint that could not be published, as far as it goes.

    The manifest may be there although ``publish`` failed, at its last fsync for example: it is
    removed first; if that fails, its files stay and False is returned.
    """
    try:
        storage.remove(f"{identity}.json")
    except CheckpointError as exc:
        _logger.warning(
            "%s: files of an unfinished checkpoint could not be removed: %s",
            storage.at(identity),
            exc,
        )
        return False
    try:
        storage.remove_folder(identity)
    except CheckpointError as exc:  # perhaps a server still writes; it removes its own then
        _logger.info("%s: not all of it could be removed: %s", storage.at(identity), exc)
    return True


def load(storage: Storage, identity: str | None = None) -> Manifest:
    """Return the manifest of a checkpoint, the latest unless one is named."""
    if identity is None:
        found = ids(storage)
        if not found:
            raise nothing_in(storage)
        identity = found[-1]
    elif not ID.fullmatch(identity):
        raise _no_such(storage, identity)
    path = f"{identity}.json"
    data = storage.read(path, MAX_MANIFEST_BYTES)
    manifest = Manifest.decode(data.tobytes(), storage.at(path))
    if manifest.id != identity:
        raise CheckpointError(
            f"{storage.at(path)}: id: expected {identity}, as the file is named, "
            f"got {manifest.id}"
        )
    return manifest


def nothing_in(storage: Storage) -> CheckpointError:
    """Return the error of a folder without a checkpoint, which says what is there instead."""
    names = storage.list()
    if names:
        more = ", ..." if len(names) > 3 else ""
        what = f"no manifest is among {', '.join(names[:3])}{more}"
    elif isinstance(storage, LocalStorage) and Path(storage.url).is_file():
        what = "this is a file, give the folder that dump_checkpoint was given"
    elif isinstance(storage, LocalStorage) and Path(storage.url).is_dir():
        what = "the folder is empty"
    else:  # object stores have no empty ones
        what = "there is no such folder"
    return CheckpointError(f"{storage.url}: no checkpoint is here: {what}")


def find(storage: Storage, name: str) -> str:
    """Return the id of a checkpoint by its id, or by the number that it begins with."""
    found = [
        identity
        for identity in ids(storage)
        if identity == name or (name.isdecimal() and number_of(identity)[0] == int(name))
    ]
    if len(found) != 1:
        raise _no_such(storage, name)
    return found[0]


def _no_such(storage: Storage, name: str) -> CheckpointError:
    known = ids(storage)
    if not known:
        return nothing_in(storage)
    return CheckpointError(
        f"{storage.url}: expected the id of a checkpoint, or its number if no other has it, "
        f"got {name!r}; here are {', '.join(known)}"
    )


def latest(storage: Storage) -> str | None:
    return next(reversed(ids(storage)), None)


def chain(storage: Storage, identity: str | None = None) -> list[Manifest]:
    """Return a full checkpoint and the deltas up to the one asked for, or to the latest.

    A full one that was written beside the deltas (``Manifest.after``) takes the place of all
    that came before it.
    """
    found = [load(storage, identity)]
    known = ids(storage)
    while (base := found[-1].base) is not None:
        delta = found[-1]
        found.append(_base_of(storage, delta, base, known))
        if found[-1].schema != delta.schema:
            name = storage.at(f"{delta.id}.json")
            raise CheckpointError(f"{name}: schema: expected that of its base {base}")
    return found[::-1]


def _base_of(storage: Storage, delta: Manifest, base: str, known: list[str]) -> Manifest:
    """Return what a delta changes: a full checkpoint beside its base, or the base."""
    first, end = number_of(base), number_of(delta.id)
    for identity in known:
        if first < number_of(identity) < end:
            with suppress(CheckpointError):  # not this one then; the base may be there
                beside = load(storage, identity)
                if beside.after == base:
                    return beside
    if base not in known:
        raise CheckpointError(
            f"{storage.at(delta.id)}.json: base: {base} is not here, so the changes up to it "
            "are missing"
        )
    return load(storage, base)


@dataclass(frozen=True, slots=True)
class Chain:
    """A full checkpoint and deltas to it."""

    storage: Storage
    manifests: list[Manifest]  # the full one first
    # Who wrote it by itself, as others wrote theirs; None if all servers wrote it together.
    server: int | None = None


def folder_of(server: int) -> str:
    return f"s{server}"  # a server's own catalog


def below(url: str, folder: str) -> str:
    return f"{url.rstrip('/')}/{folder}"


def chains(url: str, identity: str | None = None) -> list[Chain]:
    """Return every chain of checkpoints that together are the rows of a job in a folder."""
    storage = open_storage(url)
    if identity is not None or latest(storage) is not None:
        return [Chain(storage, chain(storage, identity))]
    folders = [name for name in storage.list() if _SERVER.fullmatch(name)]
    own = [(int(name[1:]), open_storage(below(url, name))) for name in folders]
    found = [Chain(one, chain(one), server) for server, one in own if latest(one) is not None]
    if not found:
        raise nothing_in(storage)
    expected = set(range(found[0].manifests[-1].num_servers))
    for one in found:
        count = one.manifests[-1].num_servers
        if count != len(expected):
            raise CheckpointError(
                f"{one.storage.url}: expected rows of one of {len(expected)} servers, as in "
                f"{found[0].storage.url}, got one of {count}"
            )
    missing = sorted(map(folder_of, expected - {one.server for one in found}))
    if missing:
        raise CheckpointError(
            f"{url}: expected what {len(expected)} servers wrote, but "
            f"{', '.join(missing)} is missing"
        )
    return found


def keep_last(storage: Storage, count: int, writing: Collection[str] = ()) -> list[str]:
    """Remove all but the last checkpoints and what they are based on; returns their ids.

    What writers that died have left goes too: folders without a manifest, of a number below
    the latest checkpoint's. A writer that is slower than another one's whole checkpoint would
    lose its files, which its ``publish`` reports. Those in ``writing`` are left alone, and
    nothing is removed if something that is kept cannot be read.
    """
    if count < 1:
        raise ConfigError(f"keep_last: expected at least 1, got {count}")
    found = ids(storage)
    kept: set[str] = set()
    for identity in found[-count:]:
        link: str | None = identity
        while link is not None and link not in kept:
            kept.add(link)
            link = load(storage, link).base
    removed = [identity for identity in found if identity not in kept]
    _remove(storage, removed, writing)
    return removed


def drop_before(storage: Storage, first: str, writing: Collection[str] = ()) -> None:
    """Remove all checkpoints before that one; for the rest as ``keep_last``."""
    removed = [one for one in ids(storage) if number_of(one) < number_of(first)]
    _remove(storage, removed, writing)


def _remove(storage: Storage, removed: list[str], writing: Collection[str]) -> None:
    # The latest first: a delta ends to exist before its base does.
    for identity in reversed(removed):
        storage.remove(f"{identity}.json")
    for identity in removed:
        storage.remove_folder(identity)
    _clean(storage, writing)


def _clean(storage: Storage, writing: Collection[str]) -> None:
    """Remove what is left of checkpoints that were never published, or are no more."""
    # Listed after the names: a checkpoint that is published in between is then in both.
    names = storage.list()
    published = ids(storage)
    if not published:
        return
    last, _ = number_of(published[-1])
    for name in names:
        identity, _, ending = name.partition(".")
        if not ID.fullmatch(identity) or identity in published or identity in writing:
            continue
        # Writers that began at the same time have the same number.
        if number_of(identity)[0] < last:
            if ending == "json.tmp":
                storage.remove(name)
            elif not ending:
                storage.remove_folder(name)
