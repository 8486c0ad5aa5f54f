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
