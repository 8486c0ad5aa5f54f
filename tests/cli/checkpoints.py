"""Small checkpoints, and ``persia-ckpt`` in this process."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner, Result

from persia._cli.ckpt import cli
from persia._files.catalog import new_id, publish
from persia._files.manifest import Manifest
from persia._files.part_writer import PartWriter
from persia._files.storage import LocalStorage
from tests.files.support import block, manifest

SHIFT = 56
USERS, ITEMS, TAGS = ([(g + 1) << SHIFT | n for n in range(50)] for g in range(3))


def checkpoint(
    folder: Path, seed: int = 0, base: str | None = None, num_users: int = 50
) -> Manifest:
    storage = LocalStorage(folder)
    identity = new_id(storage)
    with PartWriter(storage, f"{identity}/server0") as writer:
        writer.add("table0", block(USERS[:num_users], seed=seed))
        if base is None:
            writer.add("table0", block(ITEMS))
            writer.add("table1", block(TAGS, dim=3, words=3, dtype="bfloat16"))
        parts = writer.finish()
    made = manifest(identity, base, step=3, parts=parts)
    publish(storage, made)
    return made


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])
