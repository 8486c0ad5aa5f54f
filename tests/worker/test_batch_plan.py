"""Names of features resolved against the schema."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from persia._worker.batch_plan import BatchPlanner
from persia.config import EmbeddingSchema, _compare, describe_differences, schema_fingerprint
from persia.errors import DataError
from tests.support.services import CONFIG, SCHEMA


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
    planner.MAX_KEPT = 1
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


def test_w07_the_fingerprint_is_of_what_signs_mean() -> None:
    same = copy.deepcopy(CONFIG)
    same["slots_config"]["sum"]["pooling"] = "mean"
    same["slots_config"]["raw"]["sample_fixed_size"] = 9
    assert schema_fingerprint(EmbeddingSchema.load(same)) == schema_fingerprint(SCHEMA)
    for key, value in (("feature_index_prefix_bit", 9), ("feature_groups", {})):
        other = copy.deepcopy(CONFIG) | {key: value}
        assert schema_fingerprint(EmbeddingSchema.load(other)) != schema_fingerprint(SCHEMA)
    other = copy.deepcopy(CONFIG)
    other["slots_config"] = {"new": {"dim": 4}} | other["slots_config"]
    assert schema_fingerprint(EmbeddingSchema.load(other)) != schema_fingerprint(SCHEMA)
    other = copy.deepcopy(CONFIG)
    other["slots_config"]["mean"]["dim"] = 8
    assert schema_fingerprint(EmbeddingSchema.load(other)) != schema_fingerprint(SCHEMA)


def told(other: dict[str, Any]) -> str:
    one, two = (schema_fingerprint(EmbeddingSchema.load(config)) for config in (CONFIG, other))
    return describe_differences(one, two, "there", "here")


def test_two_configs_are_told_apart_by_what_differs() -> None:
    other = copy.deepcopy(CONFIG)
    other["slots_config"]["mean"]["dim"] = 12
    dim = CONFIG["slots_config"]["mean"]["dim"]
    assert told(other).startswith(f"slots_config.mean.dim is {dim} there and 12 here")
    other = {"slots_config": {"new": {"dim": 4}} | CONFIG["slots_config"]}
    assert told(CONFIG | other).startswith("slots_config.new is absent there and present here;")
    other = {"feature_index_prefix_bit": 9}
    assert told(CONFIG | other) == "feature_index_prefix_bit is 8 there and 9 here"
    other = copy.deepcopy(CONFIG)
    other["slots_config"]["stack_max"]["hash_stack_config"]["embedding_size"] = 77
    assert "slots_config.stack_max.hash_stack_config is 3 rounds of 5 rows there" in told(other)
    assert "3 rounds of 77 rows here" in told(other)
    slots = CONFIG["slots_config"]
    other = {"slots_config": dict(reversed(slots.items()))}
    assert "in the order of the file, is " in told(CONFIG | other)


def test_fingerprints_that_say_nothing_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_compare, "_MAX_FINGERPRINT", 10)
    digest = schema_fingerprint(SCHEMA)
    assert len(digest) == 32
    for other in ("other", "[" * 5000, '{"slots": 3}', ""):
        assert (
            describe_differences(digest, other, "a", "b")
            == f"fingerprints {digest} and {other:.80}"
        )
