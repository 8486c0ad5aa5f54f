"""What every test gets: its own copy of the environment, and a Hypothesis profile."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

# Derandomized throughout: a test that fails today fails tomorrow. ``deep`` runs by hand, with
# --hypothesis-profile=deep.
settings.register_profile("dev", max_examples=50, derandomize=True, deadline=None)
settings.register_profile("ci", max_examples=200, derandomize=True, deadline=None)
settings.register_profile("deep", max_examples=20_000, derandomize=True, deadline=None)
settings.load_profile("ci" if os.environ.get("CI") == "true" else "dev")


@pytest.fixture(autouse=True)
def _same_environment_after() -> Iterator[None]:
    before = dict(os.environ)
    yield
    if dict(os.environ) != before:
        os.environ.clear()
        os.environ.update(before)
