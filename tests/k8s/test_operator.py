"""What the operator remembers, and that its files in deploy/ are whole."""

from __future__ import annotations

import asyncio
import base64
import copy
import io
import json
import os
import signal
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("kopf")

from aiohttp import ClientSession, web

from persia._k8s.api import JOB_KIND, ApiError, KubernetesApi, path_of
from persia._k8s.cache import Cache
from persia._k8s.operator import (
    _AT_ONCE,
    Operator,
    _together,
    carry_out,
    new_keys,
    watched,
)
from persia._k8s.plan import plan_job
from persia._k8s.reconcile import (
    Children,
    Create,
    CreateKeys,
    Delete,
    Settings,
    WriteStatus,
    reconcile,
)
from persia._k8s.spec import read_job
from tests.k8s.cluster import KINDS, Cluster
from tests.k8s.http_api import run
from tests.k8s.memory_api import MemoryApi
from tests.k8s.scale import MOST_CREATE_S, MOST_REQUESTS, meets_goals
from tests.k8s.scale_child import measure
from tests.k8s.schemas import check
from tests.k8s.specs import original
from tests.support.fixtures import Monkey
from tests.support.processes import ROOT


def test_kinds_are_those_that_the_cluster_has() -> None:
    assert ("policy/v1beta1", "PodDisruptionBudget") in watched((1, 20), False)
    assert ("jobset.x-k8s.io/v1alpha2", "JobSet") not in watched((1, 20), False)
    assert ("policy/v1", "PodDisruptionBudget") in watched((1, 21), True)


def test_a_late_event_does_not_undo_a_newer_one() -> None:
    async def play() -> None:
        cluster = Cluster()
        operator = Operator(cluster.api, Settings(), KINDS)
        await operator.list_all()
        await operator.settle()
        before = list(cluster.api.writes)
        old = {**cluster.job, "status": {}}
        old["metadata"] = {**old["metadata"], "resourceVersion": "0"}
        operator.cache.note(old)
        await operator.settle()
        assert cluster.api.writes == before

    asyncio.run(play())


def test_changes_of_pods_are_gathered(monkeypatch: Monkey) -> None:
    monkeypatch.setattr("persia._k8s.operator._GATHER_S", 0.05)

    async def play() -> None:
        cluster = Cluster()
        operator = Operator(cluster.api, Settings(), KINDS)
        await operator.list_all()
        await operator.settle()
        cluster.add_pod("adult-income-nn-worker-0", "nn-worker", phase="Running")
        (pod,) = cluster.api.of("Pod").values()
        before = len(cluster.api.writes)
        for number in range(20):
            operator.cache.note({**pod, "status": {"phase": "Running", "message": f"{number}"}})
        await operator.settle()
        assert len(cluster.api.writes) == before
        end = asyncio.get_running_loop().time() + 10
        while len(cluster.api.writes) == before:
            assert asyncio.get_running_loop().time() < end
            await asyncio.sleep(0.01)
            await operator.settle()
        assert cluster.api.writes[before:] == [("replace", "PersiaJob", "adult-income")]

    asyncio.run(play())


def test_objects_are_created_together_but_keys_before_them() -> None:
    cluster = Cluster()
    job = cluster.job
    actions = reconcile(job, Children(), datetime.now(timezone.utc))
    groups = list(_together(actions))
    assert [one for several in groups for one in several] == actions
    assert max(len(several) for several in groups) == 12  # all that it takes, but its keys
    many = [Create({})] * (2 * _AT_ONCE + 1)
    assert [len(several) for several in _together(many)] == [_AT_ONCE, _AT_ONCE, 1]
    kinds = [{type(one) for one in several} for several in groups]
    assert all(len(found) == 1 for found in kinds)
    assert kinds.index({CreateKeys}) < kinds.index({Create})


def test_an_event_of_a_deleted_child_has_it_created_again() -> None:
    async def play() -> None:
        cluster = Cluster()
        operator = Operator(cluster.api, Settings(), KINDS)
        await operator.list_all()
        await operator.settle()
        service = cluster.api.objects.pop(("Service", "default", "adult-income-nn-worker"))
        operator.cache.note(service, is_deleted=True)
        await operator.settle()
        assert "adult-income-nn-worker" in cluster.api.of("Service")
        # Of a job that is gone, with its children, nothing is remembered.
        for one in list(cluster.api.objects.values()):
            operator.cache.note(one, is_deleted=True)
        assert not await operator.step(("default", "adult-income"))
        assert not operator.cache.entries
        assert not operator._memory

    asyncio.run(play())


