"""The manifest: what a checkpoint is. Without it, there is none.

Canonical JSON (sorted keys, no spaces) with a checksum of itself: that of the same JSON without
the field ``xxh3_128``. It names every file with its size and checksum, so whoever has checked a
manifest can check all the rest.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import xxhash

from persia._files.entries import NAME, NUM_BUCKETS, Deleted, File, Part
from persia._files.json_reader import FieldPath, Fields, parse
from persia._files.schema import SavedSchema
from persia.errors import CheckpointError
from persia.version import __version__

FORMAT = "persia-checkpoint"
VERSION = 1
# A part is told in 300 bytes: enough for a million parts.
MAX_MANIFEST_BYTES = 256 << 20
ID = re.compile(r"\d{8,19}-[0-9a-f]{8}")
TIME = "%Y-%m-%dT%H:%M:%S.%fZ"

Kind = Literal["full", "delta"]


def now() -> str:
    """Return the time as manifests have it, UTC."""
    return datetime.datetime.now(datetime.timezone.utc).strftime(TIME)


def number_of(identity: str) -> tuple[int, str]:
    """Return what ids are sorted by."""
    number, _, chance = identity.partition("-")
    return int(number), chance


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One checkpoint."""

    id: str
    """Number in its catalog, and chance: two writers never have the same."""

    kind: Kind
    base: str | None = None
    """Of a delta, the checkpoint that it changes; None of a full one."""

    step: int
    """The cut comes after this step."""

    created: str = field(default_factory=now)
    """UTC, as ``now`` returns it."""

    num_servers: int
    """How many parameter servers wrote it."""

    schema: SavedSchema
    parts: tuple[Part, ...]
    deleted: tuple[Deleted, ...] = ()
    """Signs that were rows at ``base`` and are none now; rows of ``parts`` are never meant."""

    files: Mapping[str, File] = field(default_factory=dict)
    """All others by name: the dense model, its optimizer, states of generators, sketches."""

    extras: Mapping[str, Any] = field(default_factory=dict)
    """What else has to be known to continue; JSON."""

    writer: str = __version__
    """Version of PERSIA that wrote it."""

    @property
    def num_rows(self) -> int:
        """Rows in its parts."""
        return sum(part.num_rows for part in self.parts)

    @property
    def num_bytes(self) -> int:
        """Bytes of its files."""
        return sum(file.num_bytes for file in self.all_files())

    def all_files(self) -> list[File]:
        """Return every file it names."""
        entries: tuple[Part | Deleted, ...] = (*self.parts, *self.deleted)
        return [*(entry.file for entry in entries), *self.files.values()]

    def encode(self) -> bytes:
        """Return the file.

        Raises:
            CheckpointError: If it could not be read again, naming the field.
        """
        content = self._to_json()
        try:
            content["xxh3_128"] = _checksum(content)
            data = _canonical(content)
        except (TypeError, ValueError, RecursionError) as exc:
            raise CheckpointError(f"manifest of {self.id}: extras: not JSON: {exc}") from exc
        Manifest.decode(data, f"manifest of {self.id}")
        return data

    def _to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "id": self.id,
            "kind": self.kind,
            "base": self.base,
            "step": self.step,
            "created": self.created,
            "writer": self.writer,
            "servers": self.num_servers,
            "schema": self.schema.to_json(),
            "parts": [part.to_json() for part in self.parts],
            "deleted": [deleted.to_json() for deleted in self.deleted],
            "files": {name: file.to_json() for name, file in self.files.items()},
            "extras": dict(self.extras),
        }

    @staticmethod
    def decode(data: bytes, path: str) -> Manifest:
        """Return a manifest from its file, every field of it checked.

        Raises:
            CheckpointError: If it is not one, naming ``path`` and the field.
        """
        where = FieldPath(path)
        content = parse(data, where)
        fields = Fields(content, where)
        if (name := fields.text("format")) != FORMAT:
            raise where.at("format").expected(f'"{FORMAT}"', name)
        version = fields.integer("version", 1)
        if version != VERSION:
            raise where.at("version").error(
                f"expected {VERSION}, got {version}: written by a later version of PERSIA"
            )
        checksum = fields.text("xxh3_128")
        try:
            own = _checksum({key: content[key] for key in content if key != "xxh3_128"})
        except RecursionError:  # writing takes a level more than reading
            raise where.error("expected JSON, got a value nested too deeply") from None
        if checksum != own:
            raise where.at("xxh3_128").error(
                f"expected {own}, got {checksum}: the file is damaged"
            )
        manifest = _read(fields)
        _check_agrees(manifest, where)
        return manifest


