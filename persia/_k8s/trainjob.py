"""A TrainJob of Kubeflow Trainer (2.2 or later), and the TrainingRuntime that it needs.

A TrainJob cannot change how many servers its runtime has, so each job brings a runtime of its
own, in its namespace, which takes no rights of the cluster's administrator.
"""

from __future__ import annotations

from typing import Any

from persia._k8s.jobset import job_set_spec, user_labels
from persia._k8s.plan import TRAINER, Plan
from persia._k8s.pods import disruption_budget, metadata, network_policy
from persia.errors import ConfigError

_API_VERSION = "trainer.kubeflow.org/v1alpha1"
_KIND = "TrainingRuntime"


def objects(plan: Plan, kubernetes: tuple[int, int] = (1, 21)) -> list[dict[str, Any]]:
    """Return the TrainJob of a job, its runtime, and what is beside them.

    Raises:
        ConfigError: If the job has no trainers.
    """
    trainer = next((role for role in plan.roles if role.kind is TRAINER), None)
    if trainer is None:
        raise ConfigError("spec.nnWorker: expected trainers for a TrainJob, got none")
    runtime: dict[str, Any] = {
        "apiVersion": _API_VERSION,
        "kind": _KIND,
        "metadata": metadata(plan, plan.name),
        "spec": {
            # Trainer's variables of torchrun go into the container of nn-workers alone.
            "mlPolicy": {"numNodes": trainer.replicas, "torch": {}},
            "template": {"spec": job_set_spec(plan)},
        },
    }
    spec: dict[str, Any] = {
        "runtimeRef": {
            "apiGroup": _API_VERSION.partition("/")[0],
            "kind": _KIND,
            "name": plan.name,
        },
        "suspend": plan.job.spec.suspend,
        "trainer": {"numNodes": trainer.replicas, "numProcPerNode": trainer.num_ranks},
    }
    if plan.job.spec.activeDeadlineSeconds is not None:
        spec["activeDeadlineSeconds"] = plan.job.spec.activeDeadlineSeconds
    train_job = {
        "apiVersion": _API_VERSION,
        "kind": "TrainJob",
        "metadata": metadata(plan, plan.name, user_labels(plan)),
        "spec": spec,
    }
    beside = [network_policy(plan), disruption_budget(plan, kubernetes)]
    return [*filter(None, beside), runtime, train_job]
