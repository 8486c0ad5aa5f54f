"""A parameter server's share of a load: verify all of it, then replace the rows.

    verify    manifests, what they mean here, every file that has rows of this server
    commit    drop the rows held, then restore: base first, then each delta's deletions and rows

Each is a thread; whoever asks with the same number and step again is told how far it is. A
status is one value, replaced by the thread that works and set before it starts: a load that
is over is never seen as one that goes on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from persia._files.places import chains
from persia._rpc.messages import (
    HyperParameters,
    InitializationSettings,
    LoadRequest,
    LoadStatus,
    OptimizerSettings,
)
from persia._services.restoring import Restoring
from persia.errors import CheckpointError, PersiaError
from persia.logger import get_logger

if TYPE_CHECKING:
    from persia._services.checkpoints import Held

_logger = get_logger("persia.checkpoints")

# What a step is while it goes on, and once it is done.
_STATES = {"verify": ("verifying", "verified"), "commit": ("loading", "loaded")}


def settings_of(request: LoadRequest) -> tuple[HyperParameters, OptimizerSettings]:
    """Return what the servers that wrote a checkpoint had been told.

    Raises:
        CheckpointError: If there is no checkpoint, or it does not say.
    """
    storage, manifests = chains(request.url, request.checkpoint or None)[0]
    manifest = manifests[-1]
    try:
        told = manifest.extras["servers"]
        hyper, optimizer = dict(told["hyper_parameters"]), told["optimizer"]
        initialization = InitializationSettings(**hyper.pop("initialization"))
        return (
            HyperParameters(initialization, **hyper),
            OptimizerSettings(optimizer["name"], dict(optimizer["options"])),
        )
    except (KeyError, TypeError) as exc:
        raise CheckpointError(
            f"{storage.url}: {manifest.id}: extras.servers: expected hyper_parameters and "
            f"optimizer, as no trainer has configured this server: {exc!r}"
        ) from exc


def _nobody(done: int, total: int, rows: int) -> None:
    """Tell nobody how far it is."""


@dataclass(slots=True)
class _Load:
    """One load; its owner's lock guards it."""

    request: LoadRequest  # of the step last begun
    status: LoadStatus
    work: Restoring | None = None  # once verify has begun
    is_dropped: bool = False


class Loads:
    """The loads of one server, one at a time; any thread may call it.

    Args:
        replica: Number of the server.
        num_replicas: How many servers there are.
        num_threads: Files that are checked at the same time.
    """

    def __init__(self, replica: int, num_replicas: int, num_threads: int) -> None:
        self._replica = replica
        self._num_threads = num_threads
        self._num_replicas = num_replicas
        self._lock = threading.Lock()  # guards the load
        self._load: _Load | None = None

    @property
    def is_loading(self) -> bool:
        """Whether rows are being replaced."""
        with self._lock:
            return self._load is not None and self._load.status.state == "loading"

    def load(self, request: LoadRequest, held: Callable[[], Held]) -> LoadStatus:
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
                target=self._run, args=(load, request), name="persia-load", daemon=True
            ).start()
            return load.status

    def load_now(self, request: LoadRequest, held: Held) -> list[str]:
        """Verify and commit in this thread; returns what the user should know.

        Raises:
            CheckpointError: If something is missing, damaged, or does not fit.
        """
        work = self._work(held, request)
        with self._lock:
            self._load = _Load(request, LoadStatus("loading", 0, 0, 0, "", ()), work)
        try:
            work.verify(_nobody)
            work.commit(_nobody)
        finally:
            with self._lock:
                self._load = None
        return work.notes

    def _begin(self, old: _Load | None, request: LoadRequest, held: Held) -> _Load:
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

    def _work(self, held: Held, request: LoadRequest) -> Restoring:
        return Restoring(self._replica, self._num_replicas, held, request, self._num_threads)

    def _go_on(self, load: _Load | None, request: LoadRequest) -> _Load:
        if (
            load is None
            or load.request.load_id != request.load_id
            or load.status.state != "verified"
            or request.step != "commit"
        ):
            raise CheckpointError(
                f"parameter server {self._replica}: {request.step!r} of load "
                f"{request.load_id:x}: expected one that it has verified; it was restarted, or "
                "another load took its place"
            )
        return load

    def _run(self, load: _Load, request: LoadRequest) -> None:
        work = load.work
        if work is None:
            return

        def moved(done: int, total: int, rows: int) -> None:
            with self._lock:
                load.status = replace(load.status, done=done, total=total, num_rows=rows)
                if load.is_dropped:
                    raise CheckpointError("the load was given up")

        try:
            step = work.verify if request.step == "verify" else work.commit
            step(moved)
        except BaseException as exc:
            if not isinstance(exc, PersiaError):
                _logger.exception("a load failed")
            with self._lock:
                load.status = replace(load.status, state="failed", error=str(exc) or repr(exc))
            return
        with self._lock:
            load.status = replace(
                load.status, state=_STATES[request.step][1], notes=tuple(work.notes)
            )
