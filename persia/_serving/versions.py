"""The models of a folder and their versions: which are loaded, and which one answers.

A repository is ``<root>/<model>/<version>/``, versions from 1; ``<model>/current.json``, if it
is there, names the version that is wanted: ``{"version": n}``. The folder is looked at every
``poll_s``. A new version is loaded in a thread of its own, compared with the one that answers,
warmed up with recorded requests, and then served by the exchange of one pointer:

    found ---> loading ---> ready ---another took its place, unload---> unloading ---> closed
      ^           |                                                    (last request ended)
      |           v
      +------- failed: with the reason, and tried again after a growing pause, or at once when
               its folder has changed. The version that answered before goes on.

A load that takes longer than ``load_timeout_s`` counts as failed, and holds up nothing else; if
it ends after all and is still wanted, it is used. With the policy ``latest`` the wanted version
comes first, then those below it, down to the one that answers; below a version that
``current.json`` names, others are tried only while none answers. A root that shows no model at
all, as when a disk is away, unloads nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from persia._serving.bundle import MANIFEST, NAME, NUMBER, current_version
from persia._serving.servable import Servable
from persia._serving.warmup import FILE_NAME, WarmupRecorder, read_requests
from persia.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    InternalError,
    ServiceTimeout,
    ServiceUnavailable,
    UnknownModel,
)

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger(__name__)

State = Literal["LOADING", "READY", "UNLOADING", "UNAVAILABLE"]
Signature = tuple[int, ...]  # of a version's folder: another one says that it has changed

_SCAN_S = 60.0  # until a look at the folders that does not end is an error of the next one


@dataclass(frozen=True, slots=True)
class VersionPolicy:
    """Which versions of a model are served."""

    kind: Literal["latest", "specific", "all"] = "latest"
    versions: tuple[int, ...] = ()  # of ``specific``

    @classmethod
    def parse(cls, text: str) -> VersionPolicy:
        """Read ``latest``, ``all``, or numbers of versions separated by commas.

        Raises:
            ConfigError: If it is none of these.
        """
        text = text.strip()
        if text == "latest":
            return cls("latest")
        if text == "all":
            return cls("all")
        parts = [part.strip() for part in text.split(",")]
        if not all(NUMBER.fullmatch(part) for part in parts):
            raise ConfigError(
                f"version policy: expected latest, all or numbers of versions, got {text!r}"
            )
        return cls("specific", tuple(sorted({int(part) for part in parts})))


@dataclass(frozen=True, slots=True)
class VersionState:
    """One line of the repository's index."""

    model: str
    version: int | None  # None: of the model as a whole, which has no version
    state: State
    reason: str  # "" unless something is wrong
    is_default: bool  # what a request without a version gets


@dataclass(frozen=True, slots=True)
class _Found:
    """What is on disk of one model."""

    versions: Mapping[int, Signature]
    current: int | None  # that ``current.json`` names
    problem: str

    @property
    def is_empty(self) -> bool:
        """Whether it has no version and names none, as before the first export ends."""
        return not (self.versions or self.problem) and self.current is None


@dataclass(eq=False, slots=True)
class _Live:
    """A loaded version."""

    number: int
    signature: Signature
    servable: Servable
    num_users: int = 0
    is_retired: bool = False


@dataclass(eq=False, slots=True)
class _Loading:
    """A load that goes on in a thread of its own."""

    number: int
    signature: Signature
    deadline: float
    folder: Path
    is_wanted: bool = True


@dataclass(slots=True)
class _Failure:
    """A version that could not be loaded."""

    signature: Signature
    reason: str
    pause_s: float
    retry_at: float


