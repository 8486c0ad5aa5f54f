"""Checkpoints as the trainer makes and loads them.

    the user's thread                       behind it
    ranks held at the end of a step
    servers begin their cut                 each server writes its parts
    dense model, optimizer, generators      wait for all of them, write the dense files
      as bytes                              publish: one manifest, and with it the checkpoint
    ranks go on                             end the cut

The pause is the left column. A failure on either side leaves no checkpoint, or the one before.
Loading verifies everything, on every server and here, before anything changes anywhere.

The dense side's files are scripted models and state dicts; a model that is wrapped for data
parallelism is stored without the wrapper's ``module.`` prefix, for any number of ranks, and a
compiled one, or one with compiled modules, without ``_orig_mod.``: plain and compiled models
have the same names.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import logging
import os
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from tqdm import tqdm

from persia import env
from persia._files import catalog
from persia._files.catalog import chains
from persia._files.json_models import parse, read_json
from persia._files.log_position import POSITION, LogPosition, Reached, joined
from persia._files.manifest import File, Manifest, Part, ServerFiles
from persia._files.open import open_storage
from persia._files.parts import read_file, write_file
from persia._files.schema import SavedSchema
from persia._files.storage import Storage, write_atomic
from persia._files.writer_lock import sole_writer
from persia._rpc.messages import CutRequest, LoadRequest, WriteRequest
from persia._training.progress import check_trainer
from persia.errors import CheckpointError, ConfigError, PersiaError
from persia.logger import get_logger

if TYPE_CHECKING:
    from persia._files.writer_lock import JobFolders
    from persia._rpc.messages import (
        CutInfo,
        CutStatus,
        EmbeddingWorker,
        FeatureOrder,
        LoadNote,
        LoadStatus,
    )

_logger = get_logger("persia.checkpoints")

# Seconds between two polls of the servers, and the share of the time passed: a short dump is
# known to be over soon after, and a long one is not polled all the time.
_FIRST_ASK_S = 0.005
_LONGEST_ASK_S = 0.5
_ASKED_AFTER = 1 / 32
# Largest file of a dense model or optimizer.
MAX_DENSE_BYTES = 1 << 36
# The trainer's file for what no other file holds: generators, scaler, position in the data.
TRAINER = "trainer.pt"
# What ``extras`` of a checkpoint's manifest call the job, where it has a name.
JOB = "job"
# What a wrapper for data parallelism puts before the names of parameters.
_PREFIX = "module."
# What torch.compile() puts into the names of a module's parameters.
_COMPILED = "_orig_mod"
# What torch calls a state that is no parameter and no buffer: modules of rows have one.
_EXTRA_STATE = "_extra_state"

Dense = Mapping[str, bytes]
T = TypeVar("T")


def state_of(instance: Any) -> bytes:
    """Return the state dict of a model, under plain names, or of an optimizer."""
    return serialized(_plain_state(instance))


def serialized(state: Any, save: Callable[[Any, io.BytesIO], None] = torch.save) -> bytes:
    """Return a state dict, or what ``save`` takes, as bytes."""
    buffer = io.BytesIO()
    save(state, buffer)
    return buffer.getvalue()


def scripted(model: Any, option: str) -> Any:
    """Return a model, without its wrappers, as TorchScript; it shares the weights."""
    model = unwrap_all(model)
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"{option} needs a torch.nn.Module, got {type(model).__name__}")
    try:
        return torch.jit.script(_uncompiled(model, {}))
    # ValueError for what it cannot annotate, OSError where there is no source file.
    except (RuntimeError, OSError, ValueError) as exc:
        raise ConfigError(
            f"{option}: {type(model).__name__} cannot be scripted: {exc}"
        ) from exc


@dataclass(frozen=True, slots=True)
class Frozen:
    """A checkpoint whose moment has passed: what is still to be written."""

    cut_id: int
    step: int
    infos: tuple[CutInfo, ...]
    order: FeatureOrder | None  # of features, as the model receives them
    dense: Dense


class _Background:
    """One action at a time in a thread. The user's thread starts it and waits for it."""

    def __init__(self, worker: EmbeddingWorker) -> None:
        self._worker = worker
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def _start(self, action: Callable[[], object], what: str) -> None:
        def run() -> None:
            try:
                action()
            except BaseException as exc:
                _logger.error("%s failed: %s", what, exc)
                self._failure = exc

        self._thread = threading.Thread(target=run, name="persia-checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait for what goes on in the background, if anything does, and raise what it did."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()  # it has deadlines of its own
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


class CheckpointWriter(_Background):
    """Dumps of one context; one at a time. The user's thread calls it."""

    def begin(self, step: int, dense: Callable[[], Dense]) -> Frozen:
        """Begin a cut on every server and take the dense side, while updates are held."""
        cut_id = secrets.randbits(63)
        try:
            infos = self._worker.begin_cut(CutRequest(cut_id, None))
            return Frozen(cut_id, step, infos, self._worker.feature_order(), dense())
        except BaseException:
            self._end(cut_id)
            raise

    def finish(
        self,
        frozen: Frozen,
        url: str,
        keep_last: int,
        *,
        blocking: bool,
        job: JobFolders | None = None,
    ) -> str:
        """Write and publish, here if it is ``blocking``, else in a thread.

        ``keep_last`` checkpoints stay in the folder. ``job`` keeps others out of it afterwards.
        Returns its id, or "" if it is not written yet.
        """
        write = partial(self._write, frozen, url, keep_last, job, shows=blocking)
        if blocking:
            return write()
        self._start(write, f"the checkpoint in {url}")
        return ""

    def drop(self, frozen: Frozen) -> None:
        """Give up what ``begin`` has begun."""
        self._end(frozen.cut_id)

    def _write(
        self, frozen: Frozen, url: str, keep_last: int, job: JobFolders | None, *, shows: bool
    ) -> str:
        began = time.monotonic()
        is_gone = True  # no manifest names files of this cut
        try:
            storage = open_storage(url)
            with sole_writer(storage, job):
                identity = catalog.new_id(storage)
                try:
                    self._worker.write_cut(WriteRequest(frozen.cut_id, url, identity))
                    files = _write_dense(storage, identity, frozen.dense)
                    statuses = self._await_servers(frozen, shows)
                    manifest = _manifest(identity, frozen, statuses, files)
                    catalog.publish(storage, manifest)
                except BaseException:
                    is_gone = catalog.discard(storage, identity)
                    raise
                is_gone = False
                for name, data in frozen.dense.items():
                    if name != TRAINER:
                        storage.publish(name, data)  # for those who look for it by its name
                catalog.keep_last(storage, keep_last)
        finally:
            self._end(frozen.cut_id, committed=not is_gone)
        _logger.info(
            "checkpoint %s of step %d in %s: %d rows, %.1f MB in %.1f s",
            identity,
            frozen.step,
            url,
            manifest.num_rows,
            manifest.num_bytes / 1e6,
            time.monotonic() - began,
        )
        return identity

    def _await_servers(self, frozen: Frozen, shows: bool) -> tuple[CutStatus, ...]:
        total = sum(info.num_rows for info in frozen.infos)

        def ask() -> tuple[bool, int, int, tuple[CutStatus, ...]]:
            statuses = self._worker.cut_status(frozen.cut_id)
            for number, status in enumerate(statuses):
                if status.state == "failed":
                    raise CheckpointError(
                        f"parameter server {number} could not write its rows: {status.error}"
                    )
            is_over = all(status.state == "written" for status in statuses)
            return is_over, sum(status.num_rows for status in statuses), total, statuses

        return _watch(ask, "rows", "dump", shows)

    def _end(self, cut_id: int, *, committed: bool = False) -> None:
        """End a cut. What came of it is known by now, whether a server hears this or not."""
        try:
            self._worker.end_cut(cut_id, committed)
        except PersiaError as exc:
            _logger.warning("a cut was not ended on every server: %s", exc)


def _watch(ask: Callable[[], tuple[bool, int, int, T]], unit: str, what: str, shows: bool) -> T:
    """Ask until it is over, or nothing moves for as long as a call may take.

    ``ask`` returns whether it is over, how much is done, of how much, and what is returned.
    """
    patience_s = env.rpc_timeout_s()
    begun_at = time.monotonic()
    moved_at, last = begun_at, -1
    pause = threading.Event()  # never set: a wait that Ctrl-C ends
    no_bar = None if shows else True  # None: where the output is no terminal
    with tqdm(desc=what, unit=f" {unit}", unit_scale=True, delay=1.0, disable=no_bar) as bar:
        while True:
            is_over, done, bar.total, found = ask()
            if done != last:
                bar.update(done - max(last, 0))
                moved_at, last = time.monotonic(), done
            if is_over:
                return found
            if time.monotonic() - moved_at > patience_s:
                raise CheckpointError(
                    f"{what}: the servers made no progress for {patience_s:g} s: {found}"
                )
            passed_s = time.monotonic() - begun_at
            pause.wait(min(max(passed_s * _ASKED_AFTER, _FIRST_ASK_S), _LONGEST_ASK_S))


def _write_dense(storage: Storage, identity: str, dense: Dense) -> dict[str, File]:
    files = {
        name: write_file(storage, f"{identity}/{name}", [memoryview(data)])
        for name, data in dense.items()
    }
    if files:
        storage.sync(identity)
    return files


def _manifest(
    identity: str, frozen: Frozen, statuses: tuple[CutStatus, ...], files: dict[str, File]
) -> Manifest:
    name = "a parameter server's snapshot"
    about = json.loads(frozen.infos[0].about)
    parts: list[Part] = []
    files = dict(files)
    extras: dict[str, Any] = {"servers": about["settings"]}
    logs = [json.loads(info.about).get("change_log") for info in frozen.infos]
    if all(logs):  # where the rows of this moment are in what servers write by themselves
        reached: Reached = {}
        for log in logs:
            reached = joined(reached, log["reached"])
        position = LogPosition(
            {server: log["packet"] for server, log in enumerate(logs)},
            {server: log["history"] for server, log in enumerate(logs)},
            reached,
        )
        extras[POSITION] = position.to_json(logs[0]["url"])
    if frozen.order is not None:
        extras["features"] = asdict(frozen.order)
    if (job := env.job_id()) is not None:
        extras[JOB] = job
    for status in statuses:
        written = read_json(ServerFiles, parse(status.meta.tobytes(), name), name)
        parts += written.parts
        files |= written.files
    return Manifest(
        id=identity,
        kind="full",
        step=frozen.step,
        num_servers=len(statuses),
        schema=read_json(SavedSchema, about["schema"], name),
        parts=tuple(parts),
        files=files,
        extras=extras,
    )


def check_keep_last(given: object) -> int:
    """Return how many checkpoints are kept, or raise a ConfigError."""
    if not isinstance(given, Integral) or given < 1:
        raise ConfigError(f"keep_last: expected a whole number, at least 1, got {given!r}")
    return int(given)


# --- loading --------------------------------------------------------------------------------


def names_of(features: Iterable[str] | None) -> tuple[str, ...] | None:
    """Return the features to load, None for all, or raise a ConfigError."""
    if features is None:
        return None
    names = () if isinstance(features, str) else tuple(features)
    if not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"features: expected a list of names, or None for all of them, got {features!r}"
        )
    return names


