"""What a status says of pods that do not run."""

from __future__ import annotations

from typing import Any

from persia._k8s.plan import plan_job
from persia._k8s.spec import read_job
from persia._k8s.status import condition, conditions, problems, replica_statuses
from tests.k8s.specs import original

PLAN = plan_job(read_job(original()))


def pod(name: str, role: str = "nn-worker", **status: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "labels": {"persia_role": role}}, "status": status}


def waiting(reason: str, message: str = "", **more: Any) -> dict[str, Any]:
    state = {"waiting": {"reason": reason, "message": message}}
    return {"restartCount": 3, "state": state, **more}


def test_what_keeps_pods_from_running_is_named_servers_first() -> None:
    unscheduled = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "0/2 nodes are available:\n 2 Insufficient memory.",
    }
    killed = {"terminated": {"reason": "OOMKilled", "exitCode": 137}}
    pods = [
        pod("t-0", containerStatuses=[waiting("ContainerCreating")]),
        pod("t-1", containerStatuses=[waiting("ErrImagePull", "no such image")]),
        pod("s-0", "embedding-parameter-server", conditions=[unscheduled]),
        pod(
            "s-1",
            "embedding-parameter-server",
            containerStatuses=[waiting("CrashLoopBackOff", "back-off", lastState=killed)],
        ),
        pod(
            "w-0",
            "embedding-worker",
            containerStatuses=[{"restartCount": 1, "lastState": killed}],
        ),
    ]
    assert list(problems(PLAN, pods)) == [
        "s-0: Unschedulable: 0/2 nodes are available: 2 Insufficient memory.",
        "s-1: CrashLoopBackOff after OOMKilled, exit code 137: back-off",
        "w-0: OOMKilled, exit code 137: its container was started again",
        "t-1: ErrImagePull: no such image",
    ]
    long = pod("t", containerStatuses=[waiting("ErrImagePull", "x" * 1000)])
    assert [len(line) for line in problems(PLAN, [long])] == [303]


def test_pods_are_counted_by_role() -> None:
    ready = {"type": "Ready", "status": "True"}
    pods = [
        pod(
            "t-0", phase="Running", conditions=[ready], containerStatuses=[{"restartCount": 2}]
        ),
        pod("t-1", phase="Succeeded"),
        pod("t-2", phase="Failed"),
        pod("t-3"),
    ]
    assert replica_statuses(PLAN, pods)["nn-worker"] == {
        "desired": 2,
        "running": 2,
        "ready": 1,
        "succeeded": 1,
        "failed": 1,
        "restarts": 2,
    }


def job(name: str, role: str = "nn-worker", how: str = "", **spec: Any) -> dict[str, Any]:
    ended = [{"type": how, "status": "True", "reason": "", "message": ""}] if how else []
    meta = {"name": name, "uid": f"uid-{name}", "labels": {"persia_role": role}}
    return {"kind": "Job", "metadata": meta, "spec": spec, "status": {"conditions": ended}}


def test_a_job_that_has_ended_counts_its_pods_before_they_are_seen_to_have() -> None:
    ready = {"type": "Ready", "status": "True"}
    pods = [
        pod("t-0", phase="Succeeded"),
        pod("t-1", phase="Running", conditions=[ready]),
        pod("s-0", "embedding-parameter-server", phase="Running", conditions=[ready]),
        pod("s-1", "embedding-parameter-server", phase="Running"),
    ]
    for one in pods:
        one["metadata"]["ownerReferences"] = [{"uid": f"uid-{one['metadata']['name']}"}]
    server = "embedding-parameter-server"
    jobs = [job("t-0", how="Complete"), job("t-1", how="Complete")]
    jobs += [job("s-0", server, how="Failed"), job("s-1", server)]
    found = replica_statuses(PLAN, pods, jobs)
    done = {"ready": 0, "restarts": 0, "desired": 2}
    assert found["nn-worker"] == {**done, "running": 2, "succeeded": 2, "failed": 0}
    assert found[server] == {**done, "running": 1, "succeeded": 0, "failed": 1}
    # Pods that are gone, and an Indexed Job of all pods of a role.
    assert replica_statuses(PLAN, [], jobs)["nn-worker"]["succeeded"] == 2
    whole = [job("t", how="Complete", completions=2)]
    assert replica_statuses(PLAN, [], whole)["nn-worker"]["succeeded"] == 2


def test_a_condition_keeps_the_time_at_which_it_became_so() -> None:
    first = conditions([], [condition("Accepted", True, "Valid", "")], "t1")
    again = conditions(first, [condition("Accepted", True, "Valid", "")], "t2")
    assert again == first
    # What never was true is not said to be false.
    assert conditions(first, [condition("Failed", False, "x", "")], "t2") == first
    suspended = conditions(first, [condition("Suspended", True, "Suspended", "")], "t2")
    (_, found) = conditions(suspended, [condition("Suspended", False, "Resumed", "")], "t3")
    assert found == {
        "type": "Suspended",
        "status": "False",
        "reason": "Resumed",
        "lastTransitionTime": "t3",
    }
