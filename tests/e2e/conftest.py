"""A job of one server and one worker, gone after the test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.support import Job, short_directory


@pytest.fixture
def job() -> Iterator[Job]:
    with short_directory() as directory:
        made = Job(directory)
        yield made
        made.close()
