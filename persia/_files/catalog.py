"""The checkpoints of one folder: what exists, what follows from what, what goes.

    <folder>/
      00000007-5e0c91d2.json     a manifest: since it is there, checkpoint 7 exists
      00000007-5e0c91d2/         its files, all of them
      00000008-03bb6a1f.json     a delta to 7
      00000008-03bb6a1f/
      00000009-aa20c4e7/         being written, or left by a writer that died

A checkpoint comes with its own id, so it overwrites nothing: the one before loads until the new
one is there, and after. It begins to exist with one rename, of its manifest, and ends to exist
when the manifest is unlinked, before its files are. So at any moment every manifest has its
files, and files without a manifest are nobody's.

The number in an id grows: of two checkpoints in a folder the one with the larger number is the
later one, whatever the clock said.
"""

from __future__ import annotations

import os
import secrets

from persia._files.manifest import ID, MAX_MANIFEST_BYTES, Manifest
from persia._files.storage import Storage, open_storage
from persia.errors import CheckpointError

Place = Storage | str | os.PathLike[str]


def storage_of(place: Place) -> Storage:
    """Return a storage, or that of a path or URL."""
    return place if isinstance(place, Storage) else open_storage(place)


def new_id(storage: Storage) -> str:
    """Return an id beyond all that are in use, published or not."""
    numbers = [int(name.partition("-")[0]) for name in storage.list() if _id_in(name)]
    return f"{max(numbers, default=0) + 1:08}-{secrets.token_hex(4)}"


def ids(place: Place) -> list[str]:
    """Return the ids of the checkpoints that exist, oldest first."""
    storage = storage_of(place)
    found = [
        name.removesuffix(".json")
        for name in storage.list()
        if name.endswith(".json") and ID.fullmatch(name.removesuffix(".json"))
    ]
    return sorted(found, key=number_of)


def number_of(identity: str) -> tuple[int, str]:
    """Return what ids are sorted by."""
    number, _, chance = identity.partition("-")
    return int(number), chance


def publish(storage: Storage, manifest: Manifest) -> None:
    """Make a checkpoint exist, its files being durable already.

    Raises:
        CheckpointError: If a file that it names is not there with its size, or the manifest
            could not be written; then it does not exist.
    """
    data = manifest.encode()
    for file in manifest.all_files():
        size = storage.size(file.path)
        if size != file.num_bytes:
            raise CheckpointError(
                f"{storage.at(file.path)}: expected {file.num_bytes} bytes, got {size}"
            )
    storage.publish(f"{manifest.id}.json", data)


def load(place: Place, identity: str | None = None) -> Manifest:
    """Return the manifest of a checkpoint, the latest unless one is named.

    Raises:
        CheckpointError: If there is none, or it cannot be read.
    """
    storage = storage_of(place)
    if identity is None:
        found = ids(storage)
        if not found:
            raise CheckpointError(f"{storage.url}: no checkpoint is here")
        identity = found[-1]
    elif not ID.fullmatch(identity):
        raise CheckpointError(f"{storage.url}: no id of a checkpoint: {identity!r}")
    path = f"{identity}.json"
    data = storage.read(path, MAX_MANIFEST_BYTES)
    manifest = Manifest.decode(data.tobytes(), storage.at(path))
    if manifest.id != identity:
        raise CheckpointError(
            f"{storage.at(path)}: id: expected {identity}, as the file is named, "
            f"got {manifest.id}"
        )
    return manifest


def _id_in(name: str) -> bool:
    return bool(ID.match(name))
