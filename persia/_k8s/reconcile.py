"""What the operator does next for a job: a pure function of the job and of what is there.

    actions = reconcile(job, children, now)

Level-triggered: nothing is remembered but the job's status, so it does not matter which events
were seen, or whether the actions before were all carried out. Carrying out actions until there
are none leads to the same objects from wherever it was interrupted.

    Pending --all pods run--> Running --trainers complete--> Succeeded
       |  ^                      |
       |  '------restart---------+--a Job fails--> Failed
    Suspended

A start of a job is an attempt: its number is the sum of the status' ``restarts`` and
``suspensions``, and a label of the Jobs. The status is written before Jobs of the old attempt
are deleted, so that one failure is counted once, and no start goes on with Jobs of another. The
operator's writes of a status carry the version that was read: one made from an older job is
refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from persia import env
from persia._k8s.plan import TRAINER, Note, Owner, Plan, plan_job
from persia._k8s.pods import ATTEMPT_LABEL, SPEC_ANNOTATION
from persia._k8s.render import WRITERS
from persia._k8s.spec import read_job
from persia._k8s.status import (
    condition,
    conditions,
    failure,
    is_held,
    problems,
    replica_statuses,
    result_of,
)
from persia.errors import ConfigError

Object = Mapping[str, Any]

# Kinds whose end is that of an attempt; all others stand beside the pods.
RUN_KINDS = ("Job", "JobSet")
ENDED = ("Succeeded", "Failed")
# Seconds that roles get to end by themselves once the job has.
_GRACE_S = 60
_TIME = "%Y-%m-%dT%H:%M:%SZ"


@dataclass(frozen=True, slots=True)
class Create:
    """Create an object; that it exists by now is no error."""

    object: Object


@dataclass(frozen=True, slots=True)
class CreateKeys:
    """Create the Secret of a plan, with new keys."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete an object, and keep its name until what it owns is gone."""

    object: Object


@dataclass(frozen=True, slots=True)
class WriteStatus:
    """Replace the status of the job as it was read."""

    status: Object


@dataclass(frozen=True, slots=True)
class Emit:
    """Post an event about the job."""

    note: Note


Action = Create | CreateKeys | Delete | WriteStatus | Emit


