"""A job from its creation to its end, whatever happens in between."""

from __future__ import annotations

import re
from collections import Counter
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia import env
from persia._k8s import operator
from persia._k8s.reconcile import Children, Create, Delete, WriteStatus, reconcile
from tests.k8s.cluster import Cluster
from tests.k8s.memory_api import Killed
from tests.k8s.specs import jobs
from tests.support.profiles import tries

ALL = {"NetworkPolicy": 1, "PodDisruptionBudget": 1, "Service": 3, "Job": 7, "Secret": 1}


def kinds(cluster: Cluster) -> dict[str, int]:
    found = Counter(kind for kind, *_ in cluster.api.objects)
    return {kind: number for kind, number in found.items() if kind in ALL}


def test_a_job_is_created_once_and_a_second_look_writes_nothing() -> None:
    cluster = Cluster()
    cluster.settle()
    assert kinds(cluster) == ALL
    assert cluster.status["phase"] == "Pending"
    assert cluster.conditions() == {"Accepted": "True"}
    before = list(cluster.api.writes)
    cluster.settle()
    assert cluster.api.writes == before
    (event,) = cluster.api.of("Event").values()
    assert event["reason"] == "VariableIgnored"


@given(jobs())
@tries(40)
def test_any_valid_job_is_at_rest_after_its_creation(document: dict[str, Any]) -> None:
    cluster = Cluster()
    cluster.api.objects.clear()
    cluster.api.put(document)
    cluster.settle()
    before = len(cluster.api.writes)
    cluster.settle()
    assert len(cluster.api.writes) == before


def test_pods_that_run_make_a_job_run_and_trainers_that_end_end_it() -> None:
    cluster = Cluster()
    cluster.settle()
    for name, one in cluster.api.of("Job").items():
        cluster.add_pod(name, one["metadata"]["labels"]["persia_role"], phase="Running")
    cluster.settle()
    assert cluster.status["phase"] == "Running"
    assert cluster.status["replicaStatuses"]["nn-worker"]["running"] == 2
    cluster.end("adult-income-nn-worker-0")
    cluster.settle()
    assert cluster.status["phase"] == "Running"
    cluster.end_trainers()
    cluster.settle()
    assert cluster.status["phase"] == "Succeeded"
    assert cluster.conditions()["Succeeded"] == "True"
    assert kinds(cluster) == ALL  # servers end by themselves


def test_the_counts_of_an_end_are_those_of_its_jobs_and_follow_the_other_roles() -> None:
    cluster = Cluster(ttlSecondsAfterFinished=100)
    cluster.settle()
    jobs = cluster.api.of("Job")
    for name, one in list(jobs.items()):
        cluster.add_pod(name, one["metadata"]["labels"]["persia_role"], phase="Running")
    cluster.end_trainers()  # the pods are still read as running
    cluster.settle()
    assert cluster.status["phase"] == "Succeeded"
    trainers = cluster.status["replicaStatuses"]["nn-worker"]
    assert (trainers["succeeded"], trainers["running"]) == (2, 2)
    completed = cluster.status["completionTime"]
    server = "embedding-parameter-server"
    assert cluster.status["replicaStatuses"][server]["succeeded"] == 0
    for number in (0, 1):
        cluster.end(f"adult-income-embedding-ps-{number}")
    cluster.settle()
    assert cluster.status["replicaStatuses"][server]["succeeded"] == 2
    assert cluster.status["completionTime"] == completed
    # What is deleted by hand stays counted.
    for kind in ("Pod", "Job"):
        for name in list(cluster.api.of(kind)):
            del cluster.api.objects[kind, "default", name]
    cluster.settle()
    assert cluster.status["replicaStatuses"]["nn-worker"]["succeeded"] == 2


