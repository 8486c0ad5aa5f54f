"""The JobSet of a job, by what JobSet's documents say."""

from __future__ import annotations

from typing import Any

from persia._k8s.jobset import objects
from persia._k8s.plan import plan_job
from persia._k8s.spec import read_job
from tests.k8s.specs import original


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
