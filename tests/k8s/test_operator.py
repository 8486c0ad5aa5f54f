"""What the operator remembers, and that its files in deploy/ are whole."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import pytest
import yaml

pytest.importorskip("kopf")

from persia._k8s.api import ApiError
from persia._k8s.operator import Operator, carry_out, new_keys, watched
from persia._k8s.plan import plan_job
from persia._k8s.reconcile import Create, Delete, Settings, WriteStatus
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