def test_a_job_set_s_jobs_count_its_pods() -> None:
    cluster = Cluster(engine="jobset")
    cluster.settle()
    (whole,) = cluster.api.of("JobSet").values()
    labels = {"persia_job": "adult-income", "persia_role": "nn-worker"}
    cluster.api.put(
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {
                "name": "adult-income-nn-worker-0",
                "labels": labels,
                "ownerReferences": [{"uid": whole["metadata"]["uid"]}],
            },
            "spec": {"completions": 2},
        }
    )
    cluster.end("adult-income-nn-worker-0")
    cluster.end("adult-income", "Completed", "AllJobsCompleted", kind="JobSet")
    cluster.settle()
    assert cluster.status["phase"] == "Succeeded"
    assert cluster.status["replicaStatuses"]["nn-worker"]["succeeded"] == 2


def test_what_does_not_end_with_its_job_is_deleted_and_the_job_in_its_time() -> None:
    cluster = Cluster(ttlSecondsAfterFinished=100)
    cluster.settle()
    cluster.end_trainers()
    cluster.end("adult-income-embedding-ps-0")
    cluster.settle()
    ended = datetime.strptime(cluster.status["completionTime"], "%Y-%m-%dT%H:%M:%SZ")

    def after(seconds: float) -> list[str]:
        now = ended.replace(tzinfo=timezone.utc) + timedelta(seconds=seconds)
        children = Children(list(cluster.api.of("Job").values()))
        found = reconcile(cluster.job, children, now)
        assert all(isinstance(one, Delete) for one in found)
        return [one.object["metadata"]["name"] for one in found if isinstance(one, Delete)]

    assert after(59) == []
    assert after(61) == [
        *("adult-income-embedding-ps-1", "adult-income-embedding-worker-0"),
        *("adult-income-embedding-worker-1", "adult-income-dataloader-0"),
    ]
    assert after(101) == ["adult-income"]


def test_a_failure_is_named_by_its_container() -> None:
    cluster = Cluster()
    cluster.settle()
    terminated = {"exitCode": 137, "reason": "OOMKilled"}
    container = {"restartCount": 0, "state": {"terminated": terminated}}
    job = "adult-income-nn-worker-1"
    cluster.add_pod(job, "nn-worker", phase="Failed", containerStatuses=[container])
    cluster.end(job, "Failed", "BackoffLimitExceeded")
    cluster.settle()
    assert cluster.status["phase"] == "Failed"
    assert cluster.status["message"] == f"{job}: OOMKilled, exit code 137"
    (found,) = (one for one in cluster.status["conditions"] if one["type"] == "Failed")
    assert found["reason"] == "OOMKilled"
    # Without a pod the Job says why.
    cluster = Cluster()
    cluster.settle()
    cluster.end("adult-income-embedding-ps-0", "Failed", "DeadlineExceeded")
    cluster.settle()
    assert cluster.status["message"] == "adult-income-embedding-ps-0: DeadlineExceeded: m"


def test_a_job_is_started_again_as_often_as_it_may() -> None:
    cluster = Cluster(maxRestarts=2)
    cluster.settle()
    for attempt in (1, 2):
        old = {one["metadata"]["uid"] for one in cluster.api.of("Job").values()}
        cluster.end_trainers("Failed")
        cluster.settle()
        assert cluster.status["restarts"] == attempt
        assert cluster.status["phase"] == "Pending"
        new = cluster.api.of("Job").values()
        assert not old & {one["metadata"]["uid"] for one in new}
        assert {one["metadata"]["labels"]["persia_attempt"] for one in new} == {str(attempt)}
        assert kinds(cluster) == ALL
    cluster.end_trainers("Failed")
    cluster.settle()
    assert (cluster.status["phase"], cluster.status["restarts"]) == ("Failed", 2)


def test_a_new_job_waits_until_the_old_one_of_its_name_is_gone() -> None:
    cluster = Cluster(maxRestarts=1)
    cluster.settle()
    cluster.end_trainers("Failed")
    for _ in range(3):
        cluster.reconcile()  # nothing is collected: pods of the old attempt still run
    assert all("deletionTimestamp" in one["metadata"] for one in cluster.api.of("Job").values())
    cluster.settle()
    assert kinds(cluster) == ALL


