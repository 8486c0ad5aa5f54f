"""Objects of Kubernetes alone: a Job for each pod, and a headless Service for each role.

Jobs and not a StatefulSet: pods of a role end by themselves, with a status, and what has ended
with 0 is not started again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from persia._k8s.plan import Plan, RolePlan
from persia._k8s.pods import (
    disruption_budget,
    metadata,
    network_policy,
    pod_template,
    role_labels,
)

# Starts of a pod that fails before its Job does: with Kubernetes' longest pause of five minutes
# between two of them, some hours. What cannot start stops trying.
BACKOFF_LIMIT = 100


def objects(plan: Plan, kubernetes: tuple[int, int] = (1, 21)) -> list[dict[str, Any]]:
    """Return the objects of a job; one that is suspended has no Jobs."""
    found = [network_policy(plan)]
    budget = disruption_budget(plan, kubernetes)
    if budget is not None:
        found.append(budget)
    found += [_service(plan, role) for role in plan.roles if role.kind.port is not None]
    if not plan.job.spec.suspend:
        found += _jobs(plan)
    return found


def _service(plan: Plan, role: RolePlan) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(plan, role.domain, role_labels(plan, role)),
        "spec": {
            "clusterIP": "None",
            # Roles look for each other before they are ready.
            "publishNotReadyAddresses": True,
            "selector": role_labels(plan, role),
            "ports": [{"name": name, "port": port} for name, port in role.ports.items()],
        },
    }


def _jobs(plan: Plan) -> Iterator[dict[str, Any]]:
    for role in plan.roles:
        for number in range(role.replicas):
            yield {
                "apiVersion": "batch/v1",
                "kind": "Job",
                "metadata": metadata(
                    plan, role.host_of(number), role_labels(plan, role), is_run=True
                ),
                "spec": job_spec(plan, role, number),
            }


def job_spec(plan: Plan, role: RolePlan, number: int | None = None) -> dict[str, Any]:
    """Return the spec of a Job of one pod, or, without a number, of all pods of a role."""
    spec = plan.job.spec
    template = pod_template(plan, role, number)
    restarts = template["spec"]["restartPolicy"] == "OnFailure"
    found: dict[str, Any] = {"backoffLimit": BACKOFF_LIMIT if restarts else 0}
    if number is None:
        found |= {
            "completionMode": "Indexed",
            "completions": role.replicas,
            "parallelism": role.replicas,
        }
    elif spec.ttlSecondsAfterFinished is not None and plan.owner is None:
        # Of a PersiaJob in a cluster the operator deletes all at once.
        found["ttlSecondsAfterFinished"] = spec.ttlSecondsAfterFinished
    if spec.activeDeadlineSeconds is not None:
        found["activeDeadlineSeconds"] = spec.activeDeadlineSeconds
    return {**found, "template": template}
