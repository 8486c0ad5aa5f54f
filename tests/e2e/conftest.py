"""A job of one server and one worker, gone after the test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.support import Job, new_job


@pytest.fixture
def job() -> Iterator[Job]:
    with new_job() as made:
        yield made