class Checkpoint:
    """A checkpoint that is there, its dense files verified as they are read.

    It is the newest of the folder, or the one that is named.
    """

    def __init__(self, url: str, identity: str = "") -> None:
        self.url = url
        first = chains(url, identity or None)[0]
        self._storage = first.storage
        self.manifest = first.manifests[-1]
        # What servers wrote by themselves is of no common moment, and not in this folder.
        self.id = self.manifest.id if first.server is None else ""

    def fitting(self, dense: Mapping[str, Any], map_location: Any) -> dict[str, Any]:
        """Return the states of models and optimizers by file, having changed none of them."""
        states = {}
        for name, instance in dense.items():
            state = self.state(name, map_location)
            if state is not None:
                states[name] = check_fit(instance, state, self._place(name))
            elif any(name.endswith(".pt") for name in self.manifest.files):
                there = ", ".join(sorted(self.manifest.files))
                raise CheckpointError(
                    f"{self.url}: expected {name} in checkpoint {self.manifest.id}, which has "
                    f"{there}"
                )
            else:
                _logger.warning("%s has embeddings only: %s stays as it is", self.url, name)
        return states

    def _place(self, name: str) -> str:
        return f"{self.url} ({name} of {self.manifest.id})"

    def trainer(self) -> dict[str, Any] | None:
        """Return what a run goes on from besides, checked; None if it has none."""
        state: dict[str, Any] | None = self.state(TRAINER)
        if state is not None:
            check_trainer(state, self._place(TRAINER))
        return state

    def state(self, name: str, map_location: Any = None) -> Any:
        """Return what a file of it holds, or None if it has none of that name."""
        file = self.manifest.files.get(name)
        if file is None:
            return None
        data = read_file(self._storage, file, MAX_DENSE_BYTES)
        return _load(io.BytesIO(data.tobytes()), self._storage.at(file.path), map_location)


