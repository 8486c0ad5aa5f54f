"""What a manifest says of a checkpoint's files: rows, signs of deleted rows, all others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from persia._core.base.halves import DTYPES
from persia._files.json_models import Record
from persia.config import Expect, InvalidValue, Listed, Named, integer

NUM_BUCKETS = 1 << 14
# Of files, folders and tables: what every file system and object store takes as it is.
NAME = "[A-Za-z0-9][A-Za-z0-9._-]{0,199}"
_PATH = Expect(
    "names of letters, digits and ._- between slashes", pattern=f"^{NAME}(/{NAME})*$"
)
DTYPE = Expect(f"one of {', '.join(DTYPES)}", pattern=f"^({'|'.join(DTYPES)})$")
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

    path: Annotated[str, _PATH]
    """Below the catalog's folder; begins with the checkpoint's id."""

    num_bytes: Annotated[int, integer()] = field(metadata={"key": "bytes"})
    xxh3_128: Annotated[str, _CHECKSUM]
    """Checksum of all of it, 32 hexadecimal digits."""

    def as_fields(self) -> dict[str, Any]:
        """Return the fields by name, for an entry that says more of the file."""
        return {name: getattr(self, name) for name in ("path", "num_bytes", "xxh3_128")}


@dataclass(frozen=True, slots=True)
class Part(File):
    """A file of rows that have one format and one policy."""

    server: Annotated[int, integer(0, NUM_BUCKETS - 1)]
    """Which server wrote it: ``orders`` are comparable between rows of one server."""

    table: str
    policy: Annotated[int, integer(0, _U32)]
    dtype: Annotated[str, DTYPE]
    dim: Annotated[int, integer(1, _U32)]
    state_words: Annotated[int, integer(0, _U32)]
    num_rows: Annotated[int, integer()] = field(metadata={"key": "rows"})
    buckets: Annotated[tuple[int, int], Expect("[first, end] of buckets", strict=False)]
    """First bucket of its signs, and one beyond the last."""

    max_order: Annotated[int, integer(0, _U64)]
    """The largest of ``orders``."""

    def check(self) -> None:
        """Check the range of buckets."""
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
    files: Named[File]
    """Others, by name."""
