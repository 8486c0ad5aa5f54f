"""The API of a cluster in memory: objects, versions, owners and foreground deletion.

A stand-in for an API server: it knows no schema, and no controller runs unless a test plays it.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import AsyncIterator, Mapping
from typing import Any

from persia._k8s.api import ApiError, Page

Object = Mapping[str, Any]


class Killed(BaseException):
    """The operator is killed here."""


class MemoryApi:
    """What ``persia._k8s.api.Api`` says.

    Attributes:
        objects: By kind, namespace and name.
        writes: The calls that changed something.
        kill_at: Number of the call before (negative: after) which the caller is killed.
        refuses: Kinds that cannot be created, with the status and why.
        created_at: What objects say of when they were created.
    """

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.writes: list[tuple[str, str, str]] = []
        self.kill_at: int | None = None
        self.refuses: dict[str, tuple[int, str]] = {}
        self.created_at = "2026-01-01T00:00:00Z"
        self._calls = itertools.count(1)
        self._numbers = itertools.count(1)

    # --- calls -----------------------------------------------------------------------------

    def _begin(self) -> int:
        number = next(self._calls)
        if number == self.kill_at:
            raise Killed
        return number

    def _end(self, number: int) -> None:
        if self.kill_at == -number:
            raise Killed

    async def create(self, found: Object) -> Object:
        number = self._begin()
        key = self._key(found)
        if found["kind"] in self.refuses:
            status, why = self.refuses[found["kind"]]
            raise ApiError(why, status)
        if key in self.objects:
            raise ApiError("AlreadyExists", 409)
        self.put(found)
        self.writes.append(("create", key[0], key[2]))
        self._end(number)
        return copy.deepcopy(self.objects[key])

    async def replace(self, found: Object, subresource: str = "") -> Object:
        number = self._begin()
        key = self._key(found)
        old = self.objects.get(key)
        if old is None:
            raise ApiError("NotFound", 404)
        version = found["metadata"].get("resourceVersion")
        if version not in (None, old["metadata"]["resourceVersion"]):
            raise ApiError("Conflict", 409)
        if subresource == "status":
            old["status"] = copy.deepcopy(found["status"])
        else:
            if old["spec"] != found["spec"]:
                old["metadata"]["generation"] += 1
            old["spec"] = copy.deepcopy(found["spec"])
        old["metadata"]["resourceVersion"] = str(next(self._numbers))
        self.writes.append(("replace", key[0], key[2]))
        self._end(number)
        return copy.deepcopy(old)

    async def delete(self, found: Object) -> None:
        number = self._begin()
        key = self._key(found)
        old = self.objects.get(key)
        if old is None:
            raise ApiError("NotFound", 404)
        uid = found["metadata"].get("uid")
        if uid not in (None, old["metadata"]["uid"]):
            raise ApiError("Conflict", 409)
        old["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        self.writes.append(("delete", key[0], key[2]))
        self._end(number)

    async def get(self, api_version: str, kind: str, namespace: str, name: str) -> Object:
        try:
            return copy.deepcopy(self.objects[kind, namespace, name])
        except KeyError:
            raise ApiError(f"{kind} {name}: 404", 404) from None

    async def list(
        self, api_version: str, kind: str, namespace: str | None = None, **query: str
    ) -> list[Object]:
        label, _, value = query.get("labelSelector", "").partition("=")
        return [
            copy.deepcopy(one)
            for (of, place, _), one in self.objects.items()
            if of == kind
            and namespace in (None, place)
            and (not label or label in one["metadata"].get("labels", {}))
            and (not value or one["metadata"]["labels"][label] == value)
        ]

    async def pages(
        self, api_version: str, kind: str, namespace: str | None = None, **query: str
    ) -> AsyncIterator[Page]:
        version = str(next(self._numbers))
        yield await self.list(api_version, kind, namespace, **query), version

    # --- what others do ----------------------------------------------------------------------

    def put(self, found: Object) -> dict[str, Any]:
        made: dict[str, Any] = copy.deepcopy(dict(found))
        made["metadata"].setdefault("namespace", "default")
        made["metadata"] |= {
            "uid": f"uid-{next(self._numbers):08}",
            "resourceVersion": str(next(self._numbers)),
            "creationTimestamp": self.created_at,
            "generation": 1,
        }
        self.objects[self._key(made)] = made
        return made

    def collect(self) -> int:
        """Remove what is being deleted, or owned by nothing that is there; returns how much."""
        first, before = len(self.objects), -1
        while before != len(self.objects):
            before = len(self.objects)
            uids = {one["metadata"]["uid"] for one in self.objects.values()}
            for key, one in list(self.objects.items()):
                owners = one["metadata"].get("ownerReferences", ())
                is_orphan = owners and not any(owner["uid"] in uids for owner in owners)
                if one["metadata"].get("deletionTimestamp") or is_orphan:
                    del self.objects[key]
        return first - before

    def of(self, kind: str) -> dict[str, dict[str, Any]]:
        return {name: one for (of, _, name), one in self.objects.items() if of == kind}

    @staticmethod
    def _key(found: Object) -> tuple[str, str, str]:
        meta = found["metadata"]
        return found["kind"], meta.get("namespace", "default"), meta["name"]