class CheckpointReader(_Background):
    """Loads of one context's embeddings; one at a time."""

    _request: LoadRequest | None = None  # under way

    def verify(self, identity: str, url: str, features: tuple[str, ...] | None) -> None:
        """Have every server check its share; changes nothing."""
        self.wait()
        number = secrets.randbits(63)
        self._request = request = LoadRequest(number, "verify", url, identity, features)
        try:
            self._await(request, "verified")
        except BaseException:
            self.drop()
            raise

    def commit(
        self, *, blocking: bool, level_of: Callable[[LoadNote], int] = lambda _: logging.WARNING
    ) -> list[LoadNote]:
        """Replace the rows that every server holds by those verified.

        Args:
            blocking: Whether to wait for it.
            level_of: The level of a note in the log.

        Returns:
            What the user should know of it, which is also in the log; if it is ``blocking``.
        """
        request = self._request
        if request is None:
            return []

        def run() -> list[LoadNote]:
            try:
                statuses = self._await(replace(request, step="commit"), "loaded")
                # Only now, as all have theirs, is any server's share whole.
                self._worker.load(replace(request, step="finish"))
            finally:
                self.drop()
            notes = list(dict.fromkeys(note for status in statuses for note in status.notes))
            for note in notes:
                _logger.log(level_of(note), "%s: %s", request.url, note.text)
            _logger.info(
                "loaded %d rows from %s", sum(s.num_rows for s in statuses), request.url
            )
            return notes

        if blocking:
            return run()
        self._start(run, f"loading from {request.url}")
        return []

    def drop(self) -> None:
        """Forget a load that is not to be committed."""
        request, self._request = self._request, None
        if request is None:
            return
        try:
            self._worker.load(replace(request, step="drop"))
        except PersiaError as exc:
            _logger.warning("a load was not ended on every server: %s", exc)

    def _await(self, request: LoadRequest, goal: str) -> tuple[LoadStatus, ...]:
        def ask() -> tuple[bool, int, int, tuple[LoadStatus, ...]]:
            statuses = self._worker.load(request)
            for number, status in enumerate(statuses):
                if status.state == "failed":
                    raise CheckpointError(f"parameter server {number}: {status.error}")
            is_over = all(status.state == goal for status in statuses)
            done, total = sum(s.done for s in statuses), sum(s.total for s in statuses)
            return is_over, done, total, statuses

        return _watch(ask, "B", request.step, True)