def run_ids(cluster: Cluster) -> set[str]:
    return {
        one["value"]
        for job in cluster.api.of("Job").values()
        for one in job["spec"]["template"]["spec"]["containers"][0]["env"]
        if one["name"] == env.run_id.name
    }


def test_a_suspended_job_has_no_jobs_and_resumes_with_what_it_says_then() -> None:
    cluster = Cluster()
    cluster.settle()
    before = run_ids(cluster)
    cluster.change(suspend=True)
    cluster.settle()
    assert "Job" not in kinds(cluster)
    assert cluster.status["phase"] == "Suspended"
    assert cluster.conditions()["Suspended"] == "True"
    assert (cluster.status["suspensions"], cluster.status["restarts"]) == (1, 0)
    server = {**cluster.job["spec"]["embeddingParameterServer"], "replicas": 3}
    cluster.change(suspend=False, embeddingParameterServer=server)
    cluster.settle()
    assert kinds(cluster) == {**ALL, "Job": 8}
    (budget,) = cluster.api.of("PodDisruptionBudget").values()
    assert budget["spec"]["minAvailable"] == 5
    assert cluster.conditions()["Suspended"] == "False"
    # It begins again, so what servers wrote before is not theirs.
    assert len(before) == len(run_ids(cluster)) == 1
    assert before != run_ids(cluster)


def test_a_job_that_is_resumed_while_it_is_stopped_is_not_half_of_each_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(operator, "_AT_ONCE", 2)  # of seven Jobs that are deleted
    cluster = Cluster()
    cluster.settle()
    old = {one["metadata"]["uid"] for one in cluster.api.of("Job").values()}
    cluster.change(suspend=True)
    cluster.api.kill_at = -(next(cluster.api._calls) + 3)
    with pytest.raises(Killed):
        cluster.reconcile()
    cluster.api.kill_at = None
    assert cluster.status["phase"] == "Suspended"
    going = [one["metadata"].get("deletionTimestamp") for one in cluster.api.of("Job").values()]
    assert any(going)
    assert not all(going)
    cluster.change(suspend=False)
    cluster.settle()
    assert not old & {one["metadata"]["uid"] for one in cluster.api.of("Job").values()}
    assert kinds(cluster) == ALL
    assert len(run_ids(cluster)) == 1


def start_and_suspend(cluster: Cluster) -> set[str]:
    """Have a job suspended while its operator creates its Jobs; returns the uids of those.

    The operator's write of the status is refused then.
    """
    plain, created = cluster.api.create, []

    async def create(found: Any) -> Any:
        created.append(found["kind"])
        if created.count("Job") == 4:
            cluster.change(suspend=True)
        return await plain(found)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster.api, "create", create)
        cluster.reconcile()
    assert created.count("Job") == 7
    return {one["metadata"]["uid"] for one in cluster.api.of("Job").values()}


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("is_killed", [True, False])
def test_a_start_whose_status_was_not_written_is_a_start_too(
    monkeypatch: pytest.MonkeyPatch, is_first: bool, is_killed: bool
) -> None:
    monkeypatch.setattr(operator, "_AT_ONCE", 2)
    cluster = Cluster(suspend=not is_first)
    if not is_first:
        cluster.settle()
        cluster.change(suspend=False)
    old, before = start_and_suspend(cluster), run_ids(cluster)
    assert "suspensions" not in cluster.status
    if is_killed:  # amid its deletes
        cluster.api.kill_at = -(next(cluster.api._calls) + 3)
        with pytest.raises(Killed):
            cluster.reconcile()
        cluster.api.kill_at = None
    else:
        cluster.settle()
        assert "Job" not in kinds(cluster)
        assert cluster.status["phase"] == "Suspended"
    cluster.change(suspend=False)
    cluster.settle()
    assert kinds(cluster) == ALL
    assert not old & {one["metadata"]["uid"] for one in cluster.api.of("Job").values()}
    assert len(before) == len(run_ids(cluster)) == 1
    assert before != run_ids(cluster)
    assert cluster.status["suspensions"] == 1


