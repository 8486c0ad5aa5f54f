"""PersiaJobs as they are read: the original's, and what is wrong in a document."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from persia._k8s.spec import read_job, read_spec
from persia.errors import ConfigError
from tests.k8s.specs import original


def test_a_document_of_the_original_is_read_as_it_is() -> None:
    job = read_job(original())
    assert (job.name, job.namespace) == ("adult-income", "default")
    assert [(key, role.replicas) for key, role in job.spec.roles()] == [
        ("embeddingParameterServer", 2),
        ("embeddingWorker", 2),
        ("nnWorker", 2),
        ("dataloader", 1),
    ]
    assert job.spec.embeddingWorker is not None
    assert job.spec.embeddingWorker.resources is None
    assert job.spec.restartPolicy == "Never"


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("nprocPerNode", "nprocPerNod", 12, "spec.nnWorker.nprocPerNod: unknown key, did you"),
        ("replicas: 2", "replicas: two", 11, "spec.nnWorker.replicas: expected an integer in"),
        ("value: x", "value: 3", 14, r"spec.nnWorker.env\[0\].value: expected a string, got 3"),
        ("name: A", "nam: A", 14, r"spec.nnWorker.env\[0\].name: expected a name, got nothing"),
        ("name: job", "name: Job_1", 4, "metadata.name: expected lower-case letters"),
        ("name: data}", "name: dta}", 16, "expected a name of volumes, got 'dta'"),
        (
            "mountPath: /mnt",
            "mountPath: mnt",
            16,
            "expected an absolute path of its own, got 'mnt'",
        ),
        (
            "mountPath: /",
            "mountpath: /",
            16,
            "mountpath: unknown key, did you mean",
        ),
        ("nprocPerNode: 4", "shmSize: 256MB", 12, "spec.nnWorker.shmSize: expected a quantity"),
        ("- name: data", "- name: persia-tmp", 18, "'persia-tmp' is another volume's name"),
        ("kind: PersiaJob", "kind: Job", 2, "kind: expected 'PersiaJob', got 'Job'"),
        ("PERSIA_GLOBAL_CONFIG: g", "X: g", 7, "spec.persiaEnv.X: unknown key"),
        ("OnFailure", "Sometimes", 19, "spec.restartPolicy: expected"),
    ],
)
def test_a_bad_document_names_file_line_and_key(
    tmp_path: Path, old: str, new: str, line: int, message: str
) -> None:
    text = """\
apiVersion: persia.com/v1
kind: PersiaJob
metadata:
  name: job
spec:
  persiaEnv:
    PERSIA_GLOBAL_CONFIG: g
    PERSIA_EMBEDDING_CONFIG: e
  dataloader: {replicas: 0}
  nnWorker:
    replicas: 2
    nprocPerNode: 4
    env:
      - {name: A, value: x}
    volumeMounts:
      - {mountPath: /mnt, name: data}
  volumes:
    - name: data
  restartPolicy: OnFailure
"""
    path = tmp_path / "job.yml"
    path.write_text(text, encoding="utf-8")
    assert read_job(path).spec.nnWorker is not None
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"{path}:{line}: .*{message}"):
        read_job(path)


@pytest.mark.parametrize("text", ["", "- a", "3"])
def test_a_file_without_a_job_is_said_to_be_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "job.yml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"job\.yml: expected a PersiaJob, got"):
        read_job(path)


def test_a_job_needs_a_role_with_replicas() -> None:
    spec: dict[str, Any] = {"persiaEnv": original()["spec"]["persiaEnv"]}
    for role in ({}, {"dataloader": {"replicas": 0}}):
        with pytest.raises(ConfigError, match="spec: expected a role with replicas"):
            read_spec(spec | role)
    assert read_spec(spec | {"embeddingWorker": {"replicas": 1}}).nnWorker is None
    with pytest.raises(ConfigError, match=r"spec.env\[0\].name: expected a variable's name"):
        read_spec(original(env=[{"name": "A=B", "value": ""}])["spec"])
    with pytest.raises(ConfigError, match="spec: expected a mapping, got 3"):
        read_spec(3)