@dataclass(eq=False, slots=True)
class _Model:
    """What is known of one model; the repository's lock guards it."""

    name: str
    policy: VersionPolicy
    is_wanted: bool
    found: _Found | None = None  # None: there is no such folder
    current: int | None = None  # the last that could be read
    live: dict[int, _Live] = field(default_factory=dict)
    default: _Live | None = None
    loading: _Loading | None = None
    hung: dict[int, _Loading] = field(default_factory=dict)  # beyond their deadline
    failures: dict[int, _Failure] = field(default_factory=dict)
    retired: list[_Live] = field(default_factory=list)  # not closed yet
    reload: set[int] = field(default_factory=set)  # live ones to be loaded again

    def order(self) -> list[int]:
        """Return the versions that may be served, the best first."""
        if not self.is_wanted or self.found is None:
            return []
        numbers: list[int] = sorted(self.found.versions, reverse=True)
        if self.policy.kind == "specific":
            numbers = [number for number in numbers if number in self.policy.versions]
        elif self.policy.kind == "latest" and self.current is not None:
            numbers = [number for number in numbers if number <= self.current]
        return sorted(numbers, key=lambda number: number != self.current)  # it comes first

    def wanted(self) -> list[int]:
        """Return the versions that shall be loaded now, the best first."""
        order = self.order()
        if self.policy.kind == "latest" and self.default is not None:
            number = self.default.number
            num_better = order.index(number) if number in order else 1
            # One that is named is wanted alone: those below it may have been rolled back.
            is_named = order[:1] == [self.current]
            order = order[: min(num_better, 1) if is_named else num_better]
        else:
            order = [number for number in order if number not in self.live]
        return order + sorted(self.reload)

    def surplus(self) -> list[_Live]:
        """Return what is loaded and shall not be."""
        if not self.is_wanted or self.found is None:
            return list(self.live.values())
        if self.policy.kind == "latest":
            return [one for one in self.live.values() if one is not self.default]
        if self.policy.kind == "specific":
            keep = set(self.policy.versions)
        else:
            # A folder that is empty all of a sudden is no order to serve nothing.
            keep = set(self.found.versions) or set(self.live)
        return [one for one in self.live.values() if one.number not in keep]

    def choose_default(self) -> _Live | None:
        """Return the version that answers requests which name none."""
        if self.policy.kind == "latest" and self.default is not None:
            return self.live.get(self.default.number)
        best = self.live.get(self.current or 0)
        return best or self.live.get(max(self.live, default=0))

    def would_be_default(self, number: int) -> bool:
        """Return whether a version that is loaded would take the default's place."""
        if self.default is None or self.policy.kind == "latest" or number == self.current:
            return True
        return number >= self.default.number and self.default.number != self.current

    def reason(self) -> str:
        """Say why no version answers, or not the one that is wanted; "" if all is well."""
        if not self.is_wanted:
            return "unloaded"
        if self.found is None:
            return "there is no such folder"
        if self.found.problem:
            return self.found.problem
        if self.current is not None and self.current not in self.found.versions:
            return f"current.json names version {self.current}, which is not there"
        for number in self.order():
            if number in self.live:
                break
            if number in self.failures:
                return f"version {number}: {self.failures[number].reason}"
        missing = set(self.policy.versions) - set(self.found.versions) - set(self.live)
        if missing:
            return f"no such versions: {sorted(missing)}"
        if not self.found.versions:
            return "it has no version"
        return "" if self.default is not None else "loading"


class _Pin:
    """Pins one version for a ``with`` block; the repository's ``use`` makes it."""

    __slots__ = ("_live", "_model", "_repository", "_version")

    def __init__(
        self, repository: ModelRepository, model: str, version: int | str | None
    ) -> None:
        self._repository, self._model, self._version = repository, model, version
        self._live: _Live | None = None

    def __enter__(self) -> Servable:
        self._live = self._repository._pin(self._model, self._version)
        return self._live.servable

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._repository._unpin(self._model, self._live)
            self._live = None


