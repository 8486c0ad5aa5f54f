"""The planner: a PersiaJob in, and out what each pod is, whatever writes it down.

An engine starts processes and gives names. What PERSIA needs of it is role, number and count,
addresses, and what to start again; engines differ in how they call pods and number them:

    native      job-embedding-ps-{0..1}.job-embedding-ps   a Job for each pod
    jobset      job-embedding-ps-0-{0..1}.job              an Indexed Job for each role
    trainjob    the same, but nn-workers are job-node-0-{0..1}.job
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from typing import Any

from persia import env
from persia._k8s.spec import JobSpec, PersiaJob, RoleSpec
from persia.errors import ConfigError

JOB_LABEL, ROLE_LABEL = "persia_job", "persia_role"

METRICS_PORT = 9400
MASTER_PORT = 29500
KEYS_FOLDER = "/etc/persia/keys"

_MAX_NAME = 63  # of a host, and of a label's value
_SPARE_S = 5  # of a grace period

# Keys of the spec that may change while the job runs; all others take effect at its next start.
_MUTABLE = ("suspend", "ttlSecondsAfterFinished", "maxRestarts")


@dataclass(frozen=True, slots=True)
class RoleKind:
    """What is the same for a role in every job."""

    key: str  # in the spec
    role: str  # as persia-launcher and metrics call it
    short: str  # in names of pods
    container: str
    port: int | None = None  # where it listens
    variable: str = ""  # list of its addresses
    is_restarted: bool = True  # by its own: a trainer's dense net would be gone
    image: str = "persia:server"
    keys: tuple[str, ...] = ()  # files of its folder of keys


_PUBLIC = ("server.public", "control.public", "data.public")
_LISTENING = ("server.secret", "control.secret", *_PUBLIC)
SERVER = RoleKind(
    "embeddingParameterServer",
    "embedding-parameter-server",
    "embedding-ps",
    "emb-server",
    8888,
    env.parameter_server_addresses.name,
    keys=_LISTENING,
)
WORKER = RoleKind(
    "embeddingWorker",
    "embedding-worker",
    "embedding-worker",
    "embedding-worker",
    8887,
    env.embedding_worker_addresses.name,
    keys=_LISTENING,
)
TRAINER = RoleKind(
    "nnWorker",
    "nn-worker",
    "nn-worker",
    "nn-worker",
    23457,
    env.nn_worker_addresses.name,
    is_restarted=False,
    image="persia:nn-worker",
    keys=_LISTENING,
)
LOADER = RoleKind(
    "dataloader",
    "data-loader",
    "dataloader",
    "data-loader",
    keys=("data.secret", "server.public"),
)
KINDS = (SERVER, WORKER, TRAINER, LOADER)
KEY_FILES = tuple(sorted({name for kind in KINDS for name in kind.keys}))


@dataclass(frozen=True, slots=True)
class Engine:
    """How an engine calls and numbers pods: ``{job}``, ``{role}`` and ``{n}`` are filled in."""

    name: str
    host: str
    domain: str  # the headless Service that a pod is in
    trainer: str = TRAINER.short  # what nn-workers are called in names
    spare: int = 0  # characters that the engine adds to a host's name, for the pod's
    starts: Mapping[str, str] = field(default_factory=dict)  # variables that differ by start

    def role_name(self, kind: RoleKind) -> str:
        return self.trainer if kind is TRAINER else kind.short


_SPARE = len("-abcde")
# Annotations of its pods: a JobSet that is created again, or starts all of its Jobs again, has
# the same specs for them.
_SET_UID = "JOBSET_UID"
_OF_JOB_SET = {
    _SET_UID: "jobset.sigs.k8s.io/jobset-uid",
    "JOBSET_RESTART": "jobset.sigs.k8s.io/restart-attempt",
}
ENGINES = {
    one.name: one
    for one in (
        Engine("native", "{job}-{role}-{n}", "{job}-{role}"),
        Engine("jobset", "{job}-{role}-0-{n}", "{job}", spare=_SPARE, starts=_OF_JOB_SET),
        Engine("trainjob", "{job}-{role}-0-{n}", "{job}", "node", _SPARE, _OF_JOB_SET),
    )
}


@dataclass(frozen=True, slots=True)
class RolePlan:
    """The pods of one role, less what depends on a pod's number."""

    kind: RoleKind
    spec: RoleSpec
    host: str  # of a pod within its domain, with {n} for its number
    domain: str
    image: str
    env: tuple[Mapping[str, Any], ...] = ()  # before the role's own
    num_ranks: int = 1  # in each pod

    @property
    def replicas(self) -> int:
        return self.spec.replicas

    @property
    def is_restarted(self) -> bool:
        """Whether a pod that fails is started again, as a trainer with checkpoints is."""
        names = {one["name"] for one in (*self.env, *self.spec.env)}
        return self.kind.is_restarted or env.resume_from.name in names

    def host_of(self, number: int | str) -> str:
        return self.host.format(n=number)

    @property
    def ports(self) -> dict[str, int]:
        """Where a pod listens, by name: a rank of an nn-worker is one port further."""
        found = {}
        for rank in range(self.num_ranks):
            suffix = f"-{rank}" if self.num_ranks > 1 else ""
            if self.kind.port is not None:
                found[f"rpc{suffix}"] = self.kind.port + rank
            found[f"metrics{suffix}"] = METRICS_PORT + rank
        return found


