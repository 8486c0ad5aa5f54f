"""The operator: it watches jobs and what belongs to them, and carries out ``reconcile``.

    kopf's watches --> cache, queue of jobs --> reconcile --> calls of the API

kopf's handlers are of its lowest level, and only note what they are shown: they set nothing on
objects, no finalizer and no annotation. A job is looked at whenever it or a child changes, and
every ``_SWEEP_S`` seconds for what time brings. Every ``_LIST_S`` seconds all objects are
listed again, because a watch that was cut off does not say what was deleted meanwhile.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import sys
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

import kopf

from persia._k8s.api import JOB_KIND, Api, ApiError, KubernetesApi, log_in
from persia._k8s.plan import JOB_LABEL, KEY_FILES, ROLE_LABEL, Plan
from persia._k8s.pods import ATTEMPT_LABEL, SPEC_ANNOTATION, keys_secret
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
from persia._k8s.spec import GROUP, KIND, PLURAL, VERSION
from persia._rpc.curve import CONTROL, DATA, SERVER, make_keys
from persia.errors import PersiaError

logger = logging.getLogger(__name__)

Key = tuple[str, str]  # of a job: its namespace and name
Object = Mapping[str, Any]
_Name = TypeVar("_Name", Key, str)  # of a job, or the uid of a child

_SWEEP_S, _LIST_S = 15.0, 300.0
_NUM_WORKERS = 4
# Objects of one job that are created at a time: the API writes several to its disk as one.
_AT_ONCE = 8
# Seconds in which changes of a job's pods are gathered: they come together.
_GATHER_S = 0.25
# A job without pods asks why at most this often.
_REFUSED_S = 5.0
_NOT_FOUND, _CONFLICT = 404, 409
# Most reconciliations of one job in a row, where each made a call.
_MAX_ROUNDS = 20
# Objects in one answer of a list, and seconds for which kopf keeps the last it has shown: whole
# ones are ten times what is kept of them.
_CHUNK, _IDLE_S = 100, 0.5
# What is kept of a child; of a text of few values one copy. Its spec, which is most of it, is
# read only for a Job's number of pods: the annotation says what it is.
_FEW = sys.intern
_ENDED = {"reason": _FEW, "message": None, "exitCode": None}
_STATE = {"waiting": _ENDED, "terminated": _ENDED}
_KEPT = {
    "metadata": {
        **dict.fromkeys(("name", "uid", "resourceVersion", "deletionTimestamp")),
        "namespace": _FEW,
        "labels": dict.fromkeys((JOB_LABEL, ROLE_LABEL, ATTEMPT_LABEL), _FEW),
        "annotations": {SPEC_ANNOTATION: _FEW},
        "ownerReferences": {"uid": _FEW},
    },
    "spec": {"completions": None},
    "status": {
        "phase": _FEW,
        "reason": _FEW,
        "message": None,
        "conditions": {"type": _FEW, "status": _FEW, "reason": _FEW, "message": None},
        "containerStatuses": {
            "ready": None,
            "restartCount": None,
            "state": _STATE,
            "lastState": _STATE,
        },
    },
}


def watched(kubernetes: tuple[int, int], has_job_sets: bool) -> list[tuple[str, str]]:
    """Return the versions and kinds of children."""
    policy = "policy/v1" if kubernetes >= (1, 21) else "policy/v1beta1"
    found = [("v1", "Pod"), ("v1", "Service"), ("batch/v1", "Job")]
    found += [("networking.k8s.io/v1", "NetworkPolicy"), (policy, "PodDisruptionBudget")]
    return [*found, ("jobset.x-k8s.io/v1alpha2", "JobSet")] if has_job_sets else found


async def carry_out(
    api: Api, job: Object, actions: Sequence[Action]
) -> dict[tuple[str, str], str]:
    """Make the calls of actions in their order; returns what the API refused to create.

    Raises:
        ApiError: If it refused another call.
    """
    refused: dict[tuple[str, str], str] = {}
    for several in _together(actions):
        made = await asyncio.gather(
            *(_create(api, one, refused) for one in several), return_exceptions=True
        )
        for failure in filter(None, made):
            raise failure
        action = several[0]
        if isinstance(action, Delete):
            try:
                await api.delete(action.object)
            except ApiError as exc:
                if exc.status not in (_NOT_FOUND, _CONFLICT):
                    raise
        elif isinstance(action, WriteStatus):
            await api.replace({**job, "status": action.status}, "status")
        elif isinstance(action, Emit):
            await _emit(api, job, action)
    return refused


def _together(actions: Sequence[Action]) -> Iterator[list[Action]]:
    """Yield actions in their order, several where objects are created: none needs another.

    Keys are by themselves: they are made while there is no Job.
    """
    several: list[Action] = []
    for action in actions:
        are_alike = all(isinstance(one, Create) for one in (action, *several))
        if several and not (are_alike and len(several) < _AT_ONCE):
            yield several
            several = []
        several.append(action)
    if several:
        yield several


async def _create(api: Api, action: Action, refused: dict[tuple[str, str], str]) -> None:
    """Create an object, if that is the action; notes why the API refused it."""
    if isinstance(action, Create | CreateKeys):
        found = action.object if isinstance(action, Create) else new_keys(action.plan)
        try:
            await api.create(found)
        except ApiError as exc:
            # 409: it is there already, made from what was seen before.
            if exc.status == _CONFLICT:
                return
            if not 400 <= exc.status < 500:  # the server's failure, and not the object's
                raise
            refused[found["kind"], found["metadata"]["name"]] = str(exc)


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
    now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
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


def kept(found: Object) -> Object:
    """Return of an object what is read here: of a child it is a tenth."""
    if found["kind"] == KIND:
        # Who has written which field is half of it, and the API's own to keep.
        meta = {key: one for key, one in found["metadata"].items() if key != "managedFields"}
        return {**found, "metadata": meta}
    about = {"apiVersion": _FEW(found["apiVersion"]), "kind": _FEW(found["kind"])}
    return {**about, **_selected(found, _KEPT)}


def _selected(found: Any, wanted: Mapping[str, Any] | Callable[[str], str] | None) -> Any:
    """Return the wanted keys of an object, or of each of a list; None: all of it."""
    if wanted is None or found is None:
        return found
    if callable(wanted):
        return wanted(found)
    if isinstance(found, list):
        return [_selected(one, wanted) for one in found]
    return {key: _selected(found[key], below) for key, below in wanted.items() if key in found}


class Operator:
    """Keeps what the API has of jobs, and reconciles one after another.

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
        self._api, self._settings, self._kinds = api, settings, kinds
        self._namespaces: Sequence[str | None] = list(namespaces) if namespaces else [None]
        self._jobs: dict[Key, Object] = {}
        self._children: defaultdict[Key, dict[str, Object]] = defaultdict(dict)  # by uid
        # By job, kind and name: what the API did not create, and what Jobs did not.
        self._refused: defaultdict[Key, dict[tuple[str, str], str]] = defaultdict(dict)
        self._warned: defaultdict[Key, dict[tuple[str, str], str]] = defaultdict(dict)
        self._asked: dict[Key, float] = {}
        self._queue: asyncio.Queue[Key] = asyncio.Queue()
        self._queued: set[Key] = set()
        self._changing: set[Key] = set()  # whose pods have changed a moment ago
        self._busy: set[Key] = set()  # with workers
        self._again: set[Key] = set()  # of those, what has changed meanwhile
        self._noted: set[str] = set()  # uids of what was noted since the last list began

    # --- the cache ---------------------------------------------------------------------

    def note(self, found: Object, *, is_deleted: bool = False) -> None:
        """Note how an object is, or was when it was deleted, and queue its job."""
        meta = found["metadata"]
        self._noted.add(meta["uid"])
        if found["kind"] == KIND:
            key = (meta["namespace"], meta["name"])
            if is_deleted:
                self._forget(key)
            elif not _is_older(found, self._jobs.get(key)):
                self._jobs[key] = kept(found)
        else:
            key = (meta["namespace"], (meta.get("labels") or {}).get(JOB_LABEL, ""))
            if is_deleted:
                self._children[key].pop(meta["uid"], None)
            elif not _is_older(found, self._children[key].get(meta["uid"])):
                self._children[key][meta["uid"]] = kept(found)
        if found["kind"] != "Pod":
            self.queue(key)
        elif key not in self._changing:
            self._changing.add(key)
            asyncio.get_running_loop().call_later(_GATHER_S, self._queue_changed, key)

    def _queue_changed(self, key: Key) -> None:
        self._changing.discard(key)
        self.queue(key)

    def queue(self, key: Key) -> None:
        if key in self._jobs and key not in self._queued:
            self._queued.add(key)
            self._queue.put_nowait(key)

    def _forget(self, key: Key) -> None:
        """Drop what is remembered of a job that is gone: one of its name is another job."""
        for memory in (self._jobs, self._refused, self._warned, self._asked):
            memory.pop(key, None)

    async def list_all(self) -> None:
        """Replace the cache by what the API has now, and queue every job.

        A list takes a while. What was noted since it began may be newer, and then stays.
        """
        self._noted.clear()
        jobs: dict[Key, Object] = {}
        children: defaultdict[Key, dict[str, Object]] = defaultdict(dict)
        for namespace in self._namespaces:
            for one in await self._api.list(*JOB_KIND, namespace):
                jobs[one["metadata"]["namespace"], one["metadata"]["name"]] = kept(one)
            for version, kind in self._kinds:
                async for one in self._api.each(
                    version, kind, namespace, labelSelector=JOB_LABEL, limit=str(_CHUNK)
                ):
                    meta = one["metadata"]
                    key = (meta["namespace"], meta["labels"][JOB_LABEL])
                    children[key][meta["uid"]] = kept(one)
        for key in self._children.keys() | children.keys():
            children[key] = self._merged(children[key], self._children[key])
        jobs = self._merged(jobs, self._jobs)
        for key in self._jobs.keys() - jobs.keys():
            self._forget(key)
        self._jobs = jobs
        self._children = defaultdict(dict, {key: one for key, one in children.items() if one})
        for key in jobs:
            self.queue(key)

    def _merged(
        self, listed: Mapping[_Name, Object], cached: Mapping[_Name, Object]
    ) -> dict[_Name, Object]:
        """Return what a list has found, or what was noted since the list began."""
        found = {
            name: one
            for name, one in listed.items()
            if one["metadata"]["uid"] not in self._noted or name in cached  # else it is gone
        }
        for name, one in cached.items():
            is_noted = one["metadata"]["uid"] in self._noted
            if is_noted and not _is_older(one, listed.get(name)):
                found[name] = one
        return found

    # --- the work ------------------------------------------------------------------------

    async def step(self, key: Key) -> bool:
        """Reconcile a job once; returns whether there was anything to do."""
        job = self._jobs.get(key)
        if job is None:
            return False
        own = list(self._children[key].values())
        pods = [one for one in own if one["kind"] == "Pod"]
        objects = [one for one in own if one["kind"] != "Pod"]
        try:
            await self._ask_why(key, job, objects, pods)
            children = Children(objects, pods, {**self._refused[key], **self._warned[key]})
            actions = reconcile(job, children, datetime.now(timezone.utc), self._settings)
            self._refused[key] = await carry_out(_Noting(self._api, self), job, actions)
        finally:
            if key not in self._jobs:  # deleted meanwhile
                self._forget(key)
        return bool(actions)

    async def _ask_why(
        self, key: Key, job: Object, objects: Sequence[Object], pods: Sequence[Object]
    ) -> None:
        """Look up why Jobs have no pods, such as a quota: only events say so."""
        owners = {
            owner["uid"] for pod in pods for owner in pod["metadata"].get("ownerReferences", ())
        }
        bare = {
            one["metadata"]["uid"]: one["metadata"]["name"]
            for one in objects
            if one["kind"] == "Job"
            and one["metadata"]["uid"] not in owners
            and not (one.get("status") or {}).get("conditions")
        }
        now = asyncio.get_running_loop().time()
        self._warned[key] = {
            of: why for of, why in self._warned[key].items() if of[1] in bare.values()
        }
        if not bare or now - self._asked.get(key, -_REFUSED_S) < _REFUSED_S:
            return
        self._asked[key] = now
        events = await self._api.list(
            "v1", "Event", key[0], fieldSelector="reason=FailedCreate,involvedObject.kind=Job"
        )
        for event in events:
            name = bare.get(event["involvedObject"].get("uid"))
            if name is not None:
                self._warned[key]["Job", name] = " ".join(event["message"].split())

    async def settle(self) -> None:
        """Reconcile every job that is queued until nothing is to be done: ``--once``."""
        while not self._queue.empty():
            key = self._queue.get_nowait()
            self._queued.discard(key)
            for _ in range(_MAX_ROUNDS):
                if not await self.step(key):
                    break

    async def work(self) -> None:
        """Reconcile jobs as they are queued, for ever."""
        while True:
            key = await self._queue.get()
            self._queued.discard(key)
            if key in self._busy:  # another worker has it, and queues it when that is done
                self._again.add(key)
                continue
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
                if key in self._again:
                    self._again.discard(key)
                    self.queue(key)

    async def sweep(self) -> None:
        """Queue every job now and then, and list everything at times, for ever."""
        rounds = 0
        while True:
            await asyncio.sleep(_SWEEP_S)
            rounds += 1
            if rounds * _SWEEP_S >= _LIST_S:
                rounds = 0
                try:
                    await self.list_all()
                except PersiaError as exc:  # also a ConfigError: credentials may be replaced
                    logger.warning("%s", exc)
                except Exception:
                    logger.exception("objects cannot be listed")
            for key in list(self._jobs):
                self.queue(key)


