"""What a batch that lacks slots of the config is told."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from persia._services.plan import Planner
from persia.config import EmbeddingSchema

if TYPE_CHECKING:
    import pytest


def test_slots_that_the_first_batch_lacks_are_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    slots = {name: {"dim": 4} for name in ("user", "item", "city")}
    planner = Planner(EmbeddingSchema.load({"slots_config": slots}))
    with caplog.at_level(logging.INFO):
        planner.plan(("user",))
        planner.plan(("item",))
    assert [record.message for record in caplog.records] == [
        "the first batch has no 'city', 'item', of 3 slots in the embedding config: the model "
        "gets that many embeddings fewer"
    ]
