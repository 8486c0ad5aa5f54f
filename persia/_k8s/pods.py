"""The template of a pod, which all engines share, and the objects beside the pods."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from persia._k8s.plan import (
    JOB_LABEL,
    KEY_FILES,
    KEYS_FOLDER,
    LOADER,
    MASTER_PORT,
    METRICS_PORT,
    ROLE_LABEL,
    SERVER,
    TRAINER,
    Plan,
    RolePlan,
)
from persia._k8s.spec import API_VERSION, KIND

# On children of a PersiaJob: what they were made of, and at which start of the job.
SPEC_ANNOTATION, ATTEMPT_LABEL = f"{API_VERSION.partition('/')[0]}/spec", "persia_attempt"

_USER = 10001  # of the image
_SHM, _TMP = "/dev/shm", "/tmp"
# A server that was killed reads all of its rows again before it serves.
_STARTUP_S, _STARTUP_PERIOD_S = 1800, 5


def metadata(
    plan: Plan, name: str, labels: Mapping[str, str] | None = None, *, is_run: bool = False
) -> dict[str, Any]:
    """Return an object's metadata; ``is_run`` where its end is one of the job's start."""
    found: dict[str, Any] = {"name": name}
    if plan.job.namespace is not None:
        found["namespace"] = plan.job.namespace
    found["labels"] = {**(labels or {}), **plan.labels}
    if plan.owner is not None:
        if is_run:
            found["labels"][ATTEMPT_LABEL] = str(plan.owner.attempt)
        found["annotations"] = {SPEC_ANNOTATION: plan.spec_hash}
        found["ownerReferences"] = [
            {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "name": plan.name,
                "uid": plan.owner.uid,
                "controller": True,
            }
        ]
    return found


def role_labels(plan: Plan, role: RolePlan) -> dict[str, str]:
    return {JOB_LABEL: plan.name, ROLE_LABEL: role.kind.role}


def pod_template(plan: Plan, role: RolePlan, number: int | None = None) -> dict[str, Any]:
    """Return the template of a pod; without a number its engine numbers it."""
    spec = plan.job.spec
    is_restarted = role.is_restarted and spec.restartPolicy != "Never"
    pod: dict[str, Any] = {
        "restartPolicy": "OnFailure" if is_restarted else "Never",
        # PERSIA asks nothing of the cluster, and finds its peers by their names.
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "terminationGracePeriodSeconds": role.spec.terminationGracePeriodSeconds,
        "containers": [_container(plan, role, number)],
        "volumes": [*spec.volumes, *_own_volumes(plan, role)],
    }
    if number is not None:
        pod |= {"hostname": role.host_of(number), "subdomain": role.domain}
    for key in ("nodeSelector", "affinity", "priorityClassName"):
        pod[key] = getattr(role.spec, key)
    pod["tolerations"] = list(role.spec.tolerations)
    for key in ("serviceAccountName", "schedulerName"):
        pod[key] = getattr(spec, key)
    pod["imagePullSecrets"] = list(spec.imagePullSecrets)
    if role.kind is SERVER and not role.spec.affinity:
        pod["topologySpreadConstraints"] = [_spread(plan, role)]
    annotations = dict(spec.podAnnotations)
    if spec.enableMetrics:
        scraped = {"scrape": "true", "port": str(METRICS_PORT), "path": "/metrics"}
        annotations |= {f"prometheus.io/{key}": value for key, value in scraped.items()}
    meta: dict[str, Any] = {"labels": {**spec.podLabels, **role_labels(plan, role)}}
    if annotations:
        meta["annotations"] = annotations
    return {
        "metadata": meta,
        "spec": {key: value for key, value in pod.items() if value or value in (0, False)},
    }


def _container(plan: Plan, role: RolePlan, number: int | None) -> dict[str, Any]:
    ports = role.ports
    command = list(role.spec.command) or ["persia-launcher"]
    arguments = [] if role.spec.command else _arguments(plan, role, number)
    found: dict[str, Any] = {
        "name": role.kind.container if role.kind is not TRAINER else plan.engine.trainer,
        "image": role.image,
        "command": command,
        "args": [*arguments, *role.spec.args],
        "env": _merged(*role.env, *_numbered(plan, role, number), *role.spec.env),
        "ports": [{"name": name, "containerPort": port} for name, port in ports.items()],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
            **(role.spec.securityContext or {}),
        },
        "volumeMounts": [*role.spec.volumeMounts, *_own_mounts(plan, role)],
        **_probes(role),
    }
    if plan.job.spec.imagePullPolicy:
        found["imagePullPolicy"] = plan.job.spec.imagePullPolicy
    if role.spec.resources:
        found["resources"] = _quantities(role.spec.resources)
    return found


def _quantities(resources: Mapping[str, Any]) -> dict[str, Any]:
    """Return resources with quantities as texts: as the API keeps them."""
    return {
        key: {name: str(value) for name, value in found.items()}
        if isinstance(found, Mapping)
        else found
        for key, found in resources.items()
    }


def _arguments(plan: Plan, role: RolePlan, number: int | None) -> list[str]:
    if role.kind is not TRAINER:
        return [role.kind.role]
    if plan.engine.name == "trainjob":
        return [role.kind.role]  # Trainer sets PET_NNODES and the rest
    # An Indexed Job has the number in a variable, which Kubernetes expands in arguments.
    rank = "$(JOB_COMPLETION_INDEX)" if number is None else str(number)
    return [
        role.kind.role,
        *("--nproc-per-node", str(role.num_ranks)),
        *("--nnodes", str(role.replicas)),
        *("--node-rank", rank),
    ]


def _numbered(plan: Plan, role: RolePlan, number: int | None) -> list[dict[str, Any]]:
    if role.kind is TRAINER:
        values = {
            "MASTER_ADDR": f"{role.host_of(0)}.{role.domain}",
            "MASTER_PORT": str(MASTER_PORT),
        }
        if plan.engine.name == "trainjob":
            return []
    else:
        # Of a host name such as job-embedding-ps-0-3 it is the last number.
        values = {
            "REPLICA_INDEX": "auto" if number is None else str(number),
            "REPLICA_SIZE": str(role.replicas),
        }
    return [{"name": name, "value": value} for name, value in values.items()]


def _merged(*variables: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return each variable once, at its last place: it may refer to those before it."""
    found: dict[str, dict[str, Any]] = {}
    for one in variables:
        found.pop(one["name"], None)
        found[one["name"]] = dict(one)
    return list(found.values())


