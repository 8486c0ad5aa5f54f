"""A parameter server's share of a load: verify all of it, then replace the rows.

    verify    manifests, what they mean here, every file that has rows of this server
    commit    drop the rows held, then restore: base first, then each delta's deletions and rows
    finish    every server has its share: the rows are whole

Updates of rows that were looked up before all were replaced are refused: they may be those of a
trainer that has died, repeated by an embedding-worker, and the rows are another one's now.

The first two are threads; the same request again is answered with how far it is. A status is
one value, replaced by the thread that works and set before it starts.

From commit to finish rows are *missing*: here, or on another server. Whatever comes between, a
failure, a kill of this process or the death of the trainer, they stay missing, in the state
file too, until a load of as many features is finished or all rows are cleared. Commit waits
for the requests that are being served; those to come are refused: while rows are missing no
batch is trained and nothing is dumped.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from persia._core.store.blocks import RowBlock
from persia._files.catalog import Chain, chains
from persia._files.log_position import Reached, reached_by
from persia._files.manifest import Manifest, Part, sketch_name
from persia._files.mapping import Mapping, first_names
from persia._files.parts import (
    DuplicateFilter,
    check_part,
    filter_owned,
    num_owned,
    read_deleted,
    run_ahead,
)
from persia._files.rows import rows_of
from persia._files.storage import BufferPool, Storage
from persia._rpc.messages import (
    HyperParameters,
    LoadNote,
    LoadRequest,
    LoadStatus,
    OptimizerSettings,
    TableGradients,
)
from persia._server.row_settings import KeptWords, ServerState, settings_from_json
from persia._server.snapshot import Sketch, read_sketch
from persia._server.state_file import StateRecovery
from persia.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    PersiaError,
    RowsReplaced,
    ServiceBusy,
)
from persia.logger import get_logger

_logger = get_logger("persia.checkpoints")

_Signs = tuple[NDArray[np.uint64], NDArray[np.uint64]]
Progress = Callable[[int, int, int], None]  # bytes done, of, rows

# What a step is while it goes on, and once it is done.
_STATES = {"verify": ("verifying", "verified"), "commit": ("loading", "loaded")}
# Seconds that a load waits for the requests that are being served.
_IDLE_TIMEOUT_S = 60.0
# Parts that enter the store at the same time: each takes the shards' locks in turn.
_RESTORING = 2
# Rows looked at under a shard's lock at a time.
_BLOCK_ROWS = 65_536


def _saved_settings(manifest: Manifest) -> dict[str, Any]:
    saved = manifest.extras.get("servers")
    return saved if isinstance(saved, dict) else {}


def settings_of(
    request: LoadRequest,
) -> tuple[HyperParameters, OptimizerSettings, KeptWords]:
    """Return the settings of the servers that wrote a checkpoint, and words of its rows."""
    chain = chains(request.url, request.checkpoint or None)[0]
    manifest = chain.manifests[-1]
    saved = _saved_settings(manifest)
    try:
        hyper, optimizer = settings_from_json(
            saved.get("hyper_parameters"), saved.get("optimizer")
        )
        if hyper is None or optimizer is None:
            raise ConfigError("expected hyper_parameters and optimizer")
        tables = [
            one for one in manifest.schema.tables.values() if one.optimizer == optimizer.name
        ]
        return hyper, optimizer, {table.dim: table.state_words for table in tables}
    except ConfigError as exc:
        raise CheckpointError(
            f"{chain.storage.url}: {manifest.id}: extras.servers: {exc}, as no trainer has "
            "configured this server"
        ) from exc


@dataclass(frozen=True, slots=True)
class Missing:
    """Which rows are not there, or not all."""

    url: str  # whose load was cut short
    features: frozenset[str] | None  # None is all

    def after(self, loaded: tuple[str, ...] | None) -> Missing | None:
        """Return what is still missing once these features have been loaded."""
        if loaded is None or (self.features is not None and self.features <= set(loaded)):
            return None
        left = None if self.features is None else self.features - set(loaded)
        return Missing(self.url, left)

    def to_json(self) -> dict[str, Any]:
        """Return what a state file notes."""
        features = None if self.features is None else sorted(self.features)
        return {"url": self.url, "features": features}

    @staticmethod
    def from_json(found: Any) -> Missing | None:
        """Read what a state file notes; what cannot be read is taken for all rows."""
        if found is None:
            return None
        try:
            features = found["features"]
            return Missing(str(found["url"]), None if features is None else frozenset(features))
        except (TypeError, KeyError):
            return Missing("a checkpoint", None)


@dataclass(slots=True)
class _Load:
    """One load; its owner's lock guards it."""

    request: LoadRequest  # of the step last begun
    status: LoadStatus
    restore: CheckpointRestore
    is_dropped: bool = False
    missing_before: Missing | None = None