class _Noting:
    """The API, with what it answers noted: watches tell of it a little later."""

    def __init__(self, api: Api, operator: Operator) -> None:
        self._api, self._operator = api, operator

    async def create(self, found: Object) -> Object:
        made = await self._api.create(found)
        if found["kind"] not in ("Event", "Secret"):
            self._operator.note({**made, "kind": found["kind"]})
        return made

    async def replace(self, found: Object, subresource: str = "") -> Object:
        made = await self._api.replace(found, subresource)
        self._operator.note({**made, "kind": found["kind"]})
        return made

    async def delete(self, found: Object) -> None:
        await self._api.delete(found)
        gone = {"deletionTimestamp": "now"}
        self._operator.note({**found, "metadata": {**found["metadata"], **gone}})

    async def get(self, api_version: str, kind: str, namespace: str, name: str) -> Object:
        return await self._api.get(api_version, kind, namespace, name)

    async def list(
        self, api_version: str, kind: str, namespace: str | None = None, **query: str
    ) -> list[Object]:
        return await self._api.list(api_version, kind, namespace, **query)

    def each(
        self, api_version: str, kind: str, namespace: str | None = None, **query: str
    ) -> AsyncIterator[Object]:
        return self._api.each(api_version, kind, namespace, **query)


def _is_older(found: Object, known: Object | None) -> bool:
    """Whether an object is older than what is known of it.

    Versions are opaque by the API's rules, but numbers wherever etcd is behind it, and the
    check is only of what arrives late: what is wrong is put right by the next list.
    """
    try:
        return known is not None and int(found["metadata"]["resourceVersion"]) < int(
            known["metadata"]["resourceVersion"]
        )
    except (KeyError, ValueError):
        return False


