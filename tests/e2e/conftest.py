"""A job of one server and one worker, and a namespace of a cluster, gone after the test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.e2e.clusters import Kubectl, create_resource, kubectl_of_tests
from tests.e2e.support import Job, new_job


@pytest.fixture
def job() -> Iterator[Job]:
    with new_job() as made:
        yield made


@pytest.fixture(scope="module")
def kubectl() -> Kubectl:
    call = kubectl_of_tests()
    create_resource(call)
    return call


@pytest.fixture
def namespace(kubectl: Kubectl, request: pytest.FixtureRequest) -> Iterator[str]:
    name = f"persia-{os.getpid()}-{abs(hash(request.node.name)) % 10_000}"
    kubectl("create", "namespace", name)
    yield name
    kubectl("delete", "namespace", name, "--wait=false")
