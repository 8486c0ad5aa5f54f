"""What the operator keeps, by lists and watches of a server of HTTP."""

from __future__ import annotations

import asyncio
import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kopf")

from aiohttp import web

from persia._k8s import api
from persia._k8s import cache as cache_module
from persia._k8s.api import JOB_KIND, KubernetesApi
from persia._k8s.cache import Cache, kept
from persia._k8s.reconcile import Children, reconcile
from persia.errors import ConfigError
from tests.k8s.cluster import Cluster
from tests.k8s.http_api import run
from tests.support.fixtures import Monkey
from tests.support.waiting import PATIENCE_S

PODS = ("v1", "Pod", None)
KEY = ("default", "job")


def pod(name: str, version: int, phase: str = "Pending", **more: Any) -> dict[str, Any]:
    meta = {"name": name, "namespace": "default", "uid": name, "labels": {"persia_job": "job"}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**meta, "resourceVersion": str(version), **more},
        "status": {"phase": phase},
    }


def a_job(version: int, uid: str = "u", **more: Any) -> dict[str, Any]:
    meta = {"name": "job", "namespace": "default", "uid": uid, "resourceVersion": str(version)}
    api_version, kind = JOB_KIND
    return {"apiVersion": api_version, "kind": kind, "metadata": {**meta, **more}, "spec": {}}


def names(cache: Cache) -> dict[str, str]:
    """Return the phases of the pods that are known."""
    if KEY not in cache.entries:
        return {}
    found = cache.entries[KEY].children
    return {name: one["status"]["phase"] for name, one in found.items()}


class Script:
    """Answers one request after another; the last answer is that nothing happens any more."""

    def __init__(self, *answers: tuple[str, Any]) -> None:
        self._answers = list(answers)
        self.asked: list[tuple[str, str]] = []  # what, and from which version
        self.is_over = asyncio.Event()

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        is_watch = "watch" in request.query
        assert request.query["labelSelector"] == "persia_job"
        version = request.query.get("resourceVersion", "")
        self.asked.append(("watch" if is_watch else "list", version))
        if not self._answers:
            self.is_over.set()
            await asyncio.sleep(PATIENCE_S)
        how, given = self._answers.pop(0)
        if how == "status":
            return web.json_response({"message": "no"}, status=given)
        if how == "list":
            version, items = given
            return web.json_response({"items": items, "metadata": {"resourceVersion": version}})
        answer = web.StreamResponse()
        await answer.prepare(request)
        for event in given:
            if event is None:  # cut in the middle of a line
                await answer.write(b'{"type": "DELETED", "obj')
                assert request.transport is not None
                request.transport.abort()
                break
            what, found = event
            await answer.write(json.dumps({"type": what, "object": found}).encode() + b"\n")
        return answer


@pytest.fixture
def config(tmp_path: Path, monkeypatch: Monkey) -> Path:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    monkeypatch.setattr(cache_module, "_PAUSE_S", 0.0)
    return tmp_path / "config"


def follow(config: Path, cache: Cache, *answers: tuple[str, Any]) -> list[tuple[str, str]]:
    """Have a cache follow pods until the answers are used up; returns what was asked."""
    asked: list[tuple[str, str]] = []

    async def calls(of: KubernetesApi) -> None:
        version = await cache.list(of, PODS)
        task = asyncio.create_task(cache.follow(of, PODS, version))
        try:
            await asyncio.wait_for(script.is_over.wait(), PATIENCE_S)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        asked.extend(script.asked)

    script = Script(*answers)
    run(config, script, calls)
    return asked


def test_a_kind_is_listed_once_and_watched_from_there(config: Path) -> None:
    changes: list[tuple[tuple[str, str], str]] = []
    cache = Cache(lambda *change: changes.append(change))
    bookmark = {"kind": "Pod", "apiVersion": "v1", "metadata": {"resourceVersion": "20"}}
    asked = follow(
        config,
        cache,
        ("list", ("10", [pod("a", 5), pod("b", 6)])),
        (
            "watch",
            [
                ("ADDED", pod("c", 11)),
                ("MODIFIED", pod("a", 12, managedFields=["read by none"])),
                ("MODIFIED", pod("a", 13, "Running")),
                ("BOOKMARK", bookmark),
            ],
        ),
        ("watch", [("DELETED", pod("c", 21)), None]),
        ("status", 503),
        ("watch", [("MODIFIED", pod("b", 22, "Running"))]),
    )
    versions = ["10", "20", "21", "21", "22"]
    assert asked == [("list", ""), *(("watch", version) for version in versions)]
    assert names(cache) == {"a": "Running", "b": "Running"}
    # Two of the list, a new one, two that run, and one that is gone; 12 changed nothing.
    assert changes == [(KEY, "Pod")] * 6


