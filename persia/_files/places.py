"""Where the rows of a job are: in one catalog, or in one of each server.

<folder>/00000007-5e0c91d2.json    a checkpoint of all servers, at one moment
<folder>/s0/...  <folder>/s1/...   what each server wrote by itself as rows changed
"""

from __future__ import annotations

import re

from persia._files import catalog
from persia._files.manifest import Manifest
from persia._files.storage import Storage, open_storage
from persia.errors import CheckpointError

_FOLDER = re.compile(r"s(0|[1-9]\d{0,4})")


def folder_of(server: int) -> str:
    """Return the name of a server's own catalog."""
    return f"s{server}"


def below(url: str, folder: str) -> str:
    """Return the URL of a folder in another."""
    return f"{url.rstrip('/')}/{folder}"


def chains(url: str, identity: str | None = None) -> list[tuple[Storage, list[Manifest]]]:
    """Return every chain of checkpoints that together are the rows of a job.

    Args:
        url: Of the folder.
        identity: The checkpoint of a catalog; the latest if not given.

    Raises:
        CheckpointError: If there is none, or what a server wrote is missing.
    """
    storage = open_storage(url)
    if identity is not None or catalog.latest(storage) is not None:
        return [(storage, catalog.chain(storage, identity))]
    folders = [name for name in storage.list() if _FOLDER.fullmatch(name)]
    own = [open_storage(below(url, name)) for name in folders]
    found = [(one, catalog.chain(one)) for one in own if catalog.latest(one) is not None]
    if not found:
        raise catalog.nothing_in(storage)
    expected = {folder_of(number) for number in range(found[0][1][-1].num_servers)}
    for one, chain in found:
        if chain[-1].num_servers != len(expected):
            raise CheckpointError(
                f"{one.url}: expected rows of one of {len(expected)} servers, as in "
                f"{found[0][0].url}, got one of {chain[-1].num_servers}"
            )
    missing = expected - {one.url.rstrip("/").rpartition("/")[2] for one, _ in found}
    if missing:
        raise CheckpointError(
            f"{url}: expected what {len(expected)} servers wrote, but "
            f"{', '.join(sorted(missing))} is missing"
        )
    return found