class _Use:
    """A context of ``LoadManager``. Each request enters it, and gets the load of its rows."""

    def __init__(self, manager: LoadManager, or_missing: bool) -> None:
        self._manager, self._or_missing = manager, or_missing

    def __enter__(self) -> int | None:
        manager = self._manager
        with manager._lock:
            if manager._load is not None or manager._missing is not None:
                manager._check_whole(self._or_missing)
            manager._num_uses += 1
            return manager.load_id

    def __exit__(self, *_: object) -> None:
        manager = self._manager
        with manager._lock:
            manager._num_uses -= 1
            if not manager._num_uses and manager._load is not None:
                manager._idle.notify_all()


class _EvaluationUse(_Use):
    """A context of evaluation, which is refused for as long as a load takes."""

    def __enter__(self) -> int | None:
        manager = self._manager
        with manager._lock:
            if manager._load is not None or manager._missing is not None:
                manager._check_shown()
            manager._num_uses += 1
        return None  # no update follows


class LoadManager:
    """The loads of one server, one at a time, into what ``now`` returns; thread-safe.

    What is missing is noted when it changes, so that it outlives the process.

    Attributes:
        whole_rows: A context for what needs all rows: no load replaces them meanwhile. It
            raises a CheckpointError if one does, or has left some of them out.
        any_rows: The same for what does not need those that a load has left out.
        shown_rows: The same for evaluation: ServiceBusy from commit to finish, as it can be
            asked again.
        reached: What the rows loaded last have of change logs; nothing of some features only.
        load_id: Of the load that replaced rows last, greater than those before it; 0 is none.
        num_refused: Updates of rows that were replaced since their lookup.
    """

    def __init__(
        self,
        replica: int,
        num_replicas: int,
        num_threads: int,
        recovery: StateRecovery,
        now: Callable[[], ServerState],
    ) -> None:
        self.whole_rows = _Use(self, or_missing=False)
        self.any_rows = _Use(self, or_missing=True)
        self.shown_rows = _EvaluationUse(self, or_missing=False)
        self._replica, self._num_replicas = replica, num_replicas
        self._num_threads, self._recovery, self._now = num_threads, recovery, now
        self._lock = threading.Lock()  # guards all below
        self._idle = threading.Condition(self._lock)  # the last use has ended
        self._num_uses = 0
        self._load: _Load | None = None
        self._missing: Missing | None = None  # rows that a load has left out
        self._finished: int | None = None  # the load that was last
        self.loaded_at: float | None = None  # when one last replaced the rows; monotonic
        self.reached: Reached = {}
        self.load_id = self.num_refused = 0
        # By prefix of signs the load that has replaced these rows last.
        self._replaced: dict[int, int] = {}
        self._all_replaced = 0  # the last load of all rows

    @property
    def is_loading(self) -> bool:
        """Whether rows are being replaced."""
        load = self._load
        return load is not None and load.status.state == "loading"

    @property
    def problem(self) -> str | None:
        """Why rows are not whole, or None."""
        if self.is_loading:
            return "a load is replacing its rows"
        if self._missing is not None:
            return "rows are missing: a load was not finished on every server"
        return None

    @property
    def missing_from(self) -> str | None:
        """The URL of the load that has left rows out; None if none are missing."""
        return None if self._missing is None else self._missing.url

    def recover(self, missing: Any, loads: Any = None) -> None:
        """Begin with what a process before this one noted."""
        self._missing = Missing.from_json(missing)
        if isinstance(loads, dict):
            self.load_id, self._all_replaced = loads["last"], loads["all"]
            self._replaced = {int(prefix): one for prefix, one in loads["prefixes"].items()}

    def check_current(
        self,
        update_id: tuple[int, int],
        load_id: int | None,
        tables: Iterable[TableGradients],
    ) -> None:
        """Refuse an update of rows that were replaced since, inside of ``whole_rows``.

        Args:
            update_id: Its client and number.
            load_id: That of its lookup's reply; None is not checked.
            tables: What it steps, with signs.
        """
        # A server that was restarted without its rows knows of no load: clients train on.
        if load_id is None or self.load_id in (0, load_id):
            return
        if load_id >= self._all_replaced:
            since = [prefix for prefix, one in self._replaced.items() if one > load_id]
            replaced = np.array(since, np.uint64)
            bits = np.uint64(64 - self._now().settings.schema.prefix_bits)
            if not any(np.isin(one.signs >> bits, replaced).any() for one in tables):
                return
        with self._lock:
            self.num_refused += 1
        raise RowsReplaced(
            f"parameter server {self._replica}: update {update_id[1]} of client "
            f"{update_id[0]:#x} is of rows that a load has replaced since they were looked up; "
            "nothing was stepped: another trainer has loaded a checkpoint"
        )

    def _check_whole(self, or_missing: bool) -> None:
        if self.is_loading:
            raise CheckpointError(
                f"parameter server {self._replica}: a load is replacing its rows; "
                "wait_for_load_embedding() waits for it"
            )
        if self._missing is not None and not or_missing:
            names = self._missing.features
            what = "rows" if names is None else f"rows of {', '.join(sorted(names))}"
            raise CheckpointError(
                f"parameter server {self._replica}: {what} are missing: a load of "
                f"{self._missing.url} was not finished on every server; load again, or "
                "clear_embeddings()"
            )

    def _check_shown(self) -> None:
        load = self._load
        if load is not None and load.status.state in _STATES["commit"]:
            raise ServiceBusy(
                f"parameter server {self._replica}: a load is replacing its rows; ask again, "
                "or wait_for_load_embedding()"
            )
        self._check_whole(False)

    def clear_missing(self) -> None:
        """Note that all rows were cleared, so none is missing."""
        with self._lock:
            self._set_missing(None)

    def _set_missing(self, missing: Missing | None) -> None:
        if missing != self._missing:
            self._missing = missing
            self._recovery.note(missing=None if missing is None else missing.to_json())

    def load(self, request: LoadRequest) -> LoadStatus:
        """Begin a step, or return how far it is."""
        with self._lock:
            load = self._load
            is_same = load is not None and load.request.load_id == request.load_id
            if request.step == "drop":
                if load is not None and is_same:
                    # A thread that replaces rows notices at its next part.
                    load.is_dropped = True
                    self._load = load if self.is_loading else None
                return LoadStatus("dropped", 0, 0, 0, "", ())
            if request.step == "finish":
                return self._finish(load if is_same else None, request)
            if load is not None and load.request == request:
                return load.status
            if request.step == "verify":
                if self.is_loading:
                    raise CheckpointError(
                        f"parameter server {self._replica}: another load is replacing its "
                        "rows; wait_for_load_embedding() waits for it"
                    )
                load = self._load = self._new_load(request)
            elif (
                load is None
                or not is_same
                or load.status.state != "verified"
                or request.step != "commit"
            ):
                raise self._out_of_order(request)
            # Before the thread runs: what it sets is never overwritten from here.
            load.request = request
            load.status = replace(load.status, state=_STATES[request.step][0], done=0)
            threading.Thread(
                target=self._run, args=(load, request), name="persia-load", daemon=True
            ).start()
            return load.status

    def load_now(self, request: LoadRequest) -> list[LoadNote]:
        """Verify and commit in this thread; returns what the user should know."""

        def ignore(done: int, total: int, rows: int) -> None:
            """Progress that is not asked for."""

        load = self._new_load(request)
        load.status = replace(load.status, state="loading")
        with self._lock:
            self._load = load
        try:
            load.restore.verify(ignore)
            self._commit(load, ignore)
            with self._lock:
                self._set_missing(load.missing_before)
                self.loaded_at = time.monotonic()
                self.reached = load.restore.reached
        finally:
            with self._lock:
                self._load = None
        return load.restore.notes

    def _new_load(self, request: LoadRequest) -> _Load:
        restore = CheckpointRestore(
            self._replica, self._num_replicas, self._now(), request, self._num_threads
        )
        return _Load(request, LoadStatus("verifying", 0, 0, 0, "", ()), restore)

    def _finish(self, load: _Load | None, request: LoadRequest) -> LoadStatus:
        """With the lock held: the rows are whole, as every server has its share."""
        if self._finished != request.load_id:
            if load is None or load.status.state != "loaded":
                raise self._out_of_order(request)
            self._set_missing(load.missing_before)
            self._load, self._finished = None, request.load_id
            self.reached = load.restore.reached
        return LoadStatus("finished", 0, 0, 0, "", ())

    def _commit(self, load: _Load, progress: Progress) -> None:
        """Replace rows once no request uses them; from here on they are missing."""
        request = load.request
        with self._lock:
            if not self._idle.wait_for(lambda: not self._num_uses, _IDLE_TIMEOUT_S):
                raise CheckpointError(
                    f"{self._num_uses} requests to parameter server {self._replica} have not "
                    f"ended within {_IDLE_TIMEOUT_S:g} s; nothing was loaded"
                )
            if load.is_dropped:
                raise CheckpointError("the load was cancelled; nothing was loaded")
            load.restore.check_fits(self._now())  # from here on settings cannot change that
            before = self._missing
            load.missing_before = None if before is None else before.after(request.features)
            names = None if request.features is None else frozenset(request.features)
            if before is not None and names is not None:
                names = None if before.features is None else names | before.features
            self._note_replaced(load)  # before any row goes
            self._set_missing(Missing(request.url, names))
        load.restore.commit(progress)

    def _note_replaced(self, load: _Load) -> None:
        """With the lock held: name the rows that go, for updates that come too late."""
        # By the clock, so that a server that has lost its state gives none out again.
        self.load_id = max(self.load_id + 1, time.time_ns())
        if load.request.features is None:
            # That of a server which starts (``load_now``) has no number, and replaces no rows.
            self.load_id = self.load_id if load.request.load_id else 0
            self._all_replaced, self._replaced = self.load_id, {}
        else:
            self._replaced |= dict.fromkeys(load.restore.prefixes, self.load_id)
        self._recovery.note(
            loads={
                "last": self.load_id,
                "all": self._all_replaced,
                "prefixes": {str(prefix): one for prefix, one in self._replaced.items()},
            }
        )

    def _out_of_order(self, request: LoadRequest) -> CheckpointError:
        before = "verified" if request.step == "commit" else "loaded"
        return CheckpointError(
            f"parameter server {self._replica}: {request.step!r} of load "
            f"{request.load_id:x}: expected one that it has {before}; it was restarted, or "
            "another load took its place"
        )

    def _run(self, load: _Load, request: LoadRequest) -> None:
        def progress(done: int, total: int, rows: int) -> None:
            with self._lock:
                load.status = replace(load.status, done=done, total=total, num_rows=rows)
                if load.is_dropped:
                    raise CheckpointError("the load was cancelled")

        try:
            if request.step == "verify":
                load.restore.verify(progress)
            else:
                self._commit(load, progress)
        except BaseException as exc:
            if not isinstance(exc, PersiaError):
                _logger.exception("a load failed")
            with self._lock:
                load.status = replace(load.status, state="failed", error=str(exc) or repr(exc))
            return
        with self._lock:
            if request.step == "commit":
                self.loaded_at = time.monotonic()
            load.status = replace(
                load.status,
                state=_STATES[request.step][1],
                notes=tuple(load.restore.notes),
            )


