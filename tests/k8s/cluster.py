"""A job in an API in memory, with an operator that a test starts, kills and starts again."""

from __future__ import annotations

import asyncio
from typing import Any

from persia._k8s.api import ApiError
from persia._k8s.operator import Operator, watched
from persia._k8s.reconcile import Settings
from tests.k8s.memory_api import MemoryApi
from tests.k8s.specs import original

KINDS = watched((1, 30), True)
MOST_ROUNDS = 12


class Cluster:
    def __init__(self, **spec: Any) -> None:
        self.api = MemoryApi()
        self.api.put(original(**spec))

    @property
    def job(self) -> dict[str, Any]:
        return self.api.of("PersiaJob")["adult-income"]

    @property
    def status(self) -> dict[str, Any]:
        return dict(self.job.get("status") or {})

    def conditions(self) -> dict[str, str]:
        return {one["type"]: one["status"] for one in self.status["conditions"]}

    def reconcile(self) -> None:
        """Have a fresh operator list everything and do what there is to do, once."""

        async def once() -> None:
            operator = Operator(self.api, Settings(), KINDS)
            await operator.list_all()
            try:
                await operator.settle()
            except ApiError as exc:
                if exc.status != 409:  # the job has changed meanwhile: the next one sees it
                    raise

        asyncio.run(once())

    def settle(self) -> None:
        """Reconcile and collect what is deleted until nothing changes."""
        for _ in range(MOST_ROUNDS):
            before = len(self.api.writes)
            self.reconcile()
            if not self.api.collect() and len(self.api.writes) == before:
                return
        raise AssertionError(f"still writes: {self.api.writes[-20:]}")

    def change(self, **spec: Any) -> None:
        self.job["spec"] |= spec
        meta = self.job["metadata"]
        meta["generation"] += 1
        meta["resourceVersion"] = str(next(self.api._numbers))

    def end(
        self, name: str, how: str = "Complete", reason: str = "", kind: str = "Job"
    ) -> None:
        """Have a Job end, as its controller does."""
        self.api.of(kind)[name]["status"] = {
            "conditions": [{"type": how, "status": "True", "reason": reason, "message": "m"}]
        }

    def end_trainers(self, how: str = "Complete") -> None:
        for number in (0, 1):
            self.end(f"adult-income-nn-worker-{number}", how)

    def add_pod(self, job: str, role: str, **status: Any) -> None:
        """Add a pod of a Job, with a status."""
        self.api.put(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    "name": f"{job}-x",
                    "labels": {"persia_job": "adult-income", "persia_role": role},
                    "ownerReferences": [{"uid": self.api.of("Job")[job]["metadata"]["uid"]}],
                },
                "status": status,
            }
        )

    def shape(self) -> dict[tuple[str, str], Any]:
        """Return what is there, less what differs from run to run."""
        return {
            (kind, name): (one.get("spec"), one["metadata"].get("labels"))
            for (kind, _, name), one in self.api.objects.items()
            if kind not in ("Event", "Pod")
        }
