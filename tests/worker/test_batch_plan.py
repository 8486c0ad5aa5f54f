"""Names of features resolved against the schema."""

from __future__ import annotations

import logging

import pytest

from persia._worker.batch_plan import UNSEEN_AFTER, BatchPlanner
from persia.config import EmbeddingSchema
from persia.errors import DataError
from tests.support.services import SCHEMA


def test_groups_of_a_table_stand_in_the_order_of_their_first_feature() -> None:
    plan = BatchPlanner(SCHEMA).plan(("mean", "sum", "raw", "stack", "max"))
    assert [table.number for table in plan.tables] == [
        SCHEMA.slots["mean"].table,
        SCHEMA.slots["raw"].table,
    ]
    groups = plan.tables[0].groups
    assert [group.features for group in groups] == [(0,), (1, 4), (3,)]
    assert [group.is_plain for group in groups] == [True, False, False]
    assert [feature.pooled for feature in plan.features] == [0, 1, -1, 2, 3]
    assert [table.num_pooled for table in plan.tables] == [4, 0]


def test_a_plan_is_made_once_and_only_so_many_are_kept() -> None:
    planner = BatchPlanner(SCHEMA)
    assert planner.plan(("sum", "max")) is planner.plan(("sum", "max"))
    planner.MAX_PLANS = 1
    assert planner.plan(("max", "sum")).names == ("max", "sum")
    assert planner.plan(("max", "sum")) is not planner.plan(("max", "sum"))


def test_an_unknown_feature_is_named_with_the_nearest_known() -> None:
    with pytest.raises(DataError, match=r"'mena' .*did you mean 'mean'\?"):
        BatchPlanner(SCHEMA).plan(("sum", "mena"))
    with pytest.raises(DataError, match=r"'zzzz' is not in the embedding config$"):
        BatchPlanner(SCHEMA).plan(("zzzz",))


def test_w22_a_repeated_feature_is_named() -> None:
    with pytest.raises(DataError, match="'sum' comes twice"):
        BatchPlanner(SCHEMA).plan(("sum", "max", "sum"))


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