# --- what is read, and what is done with it -------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _MappedChain(Chain):
    """A chain with the parts that this server reads."""

    mapping: Mapping  # what their rows become here


def _check(chain: _MappedChain, part: Part, memory: BufferPool) -> _Signs:
    """Check a part and whose rows are in it; returns its signs, and those they become here."""
    signs = check_part(chain.storage, part, memory)  # none comes twice: the caller's window
    if chain.server is not None:
        # Servers own different signs, so no two of their chains have one in common.
        count = chain.manifests[-1].num_servers
        if num_owned(signs, chain.server, count) != len(signs):
            raise CheckpointError(
                f"{chain.storage.at(part.path)}: signs: expected those of server "
                f"{chain.server} of {count}, got another server's, whose own folder may have "
                "them too"
            )
    try:
        return signs, chain.mapping.signs_of(part.table, signs)
    except CheckpointError as exc:
        raise CheckpointError(f"{chain.storage.at(part.path)}: {exc}") from exc


class CheckpointRestore:
    """One server's share of one load. Its methods run one after the other, in threads."""

    def __init__(
        self,
        replica: int,
        num_replicas: int,
        now: ServerState,
        request: LoadRequest,
        num_threads: int,
    ) -> None:
        self._replica, self._num_replicas = replica, num_replicas
        self._store, self._settings = now.store, now.settings
        self._request, self._num_threads = request, num_threads
        self.notes: list[LoadNote] = []
        self.reached: Reached = {}
        self._chains: list[_MappedChain] = []
        self._sketch: Sketch | None = None
        self._num_bytes = 0
        self._num_rows = 0  # at least, once verified

    def verify(self, progress: Progress) -> None:
        """Read everything that commit will read, and check it; changes nothing."""
        found = chains(self._request.url, self._request.checkpoint or None)
        self._chains = [self._read(one) for one in found]
        latest = found[0].manifests[-1]
        if self._request.features is None:
            self.reached = reached_by(found)
        self._check_initializers(latest)
        self.notes = [
            *self._chains[0].mapping.notes,
            *self._differing_settings(latest),
            *self._differing_slots(latest),
        ]
        self._num_bytes = sum(
            part.num_bytes for c in self._chains for m in c.manifests for part in m.parts
        )
        done = 0

        def read(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            progress(done, self._num_bytes, 0)

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
        chain: _MappedChain,
        manifest: Manifest,
        read: Callable[[int], None],
    ) -> int:
        """Check the parts of one checkpoint; returns how many rows this server will own."""
        window = DuplicateFilter(f"parts of {chain.storage.at(manifest.id)}")
        memory = BufferPool()
        count = 0
        parts = sorted(manifest.parts, key=lambda part: part.buckets)
        checked = run_ahead(
            pool, lambda part: _check(chain, part, memory), parts, self._num_threads
        )
        for part, (signs, here) in checked:
            window.add(part, signs)
            count += num_owned(here, self._replica, self._num_replicas)
            read(part.num_bytes)
        window.close()
        return count

    def _check_capacity(self, num_rows: int) -> None:
        """Refuse what cannot fit: which rows stayed would depend on their order in files.

        Of a chain at least the rows of its largest checkpoint are counted: deltas may delete.
        """
        capacity = self._store.capacity
        if num_rows > capacity and all(len(chain.manifests) == 1 for chain in self._chains):
            raise ConfigError(
                f"embedding_parameter_server_config.capacity: expected at least {num_rows}, "
                f"the rows of this server in {self._request.url}, got {capacity}; or load into "
                f"more than {self._num_replicas} server{'s' * (self._num_replicas != 1)}"
            )

    def _read(self, chain: Chain) -> _MappedChain:
        """Return a chain as this server reads it."""
        mapping = Mapping.between(
            chain.manifests[-1].schema,
            self._settings.saved_schema(),
            only=self._request.features,
        )
        mine = [
            replace(
                manifest,
                parts=tuple(
                    mapping.parts_for(manifest.parts, self._replica, self._num_replicas)
                ),
            )
            for manifest in chain.manifests
        ]
        return _MappedChain(chain.storage, mine, chain.server, mapping=mapping)

    def _check_initializers(self, manifest: Manifest) -> None:
        """Refuse features whose new rows would not begin by the library that they began by."""
        there = _saved_settings(manifest).get("native_initializers")
        before = there if isinstance(there, dict) else {}
        now = self._settings.native_initializers()
        for feature in manifest.schema.features.keys() & self._settings.schema.slots.keys():
            is_loaded = self._request.features is None or feature in self._request.features
            if is_loaded and before.get(feature) != now.get(feature):
                names = [one.get(feature, "a built-in one") for one in (before, now)]
                raise ConfigError(
                    f"the checkpoint does not fit: the initialization of feature {feature!r} "
                    f"is {names[0]} in the checkpoint and {names[1]} here; give the one that "
                    "it was saved with, or load what fits by features=[...]"
                )

    def _differing_settings(self, manifest: Manifest) -> list[LoadNote]:
        """Return notes on settings by which new rows differ from those of the job before."""
        there = _saved_settings(manifest).get("hyper_parameters")
        if not isinstance(there, dict):
            return []
        here = dataclasses.asdict(self._settings.hyper)
        return [
            LoadNote(
                "seed" if name == "seed" else "other",
                f"{name} is {there[name]} in the checkpoint and {here[name]} here, for new "
                "rows and steps",
            )
            for name in ("seed", "initialization", "admit_probability", "weight_bound")
            if name in there and there[name] != here[name]
        ]

    def _differing_slots(self, manifest: Manifest) -> list[LoadNote]:
        """Return notes on what the model receives of the same rows."""
        there = _saved_settings(manifest).get("slots")
        if not isinstance(there, dict):  # as of earlier versions
            return []
        changed: dict[str, list[str]] = {}
        for name, slot in self._settings.slots_to_json().items():
            before = there.get(name)
            is_loaded = self._request.features is None or name in self._request.features
            if not is_loaded or not isinstance(before, dict):
                continue
            for what in slot.keys() & before.keys():
                if before[what] != slot[what]:
                    text = f"{what} is {before[what]} in the checkpoint and {slot[what]} here"
                    changed.setdefault(text, []).append(name)
        return [
            LoadNote(
                "other",
                f"{text}, for features {first_names(names)}: the model receives other values "
                "of the same rows",
            )
            for text, names in sorted(changed.items())
        ]

    def _find_sketch(self, storage: Storage, manifest: Manifest) -> None:
        """Read the counts of ids not admitted yet, if they can be used here."""
        if not self._settings.sketch_bytes or self._request.features is not None:
            return
        file = manifest.files.get(sketch_name(self._replica))
        if file is not None and manifest.num_servers == self._num_replicas:
            self._sketch = read_sketch(storage, file)
        else:
            self._note(
                "counts",
                "how often ids that wait for admission appeared is not known for this number "
                "of servers: they are counted from 0",
            )

    def _note(self, kind: str, text: str) -> None:
        self.notes.append(LoadNote(kind, text))

    @property
    def prefixes(self) -> list[int]:
        """Prefixes of the signs whose rows are replaced; of a load of some features."""
        return [new + 1 for new in self._chains[0].mapping.groups if new >= 0]

    def check_fits(self, now: ServerState) -> None:
        """Check that what was verified is still what the server holds."""
        changed = now.settings.first_changed(self._settings)
        if now.store is not self._store or changed is not None:
            raise CheckpointError(
                f"parameter server {self._replica} was given another seed or optimizer since "
                f"{self._request.url} was verified for it; nothing was loaded, load again"
            )

    def commit(self, progress: Progress) -> None:
        """Replace the rows held by those of the checkpoint."""
        stats = self._store.stats
        before = stats()["evicted"]
        try:
            self._drop_rows()
            self._restore(progress)
        except BaseException as exc:
            with suppress(Exception):
                self._store.end_restore()  # keeps no memory for rows that did not come
            raise CheckpointError(
                f"{exc}; rows of parameter server {self._replica} are missing now: load again "
                "before you train on"
            ) from exc
        if evicted := stats()["evicted"] - before:
            self._note(
                "other",
                f"{evicted} rows did not fit into parameter server {self._replica} and were "
                "evicted, those that came first: capacity or memory_limit is too small",
            )

    def _drop_rows(self) -> None:
        """Drop all rows, or with some features to load those of their groups."""
        store = self._store
        if self._request.features is None:
            store.clear(reuse=True)  # new memory would cost more than what goes into it
            return
        bits = np.uint64(64 - self._settings.schema.prefix_bits)
        loaded = np.array(self.prefixes, np.uint64)
        found = []
        with store.begin_snapshot() as cut:
            for block in cut.blocks(_BLOCK_ROWS):
                found.append(block.signs[np.isin(block.signs >> bits, loaded)])
        for signs in found:
            store.delete(signs)

    def _restore(self, progress: Progress) -> None:
        store = self._store
        done = count = 0

        def read(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            progress(done, self._num_bytes, count)

        def restore(chain: _MappedChain, part: Part, block: RowBlock) -> int:
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
        progress(done, self._num_bytes, count)
        if self._sketch is None:
            return
        try:
            store.restore_sketch(*self._sketch)
        except DataError as exc:
            self._note(
                "counts",
                f"ids that wait for admission are counted from 0, as their counts were of "
                f"another size: {exc}",
            )
