"""PersiaJobs for tests: one that is whole, and any that is valid."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st

ROLES = ("embeddingParameterServer", "embeddingWorker", "nnWorker", "dataloader")

# As the original's documents are: the job of its example, with the broker's variable.
ORIGINAL: dict[str, Any] = {
    "apiVersion": "persia.com/v1",
    "kind": "PersiaJob",
    "metadata": {"name": "adult-income", "namespace": "default"},
    "spec": {
        "persiaEnv": {
            "PERSIA_GLOBAL_CONFIG": "/home/config/global_config.yml",
            "PERSIA_EMBEDDING_CONFIG": "/home/config/embedding_config.yml",
            "PERSIA_NN_WORKER_ENTRY": "/home/train.py",
            "PERSIA_DATALOADER_ENTRY": "/home/data_loader.py",
        },
        "env": [{"name": "PERSIA_NATS_URL", "value": "nats://persia-nats-service:4222"}],
        "logLevel": "debug",
        "restartPolicy": "Never",
        "imagePullPolicy": "IfNotPresent",
        "enableMetrics": False,
        "volumes": [{"name": "data", "hostPath": {"path": "/data", "type": "Directory"}}],
        "embeddingParameterServer": {
            "replicas": 2,
            "resources": {"limits": {"memory": "24Gi", "cpu": "4"}},
            "volumeMounts": [{"name": "data", "mountPath": "/data"}],
            "env": [{"name": "RUST_BACKTRACE", "value": "1"}],
            "image": "registry.local/server:1",
        },
        "embeddingWorker": {"replicas": 2, "resources": None},
        "nnWorker": {
            "replicas": 2,
            "nprocPerNode": 2,
            "resources": {"limits": {"nvidia.com/gpu": 2}},
            "env": [{"name": "CUBLAS_WORKSPACE_CONFIG", "value": ":4096:8"}],
        },
        "dataloader": {"replicas": 1},
    },
}


def original(**changes: Any) -> dict[str, Any]:
    """The original's document, with other values of its spec."""
    document = copy.deepcopy(ORIGINAL)
    document["spec"] |= changes
    return document


_WORD = st.sampled_from(["a", "b1", "some-word", "x" * 20])
_LABELS = st.dictionaries(
    st.sampled_from(["team", "kueue.x-k8s.io/queue-name", "example.com/part"]),
    _WORD,
    max_size=2,
)
_VARIABLE = st.one_of(
    st.fixed_dictionaries(
        {"name": st.sampled_from(["A", "B_2", "LOG_LEVEL"]), "value": st.text(max_size=5)}
    ),
    st.just({"name": "HOST_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}}),
    st.just({"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}),
)
_VOLUMES: tuple[dict[str, Any], ...] = (
    {"name": "data", "hostPath": {"path": "/data"}},
    {"name": "scripts", "configMap": {"name": "scripts"}},
    {"name": "claim", "persistentVolumeClaim": {"claimName": "claim"}},
    {"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": "2Gi"}},
)
_QUANTITIES = st.dictionaries(
    st.sampled_from(["cpu", "memory", "nvidia.com/gpu"]), st.sampled_from(["1", "500m", "2Gi"])
)
_AFFINITY = {
    "nodeAffinity": {
        "preferredDuringSchedulingIgnoredDuringExecution": [
            {
                "weight": 1,
                "preference": {"matchExpressions": [{"key": "disk", "operator": "Exists"}]},
            }
        ]
    }
}


def _optional(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Any of these keys; one without a value counts as not given."""
    return st.fixed_dictionaries(
        {}, optional={key: st.none() | of for key, of in fields.items()}
    )


@st.composite
def _roles(draw: st.DrawFn, volumes: list[str], least: int) -> dict[str, Any]:
    mounts = [
        {"name": name, "mountPath": draw(st.sampled_from([f"/{name}", f"/mnt/{name}/"]))}
        for name in draw(st.lists(st.sampled_from(volumes or ["none"]), unique=True))
        if volumes
    ]
    replaces_own: bool = draw(st.booleans())
    if mounts and replaces_own:
        mounts[0]["mountPath"] = draw(st.sampled_from(["/dev/shm", "/tmp", "/tmp/"]))
    given = draw(
        _optional(
            resources=_optional(limits=_QUANTITIES, requests=_QUANTITIES).map(_without_none),
            env=st.lists(_VARIABLE, max_size=3),
            image=st.just("registry.local/persia:1"),
            command=st.just(["sh", "-c"]),
            args=st.lists(st.sampled_from(["--lr", "3"]), max_size=2),
            shmSize=st.just("8Gi"),
            nodeSelector=_LABELS,
            tolerations=st.just(
                [{"key": "spot", "operator": "Exists", "effect": "NoSchedule"}]
            ),
            affinity=st.just(_AFFINITY),
            priorityClassName=_WORD,
            securityContext=st.just({"runAsUser": 1000, "readOnlyRootFilesystem": False}),
            terminationGracePeriodSeconds=st.integers(0, 600),
        )
    )
    return {"replicas": draw(st.integers(least, 3)), "volumeMounts": mounts, **given}


def _without_none(given: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in given.items() if value is not None}


@st.composite
def jobs(draw: st.DrawFn, *, needs_trainer: bool = False) -> dict[str, Any]:
    """Any valid document."""
    volumes = draw(st.lists(st.sampled_from(_VOLUMES), unique_by=lambda one: one["name"]))
    names = [one["name"] for one in volumes]
    chosen = draw(st.lists(st.sampled_from(ROLES), unique=True, min_size=1))
    if needs_trainer and "nnWorker" not in chosen:
        chosen.append("nnWorker")
    first = "nnWorker" if needs_trainer else chosen[0]
    roles = {key: draw(_roles(names, int(key == first))) for key in chosen}
    if "nnWorker" in roles:
        roles["nnWorker"]["nprocPerNode"] = draw(st.integers(1, 8))
    given = draw(
        _optional(
            enableMetrics=st.booleans(),
            env=st.lists(_VARIABLE, max_size=3),
            logLevel=st.sampled_from(["info", "debug"]),
            restartPolicy=st.sampled_from(["Always", "OnFailure", "Never"]),
            imagePullPolicy=st.sampled_from(["Always", "IfNotPresent", "Never"]),
            suspend=st.booleans(),
            maxRestarts=st.integers(0, 5),
            activeDeadlineSeconds=st.integers(1, 1000),
            ttlSecondsAfterFinished=st.integers(0, 1000),
            keysSecret=_WORD,
            podLabels=_LABELS,
            podAnnotations=_LABELS,
            imagePullSecrets=st.just([{"name": "pull"}]),
            serviceAccountName=_WORD,
            schedulerName=st.just("volcano"),
        )
    )
    persia_env = draw(_optional(PERSIA_NN_WORKER_ENTRY=_WORD, PERSIA_DATALOADER_ENTRY=_WORD))
    paths = {"PERSIA_GLOBAL_CONFIG": "/g.yml", "PERSIA_EMBEDDING_CONFIG": "/e.yml"}
    metadata: dict[str, Any] = {"name": draw(st.sampled_from(["j", "adult-income", "a" * 35]))}
    metadata |= draw(
        st.fixed_dictionaries(
            {}, optional={"labels": _LABELS, "namespace": _WORD.map(lambda word: f"n-{word}")}
        )
    )
    return {
        "apiVersion": "persia.com/v1",
        "kind": "PersiaJob",
        "metadata": metadata,
        "spec": {"persiaEnv": {**paths, **persia_env}, "volumes": volumes, **roles, **given},
    }
