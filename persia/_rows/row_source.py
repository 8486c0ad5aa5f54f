"""Where served rows come from: a checkpoint, a change log, or the one and then the other.

    checkpoint   a folder's newest one, or one by its id; newer ones may be picked up
    change log   what training servers write as training goes on; it has all rows

With both, rows are the checkpoint's until the log is whole and has come as far as it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from persia._core.kernels.optim import RowOptimizer
from persia._files import catalog
from persia._files.catalog import Chain
from persia._files.change_log import ChangeLog
from persia._files.log_position import LogPosition
from persia._files.manifest import number_of
from persia._files.mapping import Mapping as SchemaMapping
from persia._files.open import open_storage
from persia._files.schema import SavedSchema
from persia.config import EmbeddingSchema
from persia.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSource:
    """Where rows come from; at least one of ``checkpoint`` and ``change_log``."""

    checkpoint: str = ""  # folder or URL
    checkpoint_id: str = ""  # in it; "" is the newest
    follows_newer: bool = False  # whether a newer one that comes is loaded
    # Whether a client asked for this checkpoint: it has to be there, and is followed by others
    # only if it is the folder's newest.
    is_explicit: bool = False
    change_log: str = ""  # folder or URL: ``incremental_dir`` of the training servers
    # By server, packets that the log must have come to before its rows are shown.
    packets: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.checkpoint and not self.change_log:
            raise ConfigError("rows: expected a checkpoint or a change log, got neither")

    def newer_than(self, identity: str) -> str | None:
        """Return the id of the folder's newest checkpoint if it is newer than this one."""
        if not (self.checkpoint and self.follows_newer):
            return None
        newest = catalog.latest(open_storage(self.checkpoint))
        if newest is None or (identity and number_of(newest) <= number_of(identity)):
            return None
        return newest

    def followed(self, opened: Opened) -> RowSource:
        """Return the source of what follows: nothing after an older one that was asked for."""
        if not self.is_explicit:
            return self
        newest = catalog.latest(open_storage(self.checkpoint))
        if newest is None or newest == opened.version:
            return replace(self, checkpoint_id="")
        return replace(self, follows_newer=False, change_log="")


@dataclass(frozen=True, slots=True)
class Opened:
    """Chains of checkpoints that together are all rows, and how to go on from them."""

    version: str  # id of a checkpoint; "" of a log, which has no moment in common
    chains: tuple[Chain, ...]
    # Where the log has all changes that are in the checkpoint's rows.
    position: LogPosition
    log: ChangeLog | None  # to follow from here


def open_checkpoint(url: str, identity: str = "") -> Opened:
    """Open a checkpoint, the newest unless one is named; CheckpointError if there is none."""
    chains = catalog.chains(url, identity or None)
    last = chains[0].manifests[-1]
    version = last.id if chains[0].server is None else ""
    return Opened(version, tuple(chains), LogPosition.of(last), None)


def open_log(url: str, *, is_damaged: bool = False) -> Opened:
    """Open a change log at its newest chains, or at those that can be read if it is damaged.

    Raises:
        LogNotReady: It is not whole yet.
    """
    log = ChangeLog(url)
    chains = log.start(is_damaged=is_damaged)
    return Opened("", tuple(chains), LogPosition(), log)


class SchemaMatch:
    """How rows of manifests become rows of this config; any thread may call it."""

    def __init__(self, schema: EmbeddingSchema) -> None:
        self.schema = schema
        self._last: tuple[SavedSchema, SchemaMapping] | None = None

    def mapping(self, saved: SavedSchema) -> SchemaMapping:
        """Return the mapping from a manifest's schema; ConfigError if rows cannot be used."""
        last = self._last
        if last is not None and last[0] == saved:
            return last[1]
        # Rows without state: no optimizer is another one here, and none evicts.
        plain = RowOptimizer("sgd", 0.0, lr=0.0)
        wanted = SavedSchema.of(self.schema, [plain] * len(self.schema.tables))
        mapping = SchemaMapping.between(saved, wanted)
        self._last = saved, mapping
        return mapping