@dataclass(frozen=True, slots=True)
class Owner:
    """The PersiaJob in a cluster whose children the objects are."""

    uid: str
    attempt: int = 0  # how often it was stopped, to be started again


@dataclass(frozen=True, slots=True)
class Note:
    """Something of a document that does not do what its author may expect."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Plan:
    """A job, as writers need it."""

    job: PersiaJob
    engine: Engine
    roles: tuple[RolePlan, ...]
    keys_secret: str | None  # None: nothing is encrypted
    owner: Owner | None
    spec_hash: str
    notes: tuple[Note, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)  # of every object

    @property
    def name(self) -> str:
        return self.job.name

    def role(self, kind: RoleKind) -> RolePlan | None:
        return next((role for role in self.roles if role.kind is kind), None)


def plan_job(
    job: PersiaJob,
    engine: str | None = None,
    *,
    keys_secret: str | None = None,
    owner: Owner | None = None,
    images: Mapping[str, str] | None = None,
    run_id: str | None = None,
) -> Plan:
    """Return the plan of a job.

    Args:
        job: The job.
        engine: Its name; as the job says if not given.
        keys_secret: Secret with keys for jobs that name none.
        owner: The PersiaJob in a cluster, if it is one.
        images: By role, those of roles that name none.
        run_id: Name of its run; made of its own and its owner's if not given.

    Raises:
        ConfigError: If its name is too long for those of its pods.
    """
    found = ENGINES[engine or job.spec.engine]
    keys_secret = job.spec.keysSecret or keys_secret
    roles = tuple(_roles(job, found, images or {}))
    _check_names(job, found, roles)
    # Another job of this name, or another start of it, is another run.
    if run_id is None:
        run_id = job.name if owner is None else f"{job.name}-{owner.uid[:8]}-{owner.attempt}"
    job_id = run_id if owner is None else f"{job.name}-{owner.uid[:8]}"
    if owner is None and _SET_UID in found.starts:
        job_id = f"{job_id}-$({_SET_UID})"
    run_id = "-".join((run_id, *(f"$({name})" for name in found.starts)))
    ids = {env.run_id.name: run_id, env.job_id.name: job_id}
    shared = {**_variables(job, roles, keys_secret), **ids}
    return Plan(
        job=job,
        engine=found,
        roles=tuple(
            replace(role, env=(*_of_pod(found.starts), *_environment(job, role, shared)))
            for role in roles
        ),
        keys_secret=keys_secret,
        owner=owner,
        spec_hash=spec_hash(job.spec),
        notes=tuple(_notes(job)),
        labels={JOB_LABEL: job.name},
    )


def _roles(job: PersiaJob, engine: Engine, images: Mapping[str, str]) -> Iterator[RolePlan]:
    given = dict(job.spec.roles())
    for kind in KINDS:
        spec = given.get(kind.key)
        if spec is None or not spec.replicas:
            continue
        names = {"job": job.name, "role": engine.role_name(kind)}
        yield RolePlan(
            kind,
            spec,
            engine.host.format(**names, n="{n}"),
            engine.domain.format(**names),
            spec.image or images.get(kind.role) or kind.image,
            num_ranks=getattr(spec, "nprocPerNode", 1),
        )


def _check_names(job: PersiaJob, engine: Engine, roles: Iterable[RolePlan]) -> None:
    for role in roles:
        host = role.host_of(role.replicas - 1)
        excess = len(host) + engine.spare - _MAX_NAME
        if excess > 0:
            raise ConfigError(
                f"metadata.name: expected at most {len(job.name) - excess} characters for pods "
                f"such as {host}, got {len(job.name)}"
            )


def _variables(
    job: PersiaJob, roles: Iterable[RolePlan], keys_secret: str | None
) -> dict[str, str]:
    """Return the variables that all containers of a job have."""
    found = {
        env.global_config_path.name: job.spec.persiaEnv.PERSIA_GLOBAL_CONFIG,
        env.embedding_config_path.name: job.spec.persiaEnv.PERSIA_EMBEDDING_CONFIG,
        env.log_level.name: job.spec.logLevel,
        env.listen_host.name: "0.0.0.0",
        env.metrics_host.name: "0.0.0.0",
        env.metrics_port.name: str(METRICS_PORT),
        env.is_supervised.name: "1",
    }
    if keys_secret:
        found[env.keys_directory.name] = KEYS_FOLDER
    else:
        found[env.may_listen_without_keys.name] = "1"
    for role in roles:
        if role.kind.variable:
            # A range and not the Service's name: it leads to each pod, wherever that is now.
            hosts = role.host_of(f"{{0..{role.replicas - 1}}}")
            found[role.kind.variable] = f"{hosts}.{role.domain}:{role.kind.port}"
    return found


def _of_pod(annotations: Mapping[str, str]) -> Iterator[Mapping[str, Any]]:
    """Yield variables that are annotations of the pod; others can name those before them."""
    for name, key in annotations.items():
        path = f"metadata.annotations['{key}']"
        yield {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _environment(
    job: PersiaJob, role: RolePlan, shared: Mapping[str, str]
) -> tuple[Mapping[str, Any], ...]:
    own = dict(shared)
    paths = job.spec.persiaEnv
    if role.kind is TRAINER and paths.PERSIA_NN_WORKER_ENTRY:
        own[env.nn_worker_entry.name] = paths.PERSIA_NN_WORKER_ENTRY
    if role.kind is TRAINER and role.spec.terminationGracePeriodSeconds > _SPARE_S:
        # Less than Kubernetes waits: the launcher ends after its script.
        own[env.grace_period_s.name] = str(role.spec.terminationGracePeriodSeconds - _SPARE_S)
    if role.kind is LOADER and paths.PERSIA_DATALOADER_ENTRY:
        own[env.data_loader_entry.name] = paths.PERSIA_DATALOADER_ENTRY
    return (*({"name": name, "value": value} for name, value in own.items()), *job.spec.env)


def _notes(job: PersiaJob) -> Iterator[Note]:
    """Yield what is said of variables with PERSIA's prefix that PERSIA does not read."""
    lists = [job.spec.env, *(role.env for _, role in job.spec.roles())]
    for name in sorted({one["name"] for variables in lists for one in variables}):
        if name in ("PERSIA_NATS_URL", "PERSIA_NATS_IP"):
            yield Note("VariableIgnored", f"{name} is ignored: there is no broker any more")
        elif name.startswith("PERSIA_") and name not in env.VARIABLES:
            yield Note("VariableUnknown", f"{name} is no variable that PERSIA reads")


def spec_hash(spec: JobSpec) -> str:
    """Return a short digest of what takes effect only when a job is started.

    Values at their defaults are left out, so that a later version with more fields finds the
    same digest for the same document.
    """
    kept = {key: value for key, value in _given(spec).items() if key not in _MUTABLE}
    text = json.dumps(kept, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _given(section: Any) -> dict[str, Any]:
    found = {}
    for one in fields(section):
        value = getattr(section, one.name)
        empty = one.default_factory() if one.default_factory is not MISSING else one.default
        if value != empty:
            found[one.name] = _given(value) if is_dataclass(value) else value
    return found