def _read(fields: Fields) -> Manifest:
    identity = _id(fields.text("id"), fields.where.at("id"))
    kind = cast("Kind", fields.one_of("kind", ("full", "delta")))
    base = fields.optional_text("base")
    if (base is None) != (kind == "full"):
        raise fields.where.at("base").expected(
            "null" if kind == "full" else "the id of a checkpoint", base
        )
    if base is not None:
        _id(base, fields.where.at("base"))
        if number_of(base) >= number_of(identity):  # so no chain is a ring
            raise fields.where.at("base").expected("one before this checkpoint", base)
    created = fields.text("created")
    try:
        datetime.datetime.strptime(created, TIME)
    except ValueError:
        raise fields.where.at("created").expected(f"a time like {TIME}", created) from None
    named = fields.fields("files")
    files = {}
    for name in named.names():
        if not NAME.fullmatch(name):
            raise named.where.expected("names of letters, digits and ._-", name)
        entry = named.fields(name)
        files[name] = File.from_json(entry)
        entry.done()
    manifest = Manifest(
        id=identity,
        kind=kind,
        base=base,
        step=fields.integer("step"),
        created=created,
        writer=fields.text("writer"),
        num_servers=fields.integer("servers", 1, NUM_BUCKETS),
        schema=SavedSchema.from_json(fields.fields("schema")),
        parts=tuple(Part.from_json(part) for part in fields.objects("parts")),
        deleted=tuple(Deleted.from_json(entry) for entry in fields.objects("deleted")),
        files=files,
        extras=fields.object("extras"),
    )
    fields.done()
    return manifest


def _check_agrees(manifest: Manifest, where: FieldPath) -> None:
    """Check what one field says against the others."""
    for place, part in enumerate(manifest.parts):
        here = where.at("parts").at(place)
        table = manifest.schema.tables.get(part.table)
        if table is None:
            raise here.at("table").expected("a table of the schema", part.table)
        kept = (part.dtype, part.dim, part.state_words)
        if kept != (table.dtype, table.dim, table.state_words):
            raise here.error(
                f"expected rows of {part.table}, {table.dtype} [{table.dim}] with "
                f"{table.state_words} words of state, got {kept[0]} [{kept[1]}] with {kept[2]}"
            )
        if part.policy >= len(manifest.schema.policies):
            raise here.at("policy").error(f"the schema has no policy {part.policy}")
        if part.server >= manifest.num_servers:
            raise here.at("server").error(
                f"there are {manifest.num_servers}, got {part.server}"
            )
    if manifest.kind == "full" and manifest.deleted:
        raise where.at("deleted").error("a full checkpoint deletes nothing")
    paths = [file.path for file in manifest.all_files()]
    for path in paths:
        # So that removing the folder of this id removes what is its own and nothing else.
        if not path.startswith(f"{manifest.id}/"):
            raise where.error(f"expected paths below {manifest.id}/, got {path}")
    if len(set(paths)) < len(paths):
        raise where.error("a path comes twice")


def _id(text: str, where: FieldPath) -> str:
    if not ID.fullmatch(text):
        raise where.expected("a number of 8 to 19 digits, -, 8 hexadecimal digits", text)
    return text


def _canonical(content: dict[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _checksum(content: dict[str, Any]) -> str:
    return xxhash.xxh3_128(_canonical(content)).hexdigest()