def test_a_version_that_is_forgotten_has_the_kind_listed_again(config: Path) -> None:
    cache = Cache(lambda *_: None)
    too_old = {"code": 410, "message": "too old resource version"}
    asked = follow(
        config,
        cache,
        ("list", ("10", [pod("a", 5), pod("b", 6)])),
        ("watch", [("ERROR", too_old)]),
        ("list", ("30", [pod("b", 25, "Running")])),
        ("status", 410),
        ("list", ("40", [])),
    )
    lists = [version for what, version in asked if what == "list"]
    assert lists == ["", "", ""]
    assert asked[-1] == ("watch", "40")
    assert not cache.entries


def test_credentials_that_are_away_for_a_while_end_nothing(
    config: Path, monkeypatch: Monkey
) -> None:
    cache = Cache(lambda *_: None)
    tries: list[int] = []

    def log_in() -> Any:
        tries.append(1)
        if len(tries) == 2:  # the first one is the connection's
            raise ConfigError("expected a service account, found none")
        return real()

    real = api.log_in
    monkeypatch.setattr(api, "log_in", log_in)
    refused = ("status", 401)
    answers = (refused, refused, ("watch", [("ADDED", pod("a", 2))]))
    follow(config, cache, ("list", ("1", [])), *answers)
    assert len(tries) == 3
    assert names(cache) == {"a": "Pending"}


def test_an_answer_to_a_write_that_comes_late_brings_nothing_back() -> None:
    cache = Cache(lambda *_: None)
    cache.note_answer(a_job(3))
    assert cache.job(KEY) is not None
    cache.note(a_job(2, status="old"))
    assert "status" not in (cache.job(KEY) or {})
    # What a watch has shown since then is that the job and a pod are gone.
    cache.note(a_job(5), is_deleted=True)
    cache.note_answer(pod("a", 4))
    cache.note(pod("a", 6), is_deleted=True)
    cache._shown |= {("PersiaJob", None): 5, ("Pod", "default"): 6}
    cache.note_answer(a_job(4, status="late"))
    cache.note_answer(pod("a", 4))
    cache.note_deletion(pod("a", 4))
    assert not cache.entries
    cache.note_answer(pod("a", 7))
    cache.note_deletion(pod("a", 4))
    assert cache.entries[KEY].children["a"]["metadata"]["deletionTimestamp"]


def test_a_job_that_was_made_again_outlives_the_end_of_the_old_one() -> None:
    cache = Cache(lambda *_: None)
    cache.note(a_job(3, "old"))
    cache.note(a_job(6, "new"))
    cache.note(a_job(5, "old"), is_deleted=True)
    assert (cache.job(KEY) or {})["metadata"]["uid"] == "new"


def test_of_children_only_what_is_read_is_kept() -> None:
    """With ten thousand pods the rest of them would be most of the operator's memory."""
    cluster = Cluster()
    cluster.settle()
    cluster.add_pod(
        "adult-income-nn-worker-0",
        "nn-worker",
        phase="Failed",
        podIP="10.0.0.1",
        containerStatuses=[
            {
                "name": "nn-worker",
                "image": "i",
                "ready": False,
                "restartCount": 1,
                "state": {"terminated": {"exitCode": 7, "reason": "Error"}},
            }
        ],
    )
    own = [one for (kind, *_), one in cluster.api.objects.items() if kind != "PersiaJob"]
    now = datetime.now(timezone.utc)

    def actions(objects: list[Any]) -> Any:
        pods = [one for one in objects if one["kind"] == "Pod"]
        rest = [one for one in objects if one["kind"] != "Pod"]
        return reconcile(cluster.job, Children(rest, pods), now)

    cluster.end("adult-income-nn-worker-0", "Failed", "BackoffLimitExceeded")
    small = [kept(one) for one in own]
    whole_actions = actions(own)
    assert actions(small) == whole_actions
    assert "exit code 7" in str(whole_actions)
    assert all(set(one.get("spec", {})) <= {"completions"} for one in small)
    assert len(str(small)) < len(str(own)) / 3
    # What it takes to delete one is there.
    assert all(one["apiVersion"] and one["metadata"]["uid"] for one in small)


def test_a_child_whose_label_changes_is_of_the_other_job_alone() -> None:
    changed: list[tuple[str, str]] = []
    cache = Cache(lambda key, _: changed.append(key))
    cache.note(pod("p", 1))
    cache.note(pod("p", 3, labels={"persia_job": "other"}))
    assert changed == [KEY, KEY, ("default", "other")]
    assert list(cache.entries) == [("default", "other")]
    cache.note(pod("p", 2))  # a late event
    assert list(cache.entries) == [("default", "other")]
    cache.note(pod("p", 4), is_deleted=True)  # by a watch that shows it as it was
    assert not cache.entries
    cache.note(pod("p", 5))
    assert list(cache.entries) == [KEY]