# --- files of the dense side ---------------------------------------------------------------


def unwrap(instance: Any) -> Any:
    """Return the model inside a data-parallel wrapper, or the instance itself."""
    wrappers = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
    while isinstance(instance, wrappers):
        instance = instance.module
    return instance


def save_dense(
    instance: Any, dst_dir: str | os.PathLike[str], file_name: str, is_jit: bool
) -> Path:
    """Write a state dict, or a scripted model, and return its path."""
    path = Path(dst_dir) / file_name
    # Made first: what it raises is the user's, not a file's.
    if is_jit:
        module = scripted(instance, "is_jit=True")
        write_atomic(path, lambda aside: module.save(str(aside)))
    else:
        state = _plain_state(instance)
        write_atomic(path, lambda aside: torch.save(state, aside))
    return path


def load_dense(instance: Any, path: str | os.PathLike[str], map_location: Any = None) -> None:
    """Load a state dict into a model or an optimizer."""
    place = Path(path)
    if not place.is_file():
        raise CheckpointError(f"expected the file of a state dict at {place}, found none")
    state = check_fit(instance, _load(place, str(place), map_location), str(place))
    put_dense(instance, state, str(place))


def _load(file: Any, place: str, map_location: Any) -> Any:
    try:
        return torch.load(file, map_location=map_location, weights_only=True)
    except Exception as exc:
        # torch's own advice is to trust the file.
        is_none = type(exc).__name__ == "UnpicklingError"
        first = "it is no such file" if is_none else str(exc).partition("\n")[0]
        raise CheckpointError(
            f"{place} cannot be read as a state dict, as torch.save(model.state_dict(), path) "
            f"writes it: {first}"
        ) from exc


def check_fit(instance: Any, state: Any, place: str) -> dict[str, Any]:
    """Return a state dict as the instance takes it, having changed nothing, or raise."""
    instance = unwrap_all(instance)
    is_module = isinstance(instance, torch.nn.Module)
    if not isinstance(state, dict) or (is_module and not all(type(x) is str for x in state)):
        raise CheckpointError(f"expected a state dict in {place}, got {type(state).__name__}")
    found: dict[str, Any] = state
    if not is_module:
        _check_groups(instance, found, place)
        return found
    own: dict[str, Any] = instance.state_dict()
    found = _as_named_here(found, own)
    wrong = []
    for name in sorted(own.keys() | found.keys()):
        here, there = _shape(own, name), _shape(found, name)
        if here != there:
            module = name.removesuffix(_EXTRA_STATE)
            what = name if module == name else f"{module.rstrip('.') or 'the model'}"
            wrong.append(f"{what} is {here} here and {there} there")
    if wrong:
        more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise CheckpointError(
            f"{place} does not fit this {type(instance).__name__}: {'; '.join(wrong[:3])}{more}"
        )
    return found


