"""The manifest: what a checkpoint is. Without it, there is none.

Canonical JSON (sorted keys, no spaces) with a checksum of itself: that of the same JSON without
the key ``xxh3_128``. It names every file with its size and checksum.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import xxhash

from persia._files.entries import NAME, NUM_BUCKETS, Deleted, File, Part
from persia._files.json_models import Record, parse, read_json
from persia._files.schema import SavedSchema
from persia.config import Expect, InvalidValue, Listed, Named, integer, show
from persia.errors import CheckpointError
from persia.version import __version__

FORMAT = "persia-checkpoint"
VERSION = 1
# An entry of a part takes 300 bytes: enough for a million parts.
MAX_MANIFEST_BYTES = 256 << 20
ID = re.compile(r"[0-9]{8,19}-[0-9a-f]{8}")
TIME = "%Y-%m-%dT%H:%M:%S.%fZ"

_Id = Annotated[
    str,
    Expect("a number of 8 to 19 digits, -, 8 hexadecimal digits", pattern=f"^{ID.pattern}$"),
]


def now() -> str:
    """Return the time as manifests have it, UTC."""
    return datetime.datetime.now(datetime.timezone.utc).strftime(TIME)


def number_of(identity: str) -> tuple[int, str]:
    """Return what ids are sorted by."""
    number, _, chance = identity.partition("-")
    return int(number), chance


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest(Record):
    """One checkpoint."""

    id: _Id
    """Number in its catalog, and chance: two writers never have the same."""

    kind: Literal["full", "delta"]
    base: _Id | None = None
    """Of a delta, the checkpoint that it changes; None of a full one."""

    step: Annotated[int, integer()]
    """The cut comes after this step."""

    created: str = field(default_factory=now)
    """UTC, as ``now`` returns it."""

    writer: str = __version__
    """Version of PERSIA that wrote it."""

    num_servers: Annotated[int, integer(1, NUM_BUCKETS)] = field(metadata={"key": "servers"})
    """How many parameter servers wrote it."""

    schema: SavedSchema
    parts: Listed[tuple[Part, ...]]
    deleted: Listed[tuple[Deleted, ...]] = ()
    """Signs that were rows at ``base`` and are none now; rows of ``parts`` are never meant."""

    files: Named[File] = field(default_factory=dict)
    """All others by name: the dense model, its optimizer, states of generators, sketches."""

    extras: Named[Any] = field(default_factory=dict)
    """What else has to be known to continue; JSON."""

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
        return [*self.parts, *self.deleted, *self.files.values()]

    def check(self) -> None:
        """Check what one field says against the others."""
        self._check_base()
        try:
            datetime.datetime.strptime(self.created, TIME)
        except ValueError:
            raise InvalidValue(
                f"expected a time like {TIME}, got {show(self.created)}", "created"
            ) from None
        for place, part in enumerate(self.parts):
            self._check_part(part, place)
        if self.kind == "full" and self.deleted:
            raise InvalidValue("a full checkpoint deletes nothing", "deleted")
        for name in self.files:
            if not re.fullmatch(NAME, name):
                raise InvalidValue(f"expected letters, digits and ._-, got {name!a}", "files")
        paths = [file.path for file in self.all_files()]
        for path in paths:
            # So that removing the folder of this id removes its own files and no others.
            if not path.startswith(f"{self.id}/"):
                raise InvalidValue(f"expected paths below {self.id}/, got {path}")
        if len(set(paths)) < len(paths):
            raise InvalidValue("a path comes twice")

    def _check_base(self) -> None:
        is_full = self.kind == "full"
        if (self.base is None) != is_full:
            expected = "null" if is_full else "the id of a checkpoint"
            raise InvalidValue(f"expected {expected}, got {show(self.base)}", "base")
        if self.base is not None and number_of(self.base) >= number_of(self.id):
            # So no chain is a ring.
            raise InvalidValue(f"expected one before this checkpoint, got {self.base}", "base")

    def _check_part(self, part: Part, place: int) -> None:
        table = self.schema.tables.get(part.table)
        if table is None:
            raise InvalidValue(
                f"expected a table of the schema, got {show(part.table)}",
                *("parts", place, "table"),
            )
        kept = (part.dtype, part.dim, part.state_words)
        if kept != (table.dtype, table.dim, table.state_words):
            raise InvalidValue(
                f"expected rows of {part.table}, {table.dtype} [{table.dim}] with "
                f"{table.state_words} words of state, got {kept[0]} [{kept[1]}] with {kept[2]}",
                *("parts", place),
            )
        if part.policy >= len(self.schema.policies):
            raise InvalidValue(
                f"the schema has no policy {part.policy}", "parts", place, "policy"
            )
        if part.server >= self.num_servers:
            raise InvalidValue(
                f"there are {self.num_servers}, got {part.server}", "parts", place, "server"
            )

    def encode(self) -> bytes:
        """Return the file.

        Raises:
            CheckpointError: It could not be read again; names the key.
        """
        try:
            content = {"format": FORMAT, "version": VERSION, **self.to_json()}
            content["xxh3_128"] = _checksum(content)
            data = _canonical(content)
        except (TypeError, ValueError, RecursionError) as exc:
            raise CheckpointError(f"manifest of {self.id}: extras: not JSON: {exc}") from exc
        Manifest.decode(data, f"manifest of {self.id}")
        return data

    @staticmethod
    def decode(data: bytes, path: str) -> Manifest:
        """Return a manifest from its file, every value of it checked.

        Raises:
            CheckpointError: It is not one; names ``path`` and the key.
        """
        content = dict(read_json(dict[str, Any], parse(data, path), path))
        named, version = content.pop("format", None), content.pop("version", None)
        checksum = content.pop("xxh3_128", None)
        if named != FORMAT:
            raise CheckpointError(f'{path}: format: expected "{FORMAT}", got {show(named)}')
        if type(version) is not int or version != VERSION:
            raise CheckpointError(
                f"{path}: version: expected {VERSION}, got {show(version)}: written by another "
                "version of PERSIA"
            )
        try:
            own = _checksum({"format": named, "version": version, **content})
        except RecursionError:  # writing takes a level more than reading
            raise CheckpointError(
                f"{path}: expected JSON, got a value nested too deeply"
            ) from None
        if checksum != own:
            raise CheckpointError(
                f"{path}: xxh3_128: expected {own}, got {show(checksum)}: the file is damaged"
            )
        return read_json(Manifest, content, path)


def _canonical(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _checksum(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128(_canonical(content)).hexdigest()
