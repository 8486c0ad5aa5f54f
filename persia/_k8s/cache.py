"""What the operator keeps of a cluster: jobs and their children, by lists and watches.

A kind is listed once and watched from the version of that list on, so nothing that changes is
missed. Only where the API no longer knows what came after a version is the kind listed again.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from persia._k8s.api import Api, ApiError, KubernetesApi
from persia._k8s.plan import JOB_LABEL, ROLE_LABEL
from persia._k8s.pods import ATTEMPT_LABEL, SPEC_ANNOTATION
from persia._k8s.spec import KIND
from persia.errors import PersiaError

logger = logging.getLogger(__name__)

Key = tuple[str, str]  # of a job: its namespace and name
Object = Mapping[str, Any]
# Version and kind of objects, and their namespace; None for all.
Place = tuple[str, str, str | None]

_GONE = 410
# Objects in one answer of a list: whole ones are ten times what is kept of them.
_CHUNK = 100
# Seconds from the end of a watch to the next one, and what they grow to while it fails.
_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 10.0
# What is kept of a child; of a text of few values one copy. Its spec, which is most of it, is
# read only for a Job's number of pods: the annotation says what it is.
_FEW = sys.intern
_ENDED = {"reason": _FEW, "message": None, "exitCode": None}
_STATE = {"waiting": _ENDED, "terminated": _ENDED}
_KEPT = {
    "metadata": {
        **dict.fromkeys(("name", "uid", "resourceVersion", "deletionTimestamp")),
        "namespace": _FEW,
        "creationTimestamp": _FEW,
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


@dataclass(slots=True)
class JobEntry:
    """A job, None before it is seen or once it is gone, and its children by uid."""

    job: Object | None = None
    children: dict[str, Object] = field(default_factory=dict)

    def of(self, found: Object) -> Object | None:
        """Return an object as it is known; None if it is not."""
        uid = found["metadata"]["uid"]
        if found["kind"] != KIND:
            return self.children.get(uid)
        return self.job if self.job and self.job["metadata"]["uid"] == uid else None

    def put(self, found: Object) -> None:
        if found["kind"] == KIND:
            self.job = found
        else:
            self.children[found["metadata"]["uid"]] = found

    def drop(self, found: Object) -> None:
        if found["kind"] == KIND:
            self.job = None
        else:
            del self.children[found["metadata"]["uid"]]


class Cache:
    """Jobs and their children.

    Args:
        changed: Called with the job and the kind of each object of which anything that is kept
            has changed.
    """

    def __init__(self, changed: Callable[[Key, str], None]) -> None:
        self.entries: defaultdict[Key, JobEntry] = defaultdict(JobEntry)
        self._keys: dict[str, Key] = {}  # of children, by uid
        self._changed = changed
        # By kind and namespace: the newest version that a list or a watch has shown.
        self._shown: dict[tuple[str, str | None], int] = {}

    def job(self, key: Key) -> Object | None:
        return self.entries[key].job if key in self.entries else None

    def note(self, found: Object, *, is_deleted: bool = False) -> None:
        """Note how an object is, or was when it was deleted."""
        kind, uid = found["kind"], found["metadata"]["uid"]
        key = self._keys.get(uid) or _key_of(found)
        entry = self.entries[key]
        known = entry.of(found)
        if is_deleted:
            self._keys.pop(uid, None)
            if known is not None:
                entry.drop(known)
                self._changed(key, kind)
        elif known is None or _version(found) >= _version(known):
            if key != _key_of(found):  # its label names another job now
                self.note(found, is_deleted=True)
                self.note(found)
                return
            new = kept(found)
            entry.put(new)
            if kind != KIND:
                self._keys[uid] = key
            if known is None or _unversioned(new) != _unversioned(known):
                self._changed(key, kind)
        if entry.job is None and not entry.children:
            del self.entries[key]

    def note_answer(self, found: Object) -> None:
        """Note an object by the answer to a write of our own: a watch shows it later.

        An answer that comes after a watch has shown that version, or a later one, is dropped:
        the object may be gone by then, and no watch would tell of that again.
        """
        kind, namespace = found["kind"], found["metadata"]["namespace"]
        shown = (self._shown.get((kind, place), 0) for place in (None, namespace))
        if _version(found) > max(shown):
            self.note(found)

    def note_deletion(self, found: Object) -> None:
        """Note that an object which is known is being deleted."""
        key = _key_of(found)
        known = self.entries[key].of(found) if key in self.entries else None
        if known is not None:
            self.note({**known, "metadata": {**known["metadata"], "deletionTimestamp": "now"}})

    async def list(self, api: Api, place: Place) -> str:
        """Have the objects of a place as the API has them now; returns the list's version."""
        _, kind, namespace = place
        uids: set[str] = set()
        version = ""
        async for page, of in api.pages(*place, limit=str(_CHUNK), **_query(kind)):
            version = of
            for one in page:
                uids.add(one["metadata"]["uid"])
                self.note(one)
        known = [
            one
            for key, entry in self.entries.items()
            if namespace in (None, key[0])
            for one in (*entry.children.values(), *filter(None, [entry.job]))
            if one["kind"] == kind
        ]
        self._shown[kind, namespace] = shown = _number(version)
        for one in known:
            if one["metadata"]["uid"] not in uids and _version(one) <= shown:
                self.note(one, is_deleted=True)
        return version

    async def follow(self, api: KubernetesApi, place: Place, version: str) -> None:
        """Keep the objects of a place as the API has them, from a version on, for ever."""
        _, kind, namespace = place
        pause_s = _PAUSE_S
        while True:
            try:
                version = version or await self.list(api, place)
                async for how, found in api.watch(*place, version, **_query(kind)):
                    version = found["metadata"]["resourceVersion"]
                    if how != "BOOKMARK":
                        self.note({**found, "kind": kind}, is_deleted=how == "DELETED")
                    self._shown[kind, namespace] = _number(version)
                pause_s = _PAUSE_S
            except PersiaError as exc:  # also a ConfigError: credentials may be replaced
                if isinstance(exc, ApiError) and exc.status == _GONE:
                    version = ""
                else:
                    logger.warning("%s", exc)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            await asyncio.sleep(pause_s)


def _key_of(found: Object) -> Key:
    meta = found["metadata"]
    if found["kind"] == KIND:
        return meta["namespace"], meta["name"]
    return meta["namespace"], (meta.get("labels") or {}).get(JOB_LABEL, "")


def _query(kind: str) -> dict[str, str]:
    return {} if kind == KIND else {"labelSelector": JOB_LABEL}


def _unversioned(found: Object) -> Object:
    return {**found, "metadata": {**found["metadata"], "resourceVersion": ""}}


def _version(found: Object) -> int:
    return _number(found["metadata"].get("resourceVersion", ""))


def _number(version: str) -> int:
    """Return a version as a number: a later one is greater, of objects of one kind."""
    return int(version) if version.isdecimal() else 0
