"""The two steps of a load on one server: what they read, and what they do with it.

A server reads the parts that may have rows of its own: those of its buckets, unless groups have
other numbers here than in the checkpoint, which moves their rows to other buckets.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from persia._files.buffer_pool import BufferPool
from persia._files.checkpoint_paths import Chain, chains
from persia._files.entries import sketch_name
from persia._files.mapping import Mapping
from persia._files.parts import (
    DuplicateFilter,
    check_part,
    filter_owned,
    num_owned,
    read_deleted,
)
from persia._files.rows import rows_of
from persia._server.snapshot import Sketch, read_sketch
from persia.errors import CheckpointError, ConfigError, DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from persia._core.store.blocks import RowBlock
    from persia._files.entries import Part
    from persia._files.manifest import Manifest
    from persia._files.storage import Storage
    from persia._rpc.messages import LoadRequest
    from persia._server.snapshot import ServerState

_Signs = tuple["NDArray[np.uint64]", "NDArray[np.uint64]"]
Moved = Callable[[int, int, int], None]  # bytes done, of, rows

# Parts that enter the store at the same time: each takes the shards' locks in turn.
_RESTORING = 2
# Rows looked at under a shard's lock at a time.
_BLOCK_ROWS = 65_536


@dataclasses.dataclass(frozen=True, slots=True)
class _Chain:
    """A full checkpoint and deltas to it, with the parts that this server reads."""

    storage: Storage
    manifests: list[Manifest]  # base first
    mapping: Mapping
    writer: int | None = None  # the server that wrote it by itself, as others wrote theirs

    @property
    def parts(self) -> list[Part]:
        """All of them."""
        return [part for manifest in self.manifests for part in manifest.parts]


def _check(chain: _Chain, part: Part, memory: BufferPool) -> _Signs:
    """Check a part and whose rows are in it; returns its signs, and those they become here."""
    signs = check_part(chain.storage, part, memory)  # none comes twice: the caller's window
    if chain.writer is not None:
        # Servers own different signs, so no two of their chains have one in common.
        count = chain.manifests[-1].num_servers
        if num_owned(signs, chain.writer, count) != len(signs):
            raise CheckpointError(
                f"{chain.storage.at(part.file.path)}: signs: expected those of server "
                f"{chain.writer} of {count}, got another server's, whose own folder may have "
                "them too"
            )
    try:
        return signs, chain.mapping.signs_of(part.table, signs)
    except CheckpointError as exc:
        raise CheckpointError(f"{chain.storage.at(part.file.path)}: {exc}") from exc


class CheckpointRestore:
    """One server's share of one load. Its methods run one after the other, in threads.

    Args:
        replica: Number of the server, of ``num_replicas``.
        num_replicas: How many servers there are.
        held: What the server holds, and is to hold.
        request: What to load.
        num_threads: Files that are checked at the same time.
    """

    def __init__(
        self,
        replica: int,
        num_replicas: int,
        held: ServerState,
        request: LoadRequest,
        num_threads: int,
    ) -> None:
        self._replica = replica
        self._num_replicas = num_replicas
        self._held = held
        self._request = request
        self._num_threads = num_threads
        self.notes: list[str] = []
        self._chains: list[_Chain] = []
        self._sketch: Sketch | None = None
        self._num_bytes = 0
        self._num_rows = 0  # at least, once verified

    def verify(self, moved: Moved) -> None:
        """Read everything that commit will read, and check it; changes nothing.

        Raises:
            CheckpointError: If something is missing or damaged.
            ConfigError: If it does not fit the embedding config; says what differs.
        """
        found = chains(self._request.url, self._request.checkpoint or None)
        self._chains = [self._read(one) for one in found]
        latest = found[0].manifests[-1]
        self.notes = [*self._chains[0].mapping.notes, *self._differing_settings(latest)]
        self._num_bytes = sum(part.file.num_bytes for c in self._chains for part in c.parts)
        done = 0

        def read(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            moved(done, self._num_bytes, 0)

        self._num_rows = 0
        with ThreadPoolExecutor(self._num_threads, "persia-verify") as pool:
            for chain in self._chains:
                self._num_rows += max(
                    self._verify_parts(pool, chain, manifest, read)
                    for manifest in chain.manifests
                )
        self._check_capacity(self._num_rows)
        for chain in self._chains:
            for manifest in chain.manifests:
                for deleted in manifest.deleted:
                    read_deleted(chain.storage, deleted)
        if len(found) == 1:
            self._find_sketch(found[0].storage, latest)

    def _verify_parts(
        self,
        pool: ThreadPoolExecutor,
        chain: _Chain,
        manifest: Manifest,
        read: Callable[[int], None],
    ) -> int:
        """Check the parts of one checkpoint; returns how many rows this server will own."""
        window = DuplicateFilter(f"parts of {chain.storage.at(manifest.id)}")
        memory = BufferPool()
        count = 0
        # As many checks ahead as there are threads: what they return are all signs.
        checks: deque[tuple[Part, Future[_Signs]]] = deque()
        left = iter(sorted(manifest.parts, key=lambda part: part.buckets))
        try:
            while True:
                for part in itertools.islice(left, 1 + self._num_threads - len(checks)):
                    checks.append((part, pool.submit(_check, chain, part, memory)))
                if not checks:
                    break
                part, check = checks.popleft()
                signs, here = check.result()
                window.add(part, signs)
                count += num_owned(here, self._replica, self._num_replicas)
                read(part.file.num_bytes)
            window.close()
        finally:
            for _, check in checks:
                check.cancel()
        return count

    def _check_capacity(self, num_rows: int) -> None:
        """Refuse what cannot fit, as which rows stayed would be nobody's choice.

        Of a chain at least the rows of its largest checkpoint are counted: deltas may delete.
        """
        capacity = self._held.store.capacity
        if num_rows > capacity and all(len(chain.manifests) == 1 for chain in self._chains):
            raise ConfigError(
                f"embedding_parameter_server_config.capacity: expected at least {num_rows}, "
                f"the rows of this server in {self._request.url}, got {capacity}; or load into "
                f"more than {self._num_replicas} server{'s' * (self._num_replicas != 1)}"
            )

    def _read(self, chain: Chain) -> _Chain:
        """Return a chain as this server reads it."""
        mapping = Mapping.between(
            chain.manifests[-1].schema, self._held.saved_schema(), only=self._request.features
        )
        mine = [
            dataclasses.replace(
                manifest,
                parts=tuple(
                    mapping.parts_for(manifest.parts, self._replica, self._num_replicas)
                ),
            )
            for manifest in chain.manifests
        ]
        return _Chain(chain.storage, mine, mapping, chain.server)

    def _differing_settings(self, manifest: Manifest) -> list[str]:
        """Say what makes new rows other ones than the job before would have had."""
        told = manifest.extras.get("servers")
        there = told.get("hyper_parameters") if isinstance(told, dict) else None
        if not isinstance(there, dict):
            return []
        here = dataclasses.asdict(self._held.settings)
        return [
            f"{name} is {there[name]} in the checkpoint and {here[name]} here, for new rows "
            "and steps"
            for name in ("seed", "initialization", "admit_probability", "weight_bound")
            if name in there and there[name] != here[name]
        ]

    def _find_sketch(self, storage: Storage, manifest: Manifest) -> None:
        """Read the counts of ids not admitted yet, if they can be used here."""
        if not self._held.policies.sketch_bytes or self._request.features is not None:
            return
        file = manifest.files.get(sketch_name(self._replica))
        if file is not None and manifest.num_servers == self._num_replicas:
            self._sketch = read_sketch(storage, file)
        else:
            self.notes.append(
                "how often ids that wait for admission appeared is not known for this number "
                "of servers: their counts begin anew"
            )

    def check_fits(self, now: ServerState) -> None:
        """Check that what was verified is still what the server holds.

        Raises:
            CheckpointError: If other settings have come, which took another store.
        """
        changed = now.optimizers.first_changed(self._held.optimizers)
        if now.store is not self._held.store or changed is not None:
            raise CheckpointError(
                f"parameter server {self._replica} was given another seed or optimizer since "
                f"{self._request.url} was verified for it; nothing was loaded, load again"
            )

    def commit(self, moved: Moved) -> None:
        """Replace the rows held by those of the checkpoint.

        Raises:
            CheckpointError: If a file is not what it was when it was verified; rows are
                missing then.
        """
        stats = self._held.store.stats
        before = stats()["evicted"]
        try:
            self._drop_rows()
            self._restore(moved)
        except BaseException as exc:
            with suppress(Exception):
                self._held.store.end_restore()  # keeps no memory for rows that did not come
            raise CheckpointError(
                f"{exc}; rows of parameter server {self._replica} are missing now: load again "
                "before you train on"
            ) from exc
        if evicted := stats()["evicted"] - before:
            self.notes.append(
                f"{evicted} rows did not fit into parameter server {self._replica} and were "
                "evicted, those that came first: capacity or memory_limit is too small"
            )

    def _drop_rows(self) -> None:
        """Drop all rows, or with some features to load those of their groups."""
        store = self._held.store
        if self._request.features is None:
            store.clear(reuse=True)  # new memory would cost more than what goes into it
            return
        mapping = self._chains[0].mapping
        bits = np.uint64(64 - self._held.schema.prefix_bits)
        loaded = np.array([new + 1 for new in mapping.groups if new >= 0], np.uint64)
        found = []
        cut = store.begin_cut()
        try:
            for block in cut.blocks(_BLOCK_ROWS):
                found.append(block.signs[np.isin(block.signs >> bits, loaded)])
        finally:
            cut.close()
        for signs in found:
            store.delete(signs)

    def _restore(self, moved: Moved) -> None:
        store = self._held.store
        done = count = 0

        def read(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            moved(done, self._num_bytes, count)

        def restore(chain: _Chain, part: Part, block: RowBlock) -> int:
            total = 0
            for _, rows in chain.mapping.apply(part.table, block):
                mine = filter_owned(rows, self._replica, self._num_replicas)
                if len(mine):
                    total += store.restore(mine)
            return total

        # Parts have no rows in common, so any two of them may enter at the same time.
        waiting: deque[Future[int]] = deque()
        shares = [(share, _RESTORING) for share in range(_RESTORING)]
        with ThreadPoolExecutor(_RESTORING, "persia-restore") as pool:
            for prepared in [pool.submit(store.expect, self._num_rows, *its) for its in shares]:
                prepared.result()
            for chain in self._chains:
                for part, block in rows_of(chain.storage, chain.manifests, read):
                    waiting.append(pool.submit(restore, chain, part, block))
                    if len(waiting) > _RESTORING:
                        count += waiting.popleft().result()
            for entered in waiting:
                count += entered.result()
            for ended in [pool.submit(store.end_restore, *its) for its in shares]:
                ended.result()
        moved(done, self._num_bytes, count)
        if self._sketch is None:
            return
        try:
            store.restore_sketch(*self._sketch)
        except DataError as exc:
            self.notes.append(
                f"counts of ids that wait for admission begin anew, as they were of another "
                f"size: {exc}"
            )