def test_a_job_that_is_created_suspended_has_not_been_stopped() -> None:
    cluster = Cluster(suspend=True)
    cluster.settle()
    assert cluster.status["phase"] == "Suspended"
    assert "suspensions" not in cluster.status


def test_a_change_of_a_running_job_is_said_to_need_a_new_start() -> None:
    cluster = Cluster()
    cluster.settle()
    before = cluster.shape()
    cluster.change(logLevel="info")
    cluster.settle()
    assert cluster.conditions()["SpecChanged"] == "True"
    assert cluster.status["message"].startswith("suspend the job and resume it")
    del before["PersiaJob", "adult-income"]
    assert {key: one for key, one in cluster.shape().items() if key in before} == before
    cluster.change(logLevel="debug", maxRestarts=7)
    cluster.settle()
    assert cluster.conditions()["SpecChanged"] == "False"


def test_a_job_that_cannot_be_read_says_why_until_it_can() -> None:
    cluster = Cluster(env=[{"name": "A", "value": 3}])
    cluster.settle()
    assert kinds(cluster) == {}
    assert cluster.conditions() == {"Accepted": "False"}
    assert "spec.env[0].value: expected a string, got 3" in cluster.status["message"]
    cluster.change(env=[])
    cluster.settle()
    assert kinds(cluster) == ALL
    assert cluster.conditions()["Accepted"] == "True"


def test_what_is_deleted_by_hand_is_created_again() -> None:
    cluster = Cluster()
    cluster.settle()
    before = cluster.shape()
    for kind in ("Job", "Service", "NetworkPolicy"):
        name = next(iter(cluster.api.of(kind)))
        del cluster.api.objects[kind, "default", name]
    cluster.settle()
    assert cluster.shape() == before


def test_an_object_of_another_s_is_left_alone_and_named() -> None:
    cluster = Cluster()
    name = "adult-income-nn-worker"
    labels = {"persia_job": "adult-income"}
    meta = {"name": name, "labels": labels}
    foreign = cluster.api.put({"apiVersion": "v1", "kind": "Service", "metadata": meta})
    cluster.settle()
    assert cluster.api.of("Service")[name]["metadata"]["uid"] == foreign["metadata"]["uid"]
    assert cluster.status["message"] == f"Service {name} is there and not of this job"


def test_what_the_api_refuses_is_the_message() -> None:
    cluster = Cluster()
    cluster.api.refuses["Job"] = (403, "exceeded quota: team, requested: count/jobs.batch=1")
    cluster.reconcile()
    assert "exceeded quota: team" in cluster.status["message"]
    cluster.api.refuses.clear()
    cluster.settle()
    assert kinds(cluster) == ALL
    assert "message" not in cluster.status


def test_a_quota_that_pods_exceed_is_the_message() -> None:
    cluster = Cluster()
    cluster.settle()
    job = cluster.api.of("Job")["adult-income-embedding-ps-1"]
    why = 'pods "x" is forbidden: exceeded quota: team'
    cluster.api.put(
        {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": "e"},
            "involvedObject": {"kind": "Job", "uid": job["metadata"]["uid"]},
            "reason": "FailedCreate",
            "message": why,
        }
    )
    cluster.settle()
    assert cluster.status["message"] == f"adult-income-embedding-ps-1: {why}"


