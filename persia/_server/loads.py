"""A parameter server's share of a load: verify all of it, then replace the rows.

    verify    manifests, what they mean here, every file that has rows of this server
    commit    drop the rows held, then restore: base first, then each delta's deletions and rows
    finish    every server has its share: the rows are whole

The first two are threads; whoever asks with the same number and step again is told how far it
is. A status is one value, replaced by the thread that works and set before it starts: a load
that is over is never seen as one that goes on.

From commit to finish rows are *missing*: here, or on another server. Whatever comes between, a
failure, a kill of this process or the death of the trainer, they stay missing, in the state
file too, until a load of as many features is finished or all rows are cleared. Commit waits
for the requests that are being served; those to come are refused. While rows are missing
nobody trains and nothing is dumped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from persia._files.checkpoint_paths import chains
from persia._rpc.messages import (
    HyperParameters,
    InitializationSettings,
    LoadRequest,
    LoadStatus,
    OptimizerSettings,
)
from persia._server.restore import CheckpointRestore, Moved
from persia.errors import CheckpointError, PersiaError
from persia.logger import get_logger

if TYPE_CHECKING:
    from persia._server.snapshot import ServerState

_logger = get_logger("persia.checkpoints")

# What a step is while it goes on, and once it is done.
_STATES = {"verify": ("verifying", "verified"), "commit": ("loading", "loaded")}
# How long a load waits for the requests that are being served.
_PATIENCE_S = 60.0


def settings_of(request: LoadRequest) -> tuple[HyperParameters, OptimizerSettings]:
    """Return what the servers that wrote a checkpoint had been told.

    Raises:
        CheckpointError: If there is no checkpoint, or it does not say.
    """
    chain = chains(request.url, request.checkpoint or None)[0]
    manifest = chain.manifests[-1]
    try:
        told = manifest.extras["servers"]
        hyper, optimizer = dict(told["hyper_parameters"]), told["optimizer"]
        initialization = InitializationSettings(**hyper.pop("initialization"))
        return (
            HyperParameters(initialization, **hyper),
            OptimizerSettings(optimizer["name"], dict(optimizer["options"])),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as exc:
        raise CheckpointError(
            f"{chain.storage.url}: {manifest.id}: extras.servers: expected hyper_parameters "
            f"and optimizer, as no trainer has configured this server: {exc!r}"
        ) from exc


def _nobody(done: int, total: int, rows: int) -> None:
    """Tell nobody how far it is."""


@dataclass(slots=True)
class _Load:
    """One load; its owner's lock guards it."""

    request: LoadRequest  # of the step last begun
    status: LoadStatus
    work: CheckpointRestore | None = None  # once verify has begun
    is_dropped: bool = False
    missing_before: Missing | None = None


@dataclass(frozen=True, slots=True)
class Missing:
    """Which rows are not there, or not all."""

    url: str  # whose load was cut short
    features: frozenset[str] | None  # None is all

    def after(self, loaded: tuple[str, ...] | None) -> Missing | None:
        """Return what is still missing once these have been loaded."""
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


