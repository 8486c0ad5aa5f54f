"""The operator: it carries out ``reconcile`` for every job, whenever anything of it changes.

    lists, watches --> cache, queue of jobs --> reconcile --> calls of the API

It sets nothing on objects, no finalizer and no annotation. A job is looked at when it or a
child changes, and every ``_SWEEP_S`` seconds for what time brings and for calls that failed.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import itertools
import logging
import signal
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from persia._k8s.api import JOB_KIND, Api, ApiError, KubernetesApi
from persia._k8s.cache import Cache, Key, Object, Place
from persia._k8s.plan import KEY_FILES, Plan
from persia._k8s.pods import keys_secret
from persia._k8s.reconcile import (
    Action,
    Children,
    Create,
    CreateKeys,
    Delete,
    Emit,
    Settings,
    WriteStatus,
    reconcile,
)
from persia._k8s.spec import KIND
from persia._rpc.curve import CONTROL, DATA, SERVER, make_keys

logger = logging.getLogger(__name__)

_SWEEP_S = 15.0
# Calls of a new job at a time, and jobs that are reconciled beside it. New ones are created one
# after another: they are ready sooner than if they shared the API.
_AT_ONCE, _NUM_OTHERS = 16, 3
# Seconds in which changes of a job's pods are gathered: they come together.
_GATHER_S = 1.0
# Seconds after which it is asked why a Job has no pod, and between two questions.
_REFUSED_S = 5.0
_NOT_FOUND, _CONFLICT = 404, 409
# Most reconciliations of one job in a row, where each made a call.
_MAX_ROUNDS = 20
_TIME = "%Y-%m-%dT%H:%M:%SZ"


def watched(kubernetes: tuple[int, int], has_job_sets: bool) -> list[tuple[str, str]]:
    """Return the versions and kinds of children."""
    policy = "policy/v1" if kubernetes >= (1, 21) else "policy/v1beta1"
    found = [("v1", "Pod"), ("v1", "Service"), ("batch/v1", "Job")]
    found += [("networking.k8s.io/v1", "NetworkPolicy"), (policy, "PodDisruptionBudget")]
    return [*found, ("jobset.x-k8s.io/v1alpha2", "JobSet")] if has_job_sets else found


async def carry_out(
    api: Api, job: Object, actions: Sequence[Action], cache: Cache
) -> dict[tuple[str, str], str]:
    """Make the calls of actions in their order; returns what the API refused to create.

    Raises:
        ApiError: If it refused another call.
    """
    refused: dict[tuple[str, str], str] = {}
    for several in _together(actions):
        made = await asyncio.gather(
            *(_call(api, job, one, cache, refused) for one in several), return_exceptions=True
        )
        for failure in filter(None, made):
            raise failure
    return refused


def _together(actions: Sequence[Action]) -> Iterator[list[Action]]:
    """Yield actions in their order, several where objects are created, or deleted.

    Keys are by themselves: they are made while there is no Job.
    """
    for kind, same in itertools.groupby(actions, type):
        several = list(same)
        at_once = _AT_ONCE if kind in (Create, Delete) else 1
        for begin in range(0, len(several), at_once):
            yield several[begin : begin + at_once]


async def _call(
    api: Api, job: Object, action: Action, cache: Cache, refused: dict[tuple[str, str], str]
) -> None:
    """Make the call of one action; notes in ``refused`` why the API did not create it."""
    if isinstance(action, Create):
        made = await _create(api, action.object, refused)
        if made is not None:
            cache.note_answer(made)
    elif isinstance(action, CreateKeys):
        await _create(api, new_keys(action.plan), refused)
    elif isinstance(action, Delete):
        try:
            await api.delete(action.object)
        except ApiError as exc:
            if exc.status == _CONFLICT:  # another object of that name, or a webhook's refusal
                logger.warning("%s", exc)
                return
            if exc.status != _NOT_FOUND:
                raise
        cache.note_deletion(action.object)
    elif isinstance(action, WriteStatus):
        cache.note_answer(await api.replace({**job, "status": action.status}, "status"))
    else:
        await _emit(api, job, action)


async def _create(
    api: Api, found: Object, refused: dict[tuple[str, str], str]
) -> Object | None:
    """Create an object; returns it as it is, or None if it is refused or there already."""
    try:
        return await api.create(found)
    except ApiError as exc:
        if not 400 <= exc.status < 500:  # the server's failure, and not the object's
            raise
        if exc.status != _CONFLICT:  # else it was created after the last look
            refused[found["kind"], found["metadata"]["name"]] = str(exc)
        return None


def new_keys(plan: Plan) -> dict[str, Any]:
    """Return the Secret of a plan with new keys."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_keys(folder, (SERVER, CONTROL, DATA))
        return keys_secret(plan, {one: (folder / one).read_bytes() for one in KEY_FILES})