def test_a_job_that_is_deleted_takes_everything_with_it() -> None:
    cluster = Cluster()
    cluster.settle()
    assert "finalizers" not in cluster.job["metadata"]
    cluster.job["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    before = len(cluster.api.writes)
    cluster.reconcile()
    assert len(cluster.api.writes) == before
    cluster.api.collect()
    assert set(cluster.api.objects) == {
        ("Event", "default", name) for name in cluster.api.of("Event")
    }


def test_two_jobs_in_a_namespace_have_objects_of_their_own() -> None:
    cluster = Cluster()
    other = {**cluster.job, "metadata": {"name": "other", "namespace": "default"}}
    cluster.api.put(other)
    cluster.settle()
    assert kinds(cluster) == {kind: 2 * number for kind, number in ALL.items()}


def test_a_job_set_decides_by_itself_how_it_ends() -> None:
    for how, phase in (("Completed", "Succeeded"), ("Failed", "Failed")):
        cluster = Cluster(engine="jobset", maxRestarts=3)
        cluster.settle()
        assert list(cluster.api.of("JobSet")) == ["adult-income"]
        assert "Job" not in kinds(cluster)
        cluster.end("adult-income", how, "AllJobsCompleted", kind="JobSet")
        cluster.settle()
        assert (cluster.status["phase"], cluster.status["restarts"]) == (phase, 0)


# --- an operator that is killed ---------------------------------------------------------------

# What happens to a job, one after the other; the operator works in between.
STORIES = {
    "to its end": ["end"],
    "restarted": ["fail", "end"],
    "fails": ["fail", "fail"],
    "suspended": ["suspend", "resume", "end"],
    "changed while suspended": ["suspend", "change", "resume", "fail"],
}


def play(story: list[str], kill_at: int | None) -> tuple[dict[Any, Any], str, int]:
    """Return the shape and phase at the end, and how many calls were made."""
    cluster = Cluster(maxRestarts=1)
    cluster.api.kill_at = kill_at
    calls = 0

    def work() -> None:
        try:
            cluster.settle()
        except Killed:
            cluster.api.kill_at = None
            cluster.settle()

    def happen(what: str) -> None:
        if what == "end":
            cluster.end_trainers()
        elif what == "fail":
            cluster.end("adult-income-nn-worker-1", "Failed")
        elif what == "change":
            cluster.change(logLevel="info")
        else:
            cluster.change(suspend=what == "suspend")

    work()
    for what in story:
        happen(what)
        work()
    calls = next(cluster.api._calls) - 1
    shape = {key: one for key, one in cluster.shape().items() if key[0] != "Secret"}
    # Keys that are made belong to the job's uid, which is the same in each play.
    secrets = sorted(cluster.api.of("Secret"))
    return {**shape, "secrets": secrets}, cluster.status["phase"], calls


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_an_operator_killed_at_any_call_leaves_the_next_one_the_same_objects(
    story: list[str],
) -> None:
    shape, phase, calls = play(story, None)
    assert calls > 14
    for number in range(1, calls + 1):
        for kill_at in (number, -number):
            assert play(story, kill_at)[:2] == (shape, phase), kill_at


@given(st.lists(st.sampled_from(["suspend", "resume", "fail", "change", "delete"]), max_size=5))
@tries(40)
def test_any_course_of_events_comes_to_rest(story: list[str]) -> None:
    cluster = Cluster(maxRestarts=3)
    for what in story:
        cluster.reconcile()
        running = cluster.api.of("Job")
        if what == "fail" and "adult-income-nn-worker-1" in running:
            cluster.end("adult-income-nn-worker-1", "Failed")
        elif what == "change":
            cluster.change(logLevel="info")
        elif what == "delete":
            cluster.api.collect()
        elif what in ("suspend", "resume"):
            cluster.change(suspend=what == "suspend")
    cluster.settle()
    cluster.change(suspend=False)
    cluster.settle()
    names = {re.sub(r"\d+$", "", name) for name in cluster.api.of("Job")}
    assert len(names) == 4


def test_the_first_look_creates_before_it_says_so() -> None:
    cluster = Cluster()
    actions = reconcile(cluster.job, Children(), datetime.now(timezone.utc))
    assert isinstance(actions[-1], WriteStatus)
    assert sum(isinstance(one, Create) for one in actions) == 12