async def find_settings(api: KubernetesApi, images: Mapping[str, str]) -> tuple[Settings, bool]:
    """Return the settings for a cluster, and whether it has JobSets."""
    version = await api.version()
    return Settings(images, version), await api.has("/apis/jobset.x-k8s.io/v1alpha2")


def run_operator(
    namespaces: Sequence[str], images: Mapping[str, str], *, is_once: bool = False
) -> None:
    """Run the operator until a signal ends it, or once over all jobs."""
    asyncio.run(_once(namespaces, images) if is_once else _run(namespaces, images))


async def _once(namespaces: Sequence[str], images: Mapping[str, str]) -> None:
    async with KubernetesApi() as api:
        operator, _ = await _listed(api, namespaces, images)
        await operator.settle()


async def _listed(
    api: KubernetesApi, namespaces: Sequence[str], images: Mapping[str, str]
) -> tuple[Operator, list[tuple[str, str]]]:
    """Return an operator that has listed everything, and the kinds of children."""
    settings, has_job_sets = await find_settings(api, images)
    kinds = watched(settings.kubernetes, has_job_sets)
    operator = Operator(api, settings, kinds, namespaces)
    await operator.list_all()
    return operator, kinds


async def _run(namespaces: Sequence[str], images: Mapping[str, str]) -> None:
    async with KubernetesApi() as api:
        operator, kinds = await _listed(api, namespaces, images)
        tasks = [asyncio.create_task(operator.work()) for _ in range(_NUM_WORKERS)]
        tasks.append(asyncio.create_task(operator.sweep()))
        try:
            await kopf.operator(
                registry=_registry(operator, kinds),
                settings=_kopf_settings(),
                standalone=True,
                clusterwide=not namespaces,
                namespaces=list(namespaces),
            )
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _kopf_settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    # Nothing is handled by kopf beyond watching, so it needs to write and to discover nothing.
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.watching.chunk_size = _CHUNK
    settings.queueing.idle_timeout = _IDLE_S
    return settings


def _registry(operator: Operator, kinds: Iterable[tuple[str, str]]) -> kopf.OperatorRegistry:
    registry = kopf.OperatorRegistry()

    def credentials(**_: Any) -> kopf.ConnectionInfo:
        return log_in()

    kopf.on.login(registry=registry)(credentials)

    def watch(kind: str, *resource: str, **filters: Any) -> None:
        # Async, though nothing is waited for: others are called by threads, for which neither
        # the cache nor the queue is.
        async def seen(event: kopf.RawEvent, **_: Any) -> None:
            body: dict[str, Any] = dict(event["object"])
            operator.note({**body, "kind": kind}, is_deleted=event["type"] == "DELETED")

        kopf.on.event(*resource, registry=registry, id=kind, **filters)(seen)

    watch(KIND, GROUP, VERSION, PLURAL)
    for api_version, kind in kinds:
        group, _, version = api_version.rpartition("/")
        resource = (group, version, kind) if group else (version, kind)
        watch(kind, *resource, labels={JOB_LABEL: kopf.PRESENT})
    return registry
