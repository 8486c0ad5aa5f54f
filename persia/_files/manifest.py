"""The manifest: what a checkpoint is. Without it, there is none.

Canonical JSON (sorted keys, no spaces) with a checksum of itself: that of the same JSON without
the key ``xxh3_128``. It names every file with its size and checksum.
"""

from __future__ import annotations

import datetime
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import xxhash

from persia._files.json_models import Record, parse, read_json
from persia._files.schema import DTYPE, NAME, SavedSchema
from persia._rpc.messages import FeatureOrder
from persia.config.document import Expect, InvalidValue, Listed, Named, integer, show
from persia.errors import CheckpointError
from persia.version import __version__

NUM_BUCKETS = 1 << 14
_PATH = Expect(
    "names of letters, digits and ._- between slashes", pattern=f"^{NAME}(/{NAME})*$"
)
_CHECKSUM = Expect("32 hexadecimal digits", pattern="^[0-9a-f]{32}$")
_U64 = (1 << 64) - 1
_U32 = (1 << 32) - 1


def sketch_name(server: int) -> str:
    """Return the name of a server's counts of ids that are not admitted yet.

    They cannot be divided again: they mean nothing to another number of servers.
    """
    return f"sketch-{server}.safetensors"


@dataclass(frozen=True, slots=True)
class File(Record):
    """A file of a checkpoint, as the manifest knows it."""

    path: Annotated[str, _PATH]  # below the catalog's folder; begins with the checkpoint's id
    num_bytes: Annotated[int, integer()] = field(metadata={"key": "bytes"})
    xxh3_128: Annotated[str, _CHECKSUM]  # checksum of all of it, 32 hexadecimal digits


@dataclass(frozen=True, slots=True)
class Part(File):
    """A file of rows that have one format and one policy."""

    # Which server wrote it: ``orders`` are comparable between rows of one server.
    server: Annotated[int, integer(0, NUM_BUCKETS - 1)]
    table: str
    policy: Annotated[int, integer(0, _U32)]
    dtype: Annotated[str, DTYPE]
    dim: Annotated[int, integer(1, _U32)]
    state_words: Annotated[int, integer(0, _U32)]
    num_rows: Annotated[int, integer()] = field(metadata={"key": "rows"})
    # First bucket of its signs, and one beyond the last.
    buckets: Annotated[tuple[int, int], Expect("[first, end] of buckets", strict=False)]
    max_order: Annotated[int, integer(0, _U64)]  # the largest of ``orders``

    def check(self) -> None:
        first, end = self.buckets
        if not 0 <= first < end <= NUM_BUCKETS:
            raise InvalidValue(
                f"expected 0 <= first < end <= {NUM_BUCKETS}, got {[first, end]}", "buckets"
            )


@dataclass(frozen=True, slots=True)
class Deleted(File):
    """A file of signs whose rows are gone since the base."""

    server: Annotated[int, integer(0, NUM_BUCKETS - 1)]
    num_signs: Annotated[int, integer()] = field(metadata={"key": "signs"})


@dataclass(frozen=True, slots=True)
class ServerFiles(Record):
    """What one server wrote of a checkpoint."""

    parts: Listed[tuple[Part, ...]]
    deleted: Listed[tuple[Deleted, ...]]
    files: Named[File]  # others, by name


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
    return time_text(time.time())


def time_text(seconds: float) -> str:
    """Return a time in seconds since 1970 as manifests have it."""
    return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).strftime(TIME)


def number_of(identity: str) -> tuple[int, str]:
    """Return what ids are sorted by."""
    number, _, chance = identity.partition("-")
    return int(number), chance


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest(Record):
    """One checkpoint."""

    id: _Id  # number in its catalog, and chance: two writers never have the same
    kind: Literal["full", "delta"]
    base: _Id | None = None  # of a delta, the checkpoint that it changes; None of a full one
    step: Annotated[int, integer()]  # the cut comes after this step
    created: str = field(default_factory=now)  # UTC, as ``now`` returns it
    writer: str = __version__  # version of PERSIA that wrote it
    # How many parameter servers wrote it.
    num_servers: Annotated[int, integer(1, NUM_BUCKETS)] = field(metadata={"key": "servers"})
    schema: SavedSchema
    parts: Listed[tuple[Part, ...]]
    # Signs that were rows at ``base`` and are none now; rows of ``parts`` are never meant.
    deleted: Listed[tuple[Deleted, ...]] = ()
    # All others by name: the dense model, its optimizer, states of generators, sketches.
    files: Named[File] = field(default_factory=dict)
    # What else has to be known to continue; JSON.
    extras: Named[Any] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        return sum(part.num_rows for part in self.parts)

    @property
    def created_s(self) -> float:
        """``created`` in seconds since 1970."""
        made = datetime.datetime.strptime(self.created, TIME)
        return made.replace(tzinfo=datetime.timezone.utc).timestamp()

    @property
    def after(self) -> str | None:
        """Of a full packet that a server wrote beside its deltas, the last that it has whole.

        The delta to that one is a delta to this one too.
        """
        found = self.extras.get("after")
        return found if self.kind == "full" and isinstance(found, str) else None

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.all_files())

    def all_files(self) -> list[File]:
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
        if self.after is not None and not ID.fullmatch(self.after):
            raise InvalidValue(
                f"expected the id of a checkpoint, got {show(self.after)}", "extras", "after"
            )
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
        """Return a manifest from its file, every value of it checked."""
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


def feature_order(manifest: Manifest, url: str) -> FeatureOrder | None:
    """Return the order in which the model of a checkpoint receives features, if it is known."""
    saved = manifest.extras.get("features")
    if saved is None:
        return None
    try:
        return FeatureOrder(*(_texts(saved[key]) for key in ("ids", "dense", "labels")))
    except (LookupError, TypeError) as exc:
        raise CheckpointError(
            f"{url}: {manifest.id}: extras.features: expected lists of names by ids, dense and "
            f"labels, got {saved!r:.200}"
        ) from exc


def _texts(saved: Any) -> tuple[str, ...]:
    if not isinstance(saved, list) or not all(isinstance(name, str) for name in saved):
        raise TypeError
    return tuple(saved)
