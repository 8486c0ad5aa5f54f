"""Where the rows of a job are: in one catalog, or in one of each server.

<folder>/00000007-5e0c91d2.json    a checkpoint of all servers, at one moment
<folder>/s0/...  <folder>/s1/...   what each server wrote by itself as rows changed
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from persia._files import catalog
from persia._files.manifest import Manifest
from persia._files.storage import Storage, open_storage
from persia.errors import CheckpointError

_FOLDER = re.compile(r"s(0|[1-9]\d{0,4})")


@dataclass(frozen=True, slots=True)
class Chain:
    """A full checkpoint and deltas to it."""

    storage: Storage
    manifests: list[Manifest]
    """The full one first."""

    server: int | None = None
    """Who wrote it by itself, as others wrote theirs; None if all servers wrote it together."""


def folder_of(server: int) -> str:
    """Return the name of a server's own catalog."""
    return f"s{server}"


def below(url: str, folder: str) -> str:
    """Return the URL of a folder in another."""
    return f"{url.rstrip('/')}/{folder}"


def chains(url: str, identity: str | None = None) -> list[Chain]:
    """Return every chain of checkpoints that together are the rows of a job.

    Args:
        url: Of the folder.
        identity: The checkpoint of a catalog; the latest if not given.

    Raises:
        CheckpointError: If there is none, or what a server wrote is missing.
    """
    storage = open_storage(url)
    if identity is not None or catalog.latest(storage) is not None:
        return [Chain(storage, catalog.chain(storage, identity))]
    folders = [name for name in storage.list() if _FOLDER.fullmatch(name)]
    own = [(int(name[1:]), open_storage(below(url, name))) for name in folders]
    found = [
        Chain(one, catalog.chain(one), server)
        for server, one in own
        if catalog.latest(one) is not None
    ]
    if not found:
        raise catalog.nothing_in(storage)
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