class _Switches:
    """Loads, exchanges and closes the versions of models, as their state on disk asks for."""

    def __init__(
        self,
        root: Path,
        load: Callable[[Path], Servable],
        recorder: WarmupRecorder | None,
        on_event: Callable[[str, str, int], None] | None,
        clock: Callable[[], float],
    ) -> None:
        self._root, self._load = root, load
        self._recorder = recorder
        self._on_event = on_event
        self._clock = clock
        self._load_timeout_s = 600.0
        self._retry_s, self._max_retry_s = 1.0, 60.0
        self._allow_schema_change = False
        self._changed = threading.Condition()  # its lock guards all below
        self._models: dict[str, _Model] = {}
        self._todo: list[Callable[[], None]] = []  # to be done without the lock
        self._counts: Counter[str] = Counter()
        self._is_closed = False

    def _unpin(self, name: str, live: _Live) -> None:
        with self._changed:
            live.num_users -= 1
            if not live.is_retired or live.num_users:
                return
            self._begin_closing(name, live)
        self._run_todo()

    # --- what follows; the lock is held -------------------------------------------------------

    def _give_up_hung(self, model: _Model, now: float) -> None:
        loading = model.loading
        if loading is None or now < loading.deadline:
            return
        model.loading = None
        model.hung[loading.number] = loading
        reason = f"loading takes longer than {self._load_timeout_s:g} s"
        self._note_failure(model, loading, reason)
        self._counts["hung_loads"] += 1
        self._tell("load_timeout", model.name, loading.number)

    def _note_failure(self, model: _Model, loading: _Loading, reason: str) -> None:
        before = model.failures.get(loading.number)
        pause_s = self._retry_s
        if before is not None and before.signature == loading.signature:
            pause_s = min(2.0 * before.pause_s, self._max_retry_s)
        retry_at = self._clock() + pause_s
        model.failures[loading.number] = _Failure(loading.signature, reason, pause_s, retry_at)
        self._counts["failed_loads"] += 1
        if before is None or before.reason != reason:
            logger.error("model %s version %d: %s", model.name, loading.number, reason)

    def _reconcile(self, model: _Model) -> None:
        """Retire what shall not be served, and begin the next load."""
        model.reload &= set(model.live) & set(model.order())
        for live in model.surplus():
            self._retire(model, live)
        model.default = model.choose_default()
        wanted = model.wanted()
        for loading in (model.loading, *model.hung.values()):
            if loading is not None:
                loading.is_wanted = loading.number in wanted
        if model.found is not None:
            for number in set(model.failures) - set(model.found.versions):
                del model.failures[number]
        if model.loading is None and not self._is_closed:
            due = next((one for one in wanted if self._is_due(model, one)), None)
            if due is not None:
                self._begin_loading(model, due)

    def _is_due(self, model: _Model, number: int) -> bool:
        if model.found is None or number in model.hung:
            return False
        failure = model.failures.get(number)
        if failure is None or failure.signature != model.found.versions[number]:
            return True
        return self._clock() >= failure.retry_at

    def _begin_loading(self, model: _Model, number: int) -> None:
        if model.found is None:
            raise InternalError(f"model {model.name} is loaded without a folder")
        deadline = self._clock() + self._load_timeout_s
        folder = self._root / model.name / str(number)
        loading = _Loading(number, model.found.versions[number], deadline, folder)
        model.loading = loading
        self._counts["loads"] += 1

        def begin() -> None:
            name = f"persia-load-{model.name}"
            thread = threading.Thread(
                target=self._run_load, args=(model, loading), name=name, daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:  # the system has no more threads
                self._end_load(model, loading, None, str(error))

        self._todo.append(begin)

    def _retire(self, model: _Model, live: _Live) -> None:
        if model.live.get(live.number) is live:
            del model.live[live.number]
        if model.default is live:
            model.default = None
        live.is_retired = True
        model.retired.append(live)
        self._counts["retired"] += 1
        self._tell("retired", model.name, live.number)
        if not live.num_users:
            self._begin_closing(model.name, live)

    def _begin_closing(self, name: str, live: _Live) -> None:
        def begin() -> None:
            # Not by the thread whose request was the last: giving back gigabytes takes time.
            thread = threading.Thread(
                target=self._close_version, args=(name, live), name="persia-unload", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:  # the system has no more threads
                self._close_version(name, live)

        self._todo.append(begin)

    def _tell(self, event: str, model: str, version: int) -> None:
        if self._on_event is not None:
            on_event = self._on_event
            self._todo.append(lambda: on_event(event, model, version))

    # --- in threads, without the lock ---------------------------------------------------------

    def _run_todo(self) -> None:
        while True:
            with self._changed:
                if not self._todo:
                    return
                begin = self._todo.pop(0)
            try:
                begin()
            except Exception:
                logger.exception("%s: a consequence of a change failed", self._root)

    def _close_version(self, name: str, live: _Live) -> None:
        try:
            live.servable.close()
        except Exception:
            logger.exception("model %s version %d was not closed", name, live.number)
        with self._changed:
            for model in self._models.values():
                if live in model.retired:
                    model.retired.remove(live)
            self._counts["closed"] += 1
            self._tell("closed", name, live.number)
            self._changed.notify_all()
        self._run_todo()

    def _run_load(self, model: _Model, loading: _Loading) -> None:
        servable: Servable | None = None
        try:
            servable = self._load(loading.folder)
            if servable.version not in (0, loading.number):
                raise CheckpointError(
                    f"{loading.folder}: expected version {loading.number}, got "
                    f"{servable.version}"
                )
            is_same = self._compare(model, loading, servable)
            self._warm_up(model, loading, servable, is_same)
        # MemoryError too, and whatever a model's code raises: it fails, the server does not.
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"
            self._end_load(model, loading, servable, reason)
            return
        self._end_load(model, loading, servable, "")

    def _compare(self, model: _Model, loading: _Loading, servable: Servable) -> bool:
        """Return whether it has the default's inputs; refuse it if it must have them."""
        with self._changed:
            default = model.default
            if default is None or not model.would_be_default(loading.number):
                return True
            default.num_users += 1
        try:
            before, after = default.servable.metadata(), servable.metadata()
        finally:
            self._unpin(model.name, default)
        inputs = _differences(before, after, "inputs")
        # More outputs may come: no client has asked for them yet.
        gone = _differences(before, after, "outputs", may_grow=True)
        if not self._allow_schema_change:
            for what, found in (("inputs", inputs), ("outputs", gone)):
                if found:
                    raise ConfigError(
                        f"expected the {what} of version {default.number}, got other ones: "
                        f"{'; '.join(found)}; a change must be allowed"
                    )
        return not inputs

    def _warm_up(
        self, model: _Model, loading: _Loading, servable: Servable, is_same: bool
    ) -> None:
        requests = []
        path = loading.folder / FILE_NAME
        if path.is_file():
            try:
                requests = read_requests(path)
            except CheckpointError as error:
                logger.warning("version is not warmed up by its own requests: %s", error)
        num_own = len(requests)
        if self._recorder is not None:
            if not is_same:
                self._recorder.forget(model.name)
            requests += self._recorder.requests(model.name)
        for number, inputs in enumerate(requests * 2):  # what is compiled, the second one meets
            if self._is_closed:
                return
            try:
                servable(inputs)
            except Exception as error:
                is_own = number % len(requests) < num_own
                if self._allow_schema_change and isinstance(error, DataError) and not is_own:
                    # Of a version with other inputs, which is answering until the exchange.
                    continue
                raise CheckpointError(
                    f"recorded request {number % len(requests)}: expected an answer, got "
                    f"{type(error).__name__}: {error}"
                ) from error

    def _end_load(
        self, model: _Model, loading: _Loading, servable: Servable | None, reason: str
    ) -> None:
        with self._changed:
            if model.loading is loading:
                model.loading = None
                was_hung = False
            else:
                was_hung = model.hung.pop(loading.number, None) is not None
            if reason:
                if not was_hung:
                    self._note_failure(model, loading, reason)
                self._tell("load_failed", model.name, loading.number)
            elif servable is not None and loading.is_wanted and not self._is_closed:
                self._install(model, _Live(loading.number, loading.signature, servable))
                servable = None
            if servable is not None:  # failed, or not wanted any more
                surplus = _Live(loading.number, loading.signature, servable, is_retired=True)
                model.retired.append(surplus)
                self._begin_closing(model.name, surplus)
            self._reconcile(model)
            self._changed.notify_all()
        self._run_todo()

    def _install(self, model: _Model, live: _Live) -> None:
        """Exchange the pointer; the lock is held."""
        before, default = model.live.get(live.number), model.default
        model.live[live.number] = live
        model.failures.pop(live.number, None)
        model.reload.discard(live.number)
        if model.policy.kind == "latest" or default is before:
            model.default = live
        if before is not None:
            self._retire(model, before)
        self._tell("loaded", model.name, live.number)
        self._reconcile(model)
        if model.default is live:
            logger.info("model %s: version %d answers now", model.name, live.number)
            if default is not None:
                self._counts["switches"] += 1
                self._tell("switched", model.name, live.number)


class ModelRepository(_Switches):
    """Loads the versions of models and gives out the ones to be used.

    Any thread may call any method. After ``start`` a thread looks at the folders; without it
    they are looked at by ``poll`` and ``load``.

    Args:
        root: The folder of the models.
        load: Loads the version in a folder, after it has verified its files.
        policies: By model; others have ``default_policy``.
        models: The models to serve from the start; all folders of the root if None.
        poll_s: Seconds between looks at the folders.
        load_timeout_s: Seconds after which a load counts as failed.
        retry_s: Seconds until a failed load is tried again, doubled to ``max_retry_s``.
        allow_schema_change: Whether a version with other inputs may take the default's place.
        recorder: Its requests warm up new versions.
        on_event: Called with ``loaded``, ``load_failed``, ``load_timeout``, ``switched``,
            ``retired`` or ``closed``, the model and the version.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        root: Path | str,
        *,
        load: Callable[[Path], Servable],
        policies: Mapping[str, VersionPolicy] | None = None,
        default_policy: VersionPolicy = VersionPolicy(),
        models: Sequence[str] | None = None,
        poll_s: float = 1.0,
        load_timeout_s: float = 600.0,
        retry_s: float = 1.0,
        max_retry_s: float = 60.0,
        allow_schema_change: bool = False,
        recorder: WarmupRecorder | None = None,
        on_event: Callable[[str, str, int], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(Path(root), load, recorder, on_event, clock)
        self._policies = dict(policies or {})
        self._default_policy = default_policy
        self._poll_s, self._load_timeout_s = poll_s, load_timeout_s
        self._retry_s, self._max_retry_s = retry_s, max_retry_s
        self._allow_schema_change = allow_schema_change
        self._scan_lock = threading.Lock()  # one look at the folders at a time
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._serves_all = models is None
        self._was_scanned = False  # guarded as the models are
        self._scan_problem = ""
        for name in models or ():
            if not NAME.fullmatch(name):
                raise ConfigError(f"model {name!r}: expected letters, digits, . _ and -")
            self._models[name] = self._new_model(name, True)

    def _new_model(self, name: str, is_wanted: bool) -> _Model:
        return _Model(name, self._policies.get(name, self._default_policy), is_wanted)

    # --- life ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread that looks at the folders."""
        self._thread = threading.Thread(
            target=self._watch, name="persia-model-versions", daemon=True
        )
        self._thread.start()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def close(self, timeout_s: float = 30.0) -> bool:
        """Serve nothing more; return whether all requests ended and all versions are closed."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._is_closed = True
            for model in self._models.values():
                model.is_wanted = False
                self._reconcile(model)
        self._wake.set()
        self._run_todo()
        if self._thread is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()))
        with self._changed:
            ended = self._changed.wait_for(
                lambda: (
                    not any(
                        one.retired or one.loading or one.hung for one in self._models.values()
                    )
                ),
                max(0.0, deadline - time.monotonic()),
            )
        if self._recorder is not None:
            self._recorder.flush()
        return ended and (self._thread is None or not self._thread.is_alive())

    def _watch(self) -> None:
        while not self._is_closed:
            self._wake.clear()
            try:
                self.poll()
            except Exception:
                logger.exception("%s: looking for models failed; it goes on", self._root)
            self._wake.wait(self._poll_s)

    def poll(self) -> None:
        """Look at the folders now, and begin what follows from it."""
        if not self._scan_lock.acquire(timeout=_SCAN_S):
            raise ServiceTimeout(f"{self._root}: another look at it takes over {_SCAN_S:g} s")
        try:
            found = self._scan()
            with self._changed:
                if found is not None and not self._was_scanned:
                    self._warn_of_missing(found)
                # A root that was never read says nothing on which models there are.
                self._was_scanned = self._was_scanned or found is not None
                self._take(found)
                now = self._clock()
                for model in list(self._models.values()):
                    self._give_up_hung(model, now)
                    self._reconcile(model)
                    if self._serves_all and _is_forgotten(model):
                        del self._models[model.name]
                self._changed.notify_all()
        finally:
            self._scan_lock.release()
        self._run_todo()
        if self._recorder is not None:
            self._recorder.flush()

    # --- use ----------------------------------------------------------------------------------

    def use(self, model: str, version: int | str | None = None) -> _Pin:
        """Pin a version of a model, the default one if none is given, for a ``with`` block.

        Raises (when the block is entered):
            UnknownModel: If there is no such model or version.
            ServiceUnavailable: If it is not ready; says why.
        """
        return _Pin(self, model, version)

    def _pin(self, name: str, version: int | str | None) -> _Live:
        with self._changed:
            live = self._find(name, version)
            live.num_users += 1
            return live

    def _find(self, name: str, version: int | str | None) -> _Live:
        """Return what is ready, or raise; the lock is held."""
        if self._is_closed:
            raise ServiceUnavailable(
                f"model {name!r}: expected one that is ready: the server ends"
            )
        model = self._models.get(name)
        if model is None or (model.found is None and not model.live and self._was_scanned):
            raise UnknownModel(f"model {name!r}: expected one of {sorted(self._models)}")
        if version is None or version == "":
            if model.default is None:
                raise ServiceUnavailable(f"model {name!r} is not ready: {model.reason()}")
            return model.default
        number = _parse_version(version)
        live = model.live.get(number)
        if live is not None:
            return live
        if number in model.wanted():
            failure = model.failures.get(number)
            reason = failure.reason if failure else "loading"
            raise ServiceUnavailable(f"model {name!r} version {number} is not ready: {reason}")
        raise UnknownModel(
            f"model {name!r} version {version!r}: expected one of {sorted(model.live)}"
        )

    # --- what there is ------------------------------------------------------------------------

    def models(self) -> list[str]:
        """Return the models that shall be served."""
        with self._changed:
            return sorted(one.name for one in self._models.values() if one.is_wanted)

    def versions(self, model: str) -> list[int]:
        """Return the versions of a model that are ready; UnknownModel if there is none."""
        with self._changed:
            known = self._models.get(model)
            if known is None:
                raise UnknownModel(f"model {model!r}: expected one of {sorted(self._models)}")
            return sorted(known.live)

    def metadata(self, model: str, version: int | str | None = None) -> Mapping[str, Any]:
        """Return a version's metadata, with the versions that are ready; raises as ``use``."""
        with self.use(model, version) as servable:
            ready = [str(number) for number in self.versions(model)]
            return {**servable.metadata(), "name": model, "versions": ready}

    def is_ready(self, model: str | None = None, version: int | str | None = None) -> bool:
        """Return whether a version is ready; without a model, whether every model is.

        Beside other models a folder without a version counts only where its model was named:
        its first export must not stop what is served.
        """
        with self._changed:
            if model is None:
                wanted = [one for one in self._models.values() if one.is_wanted]
                if self._serves_all:
                    made = [one for one in wanted if not (one.found and one.found.is_empty)]
                    wanted = made or wanted
                is_up = self._was_scanned and not self._is_closed
                return is_up and all(one.default is not None for one in wanted)
            try:
                self._find(model, version)
            except (UnknownModel, ServiceUnavailable):
                return False
            return True

    def index(self, *, ready: bool = False) -> list[VersionState]:
        """Return every version that is known, or is ready, and what is wrong with it."""
        with self._changed:
            lines: list[VersionState] = []
            for _, model in sorted(self._models.items()):
                lines += _describe(model)
        return [one for one in lines if one.state == "READY"] if ready else lines

    def stats(self) -> Mapping[str, int]:
        """Return counts since the start, and how many versions are live, and in use, now."""
        with self._changed:
            held = [one for model in self._models.values() for one in model.live.values()]
            held += [one for model in self._models.values() for one in model.retired]
            live = sum(len(model.live) for model in self._models.values())
            names = ("loads", "failed_loads", "hung_loads", "switches", "retired", "closed")
            counts = {name: self._counts[name] for name in names}
            return counts | {"live": live, "in_use": sum(one.num_users for one in held)}

    # --- control ------------------------------------------------------------------------------

    def load(self, model: str, timeout_s: float = 600.0) -> None:
        """Serve a model, by its policy, and load again what has changed; wait until it is so.

        Raises:
            UnknownModel: If it has no folder.
            ServiceUnavailable: If the wanted version cannot be loaded; says why.
            ServiceTimeout: If it takes longer; it goes on.
        """
        if not NAME.fullmatch(model):
            raise UnknownModel(f"model {model!r}: expected letters, digits, . _ and -")
        with self._changed:
            if self._is_closed:
                raise ServiceUnavailable(
                    f"model {model!r}: expected a server that does not end"
                )
            known = self._models.get(model)
            is_new = known is None
            if known is None:
                known = self._models[model] = self._new_model(model, True)
            known.is_wanted = True
            known.failures.clear()
        self.poll()
        with self._changed:
            # That which the look above has begun again is compared with what is on disk.
            if known.found is not None:
                known.reload |= {
                    number
                    for number, live in known.live.items()
                    if known.found.versions.get(number, live.signature) != live.signature
                }
            self._reconcile(known)
        self._run_todo()
        with self._changed:
            if known.found is None and not known.live:
                if is_new:
                    self._models.pop(model, None)
                raise UnknownModel(f"model {model!r}: there is no such folder in {self._root}")
            if not self._changed.wait_for(lambda: known.loading is None, timeout_s):
                raise ServiceTimeout(f"model {model!r} is not loaded within {timeout_s:g} s")
            reason = known.reason() or "; ".join(
                known.failures[number].reason for number in known.reload & set(known.failures)
            )
            if reason:
                raise ServiceUnavailable(f"model {model!r}: {reason}")

    def unload(self, model: str, timeout_s: float = 30.0) -> None:
        """Serve a model no more until ``load``; wait until its last request has ended.

        Raises:
            UnknownModel: If there is none.
            ServiceTimeout: If a request takes longer; no new one is answered all the same.
        """
        with self._changed:
            known = self._models.get(model)
            if known is None:
                raise UnknownModel(f"model {model!r}: expected one of {sorted(self._models)}")
            known.is_wanted = False
            self._reconcile(known)
        self._run_todo()
        with self._changed:
            if not self._changed.wait_for(lambda: not known.retired, timeout_s):
                raise ServiceTimeout(
                    f"model {model!r}: requests did not end in {timeout_s:g} s"
                )

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until every model is ready; ServiceTimeout, with the reasons, if not in time."""
        with self._changed:
            if self._changed.wait_for(self.is_ready, timeout_s):
                return
            reasons = {
                one.name: one.reason() for one in self._models.values() if not one.default
            }
        raise ServiceTimeout(f"models are not ready within {timeout_s:g} s: {reasons}")

    def _take(self, found: dict[str, _Found] | None) -> None:
        """Remember what is on disk; None or no model at all changes nothing."""
        if not found:
            return
        for name in found:
            if name not in self._models:
                self._models[name] = self._new_model(name, self._serves_all)
        for name, model in self._models.items():
            model.found = found.get(name)
            if model.found is not None and not model.found.problem:
                model.current = model.found.current

    def _warn_of_missing(self, found: Mapping[str, _Found]) -> None:
        """Say which models are not there, or empty, at the first look, or that none is."""
        there = ", ".join(sorted(found)) or "none"
        for name in sorted((self._models.keys() | self._policies.keys()) - found.keys()):
            logger.warning(
                "model %s is not in %s yet, whose models are: %s", name, self._root, there
            )
        for name, model in sorted(found.items()):
            if model.is_empty and (self._serves_all or name in self._models):
                logger.warning("model %s: %s has no version yet", name, self._root / name)
        if not found:
            logger.warning("%s has no model yet, so that no request is answered", self._root)

    # --- on disk ------------------------------------------------------------------------------

    def _scan(self) -> dict[str, _Found] | None:
        """Return what is there, by model; None if the root cannot be read."""
        try:
            root = self._root.resolve(strict=True)
            names = sorted(path.name for path in root.iterdir())
            found = {}
            for name in names:
                if NAME.fullmatch(name) and _is_folder_inside(root / name, root):
                    found[name] = _scan_model(root / name, root)
        except OSError as error:
            if str(error) != self._scan_problem:
                self._scan_problem = str(error)
                logger.warning("%s: expected a folder of models, got: %s", self._root, error)
            return None
        self._scan_problem = ""
        return found


def _is_forgotten(model: _Model) -> bool:
    """Whether nothing is left of a model, on disk or in memory."""
    held = model.live or model.retired or model.loading or model.hung
    return model.found is None and not held


def _describe(model: _Model) -> list[VersionState]:
    lines: dict[int, VersionState] = {}

    def add(number: int, state: State, reason: str = "", is_default: bool = False) -> None:
        lines[number] = VersionState(model.name, number, state, reason, is_default)

    for retired in model.retired:
        add(retired.number, "UNLOADING")
    for number, failure in model.failures.items():
        add(number, "UNAVAILABLE", failure.reason)
    if model.loading is not None:
        add(model.loading.number, "LOADING")
    for live in model.live.values():
        failure_of_reload = model.failures.get(live.number)
        reason = failure_of_reload.reason if failure_of_reload else ""
        add(live.number, "READY", reason, live is model.default)
    if not lines:
        return [VersionState(model.name, None, "UNAVAILABLE", model.reason(), False)]
    return [lines[number] for number in sorted(lines)]


def _parse_version(version: int | str) -> int:
    text = str(version)
    if not NUMBER.fullmatch(text):
        raise UnknownModel(f"version {version!r}: expected a whole number from 1")
    return int(text)


def _differences(
    before: Mapping[str, Any], after: Mapping[str, Any], what: str, *, may_grow: bool = False
) -> list[str]:
    """Say which inputs or outputs of two versions differ in datatype or shape."""
    old, new = (
        {one["name"]: (one["datatype"], *one["shape"]) for one in of.get(what, ())}
        for of in (before, after)
    )
    return [
        f"{name}: {old.get(name, 'none')} before, {new.get(name, 'none')} now"
        for name in sorted(old.keys() if may_grow else old.keys() | new.keys())
        if old.get(name) != new.get(name)
    ]


def _is_folder_inside(path: Path, root: Path) -> bool:
    """Whether it is a folder, and lies below the root wherever links lead."""
    return path.is_dir() and path.resolve().is_relative_to(root)


def _scan_model(folder: Path, root: Path) -> _Found:
    versions: dict[int, Signature] = {}
    try:
        for path in sorted(folder.iterdir()):
            if NUMBER.fullmatch(path.name) and _is_folder_inside(path, root):
                versions[int(path.name)] = _signature(path)
    except OSError as error:  # of this model alone: other ones are looked at
        return _Found({}, None, f"its folder cannot be read: {error}")
    return _Found(versions, *_read_current(folder))


def _signature(folder: Path) -> Signature:
    """Return what differs between two contents of a folder that was replaced."""
    parts: list[int] = []
    for path in (folder, folder / MANIFEST):
        try:
            status = path.stat()
        except FileNotFoundError:
            parts += [0, 0, 0]
        else:
            parts += [status.st_ino, status.st_mtime_ns, status.st_size]
    return tuple(parts)


def _read_current(folder: Path) -> tuple[int | None, str]:
    """Return the version that ``current.json`` names, None without it, and what is wrong."""
    try:
        return current_version(folder), ""
    except CheckpointError as error:
        return None, str(error)
