"""The PersiaJob: its document as frozen dataclasses, whose fields have the document's names.

A superset of the original's resource: its documents are valid as they are. What a field means
is said here once; ``crd`` makes the schema of the CustomResourceDefinition of these classes.
Values that Kubernetes defines (volumes, tolerations, ...) are passed on as they are, after a
check of what this package itself reads of them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from persia.config.document import (
    Document,
    Expect,
    InvalidValue,
    Listed,
    Named,
    Section,
    integer,
    show,
    validate,
)
from persia.errors import ConfigError, did_you_mean

GROUP, VERSION, KIND, PLURAL = "persia.com", "v1", "PersiaJob", "persiajobs"
API_VERSION = f"{GROUP}/{VERSION}"

_MAX_INT32 = (1 << 31) - 1
# What Services and host names may be called: a label of DNS that begins with a letter.
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_ENV_NAME = re.compile(r"[^=\x00-\x1f]+")
# Names and places of volumes that every pod has; see ``pods``.
OWN_VOLUMES = ("persia-shm", "persia-tmp", "persia-keys")
_MOUNT_KEYS = (
    *("name", "mountPath", "mountPropagation", "readOnly", "recursiveReadOnly", "subPath"),
    "subPathExpr",
)

Object = Named[Any]
Count = Annotated[int, integer(0, _MAX_INT32)]
Replicas = Annotated[int, integer(0, 10_000)]
# Each has two ports of its own in a pod.
Ranks = Annotated[int, integer(1, 1024)]
AtLeastOne = Annotated[int, integer(1, _MAX_INT32)]
Quantity = Annotated[
    str,
    Expect("a quantity as 256Mi or 8Gi", pattern=r"^\d+(\.\d*)?([KMGTPE]i|[kMGTPE]|[eE]\d+)?$"),
]


def _doc(text: str) -> dict[str, str]:
    return {"doc": text}


@dataclass(frozen=True, slots=True)
class PersiaEnv(Section):
    """Paths in the containers."""

    PERSIA_GLOBAL_CONFIG: str = field(metadata=_doc("Path of the global config."))
    PERSIA_EMBEDDING_CONFIG: str = field(metadata=_doc("Path of the embedding config."))
    PERSIA_NN_WORKER_ENTRY: str | None = field(
        default=None, metadata=_doc("Script that nn-workers run.")
    )
    PERSIA_DATALOADER_ENTRY: str | None = field(
        default=None, metadata=_doc("Script that data-loaders run.")
    )


@dataclass(frozen=True, slots=True)
class RoleSpec(Section):
    """The pods of one role."""

    replicas: Replicas = field(metadata=_doc("Number of pods."))
    image: str | None = field(
        default=None, metadata=_doc("Image; persia:server, or persia:nn-worker.")
    )
    resources: Object | None = field(
        default=None, metadata=_doc("Limits and requests, as of a container.")
    )
    volumeMounts: Listed[tuple[Object, ...]] = field(
        default=(), metadata=_doc("Where volumes of the job are mounted.")
    )
    env: Listed[tuple[Object, ...]] = field(
        default=(), metadata=_doc("Variables of this role, which come before all others.")
    )
    command: Listed[tuple[str, ...]] = field(
        default=(), metadata=_doc("Command instead of persia-launcher and its arguments.")
    )
    args: Listed[tuple[str, ...]] = field(
        default=(), metadata=_doc("Arguments behind those of the role: of the script.")
    )
    shmSize: Quantity | None = field(
        default=None,
        metadata=_doc("Size of /dev/shm, where servers keep rows; else as the pod's memory."),
    )
    nodeSelector: Object | None = field(
        default=None, metadata=_doc("Labels that nodes must have.")
    )
    tolerations: Listed[tuple[Object, ...]] = field(
        default=(), metadata=_doc("Taints of nodes that these pods tolerate.")
    )
    affinity: Object | None = field(
        default=None, metadata=_doc("Rules of placement, instead of the spread over nodes.")
    )
    priorityClassName: str | None = field(default=None, metadata=_doc("Class of priority."))
    securityContext: Object | None = field(
        default=None, metadata=_doc("Of the container, over the restricted one of PERSIA.")
    )
    terminationGracePeriodSeconds: Count = field(
        default=30, metadata=_doc("Seconds between SIGTERM and SIGKILL.")
    )


@dataclass(frozen=True, slots=True)
class NNWorkerSpec(RoleSpec):
    """The pods of nn-workers: each is a node of torchrun's."""

    nprocPerNode: Ranks = field(default=1, metadata=_doc("Number of ranks in each pod."))


