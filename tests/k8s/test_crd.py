"""The resource of PersiaJobs: what it accepts, and that the file in deploy/ is current."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import yaml
from hypothesis import given

from persia._k8s.crd import crd
from persia._k8s.spec import read_job
from tests.k8s.schemas import check, check_custom
from tests.k8s.specs import ORIGINAL, jobs
from tests.support.processes import ROOT
from tests.support.profiles import tries


def schema() -> Any:
    return crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


SCHEMA = schema()


def test_the_file_in_deploy_is_current() -> None:
    text = (ROOT / "deploy/crd/jobs.persia.com.yaml").read_text(encoding="utf-8")
    # Otherwise: persia-k8s-utils gencrd --output deploy/crd/jobs.persia.com.yaml
    assert yaml.safe_load(text) == crd()


def test_the_definition_is_valid_for_every_version_of_kubernetes() -> None:
    check(crd())


def test_a_document_of_the_original_is_valid() -> None:
    check_custom(ORIGINAL, SCHEMA)
    example = yaml.safe_load((ROOT / "examples/kubernetes/adult.yml").read_text())
    check_custom(example, SCHEMA)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("replicas", "2"),
        ("replicas", -1),
        ("nprocPerNode", 0),
        ("nprocPerNod", 1),
        ("volumeMounts", ["/data"]),
    ],
)
def test_what_no_job_can_be_made_of_is_refused(key: str, value: object) -> None:
    document = copy.deepcopy(ORIGINAL)
    document["spec"]["nnWorker"][key] = value
    with pytest.raises(AssertionError):
        check_custom(document, SCHEMA)


@given(jobs())
@tries(60)
def test_both_the_resource_and_the_reader_accept_any_valid_document(
    document: dict[str, Any],
) -> None:
    check_custom(document, SCHEMA)
    read_job(document)


def test_the_schema_is_structural() -> None:
    def below(one: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        yield one
        for inner in one.get("properties", {}).values():
            yield from below(inner)
        for key in ("items", "additionalProperties"):
            if key in one:
                yield from below(one[key])

    for one in below(SCHEMA):
        assert "type" in one
        assert not {"properties", "additionalProperties"} <= one.keys()
        is_open = one.get("x-kubernetes-preserve-unknown-fields", False)
        assert (
            is_open
            or one["type"] != "object"
            or one.keys()
            & {
                "properties",
                "additionalProperties",
            }
            or one is SCHEMA["properties"]["metadata"]
        )