def _shape(state: dict[str, Any], name: str) -> str:
    if name not in state:
        return "missing"
    if name.rpartition(".")[2] == _EXTRA_STATE:
        return "a module with tables"  # which checks the reference that it has
    shape = getattr(state[name], "shape", None)
    return "no tensor" if shape is None else str(list(shape))


def _check_groups(optimizer: Any, state: dict[str, Any], place: str) -> None:
    """Check that a state dict has the parameters of an optimizer, if it is one's."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return
    here = [len(group["params"]) for group in optimizer.param_groups]
    there = None
    if isinstance(state.get("state"), dict):
        with contextlib.suppress(AttributeError, LookupError, TypeError):
            there = [len(group["params"]) for group in state["param_groups"]]
    if there != here:
        raise CheckpointError(
            f"{place} does not fit this {type(optimizer).__name__}: expected groups of {here} "
            f"parameters, got {there}"
        )


def put_dense(instance: Any, state: dict[str, Any], place: str) -> None:
    """Load a state dict that ``check_fit`` returned."""
    instance = unwrap_all(instance)
    try:
        instance.load_state_dict(state)
    except Exception as exc:  # of whatever is in it
        raise CheckpointError(
            f"{place} does not fit this {type(instance).__name__}: {exc}"
        ) from exc


# --- names of a dense model's state ----------------------------------------------------------


def _compiled_module(instance: Any) -> Any:
    """Return the module that ``torch.compile`` was given; None if the instance is no result."""
    # By the name, as torch._dynamo takes long to import.
    return getattr(instance, "_modules", {}).get(_COMPILED)


def unwrap_all(instance: Any) -> Any:
    """Return the model inside data-parallel wrappers and ``torch.compile``, in any order."""
    while True:
        inner = unwrap(instance)
        compiled = _compiled_module(inner)
        if compiled is None:
            return inner
        instance = compiled


def _uncompiled(module: torch.nn.Module, done: dict[int, torch.nn.Module]) -> torch.nn.Module:
    """Return a module, or if any inside it is compiled a copy that shares the weights."""
    compiled = _compiled_module(module)
    if compiled is not None:
        module = compiled
    if id(module) not in done:
        done[id(module)] = module  # also where a module contains itself
        children = {
            name: child if child is None else _uncompiled(child, done)
            for name, child in module._modules.items()
        }
        if any(children[name] is not child for name, child in module._modules.items()):
            plain = copy.copy(module)
            plain._modules = children
            done[id(module)] = plain
    return done[id(module)]


def _plain_name(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != _COMPILED)


def _renamed(state: dict[str, Any], rename: Callable[[str], str]) -> dict[str, Any]:
    """Return a state dict with other names; versions of modules, if it has any, stay."""
    renamed = OrderedDict((rename(name), value) for name, value in state.items())
    if len(renamed) < len(state):
        return state  # the names are the model's own
    versions = getattr(state, "_metadata", None)
    if versions is not None:
        found = OrderedDict((rename(name), value) for name, value in versions.items())
        renamed._metadata = found  # type: ignore[attr-defined]
    return renamed


def _plain_state(instance: Any) -> dict[str, Any]:
    """Return the state dict of a model, under plain names, or of an optimizer."""
    state: dict[str, Any] = unwrap_all(instance).state_dict()
    if isinstance(instance, torch.nn.Module) and any(_COMPILED in name for name in state):
        return _renamed(state, _plain_name)
    return state


def _as_named_here(state: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Return a file's state under the names of ``own``, the state of the model here."""
    names = {_plain_name(name): name for name in own}
    if len(names) < len(own):
        return state
    found = {_plain_name(name) for name in state}
    # The wrapper's prefix, of a file that was saved with it; a model may itself name its only
    # child "module".
    num_cut = 0
    if found and all(name.startswith(_PREFIX) for name in found):
        is_own = bool(names) and all(name.startswith(_PREFIX) for name in names)
        num_cut = 0 if is_own else len(_PREFIX)

    def rename(name: str) -> str:
        plain = _plain_name(name)[num_cut:]
        return names.get(plain, plain)

    if all(rename(name) == name for name in state):
        return state
    return _renamed(state, rename)