class LoadManager:
    """The loads of one server, one at a time; any thread may call it.

    Args:
        replica: Number of the server.
        num_replicas: How many servers there are.
        num_threads: Files that are checked at the same time.
        note: Called with what is missing when that changes, so that it outlives the process.
    """

    def __init__(
        self,
        replica: int,
        num_replicas: int,
        num_threads: int,
        note: Callable[[dict[str, Any] | None], None],
    ) -> None:
        self._replica = replica
        self._num_threads = num_threads
        self._num_replicas = num_replicas
        self._note = note
        self._lock = threading.Condition()  # guards all below; notified when a use ends
        self._load: _Load | None = None
        self._finished: int | None = None  # the load that was last
        self._missing: Missing | None = None
        self._num_uses = 0
        self.loaded_at: float | None = None  # the last load; monotonic

    @property
    def is_loading(self) -> bool:
        """Whether rows are being replaced."""
        with self._lock:
            return self._is_loading()

    def _is_loading(self) -> bool:
        return self._load is not None and self._load.status.state == "loading"

    @property
    def missing(self) -> Missing | None:
        """Which rows are missing since a load that was cut short."""
        with self._lock:
            return self._missing

    def recovered(self, noted: Any) -> None:
        """Take over what a process before this one noted."""
        with self._lock:
            self._missing = Missing.from_json(noted)

    @contextmanager
    def whole_rows(self, *, or_missing: bool = False) -> Iterator[None]:
        """Surround what needs all rows: no load replaces them meanwhile.

        Args:
            or_missing: It is no matter whether a load has left some of them out.

        Raises:
            CheckpointError: If a load is replacing them, or has left some of them out.
        """
        with self._lock:
            self._check_whole(or_missing)
            self._num_uses += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_uses -= 1
                if not self._num_uses:
                    self._lock.notify_all()

    def _check_whole(self, or_missing: bool) -> None:
        if self._is_loading():
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

    def cleared(self) -> None:
        """All rows were cleared, so none is missing."""
        with self._lock:
            self._set_missing(None)

    def _set_missing(self, missing: Missing | None) -> None:
        if missing != self._missing:
            self._missing = missing
            self._note(None if missing is None else missing.to_json())

    def load(self, request: LoadRequest, held: Callable[[], ServerState]) -> LoadStatus:
        """Begin a step, or return how far it is.

        Args:
            request: What to do.
            held: Returns what the server holds.

        Raises:
            CheckpointError: If another load is replacing rows, or commit comes without verify.
            NotConfigured: If the server has no settings yet.
        """
        with self._lock:
            load = self._load
            if request.step == "drop":
                if load is not None and load.request.load_id == request.load_id:
                    self._drop(load)
                return LoadStatus("dropped", 0, 0, 0, "", ())
            if request.step == "finish":
                return self._finish(load, request)
            if load is not None and load.request == request:
                return load.status
            if request.step == "verify":
                load = self._begin(load, request, held())
            else:
                load = self._go_on(load, request)
            # Before the thread runs: what it sets is never overwritten from here.
            load.request = request
            load.status = replace(load.status, state=_STATES[request.step][0], done=0)
            threading.Thread(
                target=self._run, args=(load, request, held), name="persia-load", daemon=True
            ).start()
            return load.status

    def load_now(self, request: LoadRequest, held: Callable[[], ServerState]) -> list[str]:
        """Verify and commit in this thread; returns what the user should know.

        Raises:
            CheckpointError: If something is missing, damaged, or does not fit.
        """
        work = self._work(held(), request)
        load = _Load(request, LoadStatus("loading", 0, 0, 0, "", ()), work)
        with self._lock:
            self._load = load
        try:
            work.verify(_nobody)
            self._commit(load, work, _nobody, held)
            with self._lock:
                self._set_missing(load.missing_before)
                self.loaded_at = time.monotonic()
        finally:
            with self._lock:
                self._load = None
        return work.notes

    def _begin(self, old: _Load | None, request: LoadRequest, held: ServerState) -> _Load:
        if old is not None and old.status.state == "loading":
            raise CheckpointError(
                f"parameter server {self._replica}: another load is replacing its rows; "
                "wait_for_load_embedding() waits for it"
            )
        work = self._work(held, request)
        self._load = _Load(request, LoadStatus("verifying", 0, 0, 0, "", ()), work)
        return self._load

    def _drop(self, load: _Load) -> None:
        """With the lock held. A thread that replaces rows notices at its next part."""
        load.is_dropped = True
        if load.status.state != "loading":
            self._load = None

    def _finish(self, load: _Load | None, request: LoadRequest) -> LoadStatus:
        """With the lock held: the rows are whole, as every server has its share."""
        finished = LoadStatus("finished", 0, 0, 0, "", ())
        if self._finished == request.load_id:
            return finished
        if load is None or load.request.load_id != request.load_id:
            raise self._does_not_follow(request)
        if load.status.state != "loaded":
            raise self._does_not_follow(request)
        self._set_missing(load.missing_before)
        self._load, self._finished = None, request.load_id
        return finished

    def _commit(
        self,
        load: _Load,
        work: CheckpointRestore,
        moved: Moved,
        held: Callable[[], ServerState],
    ) -> None:
        """Replace rows once no request uses them; from here on they are missing."""
        request = load.request
        with self._lock:
            if not self._lock.wait_for(lambda: not self._num_uses, _PATIENCE_S):
                raise CheckpointError(
                    f"{self._num_uses} requests to parameter server {self._replica} have not "
                    f"ended within {_PATIENCE_S:g} s; nothing was loaded"
                )
            if load.is_dropped:
                raise CheckpointError("the load was given up; nothing was loaded")
            work.check_fits(held())  # from here on nobody can change that
            before = self._missing
            load.missing_before = None if before is None else before.after(request.features)
            names = None if request.features is None else frozenset(request.features)
            if before is not None and names is not None:
                names = None if before.features is None else names | before.features
            self._set_missing(Missing(request.url, names))
        work.commit(moved)

    def _work(self, held: ServerState, request: LoadRequest) -> CheckpointRestore:
        return CheckpointRestore(
            self._replica, self._num_replicas, held, request, self._num_threads
        )

    def _go_on(self, load: _Load | None, request: LoadRequest) -> _Load:
        if (
            load is None
            or load.request.load_id != request.load_id
            or load.status.state != "verified"
            or request.step != "commit"
        ):
            raise self._does_not_follow(request)
        return load

    def _does_not_follow(self, request: LoadRequest) -> CheckpointError:
        before = "verified" if request.step == "commit" else "loaded"
        return CheckpointError(
            f"parameter server {self._replica}: {request.step!r} of load "
            f"{request.load_id:x}: expected one that it has {before}; it was restarted, or "
            "another load took its place"
        )

    def _run(self, load: _Load, request: LoadRequest, held: Callable[[], ServerState]) -> None:
        work = load.work
        if work is None:
            return

        def moved(done: int, total: int, rows: int) -> None:
            with self._lock:
                load.status = replace(load.status, done=done, total=total, num_rows=rows)
                if load.is_dropped:
                    raise CheckpointError("the load was given up")

        try:
            if request.step == "verify":
                work.verify(moved)
            else:
                self._commit(load, work, moved, held)
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
                load.status, state=_STATES[request.step][1], notes=tuple(work.notes)
            )
