"""The TrainJob of a job and its runtime, by what Kubeflow Trainer's documents say."""

from __future__ import annotations

import pytest

from persia._k8s.plan import plan_job
from persia._k8s.spec import read_job
from persia._k8s.trainjob import objects
from persia.errors import ConfigError
from tests.k8s.specs import original


def test_trainers_are_the_job_called_node() -> None:
    *_, runtime, train_job = objects(plan_job(read_job(original()), "trainjob"))
    jobs = {one["name"]: one for one in runtime["spec"]["template"]["spec"]["replicatedJobs"]}
    node = jobs["node"]
    labels = node["template"]["metadata"]["labels"]
    assert labels["trainer.kubeflow.org/trainjob-ancestor-step"] == "trainer"
    (container,) = node["template"]["spec"]["template"]["spec"]["containers"]
    assert container["name"] == "node"
    # Nodes and ranks are in the variables that Trainer sets, and so is where they meet.
    assert container["args"] == ["nn-worker"]
    assert not {one["name"] for one in container["env"]} & {"MASTER_ADDR", "REPLICA_INDEX"}
    for name in jobs.keys() - {"node"}:
        labels = jobs[name]["template"]["metadata"]["labels"]
        assert "trainer.kubeflow.org/trainjob-ancestor-step" not in labels
    assert runtime["spec"]["mlPolicy"] == {"numNodes": 2, "torch": {}}
    assert train_job["spec"]["trainer"] == {"numNodes": 2, "numProcPerNode": 2}
    assert train_job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert train_job["spec"]["runtimeRef"]["kind"] == runtime["kind"]


def test_a_deadline_is_the_train_job_s() -> None:
    found = objects(plan_job(read_job(original(activeDeadlineSeconds=5)), "trainjob"))[-1]
    assert found["spec"]["activeDeadlineSeconds"] == 5


def test_a_job_without_trainers_is_no_train_job() -> None:
    with pytest.raises(ConfigError, match="expected trainers for a TrainJob"):
        objects(plan_job(read_job(original(nnWorker=None)), "trainjob"))
