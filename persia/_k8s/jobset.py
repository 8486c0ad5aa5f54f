"""A JobSet, which ends, restarts and queues all roles as one (JobSet 0.9 or later).

Each role is one Indexed Job of all its pods, ``parallelism`` = ``completions`` = N: Kubeflow
Trainer counts pods so. Roles wait for each other by themselves, so none depends on another:
Kueue's gang start needs all of them at once.
"""

from __future__ import annotations

from typing import Any

from persia._k8s.native import job_spec
from persia._k8s.plan import TRAINER, Plan, RolePlan
from persia._k8s.pods import disruption_budget, metadata, network_policy, role_labels

_ANCESTOR = "trainer.kubeflow.org/trainjob-ancestor-step"


def objects(plan: Plan, kubernetes: tuple[int, int] = (1, 21)) -> list[dict[str, Any]]:
    """Return the JobSet of a job, and what is beside it."""
    beside = [network_policy(plan), disruption_budget(plan, kubernetes)]
    found: dict[str, Any] = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata(plan, plan.name, user_labels(plan), is_run=True),
        "spec": {**job_set_spec(plan), "suspend": plan.job.spec.suspend},
    }
    ttl = plan.job.spec.ttlSecondsAfterFinished
    if ttl is not None and plan.owner is None:
        found["spec"]["ttlSecondsAfterFinished"] = ttl
    return [*filter(None, beside), found]


def user_labels(plan: Plan) -> dict[str, str]:
    """Return the labels of the PersiaJob: Kueue reads its queue's name from the JobSet's."""
    return dict(plan.job.metadata.get("labels") or {})


def job_set_spec(plan: Plan) -> dict[str, Any]:
    """Return the spec, which a TrainingRuntime has as well."""
    found: dict[str, Any] = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "replicatedJobs": [_replicated_job(plan, role) for role in plan.roles],
    }
    if any(role.kind is TRAINER for role in plan.roles):
        # Servers end when they hear of the job's end; the training's status is the trainers'.
        found["successPolicy"] = {
            "operator": "All",
            "targetReplicatedJobs": [plan.engine.role_name(TRAINER)],
        }
    if plan.job.spec.maxRestarts:
        found["failurePolicy"] = {"maxRestarts": plan.job.spec.maxRestarts}
    return found


def _replicated_job(plan: Plan, role: RolePlan) -> dict[str, Any]:
    labels = role_labels(plan, role)
    if plan.engine.name == "trainjob" and role.kind is TRAINER:
        labels[_ANCESTOR] = "trainer"
    return {
        "name": plan.engine.role_name(role.kind),
        "replicas": 1,
        "template": {"metadata": {"labels": labels}, "spec": job_spec(plan, role)},
    }