async def _emit(api: Api, job: Object, action: Emit) -> None:
    """Post an event; the same one again is no second one, and a failure is only logged."""
    meta, note = job["metadata"], action.note
    digest = hashlib.sha256(f"{meta['uid']}{note}".encode()).digest()
    now = datetime.now(timezone.utc).strftime(_TIME)
    names = ("name", "namespace", "uid", "resourceVersion")
    suffix = base64.b32encode(digest[:10]).decode().lower()
    event = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{meta['name']}.{suffix}", "namespace": meta["namespace"]},
        "involvedObject": {
            "apiVersion": JOB_KIND[0],
            "kind": KIND,
            **{name: meta[name] for name in names if name in meta},
        },
        "reason": note.reason,
        "message": note.message,
        "type": "Warning",
        "source": {"component": "persia-operator"},
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }
    try:
        await api.create(event)
    except ApiError as exc:
        if exc.status != _CONFLICT:
            logger.warning("%s", exc)


@dataclass(slots=True)
class _Memory:
    """What is remembered of a job from one reconciliation to the next.

    By kind and name: what the API did not create, and what Jobs did not.
    """

    refused: dict[tuple[str, str], str] = field(default_factory=dict)
    warned: dict[tuple[str, str], str] = field(default_factory=dict)
    ask_at: float = 0.0  # when it may be asked again why Jobs have no pods