@dataclass(frozen=True, slots=True)
class JobSpec(Section):
    """What a PersiaJob asks for."""

    persiaEnv: PersiaEnv = field(metadata=_doc("Paths in the containers."))
    embeddingParameterServer: RoleSpec | None = field(
        default=None, metadata=_doc("The embedding-parameter-servers.")
    )
    embeddingWorker: RoleSpec | None = field(
        default=None, metadata=_doc("The embedding-workers.")
    )
    nnWorker: NNWorkerSpec | None = field(default=None, metadata=_doc("The trainers."))
    dataloader: RoleSpec | None = field(default=None, metadata=_doc("The data-loaders."))
    enableMetrics: bool = field(
        default=True, metadata=_doc("Whether pods are announced to Prometheus.")
    )
    volumes: Listed[tuple[Object, ...]] = field(
        default=(), metadata=_doc("Volumes of all pods.")
    )
    env: Listed[tuple[Object, ...]] = field(
        default=(), metadata=_doc("Variables of all containers.")
    )
    logLevel: str = field(default="info", metadata=_doc("Level of the log."))
    restartPolicy: Literal["Always", "OnFailure", "Never"] = field(
        default="OnFailure",
        metadata=_doc(
            "Never: no role is started again. Else what fails is, but trainers only if "
            "PERSIA_RESUME_FROM is set."
        ),
    )
    imagePullPolicy: Literal["Always", "IfNotPresent", "Never"] | None = field(
        default=None, metadata=_doc("When images are pulled; else as Kubernetes does.")
    )
    engine: Literal["native", "jobset"] = field(
        default="native", metadata=_doc("What the operator makes of the job.")
    )
    suspend: bool = field(default=False, metadata=_doc("Whether the job has no pods."))
    maxRestarts: Count = field(
        default=0, metadata=_doc("How often the whole job is started again when it fails.")
    )
    activeDeadlineSeconds: AtLeastOne | None = field(
        default=None, metadata=_doc("Seconds that a start of the job may take.")
    )
    ttlSecondsAfterFinished: Count | None = field(
        default=None, metadata=_doc("Seconds until a job that has ended is deleted.")
    )
    keysSecret: str | None = field(
        default=None,
        metadata=_doc("Secret with the files of persia-launcher keys; else the operator's."),
    )
    podLabels: Named[str] = field(default_factory=dict, metadata=_doc("Labels of pods."))
    podAnnotations: Named[str] = field(
        default_factory=dict, metadata=_doc("Annotations of pods.")
    )
    imagePullSecrets: Listed[tuple[Object, ...]] = field(
        default=(), metadata=_doc("Secrets with which images are pulled.")
    )
    serviceAccountName: str | None = field(
        default=None, metadata=_doc("Service account of pods; its token is not mounted.")
    )
    schedulerName: str | None = field(default=None, metadata=_doc("Scheduler of pods."))

    def roles(self) -> Iterator[tuple[str, RoleSpec]]:
        """Yield each role that is given, with its key."""
        for key in ("embeddingParameterServer", "embeddingWorker", "nnWorker", "dataloader"):
            role = getattr(self, key)
            if role is not None:
                yield key, role

    def check(self) -> None:
        """Check what would be refused later, object by object, or would never start."""
        _check_names(self.volumes, "volumes")
        _check_env(self.env, "env")
        names = [str(volume["name"]) for volume in self.volumes]
        for number, name in enumerate(names):
            if name in OWN_VOLUMES or name in names[:number]:
                raise InvalidValue(f"{name!r} is another volume's name", "volumes", number)
        if not any(role.replicas for _, role in self.roles()):
            raise InvalidValue("expected a role with replicas, such as nnWorker: none is given")
        for key, role in self.roles():
            _check_env(role.env, key, "env")
            _check_mounts(role, names, key)


