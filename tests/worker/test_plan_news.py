"""What a batch that lacks slots of the config is told."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from persia._worker.batch_plan import UNSEEN_AFTER, BatchPlanner
from persia.config import EmbeddingSchema

if TYPE_CHECKING:
    import pytest


def test_slots_that_the_first_batch_lacks_are_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    slots = {name: {"dim": 4} for name in ("user", "item", "city")}
    planner = BatchPlanner(EmbeddingSchema.load({"slots_config": slots}))
    with caplog.at_level(logging.INFO):
        planner.plan(("user",))
        planner.plan(("item",))
    assert [record.message for record in caplog.records] == [
        "the first batch has no 'city', 'item', of 3 slots in the embedding config: the model "
        "gets that many embeddings fewer"
    ]


def test_slots_that_no_batch_has_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    slots = {name: {"dim": 4} for name in ("user", "item", "city")}
    planner = BatchPlanner(EmbeddingSchema.load({"slots_config": slots}))
    planner.plan(("user",))
    planner.plan(("item",))  # of another data-loader
    for _ in range(2 * UNSEEN_AFTER):
        planner.plan(("user",))
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        f"none of the first {UNSEEN_AFTER} batches has 'city', of 3 slots in the embedding "
        "config: if the model needs them, data-loaders have to send them; if not, take them out"
    ]