class Operator:
    """Keeps what the API has of jobs, and reconciles them.

    Args:
        api: The API.
        settings: Of the installation.
        kinds: Versions and kinds of children, as ``watched`` returns them.
        namespaces: Those with jobs; None for all.
    """

    def __init__(
        self,
        api: Api,
        settings: Settings,
        kinds: Sequence[tuple[str, str]],
        namespaces: Sequence[str] | None = None,
    ) -> None:
        self._api, self._settings = api, settings
        within: list[str | None] = list(namespaces or ()) or [None]
        self._places: list[Place] = [
            (*kind, namespace) for namespace in within for kind in (JOB_KIND, *kinds)
        ]
        self.cache = Cache(self._note_change)
        self._memory: defaultdict[Key, _Memory] = defaultdict(_Memory)
        # Why Jobs have no pods, by their uid, and when it was asked; by namespace.
        self._failures: dict[str, tuple[float, Mapping[str, str]]] = {}
        self._new: asyncio.Queue[Key] = asyncio.Queue()  # jobs to reconcile, without a status
        self._others: asyncio.Queue[Key] = asyncio.Queue()
        self._queued: set[Key] = set()
        self._busy: set[Key] = set()  # with workers, which queue them again where that is due
        self._changing: set[Key] = set()  # whose pods have changed a moment ago

    # --- the queue -----------------------------------------------------------------------

    def _note_change(self, key: Key, kind: str) -> None:
        if kind == KIND and self.cache.job(key) is None:
            self._memory.pop(key, None)
        elif kind != "Pod":
            self.queue(key)
        elif key not in self._changing:
            self._changing.add(key)
            asyncio.get_running_loop().call_later(_GATHER_S, self._queue_changed, key)

    def _queue_changed(self, key: Key) -> None:
        self._changing.discard(key)
        self.queue(key)

    def queue(self, key: Key) -> None:
        """Have a job reconciled, once for all that asked for it until then."""
        if self.cache.job(key) is not None and key not in self._queued:
            self._queued.add(key)
            if key not in self._busy:
                self._put(key)

    def _put(self, key: Key) -> None:
        job = self.cache.job(key)
        is_new = job is not None and not job.get("status")
        (self._new if is_new else self._others).put_nowait(key)

    def queue_all(self) -> None:
        for key in list(self.cache.entries):
            self.queue(key)

    # --- the work ------------------------------------------------------------------------

    async def list_all(self) -> dict[Place, str]:
        """List everything, and queue every job; returns the versions of the lists."""
        versions = {place: await self.cache.list(self._api, place) for place in self._places}
        self.queue_all()
        return versions

    async def step(self, key: Key) -> bool:
        """Reconcile a job once; returns whether there was anything to do."""
        if self.cache.job(key) is not None:
            await self._ask_why(key)
        job = self.cache.job(key)  # as it is after that
        if job is None:
            return False
        memory = self._memory[key]
        objects, pods = self._children(key)
        children = Children(objects, pods, {**memory.refused, **memory.warned})
        actions = reconcile(job, children, datetime.now(timezone.utc), self._settings)
        memory.refused = await carry_out(self._api, job, actions, self.cache)
        return bool(actions)

    def _children(self, key: Key) -> tuple[list[Object], list[Object]]:
        """Return the objects of a job, and its pods."""
        own = self.cache.entries[key].children.values()
        pods = [one for one in own if one["kind"] == "Pod"]
        return [one for one in own if one["kind"] != "Pod"], pods

    async def _ask_why(self, key: Key) -> None:
        """Look up why Jobs have no pods, such as a quota: only events say so."""
        memory = self._memory[key]
        objects, pods = self._children(key)
        owners = {
            owner["uid"] for pod in pods for owner in pod["metadata"].get("ownerReferences", ())
        }
        bare = [
            one["metadata"]
            for one in objects
            if one["kind"] == "Job"
            and one["metadata"]["uid"] not in owners
            and not (one.get("status") or {}).get("conditions")
        ]
        names = {meta["name"] for meta in bare}
        memory.warned = {of: why for of, why in memory.warned.items() if of[1] in names}
        loop = asyncio.get_running_loop()
        if not bare or loop.time() < memory.ask_at:
            return
        memory.ask_at = loop.time() + _REFUSED_S
        loop.call_at(memory.ask_at, self.queue, key)
        # Nearly all of them get their pods in a moment.
        since = datetime.now(timezone.utc) - timedelta(seconds=_REFUSED_S)
        if all(meta.get("creationTimestamp", "") > since.strftime(_TIME) for meta in bare):
            return
        failures = await self._pods_not_created(key[0])
        for meta in bare:
            if meta["uid"] in failures:
                memory.warned["Job", meta["name"]] = failures[meta["uid"]]

    async def _pods_not_created(self, namespace: str) -> Mapping[str, str]:
        """Return why Jobs of a namespace have no pods, by their uid.

        One list is for all jobs that ask within seconds: the API reads every event for it.
        """
        now = asyncio.get_running_loop().time()
        asked_at, found = self._failures.get(namespace, (now - _REFUSED_S, {}))
        if now - asked_at < _REFUSED_S:
            return found
        self._failures[namespace] = (now, found)
        selector = "reason=FailedCreate,involvedObject.kind=Job"
        try:
            events = await self._api.list("v1", "Event", namespace, fieldSelector=selector)
            found = {
                str(event["involvedObject"].get("uid")): " ".join(event["message"].split())
                for event in events
            }
        except ApiError as exc:  # jobs are reconciled without it
            logger.warning("%s", exc)
        self._failures[namespace] = (asyncio.get_running_loop().time(), found)
        return found

    async def settle(self) -> None:
        """Reconcile every job that is queued until nothing is to be done: ``--once``."""
        for queue in (self._others, self._new):
            while not queue.empty():
                key = queue.get_nowait()
                self._queued.discard(key)
                for _ in range(_MAX_ROUNDS):
                    if not await self.step(key):
                        break

    async def work(self, queue: asyncio.Queue[Key]) -> None:
        """Reconcile jobs as they are queued, for ever."""
        while True:
            key = await queue.get()
            self._queued.discard(key)
            self._busy.add(key)
            try:
                await self.step(key)
            except ApiError as exc:
                # 409: the job has changed meanwhile, and its event queues it.
                level = logging.DEBUG if exc.status == _CONFLICT else logging.WARNING
                logger.log(level, "job %s/%s: %s", *key, exc)
            except Exception:
                logger.exception("job %s/%s: cannot be reconciled", *key)
            finally:
                self._busy.discard(key)
                if key in self._queued:  # it has changed meanwhile
                    self._put(key)

    async def sweep(self) -> None:
        """Queue every job now and then, for ever."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            self.queue_all()

    async def run(self, api: KubernetesApi) -> None:
        """Work until a signal comes."""
        stopped = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        listed = asyncio.ensure_future(self.list_all())
        running: list[asyncio.Future[Any]] = [listed, asyncio.ensure_future(stopped.wait())]
        try:
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            if stopped.is_set():
                return
            tasks = [
                *(self.cache.follow(api, *of) for of in listed.result().items()),
                *(self.work(queue) for queue in (self._new, *[self._others] * _NUM_OTHERS)),
                self.sweep(),
            ]
            running = [*running[1:], *(asyncio.ensure_future(one) for one in tasks)]
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for one in done:  # but for the signal, none ends unless it fails
                one.result()
        finally:
            for one in running:
                one.cancel()
            await asyncio.gather(*running, return_exceptions=True)


async def find_settings(api: KubernetesApi, images: Mapping[str, str]) -> tuple[Settings, bool]:
    """Return the settings for a cluster, and whether it has JobSets."""
    version = await api.version()
    return Settings(images, version), await api.has("/apis/jobset.x-k8s.io/v1alpha2")


def run_operator(
    namespaces: Sequence[str], images: Mapping[str, str], *, is_once: bool = False
) -> None:
    """Run the operator until a signal ends it, or once over all jobs."""
    asyncio.run(_run(namespaces, images, is_once=is_once))


async def _run(namespaces: Sequence[str], images: Mapping[str, str], *, is_once: bool) -> None:
    async with KubernetesApi() as api:
        settings, has_job_sets = await find_settings(api, images)
        kinds = watched(settings.kubernetes, has_job_sets)
        operator = Operator(api, settings, kinds, namespaces)
        if is_once:
            await operator.list_all()
            await operator.settle()
        else:
            await operator.run(api)