def _check_env(variables: tuple[Mapping[str, Any], ...], *keys: str) -> None:
    _check_names(variables, *keys)
    for number, one in enumerate(variables):
        value = one.get("value", "")
        if not _ENV_NAME.fullmatch(one["name"]):
            raise InvalidValue(
                f"expected a variable's name, got {show(one['name'])}", *keys, number, "name"
            )
        if not isinstance(value, str):
            todo = "put it in quotes"
            raise InvalidValue(
                f"expected a string, got {show(value)}; {todo}", *keys, number, "value"
            )


def _check_names(items: tuple[Mapping[str, Any], ...], *keys: str) -> None:
    for number, one in enumerate(items):
        if not isinstance(one.get("name"), str):
            raise InvalidValue(
                f"expected a name, got {show(one.get('name'))}", *keys, number, "name"
            )


def _check_mounts(role: RoleSpec, volumes: list[str], key: str) -> None:
    _check_names(role.volumeMounts, key, "volumeMounts")
    places: list[str] = []
    for number, mount in enumerate(role.volumeMounts):
        where = (key, "volumeMounts", number)
        if mount["name"] not in volumes:
            raise InvalidValue(
                f"expected a name of volumes, got {mount['name']!r}", *where, "name"
            )
        place = mount.get("mountPath")
        unknown = [each for each in mount if each not in _MOUNT_KEYS]
        if place is None and unknown:
            hint = did_you_mean(unknown[0], _MOUNT_KEYS)
            raise InvalidValue(f"unknown key{hint}", *where, unknown[0])
        if not isinstance(place, str) or not place.startswith("/") or place in places:
            raise InvalidValue(
                f"expected an absolute path of its own, got {show(place)}", *where, "mountPath"
            )
        places.append(place)


@dataclass(frozen=True, slots=True)
class PersiaJob(Section):
    """A PersiaJob as the API has it."""

    apiVersion: Literal["persia.com/v1"]
    kind: Literal["PersiaJob"]
    metadata: Object
    spec: JobSpec
    status: Object = field(default_factory=dict)

    def check(self) -> None:
        """Check the names: of the job and its namespace."""
        for key in ("name", "namespace"):
            value = self.metadata.get(key, "default" if key == "namespace" else None)
            if not isinstance(value, str) or not _NAME.fullmatch(value):
                raise InvalidValue(
                    "expected lower-case letters, digits and dashes, from a letter on, "
                    f"got {show(value)}",
                    "metadata",
                    key,
                )

    @property
    def name(self) -> str:
        return str(self.metadata["name"])

    @property
    def namespace(self) -> str | None:
        """None where the document names none: kubectl's own namespace is meant."""
        return self.metadata.get("namespace")


def read_job(source: str | os.PathLike[str] | Mapping[str, Any]) -> PersiaJob:
    """Return the PersiaJob of a YAML file, or of an object of the API.

    Raises:
        ConfigError: If it cannot be used; names the file with the line, and the key.
    """
    document = Document(source, KIND)
    if not isinstance(document.content, Mapping):
        raise ConfigError(
            f"{document.place()}: expected a PersiaJob, got {show(document.content)}"
        )
    return document.read(PersiaJob)


def read_spec(spec: object) -> JobSpec:
    """Return the ``spec`` alone; ConfigError if it cannot be used."""
    try:
        return validate(JobSpec, spec)
    except InvalidValue as exc:
        raise ConfigError(InvalidValue(str(exc), "spec", *exc.keys).at("")) from exc
