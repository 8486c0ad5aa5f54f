"""A stand-in for JobSet's controller, over the API in memory: what its documents promise.

It is no JobSet. The rules are quoted beside the code that follows them, from "Concepts" of
JobSet's documents and from the descriptions in its resource (release 0.12). What PERSIA does
not use of it is refused: coordinators, deadlines, volumes, an order of starts.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from tests.k8s.memory_api import MemoryApi

Object = Mapping[str, Any]
KNOWN = {
    *("network", "replicatedJobs", "successPolicy", "failurePolicy", "suspend"),
    "ttlSecondsAfterFinished",
}


class JobSetStandIn:
    """Acts on one JobSet whenever ``step`` is called; a test plays the pods."""

    def __init__(self, api: MemoryApi, name: str) -> None:
        self._api, self._name = api, name

    @property
    def job_set(self) -> dict[str, Any]:
        return self._api.of("JobSet")[self._name]

    @property
    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.job_set.setdefault("status", {})
        return found

    def jobs(self) -> dict[str, dict[str, Any]]:
        uid = self.job_set["metadata"]["uid"]
        return {
            name: one
            for name, one in self._api.of("Job").items()
            if one["metadata"]["ownerReferences"][0]["uid"] == uid
        }

    def step(self) -> None:
        spec = self.job_set["spec"]
        unknown = spec.keys() - KNOWN
        if unknown:
            raise NotImplementedError(f"the stand-in does not know {unknown}")
        if self._has("Completed") or self._has("Failed"):
            return
        # "suspend suspends all running child Jobs when set to true."
        self._set("Suspended", spec.get("suspend", False))
        for name, job in self._wanted().items():
            self._mark(job)
            if name not in self._api.of("Job"):
                self._api.put(job)
            self._api.of("Job")[name]["spec"]["suspend"] = spec.get("suspend", False)
        self._publish()
        ends = {name: _end_of(one) for name, one in self.jobs().items()}
        # "A JobSet failure is counted when ANY of its child Jobs fail."
        if "Failed" in ends.values():
            self._restart_or_fail()
        elif self._has_succeeded(ends):
            self._set("Completed", True)

    def _wanted(self) -> dict[str, dict[str, Any]]:
        """Return the Jobs: "The Job name will have the following format:
        `<jobSetName>-<replicatedJobName>-<jobIndex>`."
        """
        found = {}
        meta = self.job_set["metadata"]
        for replicated in self.job_set["spec"]["replicatedJobs"]:
            # "the number replicas that should be created ... When unset, it is defaulted to 1."
            for index in range(replicated.get("replicas", 1)):
                name = f"{self._name}-{replicated['name']}-{index}"
                template = copy.deepcopy(replicated["template"])
                labels = {
                    "jobset.sigs.k8s.io/jobset-name": self._name,
                    "jobset.sigs.k8s.io/replicatedjob-name": replicated["name"],
                    "jobset.sigs.k8s.io/job-index": str(index),
                }
                owner = {"kind": "JobSet", "name": self._name, "uid": meta["uid"]}
                found[name] = {
                    "apiVersion": "batch/v1",
                    "kind": "Job",
                    "metadata": {
                        "name": name,
                        "labels": {**template.get("metadata", {}).get("labels", {}), **labels},
                        "ownerReferences": [owner],
                    },
                    # "Job completionMode is defaulted to Indexed"
                    "spec": {"completionMode": "Indexed", **template["spec"]},
                }
        return found

    def _mark(self, job: dict[str, Any]) -> None:
        """Set what distinguishes starts: "JobSet sets the following labels on both the
        jobs and pods: ... `jobset.sigs.k8s.io/jobset-uid`: `.metadata.uid`", and "RestartsKey
        is an annotation and label key which defines the restart attempt number". All of its
        labels are annotations, too.
        """
        marks = {
            "jobset.sigs.k8s.io/jobset-uid": self.job_set["metadata"]["uid"],
            "jobset.sigs.k8s.io/restart-attempt": str(self.status.get("restarts", 0)),
        }
        for meta in (job["metadata"], job["spec"]["template"]["metadata"]):
            for key in ("labels", "annotations"):
                meta[key] = {**meta.get(key, {}), **marks}

    def _publish(self) -> None:
        """Create the headless Service: "with name `spec.network.subdomain` which defaults to
        `.metadata.name` if not set."
        """
        if self.domain not in self._api.of("Service"):
            network = self.job_set["spec"].get("network", {})
            # "publishNotReadyAddresses ... Defaults to True."
            is_early = network.get("publishNotReadyAddresses", True)
            self._api.put(
                {
                    "apiVersion": "v1",
                    "kind": "Service",
                    "metadata": {"name": self.domain},
                    "spec": {"clusterIP": "None", "publishNotReadyAddresses": is_early},
                }
            )

    @property
    def domain(self) -> str:
        network = self.job_set["spec"].get("network", {})
        return str(network.get("subdomain", self._name))

    def hosts(self) -> dict[str, dict[str, Any]]:
        """Return each pod's Job by its name in DNS: "<jobSet.name>-<spec.replicatedJob.name>-
        <job-index>-<pod-index>.<subdomain>".
        """
        return {
            f"{name}-{pod}.{self.domain}": job
            for name, job in self.jobs().items()
            for pod in range(job["spec"].get("completions", 1))
        }

    def _restart_or_fail(self) -> None:
        """Follow two rules: "A restart is done by recreating all child jobs", and "A JobSet is
        terminally failed when the number of failures reaches `spec.failurePolicy.maxRestarts`".

        Without a policy it is at once.
        """
        restarts = self.status.get("restarts", 0)
        if restarts >= self.job_set["spec"].get("failurePolicy", {}).get("maxRestarts", 0):
            self._set("Failed", True)
            return
        self.status["restarts"] = restarts + 1
        for name in self.jobs():
            del self._api.objects["Job", "default", name]

    def _has_succeeded(self, ends: Mapping[str, str]) -> bool:
        policy = self.job_set["spec"].get("successPolicy", {"operator": "All"})
        # "A null or empty list will apply to all replicatedJobs."
        targets = policy.get("targetReplicatedJobs")
        label = "jobset.sigs.k8s.io/replicatedjob-name"
        chosen = [
            ends[name] == "Complete"
            for name, one in self.jobs().items()
            if not targets or one["metadata"]["labels"][label] in targets
        ]
        # "operator determines either All or Any of the selected jobs should succeed"
        return {"All": all, "Any": any}[policy["operator"]](chosen)

    def _has(self, kind: str) -> bool:
        found = self.status.get("conditions", [])
        return any(one["type"] == kind and one["status"] == "True" for one in found)

    def _set(self, kind: str, is_true: bool) -> None:
        rest = [one for one in self.status.get("conditions", []) if one["type"] != kind]
        now = {"type": kind, "status": str(is_true), "reason": kind, "message": kind}
        self.status["conditions"] = [*rest, now]


def _end_of(job: Object) -> str:
    for one in (job.get("status") or {}).get("conditions", ()):
        if one["status"] == "True" and one["type"] in ("Complete", "Failed"):
            return str(one["type"])
    return ""
