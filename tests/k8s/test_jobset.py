"""The JobSet of a job, by what JobSet's documents say."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("kopf")

from persia import env
from persia._k8s.jobset import objects
from persia._k8s.plan import plan_job
from persia._k8s.spec import read_job
from tests.k8s.cluster import Cluster
from tests.k8s.jobset_stand_in import JobSetStandIn
from tests.k8s.memory_api import MemoryApi
from tests.k8s.specs import original
from tests.support.fixtures import Monkey


def job_set(**changes: Any) -> Any:
    document = original(**changes)
    document["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "team"}
    return objects(plan_job(read_job(document), "jobset"))[-1]


def test_each_role_is_one_indexed_job_of_all_its_pods() -> None:
    found = job_set()
    assert found["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    jobs = {one["name"]: one for one in found["spec"]["replicatedJobs"]}
    assert list(jobs) == ["embedding-ps", "embedding-worker", "nn-worker", "dataloader"]
    for one in jobs.values():
        spec = one["template"]["spec"]
        assert one["replicas"] == 1
        assert spec["parallelism"] == spec["completions"]
        assert spec["completionMode"] == "Indexed"
        assert "dependsOn" not in one
        # JobSet sets host name and subdomain.
        assert not {"hostname", "subdomain"} & spec["template"]["spec"].keys()
    server = jobs["embedding-ps"]["template"]["spec"]["template"]["spec"]["containers"][0]
    values = {one["name"]: one.get("value") for one in server["env"]}
    assert (values["REPLICA_INDEX"], values["REPLICA_SIZE"]) == ("auto", "2")


def test_the_trainers_decide_how_the_job_ends() -> None:
    found = job_set(maxRestarts=3, suspend=True, ttlSecondsAfterFinished=9)["spec"]
    assert found["successPolicy"] == {
        "operator": "All",
        "targetReplicatedJobs": ["nn-worker"],
    }
    assert found["failurePolicy"] == {"maxRestarts": 3}
    assert (found["suspend"], found["ttlSecondsAfterFinished"]) == (True, 9)
    assert "failurePolicy" not in job_set()["spec"]
    assert "successPolicy" not in job_set(nnWorker=None)["spec"]


# --- by JobSet's rules, as a stand-in follows them -------------------------------------------


def started(**spec: Any) -> tuple[Cluster, JobSetStandIn]:
    """A job of this engine whose JobSet the operator has created, and its controller."""
    cluster = Cluster(engine="jobset", **spec)
    cluster.reconcile()
    controller = JobSetStandIn(cluster.api, "adult-income")
    controller.step()
    return cluster, controller


def run_ids(controller: JobSetStandIn, variable: str = env.run_id.name) -> set[str]:
    """Return what processes read as the name of their run, or another variable."""
    found = set()
    for job in controller.jobs().values():
        template = job["spec"]["template"]
        values: dict[str, str] = {}
        for one in template["spec"]["containers"][0]["env"]:
            text = one.get("value", "")
            if "valueFrom" in one:
                path = one["valueFrom"]["fieldRef"]["fieldPath"]
                key = path.removeprefix("metadata.annotations['").removesuffix("']")
                text = template["metadata"]["annotations"][key]
            # A variable that is not before it stays as it is written.
            names = re.findall(r"\$\((\w+)\)", text)
            for name in set(names) & values.keys():
                text = text.replace(f"$({name})", values[name])
            values[one["name"]] = text
        assert "$(" not in values[variable]
        found.add(values[variable])
    assert len(found) == 1  # every process of a start
    return found


def end(controller: JobSetStandIn, how: str, *names: str) -> None:
    for name in names:
        controller.jobs()[f"adult-income-{name}-0"]["status"] = {
            "conditions": [{"type": how, "status": "True"}]
        }
    controller.step()


def test_every_address_is_the_name_of_a_pod_of_that_role(monkeypatch: Monkey) -> None:
    _, controller = started()
    hosts = controller.hosts()
    assert len(hosts) == 7
    for job in controller.jobs().values():
        for one in job["spec"]["template"]["spec"]["containers"][0]["env"]:
            if "value" in one:
                monkeypatch.setenv(one["name"], one["value"])
        for variable, role in (
            (env.parameter_server_addresses, "embedding-parameter-server"),
            (env.embedding_worker_addresses, "embedding-worker"),
            (env.nn_worker_addresses, "nn-worker"),
        ):
            named = [address.rpartition(":")[0] for address in variable()]
            own = [
                name
                for name, found in hosts.items()
                if found["metadata"]["labels"]["persia_role"] == role
            ]
            assert sorted(named) == sorted(own)
    assert env.master_address() == "adult-income-nn-worker-0-0.adult-income"
    assert env.master_address() in hosts


def test_the_job_has_succeeded_when_trainers_have_though_servers_run() -> None:
    cluster, controller = started()
    end(controller, "Complete", "dataloader")
    cluster.settle()
    assert cluster.status["phase"] != "Succeeded"
    end(controller, "Complete", "nn-worker")
    cluster.settle()
    assert cluster.status["phase"] == "Succeeded"


def test_a_failed_server_restarts_all_of_it_so_often_and_then_the_job_has_failed() -> None:
    cluster, controller = started(maxRestarts=2)
    runs: set[str] = set()
    job = run_ids(controller, env.job_id.name)
    for restart in (1, 2):
        before = {one["metadata"]["uid"] for one in controller.jobs().values()}
        runs |= run_ids(controller)
        end(controller, "Failed", "embedding-ps")
        assert not controller.jobs()
        controller.step()
        assert controller.status["restarts"] == restart
        assert not before & {one["metadata"]["uid"] for one in controller.jobs().values()}
        cluster.settle()
        assert cluster.status["phase"] != "Failed"
    assert len(runs | run_ids(controller)) == 3
    assert run_ids(controller, env.job_id.name) == job
    end(controller, "Failed", "nn-worker")
    cluster.settle()
    assert cluster.status["phase"] == "Failed"
    assert cluster.conditions()["Failed"] == "True"


def test_a_suspended_job_has_no_job_set_and_one_again_when_it_is_resumed() -> None:
    cluster, controller = started()
    runs, job = run_ids(controller), run_ids(controller, env.job_id.name)
    cluster.change(suspend=True)
    cluster.settle()
    assert not cluster.api.of("JobSet")
    assert not cluster.api.of("Job")
    cluster.change(suspend=False)
    cluster.settle()
    controller.step()
    assert len(controller.hosts()) == 7
    assert len(runs | run_ids(controller)) == 2
    assert run_ids(controller, env.job_id.name) == job


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ([], "a new dense net, unless the script's checkpoint_folder"),
        ([{"name": "PERSIA_RESUME_FROM", "value": "/c"}], "goes on from its newest checkpoint"),
    ],
)
def test_a_job_set_that_a_queue_suspends_and_resumes_says_so_and_where_it_goes_on(
    variables: list[dict[str, str]], text: str
) -> None:
    cluster, controller = started(env=variables)
    cluster.settle()
    assert "Suspended" not in cluster.conditions()
    job = run_ids(controller, env.job_id.name)
    controller.job_set["spec"]["suspend"] = True  # as Kueue does
    controller.step()
    cluster.settle()
    assert cluster.conditions()["Suspended"] == "True"
    assert cluster.status["message"] == "JobSet adult-income is suspended, as by a queue"
    controller.job_set["spec"]["suspend"] = False
    controller.step()
    cluster.settle()
    (found,) = (one for one in cluster.status["conditions"] if one["type"] == "Suspended")
    assert (found["status"], text in found["message"]) == ("False", True)
    assert "message" not in cluster.status
    # Its checkpoints are those of this job.
    assert run_ids(controller, env.job_id.name) == job


def test_a_rendered_job_set_that_is_created_again_is_another_run() -> None:
    runs: set[str] = set()
    jobs: set[str] = set()
    for number in (1, 2):
        api = MemoryApi()
        api.put(job_set())
        api.of("JobSet")["adult-income"]["metadata"]["uid"] = f"uid-{number}"
        controller = JobSetStandIn(api, "adult-income")
        controller.step()
        runs |= run_ids(controller)
        jobs |= run_ids(controller, env.job_id.name)
    assert len(runs) == len(jobs) == 2


def test_a_rendered_job_set_that_is_suspended_waits_for_its_queue() -> None:
    api = MemoryApi()
    api.put(job_set(suspend=True))
    controller = JobSetStandIn(api, "adult-income")
    controller.step()
    assert all(one["spec"]["suspend"] for one in controller.jobs().values())
    controller.job_set["spec"]["suspend"] = False  # as Kueue does
    controller.step()
    assert not any(one["spec"]["suspend"] for one in controller.jobs().values())