def test_a_job_that_changes_while_it_is_reconciled_is_looked_at_once_more() -> None:
    async def play() -> None:
        cluster = Cluster()
        operator = Operator(cluster.api, Settings(), KINDS)
        await operator.list_all()
        begun, go, done = asyncio.Event(), asyncio.Event(), asyncio.Event()
        steps: list[Any] = []

        async def step(key: Any) -> bool:
            steps.append(key)
            begun.set()
            await go.wait()
            if len(steps) == 2:
                done.set()
            return False

        operator.step = step  # type: ignore[method-assign]
        queues = (operator._new, *[operator._others] * 2)
        workers = [asyncio.create_task(operator.work(queue)) for queue in queues]
        await begun.wait()
        for number in range(3):
            operator.cache.note({**cluster.job, "status": {"restarts": number}})
        assert operator._new.empty()  # the worker that has it sees to it
        assert operator._others.empty()
        assert len(steps) == 1
        go.set()
        await asyncio.wait_for(done.wait(), 20)
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        assert len(steps) == 2

    asyncio.run(play())


def test_jobs_that_run_do_not_wait_for_new_ones() -> None:
    async def play() -> None:
        cluster = Cluster()
        operator = Operator(cluster.api, Settings(), KINDS)
        for number in range(50):
            one = original()
            one["metadata"]["name"] = f"new-{number}"
            cluster.api.put(one)
        cluster.job["status"] = {"phase": "Running"}
        await operator.list_all()
        begun, seen = asyncio.Event(), asyncio.Event()

        async def step(key: Any) -> bool:
            if key[1] == "adult-income":
                seen.set()
                return False
            begun.set()
            await asyncio.sleep(60)  # creates its objects
            return True

        operator.step = step  # type: ignore[method-assign]
        workers = [
            asyncio.create_task(operator.work(queue))
            for queue in (operator._new, operator._others)
        ]
        await asyncio.wait_for(begun.wait(), 20)
        await asyncio.wait_for(seen.wait(), 20)
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)

    asyncio.run(play())