def _probes(role: RolePlan) -> dict[str, Any]:
    """Return the probes; a script may do what it likes before it has metrics to ask."""
    if role.kind in (TRAINER, LOADER):
        return {"readinessProbe": _probe("/readyz", 10)}
    return {
        "startupProbe": {
            **_probe("/healthz", _STARTUP_PERIOD_S),
            "failureThreshold": _STARTUP_S // _STARTUP_PERIOD_S,
        },
        "readinessProbe": _probe("/readyz", 10),
        "livenessProbe": _probe("/healthz", 30),
    }


def _probe(path: str, period_s: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": METRICS_PORT},
        "periodSeconds": period_s,
        "timeoutSeconds": min(period_s, 10),
    }


def _own_volumes(plan: Plan, role: RolePlan) -> list[dict[str, Any]]:
    mounted = {mount["name"] for mount in _own_mounts(plan, role)}
    memory: dict[str, Any] = {"medium": "Memory"}
    if role.spec.shmSize:
        memory["sizeLimit"] = role.spec.shmSize
    found: dict[str, dict[str, Any]] = {
        "persia-shm": {"emptyDir": memory},
        "persia-tmp": {"emptyDir": {}},
        "persia-keys": {
            "secret": {
                "secretName": plan.keys_secret,
                "defaultMode": 0o440,
                "items": [{"key": name, "path": name} for name in role.kind.keys],
            }
        },
    }
    return [{"name": name, **found[name]} for name in found if name in mounted]


def _own_mounts(plan: Plan, role: RolePlan) -> list[dict[str, Any]]:
    """Return what is mounted where the job mounts nothing of its own."""
    taken = {mount["mountPath"].rstrip("/") for mount in role.spec.volumeMounts}
    # In memory, and as long as the pod: a server's rows outlive its container, and data-loaders
    # of torch pass batches through it.
    wanted = {"persia-tmp": _TMP}
    if role.kind in (SERVER, TRAINER):
        wanted["persia-shm"] = _SHM
    found: list[dict[str, Any]] = [
        {"name": name, "mountPath": path} for name, path in wanted.items() if path not in taken
    ]
    if plan.keys_secret and KEYS_FOLDER not in taken:
        found.append({"name": "persia-keys", "mountPath": KEYS_FOLDER, "readOnly": True})
    return found


def _spread(plan: Plan, role: RolePlan) -> dict[str, Any]:
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": role_labels(plan, role)},
    }


# --- beside the pods ------------------------------------------------------------------------


def network_policy(plan: Plan) -> dict[str, Any]:
    """Return the NetworkPolicy: pods of a job reach each other, and metrics are for all.

    Ranks of torch connect at ports that the kernel chooses, so no port is named among pods.
    """
    pods = {"matchLabels": {JOB_LABEL: plan.name}}
    ingress: list[dict[str, Any]] = [{"from": [{"podSelector": pods}]}]
    if plan.job.spec.enableMetrics:
        ports = sorted(
            {
                port
                for role in plan.roles
                for name, port in role.ports.items()
                if name.startswith("metrics")
            }
        )
        ingress.append({"ports": [{"protocol": "TCP", "port": port} for port in ports]})
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(plan, plan.name),
        "spec": {"podSelector": pods, "policyTypes": ["Ingress"], "ingress": ingress},
    }


def disruption_budget(plan: Plan, kubernetes: tuple[int, int]) -> dict[str, Any] | None:
    """Return the PodDisruptionBudget: no node with a server or a trainer is drained.

    A server that is evicted takes its rows with it, and a trainer its dense net. A number is
    needed: pods of Jobs have no controller that Kubernetes could ask how many there are to be.
    """
    kept = [role for role in plan.roles if role.kind in (SERVER, TRAINER)]
    if not kept:
        return None
    roles = {
        "key": ROLE_LABEL,
        "operator": "In",
        "values": [role.kind.role for role in kept],
    }
    return {
        "apiVersion": "policy/v1" if kubernetes >= (1, 21) else "policy/v1beta1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(plan, plan.name),
        "spec": {
            "minAvailable": sum(role.replicas for role in kept),
            "selector": {
                "matchLabels": {JOB_LABEL: plan.name},
                "matchExpressions": [roles],
            },
        },
    }


def keys_secret(plan: Plan, files: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the Secret that the plan names, of the files that roles need."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(plan, str(plan.keys_secret)),
        "type": "Opaque",
        "data": {name: base64.b64encode(files[name]).decode() for name in KEY_FILES},
    }