@dataclass(frozen=True, slots=True)
class Children:
    """What has the label of a job, also if the job does not own it."""

    objects: Sequence[Object] = ()
    pods: Sequence[Object] = ()
    # By kind and name: why the API, or a controller, refused what was to be there.
    refusals: Mapping[tuple[str, str], str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Settings:
    """What an installation decides."""

    images: Mapping[str, str] = field(default_factory=dict)  # by role
    kubernetes: tuple[int, int] = (1, 21)


def reconcile(
    job: Object, children: Children, now: datetime, settings: Settings | None = None
) -> list[Action]:
    """Return what is to be done for a job now.

    Args:
        job: The PersiaJob, as the API has it.
        children: All objects and pods with its label.
        now: The time, in UTC.
        settings: Of the operator.
    """
    settings = settings or Settings()
    if job["metadata"].get("deletionTimestamp"):
        return []  # children go with it, by their owner
    status: dict[str, Any] = dict(job.get("status") or {})
    if status.get("phase") in ENDED:
        return list(_after_end(job, status, children, now))
    try:
        plan = _plan(job, settings)
    except ConfigError as exc:
        found = {"phase": "Pending", "restarts": 0, **status, "message": str(exc)}
        refused = condition("Accepted", False, "InvalidSpec", str(exc))
        return _written(job, found, [refused], now)
    return _Step(job, plan, children, now, settings).actions()


def _plan(job: Object, settings: Settings) -> Plan:
    """Return the plan of the job's current start; ConfigError if its spec cannot be used."""
    parsed = read_job({key: job[key] for key in ("apiVersion", "kind", "metadata", "spec")})
    owner = Owner(job["metadata"]["uid"], _attempt_of(job.get("status") or {}))
    return plan_job(
        parsed,
        keys_secret=f"{parsed.name}-keys-{owner.uid[:8]}",
        owner=owner,
        images=settings.images,
    )


def _attempt_of(status: Object) -> int:
    return int(status.get("restarts", 0) + status.get("suspensions", 0))


def _written(
    job: Object, status: Object, changed: Sequence[dict[str, Any]], now: datetime
) -> list[Action]:
    """Return the write of a status, if it is not the job's already."""
    before = job.get("status") or {}
    found = {
        **{key: value for key, value in status.items() if value != ""},
        "observedGeneration": job["metadata"].get("generation", 0),
        "conditions": conditions(before.get("conditions") or [], changed, now.strftime(_TIME)),
    }
    return [] if found == before else [WriteStatus(found)]


def _own(job: Object, objects: Sequence[Object]) -> list[Object]:
    uid = job["metadata"]["uid"]
    return [
        one
        for one in objects
        if any(owner["uid"] == uid for owner in one["metadata"].get("ownerReferences", ()))
    ]


def _current(job: Object, objects: Sequence[Object], attempt: int) -> list[Object]:
    """Return the Jobs, or the JobSet, of a start of a job, less those that are deleted."""
    return [
        one
        for one in _own(job, objects)
        if one["kind"] in RUN_KINDS
        and one["metadata"]["labels"].get(ATTEMPT_LABEL) == str(attempt)
        and not _is_going(one)
    ]


def _counts(plan: Plan, children: Children, runs: Sequence[Object]) -> dict[str, Any]:
    """Return the status' counts of pods; a JobSet's Jobs are owned by it."""
    uids = {one["metadata"]["uid"] for one in runs}
    jobs = [
        one
        for one in children.objects
        if one["kind"] == "Job"
        and uids.intersection(
            (
                one["metadata"]["uid"],
                *(owner["uid"] for owner in one["metadata"].get("ownerReferences", ())),
            )
        )
    ]
    return replica_statuses(plan, children.pods, jobs)


def _after_end(
    job: Object, status: Object, children: Children, now: datetime
) -> Iterator[Action]:
    ended = datetime.strptime(status["completionTime"], _TIME).replace(tzinfo=now.tzinfo)
    ttl = (job.get("spec") or {}).get("ttlSecondsAfterFinished")
    if isinstance(ttl, int) and now >= ended + timedelta(seconds=ttl):
        yield Delete(job)
        return
    if now < ended + timedelta(seconds=_GRACE_S):
        yield from _counted_after_end(job, status, children, now)
        return
    for one in _own(job, children.objects):
        if one["kind"] in RUN_KINDS and not result_of(one) and not _is_going(one):
            yield Delete(one)


def _counted_after_end(
    job: Object, status: Object, children: Children, now: datetime
) -> list[Action]:
    """Return the write of the counts while roles end after the trainers, and are seen to.

    What has been deleted by now keeps the counts that it had.
    """
    runs = _current(job, children.objects, _attempt_of(status))
    try:
        counts = _counts(_plan(job, Settings()), children, runs)
    except ConfigError:  # the spec has changed since
        return []
    before = status.get("replicaStatuses") or {}
    for role, found in counts.items():
        for key in ("succeeded", "failed", "restarts"):
            found[key] = max(found[key], (before.get(role) or {}).get(key, 0))
    return _written(job, {**status, "replicaStatuses": counts}, [], now)


def _is_going(one: Object) -> bool:
    return bool(one["metadata"].get("deletionTimestamp"))


class _Step:
    """One reconciliation of a job that has not ended."""

    def __init__(
        self, job: Object, plan: Plan, children: Children, now: datetime, settings: Settings
    ) -> None:
        self._job, self._plan, self._children = job, plan, children
        self._now, self._settings = now, settings
        self._attempt = plan.owner.attempt if plan.owner else 0
        self._spec = plan.job.spec
        self._own = _own(job, children.objects)
        self._runs = [one for one in self._own if one["kind"] in RUN_KINDS]
        self._current = _current(job, children.objects, self._attempt)
        self._status: dict[str, Any] = {
            "phase": "Pending",
            "message": "",
            "startTime": now.strftime(_TIME),
            "restarts": 0,
            **(job.get("status") or {}),
            "replicaStatuses": _counts(plan, children, self._current),
        }

    def actions(self) -> list[Action]:
        first = not (self._job.get("status") or {})
        notes: list[Action] = [Emit(note) for note in self._plan.notes] if first else []
        if self._spec.suspend:
            return [*notes, *self._suspended()]
        failed = [one for one in self._current if result_of(one) == "Failed"]
        if failed:
            return [*notes, *self._failed(failed[0])]
        if self._has_succeeded():
            return [*notes, *self._succeeded()]
        return [*notes, *self._running()]

    def _write(self, phase: str, message: str, *changed: dict[str, Any]) -> list[Action]:
        status = {**self._status, "phase": phase, "message": message}
        accepted = condition("Accepted", True, "Valid", "")
        return _written(self._job, status, [accepted, *changed], self._now)

    def _suspended(self) -> list[Action]:
        left = f"{len(self._runs)} Jobs are being deleted" if self._runs else ""
        suspended = condition("Suspended", True, "Suspended", "")
        phase = (self._job.get("status") or {}).get("phase", "Suspended")
        # A start creates its Jobs before it writes its phase, which may then be refused.
        if self._current or phase != "Suspended":
            # Alone: from then on the Jobs are those of an attempt that is over.
            self._status["suspensions"] = self._status.get("suspensions", 0) + 1
            return self._write("Suspended", left, suspended)
        found: list[Action] = [Delete(one) for one in self._runs if not _is_going(one)]
        return [*found, *self._write("Suspended", left, suspended)]

    def _failed(self, run: Object) -> list[Action]:
        reason, message = failure(run, self._children.pods)
        restarts = self._status["restarts"]
        # A JobSet restarts its Jobs by itself, as often.
        if self._plan.engine.name == "native" and restarts < self._spec.maxRestarts:
            # Alone: what follows is decided by the status as it is then.
            self._status["restarts"] = restarts + 1
            note = Note("Restarting", f"start {self._attempt + 2}: {message}")
            return [Emit(note), *self._write("Pending", f"restarted after {message}")]
        self._status["completionTime"] = self._now.strftime(_TIME)
        return self._write("Failed", message, condition("Failed", True, reason, message))

    def _has_succeeded(self) -> bool:
        """Whether all trainers have ended with 0, or, without trainers, all pods."""
        if self._plan.engine.name == "jobset":
            return any(result_of(one) == "Complete" for one in self._current)
        trainers = self._plan.role(TRAINER)
        roles = [trainers] if trainers else self._plan.roles
        wanted = {role.host_of(number) for role in roles for number in range(role.replicas)}
        done = {
            one["metadata"]["name"] for one in self._current if result_of(one) == "Complete"
        }
        return wanted <= done

    def _succeeded(self) -> list[Action]:
        self._status["completionTime"] = self._now.strftime(_TIME)
        return self._write("Succeeded", "", condition("Succeeded", True, "Completed", ""))

    def _running(self) -> list[Action]:
        found: list[Action] = [
            Delete(one) for one in self._runs if one not in self._current and not _is_going(one)
        ]
        held = [
            f"{one['kind']} {one['metadata']['name']}" for one in self._current if is_held(one)
        ]
        changed = [self._suspension(held)]
        is_stale = any(self._is_stale(one) for one in self._current)
        text = "suspend the job and resume it: the spec has changed since it was started"
        changed.append(condition("SpecChanged", is_stale, "SpecChanged", text * is_stale))
        taken: list[str] = []
        if not is_stale:
            stale = [one for one in self._own if one["kind"] not in RUN_KINDS]
            found += [
                Delete(one) for one in stale if self._is_stale(one) and not _is_going(one)
            ]
            missing, taken = self._missing()
            if missing and not self._current and not self._spec.keysSecret:
                found.append(CreateKeys(self._plan))
            found += [Create(one) for one in missing]
        causes = [*taken, *problems(self._plan, self._children.pods)]
        causes += [f"{one} is suspended, as by a queue" for one in held]
        causes += [f"{name}: {why}" for (_, name), why in self._children.refusals.items()]
        phase = "Running" if self._all_run() else self._status["phase"]
        phase = "Pending" if phase == "Suspended" else phase
        message = causes[0] if causes else (text if is_stale else "")
        return [*found, *self._write(phase, message, *changed)]

    def _suspension(self, held: Sequence[str]) -> dict[str, Any]:
        """Return the condition; once it is over, with where the training goes on."""
        if held:
            return condition("Suspended", True, "Queued", f"{held[0]} is suspended")
        trainers = self._plan.role(TRAINER)
        if trainers is None or trainers.is_restarted:
            text = "training goes on from its newest checkpoint"
        else:
            text = (
                "training begins with a new dense net, unless the script's "
                f"checkpoint_folder has a checkpoint of this job; {env.resume_from.name} is "
                "not set"
            )
        return condition("Suspended", False, "Resumed", text)

    def _is_stale(self, one: Object) -> bool:
        annotations = one["metadata"].get("annotations") or {}
        return annotations.get(SPEC_ANNOTATION) != self._plan.spec_hash

    def _missing(self) -> tuple[list[Object], list[str]]:
        """Return what is to be created, and what cannot be: its name is another's."""
        own = {id(one) for one in self._own}
        there = {(one["kind"], one["metadata"]["name"]): one for one in self._children.objects}
        missing: list[Object] = []
        taken: list[str] = []
        writer = WRITERS[self._plan.engine.name]
        for one in writer(self._plan, self._settings.kubernetes):
            found = there.get((one["kind"], one["metadata"]["name"]))
            if found is None:
                missing.append(one)
            elif id(found) not in own:
                name = f"{one['kind']} {one['metadata']['name']}"
                taken.append(f"{name} is there and not of this job")
        return missing, taken

    def _all_run(self) -> bool:
        counts = self._status["replicaStatuses"].values()
        return all(one["desired"] <= one["running"] for one in counts)