def test_why_jobs_have_no_pods_is_asked_once_for_all_and_of_none_just_created() -> None:
    cluster = Cluster()
    other = original()
    other["metadata"]["name"] = "other"
    cluster.api.put(other)
    lists: list[str] = []

    async def counted(api_version: str, kind: str, *given: Any, **query: str) -> Any:
        lists.append(kind)
        return await plain(api_version, kind, *given, **query)

    plain = cluster.api.list
    cluster.api.list = counted  # type: ignore[assignment,method-assign]
    # Created by this reconciliation, and looked at once more in it.
    now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    cluster.api.created_at = now
    cluster.settle()
    assert len(cluster.api.of("Job")) == 14
    assert "Event" not in lists
    for one in cluster.api.of("Job").values():
        one["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
    cluster.reconcile()
    assert lists.count("Event") == 1


def test_a_question_that_fails_stops_nothing_and_the_job_is_read_after_it() -> None:
    async def play() -> None:
        cluster = Cluster()
        operator = Operator(cluster.api, Settings(), KINDS)
        await operator.list_all()
        await operator.settle()
        plain = cluster.api.list

        async def away(api_version: str, kind: str, *given: Any, **query: str) -> Any:
            if kind != "Event":
                return await plain(api_version, kind, *given, **query)
            cluster.change(suspend=True)
            operator.cache.note(copy.deepcopy(cluster.job))
            raise ApiError("GET /api/v1/namespaces/default/events: TimeoutError", 0)

        cluster.api.list = away  # type: ignore[assignment,method-assign]
        operator._memory.clear()
        operator._failures.clear()
        assert await operator.step(("default", "adult-income"))
        assert cluster.status["phase"] == "Suspended"

    asyncio.run(play())


@pytest.mark.parametrize("num_namespaces", [0, 15])  # 15: more watches than 100
def test_the_operator_lists_watches_and_ends_by_a_signal(
    tmp_path: Path, monkeypatch: Monkey, num_namespaces: int
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    namespaces = [f"team-{number}" for number in range(num_namespaces)]
    kinds = (JOB_KIND, *KINDS)
    within: list[str | None] = [*namespaces] or [None]
    places = [path_of(*kind, of) for of in within for kind in kinds]
    asked: list[str] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        asked.append(f"{request.path} {request.query.get('resourceVersion', '')}")
        if "watch" not in request.query:
            return web.json_response({"items": [], "metadata": {"resourceVersion": "7"}})
        if len(asked) == 2 * len(places):
            os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(60)
        raise AssertionError(request.path)

    async def calls(api: KubernetesApi) -> None:
        operator = Operator(api, Settings(), KINDS, namespaces)
        await asyncio.wait_for(operator.run(api), 30)

    run(tmp_path / "config", handler, calls)
    assert sorted(asked) == sorted(f"{path} {of}" for path in places for of in ("", "7"))


def test_a_signal_ends_the_operator_while_it_lists(tmp_path: Path, monkeypatch: Monkey) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    asked: list[str] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        asked.append(request.path)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(60)
        raise AssertionError(request.path)

    async def calls(api: KubernetesApi) -> None:
        await asyncio.wait_for(Operator(api, Settings(), KINDS).run(api), 20)

    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as for the first of a container
    try:
        run(tmp_path / "config", handler, calls)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert asked == [path_of(*JOB_KIND, None)]


def test_a_failure_of_the_api_is_no_refusal_of_an_object() -> None:
    api, cache = MemoryApi(), Cache(lambda *_: None)
    job = api.put(original())
    meta = {"name": "s", "namespace": "default"}
    service = {"apiVersion": "v1", "kind": "Service", "metadata": meta}

    def run(*actions: Create | Delete | WriteStatus) -> dict[tuple[str, str], str]:
        return asyncio.run(carry_out(api, job, actions, cache))

    api.refuses["Service"] = (422, "invalid")
    assert run(Create(service)) == {("Service", "s"): "invalid"}
    for status in (500, 0):
        api.refuses["Service"] = (status, "away")
        with pytest.raises(ApiError):
            run(Create(service))
    api.refuses.clear()
    assert run(Create(service), Create(service)) == {}
    made = api.of("Service")["s"]
    gone = {**made, "metadata": {**made["metadata"], "name": "gone", "uid": "another"}}
    assert run(Delete(made), Delete(gone)) == {}
    job["metadata"]["resourceVersion"] = "1"
    asyncio.run(api.replace({**job, "status": {"phase": "x"}}, "status"))
    stale = {**job, "metadata": {**job["metadata"], "resourceVersion": "0"}}
    with pytest.raises(ApiError, match="Conflict"):
        asyncio.run(carry_out(api, stale, [WriteStatus({})], cache))


def test_an_object_that_the_api_does_not_delete_stays_as_it_is_known(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def play() -> None:
        cluster = Cluster()
        operator = Operator(cluster.api, Settings(), KINDS)
        await operator.list_all()
        await operator.settle()
        for status, is_going in ((409, False), (404, True)):

            async def refuse(found: Any, status: int = status) -> None:
                raise ApiError(f"refused: {status}", status)

            cluster.api.delete = refuse  # type: ignore[method-assign]
            (job, *_) = cluster.api.of("Job").values()
            await carry_out(cluster.api, cluster.job, [Delete(job)], operator.cache)
            known = operator.cache.entries["default", "adult-income"].of(job)
            assert known is not None
            assert ("deletionTimestamp" in known["metadata"]) == is_going

    asyncio.run(play())
    assert [one.getMessage() for one in caplog.records] == ["refused: 409"]


def test_new_keys_are_those_that_roles_mount() -> None:
    plan = plan_job(read_job(original()), keys_secret="keys")
    secret, other = new_keys(plan), new_keys(plan)
    check(secret)
    assert secret["data"] != other["data"]
    assert all(len(base64.b64decode(text).strip()) == 40 for text in secret["data"].values())


def test_of_what_is_measured_a_creation_is_a_step_without_a_status(monkeypatch: Monkey) -> None:
    monkeypatch.setattr(ClientSession, "_request", ClientSession._request)  # to be restored
    for name in ("queue", "step"):
        monkeypatch.setattr(Operator, name, getattr(Operator, name))
    log = io.StringIO()
    measure(log)
    cluster = Cluster()
    cluster.settle()
    cluster.settle()
    kinds = [json.loads(line)[0] for line in log.getvalue().splitlines()]
    assert kinds.count("create") == 1
    assert kinds.count("reconcile") == kinds.count("latency") > 2
    rows = [("create", 0.0, MOST_CREATE_S), *[("reconcile", 0.0, 0.001)] * 10_000]
    assert not meets_goals("created", rows, most_mb=1.0, each_s=0.0)
    assert meets_goals("created", [("create", 0.0, 0.1), *rows[1:]], most_mb=1.0, each_s=0.0)
    assert meets_goals("restarted", rows[1:], most_mb=1.0, each_s=0.0)
    assert not meets_goals("restarted", rows[1:], most_mb=1.0, each_s=MOST_REQUESTS)


def test_the_files_in_deploy_are_valid_and_ask_for_no_more_than_is_used() -> None:
    folder = ROOT / "deploy"
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    objects = [
        one
        for name in kustomization["resources"]
        for one in yaml.safe_load_all((folder / name).read_text())
    ]
    for one in objects:
        check(one)
    (role,) = (one for one in objects if one["kind"] == "ClusterRole")
    allowed = {
        (resource, verb)
        for rule in role["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    resources = {resource for resource, _ in allowed}
    assert {verb for of, verb in allowed if of == "secrets"} == {"create"}
    assert {verb for of, verb in allowed if of == "pods"} == {"list", "watch"}
    assert not {"pods/exec", "pods/log", "serviceaccounts/token", "*"} & resources
    assert "*" not in {verb for _, verb in allowed}
