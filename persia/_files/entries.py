"""What a manifest says of a checkpoint's files: rows, signs of deleted rows, all others."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from persia._core.base.halves import DTYPES
from persia._files.json_reader import Fields

NUM_BUCKETS = 1 << 14
# Of files, folders and tables: what every file system and object store takes as it is.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_CHECKSUM = re.compile(r"[0-9a-f]{32}")
_U64 = (1 << 64) - 1
_U32 = (1 << 32) - 1


def sketch_name(server: int) -> str:
    """Return what a server's counts of ids not admitted yet are called.

    They cannot be divided anew: they mean nothing to another number of servers.
    """
    return f"sketch-{server}.safetensors"


@dataclass(frozen=True, slots=True)
class File:
    """A file of a checkpoint, as the manifest knows it."""

    path: str
    """Below the catalog's folder; begins with the checkpoint's id."""

    num_bytes: int
    xxh3_128: str
    """Checksum of all of it, 32 hexadecimal digits."""

    def to_json(self) -> dict[str, Any]:
        """Return the manifest's fields."""
        return {"path": self.path, "bytes": self.num_bytes, "xxh3_128": self.xxh3_128}

    @staticmethod
    def from_json(fields: Fields) -> File:
        """Read the manifest's fields; others stay unread."""
        path = fields.text("path")
        if not all(map(NAME.fullmatch, path.split("/"))):
            raise fields.where.at("path").expected(
                "names of letters, digits and ._- between slashes", path
            )
        size = fields.integer("bytes")
        checksum = fields.text("xxh3_128")
        if not _CHECKSUM.fullmatch(checksum):
            raise fields.where.at("xxh3_128").expected("32 hexadecimal digits", checksum)
        return File(path, size, checksum)


@dataclass(frozen=True, slots=True)
class Part:
    """A file of rows that have one format and one policy."""

    file: File
    server: int
    """Which server wrote it: ``orders`` are comparable between rows of one server."""

    table: str
    policy: int
    dtype: str
    dim: int
    state_words: int
    num_rows: int
    buckets: tuple[int, int]
    """First bucket of its signs, and one beyond the last."""

    max_order: int
    """The largest of ``orders``."""

    def to_json(self) -> dict[str, Any]:
        """Return the manifest's fields."""
        names = ("server", "table", "policy", "dtype", "dim", "state_words")
        return {
            **self.file.to_json(),
            **{name: getattr(self, name) for name in names},
            "rows": self.num_rows,
            "buckets": list(self.buckets),
            "max_order": self.max_order,
        }

    @staticmethod
    def from_json(fields: Fields) -> Part:
        """Read the manifest's fields."""
        part = Part(
            File.from_json(fields),
            server=fields.integer("server", 0, NUM_BUCKETS - 1),
            table=fields.text("table"),
            policy=fields.integer("policy", 0, _U32),
            dtype=fields.one_of("dtype", DTYPES),
            dim=fields.integer("dim", 1, _U32),
            state_words=fields.integer("state_words", 0, _U32),
            num_rows=fields.integer("rows", 0),
            buckets=_buckets(fields),
            max_order=fields.integer("max_order", 0, _U64),
        )
        fields.done()
        return part


@dataclass(frozen=True, slots=True)
class Deleted:
    """A file of signs whose rows are gone since the base."""

    file: File
    server: int
    num_signs: int

    def to_json(self) -> dict[str, Any]:
        """Return the manifest's fields."""
        return {**self.file.to_json(), "server": self.server, "signs": self.num_signs}

    @staticmethod
    def from_json(fields: Fields) -> Deleted:
        """Read the manifest's fields."""
        deleted = Deleted(
            File.from_json(fields),
            server=fields.integer("server", 0, NUM_BUCKETS - 1),
            num_signs=fields.integer("signs"),
        )
        fields.done()
        return deleted


def _buckets(fields: Fields) -> tuple[int, int]:
    """Read a range of buckets."""
    value = fields.array("buckets", 2)
    first, end = value
    if not all(type(bound) is int for bound in value) or not 0 <= first < end <= NUM_BUCKETS:
        raise fields.where.at("buckets").expected(
            f"[first, end] with 0 <= first < end <= {NUM_BUCKETS}", value
        )
    return first, end
