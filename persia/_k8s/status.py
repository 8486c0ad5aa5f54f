"""The status of a job: counts of its pods, and what keeps or kept them from running."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from persia._k8s.plan import ROLE_LABEL, Plan

Object = Mapping[str, Any]

# Reasons for which a container waits and does not start by itself soon.
_STUCK = (
    *("CrashLoopBackOff", "CreateContainerConfigError", "CreateContainerError"),
    *("ErrImagePull", "ErrImageNeverPull", "ImageInspectError", "ImagePullBackOff"),
    *("InvalidImageName", "RunContainerError"),
)
# Characters of a controller's message that a status keeps.
_MAX_SHOWN = 300


def condition(kind: str, is_true: bool, reason: str, message: str) -> dict[str, Any]:
    """Return a condition, less the time at which it became so."""
    state = "True" if is_true else "False"
    found = {"type": kind, "status": state, "reason": reason}
    # Kubernetes 1.20 may take an empty text for null, and refuses it.
    return {**found, "message": message} if message else found


def conditions(
    before: Sequence[Object], changed: Sequence[dict[str, Any]], now: str
) -> list[dict[str, Any]]:
    """Return the conditions after a change; one that is as it was keeps its time.

    A condition that is false, and never was true, is left out.
    """
    found = {one["type"]: dict(one) for one in before}
    for one in changed:
        old = found.get(one["type"])
        if old is None and one["status"] == "False" and one["type"] != "Accepted":
            continue
        is_same = old is not None and old["status"] == one["status"]
        time = old["lastTransitionTime"] if is_same and old is not None else now
        found[one["type"]] = {**one, "lastTransitionTime": time}
    return list(found.values())


def _containers(pod: Object) -> Sequence[Object]:
    found: Sequence[Object] = (pod.get("status") or {}).get("containerStatuses") or ()
    return found


def result_of(run: Object) -> str:
    """Return how a Job or a JobSet has ended; the empty text while it has not."""
    for found in (run.get("status") or {}).get("conditions") or ():
        if found["status"] == "True" and found["type"] in ("Complete", "Completed", "Failed"):
            return "Failed" if found["type"] == "Failed" else "Complete"
    return ""


def is_held(run: Object) -> bool:
    """Return whether a Job or a JobSet is suspended, as a queue does with those that wait."""
    found = (run.get("status") or {}).get("conditions") or ()
    return any(one["type"] == "Suspended" and one["status"] == "True" for one in found)


def replica_statuses(
    plan: Plan, pods: Sequence[Object], jobs: Sequence[Object] = ()
) -> dict[str, dict[str, int]]:
    """Return, by role, how many pods there are to be, and are.

    A Job that has ended says how its pods did: they may be read a little earlier than it, when
    they still ran, or be gone.

    Args:
        plan: Of the job.
        pods: Its pods.
        jobs: The Jobs of its current start, also those that a JobSet has made.
    """
    results = {job["metadata"]["uid"]: result_of(job) for job in jobs}
    found = {}
    for role in plan.roles:
        own = [pod for pod in pods if _role_of(pod) == role.kind.role]
        phases = [_phase_of(pod, results) for pod in own]
        done = sum(
            (job.get("spec") or {}).get("completions") or 1
            for job in jobs
            if _role_of(job) == role.kind.role and result_of(job) == "Complete"
        )
        failed = sum(
            _role_of(job) == role.kind.role and result_of(job) == "Failed" for job in jobs
        )
        succeeded = max(done, phases.count("Succeeded"))
        found[role.kind.role] = {
            "desired": role.replicas,
            "running": phases.count("Running") + succeeded,
            "ready": sum(
                _is_ready(pod)
                for pod, phase in zip(own, phases, strict=True)
                if phase == "Running"
            ),
            "succeeded": succeeded,
            "failed": max(failed, phases.count("Failed")),
            "restarts": sum(one["restartCount"] for pod in own for one in _containers(pod)),
        }
    return found


def _role_of(one: Object) -> str | None:
    label: str | None = (one["metadata"].get("labels") or {}).get(ROLE_LABEL)
    return label


def _phase_of(pod: Object, results: Mapping[str, str]) -> str | None:
    """Return a pod's phase, or that to which its Job says that it has come."""
    phase: str | None = (pod.get("status") or {}).get("phase")
    owners = pod["metadata"].get("ownerReferences", ())
    ends = {results.get(owner["uid"]) for owner in owners}
    if phase in ("Succeeded", "Failed"):
        return phase
    if "Complete" in ends:
        return "Succeeded"
    return "Failed" if "Failed" in ends else phase


def _is_ready(pod: Object) -> bool:
    return any(
        one["type"] == "Ready" and one["status"] == "True"
        for one in (pod.get("status") or {}).get("conditions") or ()
    )


def problems(plan: Plan, pods: Sequence[Object]) -> Iterator[str]:
    """Yield what keeps pods from running, the gravest first: one line for each pod."""
    order = {role.kind.role: number for number, role in enumerate(plan.roles)}
    for pod in sorted(
        pods,
        key=lambda pod: (
            order.get(_role_of(pod) or "", 0),
            pod["metadata"]["name"],
        ),
    ):
        name = pod["metadata"]["name"]
        for one in _containers(pod):
            waiting = (one.get("state") or {}).get("waiting") or {}
            last = (one.get("lastState") or {}).get("terminated") or {}
            if waiting.get("reason") in _STUCK:
                why = waiting.get("message") or ""
                ended = f" after {_end_of(last)}" if last else ""
                yield _line(name, f"{waiting['reason']}{ended}", why)
            elif last.get("reason") == "OOMKilled" and not one.get("ready"):
                yield _line(name, _end_of(last), "its container was started again")
        for found in (pod.get("status") or {}).get("conditions") or ():
            if found["type"] == "PodScheduled" and found["status"] == "False":
                yield _line(name, found.get("reason", ""), found.get("message", ""))


def failure(run: Object, pods: Sequence[Object]) -> tuple[str, str]:
    """Return why a Job or JobSet has failed: a reason in one word, and a line.

    The end of a container says more than the Job, if one failed.
    """
    name = run["metadata"]["name"]
    (found,) = (
        one
        for one in run["status"]["conditions"]
        if one["type"] == "Failed" and one["status"] == "True"
    )
    for pod in pods:
        owners = pod["metadata"].get("ownerReferences", ())
        if not any(owner["uid"] == run["metadata"].get("uid") for owner in owners):
            continue
        status = pod.get("status") or {}
        for one in _containers(pod):
            ended = (one.get("state") or {}).get("terminated") or {}
            if ended.get("exitCode"):
                return ended.get("reason") or "Error", f"{name}: {_end_of(ended)}"
        if status.get("phase") == "Failed" and status.get("reason"):  # such as Evicted
            return status["reason"], _line(name, status["reason"], status.get("message", ""))
    reason = found.get("reason") or "Failed"
    return reason, _line(name, reason, found.get("message", ""))


def _end_of(terminated: Object) -> str:
    reason = terminated.get("reason") or "Error"
    return f"{reason}, exit code {terminated.get('exitCode')}"


def _line(name: str, reason: str, message: str) -> str:
    text = ": ".join(filter(None, (name, reason, " ".join(message.split()))))
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
