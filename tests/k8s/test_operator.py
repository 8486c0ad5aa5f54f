"""What the operator remembers, and that its files in deploy/ are whole."""

from __future__ import annotations

import asyncio
import base64
from datetime import datetime, timezone
from typing import Any

import pytest
import yaml

pytest.importorskip("kopf")

from persia._k8s.api import ApiError
from persia._k8s.operator import (
    _AT_ONCE,
    Operator,
    _registry,
    _together,
    carry_out,
    kept,
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
from persia.errors import ConfigError
from tests.k8s.cluster import KINDS, Cluster
from tests.k8s.memory_api import MemoryApi
from tests.k8s.schemas import check
from tests.k8s.specs import original
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
        operator.note(old)
        await operator.settle()
        assert cluster.api.writes == before

    asyncio.run(play())


def test_a_list_does_not_undo_what_is_noted_while_it_is_read() -> None:
    """Its jobs are of its begin, and children come in parts after them."""

    async def play() -> None:
        cluster = Cluster(maxRestarts=3)
        operator = Operator(cluster.api, Settings(), KINDS)
        await operator.list_all()
        await operator.settle()

        async def restart() -> None:
            """Have a trainer fail and the operator start all again, with every event."""
            name = "adult-income-nn-worker-0"
            cluster.end(name, "Failed", "BackoffLimitExceeded")
            operator.note(cluster.api.of("Job")[name])
            for _ in range(6):
                await operator.settle()
                before = dict(cluster.api.objects)
                cluster.api.collect()
                for key in before.keys() - cluster.api.objects.keys():
                    operator.note(before[key], is_deleted=True)

        is_begun = False

        async def each(*of: Any, **query: str) -> Any:
            nonlocal is_begun
            listed = [one async for one in plain(*of, **query)]
            if not is_begun:  # by now the jobs are listed, and children of the first kind
                is_begun = True
                await restart()
            for one in listed:
                yield one

        plain = cluster.api.each
        cluster.api.each = each  # type: ignore[method-assign,assignment]
        await operator.list_all()
        assert cluster.status["restarts"] == 1
        running, before = cluster.api.of("Job"), list(cluster.api.writes)
        assert len(running) == 7
        await operator.settle()
        assert cluster.api.writes == before
        assert cluster.api.of("Job") == running

    asyncio.run(play())


def test_nothing_is_remembered_of_a_job_that_is_gone() -> None:
    key = ("default", "adult-income")

    async def play(how: str) -> None:
        cluster = Cluster()
        operator = Operator(cluster.api, Settings(), KINDS)
        cluster.api.refuses["NetworkPolicy"] = (422, "invalid")
        await operator.list_all()
        await operator.step(key)
        assert operator._refused[key]
        assert operator._asked.keys() | operator._warned.keys() == {key}
        job = cluster.job
        if how == "while it is reconciled":

            async def create(found: Any) -> Any:
                operator.note(job, is_deleted=True)
                raise ApiError("NotFound", 404)

            cluster.api.create = create  # type: ignore[method-assign]
            await operator.step(key)
        job["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        cluster.api.collect()
        if how == "by an event":
            operator.note(job, is_deleted=True)
        await operator.list_all()
        for memory in (operator._jobs, operator._children, operator._refused):
            assert not memory, how
        assert not operator._warned, how
        assert not operator._asked, how

    for how in ("by an event", "by a list", "while it is reconciled"):
        asyncio.run(play(how))


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


def test_changes_of_pods_are_gathered_and_seen_by_the_loop_that_reconciles() -> None:
    """kopf has threads call what is not async, and the queue of jobs is none of theirs."""
    registry = _registry(Operator(MemoryApi(), Settings(), KINDS), KINDS)
    handlers = list(registry._watching.get_all_handlers())
    assert len(handlers) == len(KINDS) + 1
    assert all(asyncio.iscoroutinefunction(one.fn) for one in handlers)

    async def play() -> None:
        cluster = Cluster()
        operator = Operator(cluster.api, Settings(), KINDS)
        await operator.list_all()
        await operator.settle()
        cluster.add_pod("adult-income-nn-worker-0", "nn-worker", phase="Running")
        (pod,) = cluster.api.of("Pod").values()
        before = len(cluster.api.writes)
        for _ in range(20):
            operator.note(pod)
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
    assert max(len(several) for several in groups) == _AT_ONCE
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
        operator.note(service, is_deleted=True)
        await operator.settle()
        assert "adult-income-nn-worker" in cluster.api.of("Service")
        operator.note(cluster.job, is_deleted=True)
        assert not await operator.step(("default", "adult-income"))

    asyncio.run(play())


def test_a_sweep_goes_on_when_the_credentials_are_away_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("persia._k8s.operator._SWEEP_S", 0.0)
    monkeypatch.setattr("persia._k8s.operator._LIST_S", 0.0)

    async def play() -> None:
        operator = Operator(Cluster().api, Settings(), KINDS)
        listed = asyncio.Event()
        calls = 0

        async def list_all() -> None:
            nonlocal calls
            calls += 1
            if calls == 1:  # as log_in raises it
                raise ConfigError("expected a service account, found none")
            listed.set()

        monkeypatch.setattr(operator, "list_all", list_all)
        task = asyncio.create_task(operator.sweep())
        try:
            await asyncio.wait_for(listed.wait(), 10.0)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

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
        workers = [asyncio.create_task(operator.work()) for _ in range(3)]
        await begun.wait()
        for _ in range(3):
            operator.note(cluster.job)
            while not operator._queue.empty():  # another worker takes it, and leaves it
                await asyncio.sleep(0)
        assert len(steps) == 1
        go.set()
        await asyncio.wait_for(done.wait(), 20)
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        assert len(steps) == 2

    asyncio.run(play())


def test_a_failure_of_the_api_is_no_refusal_of_an_object() -> None:
    api = MemoryApi()
    job = api.put(original())
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "s"}}

    def run(*actions: Create | Delete | WriteStatus) -> dict[tuple[str, str], str]:
        return asyncio.run(carry_out(api, job, actions))

    api.refuses["Service"] = (422, "invalid")
    assert run(Create(service)) == {("Service", "s"): "invalid"}
    for status in (500, 0):
        api.refuses["Service"] = (status, "away")
        with pytest.raises(ApiError):
            run(Create(service))
    api.refuses.clear()
    assert run(Create(service), Create(service)) == {}
    assert run(Delete(service), Delete({**service, "metadata": {"name": "gone"}})) == {}
    job["metadata"]["resourceVersion"] = "1"
    asyncio.run(api.replace({**job, "status": {"phase": "x"}}, "status"))
    stale = {**job, "metadata": {**job["metadata"], "resourceVersion": "0"}}
    with pytest.raises(ApiError, match="Conflict"):
        asyncio.run(carry_out(api, stale, [WriteStatus({})]))


def test_new_keys_are_those_that_roles_mount() -> None:
    plan = plan_job(read_job(original()), keys_secret="keys")
    secret, other = new_keys(plan), new_keys(plan)
    check(secret)
    assert secret["data"] != other["data"]
    assert all(len(base64.b64decode(text).strip()) == 40 for text in secret["data"].values())


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
