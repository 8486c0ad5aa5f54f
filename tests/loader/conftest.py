"""Senders that are closed after a test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from persia._loader.sender import BatchSender
from tests.loader.sending import MakeFeeder
from tests.support.streams import (
    feeder,
)


@pytest.fixture
def make_feeder() -> Iterator[MakeFeeder]:
    made = []

    def make(*arguments: Any, **options: Any) -> BatchSender:
        made.append(feeder(*arguments, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
