"""Section ``group_settings``: what is read, which tables it makes, what each bad file says."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from persia._core.kernels.optim import OPTIONS
from persia.config import (
    EmbeddingSchema,
    GroupAdmission,
    GroupEviction,
    GroupOptimizer,
    GroupSettings,
    schema_fingerprint,
)
from persia.errors import ConfigError


def load(settings: dict[str, Any] | None) -> EmbeddingSchema:
    """Slots a and b in group g, c and d by themselves, all of one dim."""
    return EmbeddingSchema.load(
        {
            "slots_config": {name: {"dim": 8} for name in "abcd"},
            "feature_groups": {"g": ["a", "b"]},
            "group_settings": settings,
        }
    )


def test_a_group_with_an_optimizer_has_a_table_to_itself() -> None:
    schema = load({"g": {"optimizer": {"lr": 1}}, "c": {"optimizer": {"lr": 1.0}}})
    assert [schema.slots[name].table for name in "abcd"] == [0, 0, 1, 2]
    changed = GroupSettings(GroupOptimizer(None, {"lr": 1.0}))
    assert [table.settings for table in schema.tables] == [changed, changed, GroupSettings()]
    assert pickle.loads(pickle.dumps(schema)) == schema
    assert schema_fingerprint(EmbeddingSchema.load(schema)) == schema_fingerprint(schema)


def test_settings_that_say_nothing_change_nothing() -> None:
    plain = load(None)
    assert len(plain.tables) == 1
    assert load({"g": {}, "c": {"optimizer": None}}) == plain


def test_an_optimizer_that_changes_nothing_still_gives_a_learning_rate_of_its_own() -> None:
    assert [load({"c": {"optimizer": {}}}).slots[name].table for name in "abcd"] == [0, 0, 1, 0]


def test_a_named_optimizer_stands_for_itself_and_another_changes_the_registered_one() -> None:
    named = GroupOptimizer("adam", {"lr": 0.5})
    assert named.options == OPTIONS["adam"] | {"lr": 0.5}
    assert named.resolve("adam", {"lr": 1.0, "eps": 1.0}) == ("adam", named.options)
    assert named.has_own_lr
    changed = GroupOptimizer(None, {"eps": 0.5})
    assert changed.resolve("adam", {"lr": 1.0, "eps": 1.0}) == ("adam", {"lr": 1.0, "eps": 0.5})
    assert not changed.has_own_lr
    assert GroupOptimizer(None, {"lr": 0.5}).has_own_lr


def test_rowwise_adagrad_is_a_name_of_an_option() -> None:
    named = GroupOptimizer("rowwise_adagrad", {"lr": 0.5})
    assert named == GroupOptimizer("adagrad", {"lr": 0.5, "vectorwise_shared": True})
    with pytest.raises(ConfigError, match=r"did you mean 'rowwise_adagrad'\? \(known: sgd, "):
        GroupOptimizer("rowise_adagrad", {})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"h": {}}, r"group_settings\.h: unknown group"),
        ({"a": {}}, r"group_settings\.a: unknown group.*outside any group"),
        ({"g": {"optimiser": {}}}, r"settings\.g\.optimiser: unknown key.*'optimizer'"),
        ({"g": {"optimizer": 3}}, r"group_settings\.g\.optimizer: expected a mapping"),
        ({"g": {"optimizer": {"name": 3}}}, r"g\.optimizer\.name: expected one of sgd, "),
        ({"g": {"optimizer": {"name": "adem"}}}, r"g\.optimizer: .*did you mean 'adam'"),
        ({"g": {"optimizer": {"name": "sgd"}}}, r"g\.optimizer: sgd: lr .* not given"),
        (
            {"g": {"optimizer": {"name": "adam", "momentum": 1}}},
            "adam has no option 'momentum'",
        ),
        ({"g": {"optimizer": {"weight_deca": 1}}}, "option 'weight_deca'.*'weight_decay'"),
        ({"g": {"optimizer": {"lr": -1}}}, "lr must be at least 0, got -1"),
        ({"g": {"optimizer": {"lr": "big"}}}, "lr must be a number, got 'big'"),
        (
            {"g": {"optimizer": {"lr": "1e-3"}}},
            r"optimizer\.lr: .*got '1e-3'; write 1\.0e-3",
        ),
        ({"g": {"optimizer": {"beta1": 1}}}, "beta1 must be below 1"),
        ({"g": {"optimizer": {"original_order": 1}}}, "original_order must be True or False"),
        ({"g": {"dtype": "f16"}}, r"g\.dtype: expected one of float32, .*got 'f16'"),
        ({"g": {"dtype": 16}}, r"g\.dtype: expected one of float32"),
    ],
)
def test_what_cannot_be_used(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(settings)


def test_a_dtype_splits_tables_and_slots_of_one_dtype_share_theirs() -> None:
    schema = load({"g": {"dtype": "float16"}, "c": {"dtype": "bfloat16"}})
    assert [schema.slots[name].table for name in "abcd"] == [0, 0, 1, 2]
    assert [table.dtype for table in schema.tables] == ["float16", "bfloat16", "float32"]
    assert len(load({name: {"dtype": "float16"} for name in "gcd"}).tables) == 1


# --- eviction and admission -----------------------------------------------------------------


def test_tables_are_split_by_eviction_and_admission() -> None:
    schema = load(
        {
            "g": {"eviction": {"policy": "lfu", "ttl_seconds": 90}},
            "c": {"admission": {"policy": "count", "threshold": 3}},
            "d": {"eviction": {"policy": "lfu", "ttl_seconds": 90.0}},
        }
    )
    assert [schema.slots[name].table for name in "abcd"] == [0, 0, 1, 0]
    eviction, admission = GroupEviction("lfu", 90.0), GroupAdmission("count", threshold=3)
    assert [table.settings for table in schema.tables] == [
        GroupSettings(eviction=eviction),
        GroupSettings(admission=admission),
    ]
    changed: dict[str, Any] = {"g": {"eviction": {}}}
    assert schema_fingerprint(load(changed)) != schema_fingerprint(load(None))


def test_times_to_live_are_milliseconds_or_steps() -> None:
    assert GroupEviction().kind() == ("lru", None, 0)
    assert GroupEviction("lfu", 0.25).kind() == ("lfu", "milliseconds", 250)
    assert GroupEviction(ttl_steps=7).kind() == ("lru", "steps", 7)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"eviction": {"policy": "fifo"}}, r"g\.eviction\.policy: expected one of lru, lfu"),
        ({"eviction": {"ttl": 3}}, r"g\.eviction\.ttl: unknown key"),
        ({"eviction": {"ttl_seconds": 0}}, r"eviction\.ttl_seconds: expected 0\.001\.\."),
        ({"eviction": {"ttl_seconds": float("nan")}}, "ttl_seconds: expected"),
        ({"eviction": {"ttl_seconds": float("inf")}}, "ttl_seconds: expected"),
        ({"eviction": {"ttl_steps": 0}}, "ttl_steps: expected an integer in 1"),
        ({"eviction": {"ttl_steps": 1, "ttl_seconds": 1}}, "a row has one time to live"),
        ({"admission": {}}, r"g\.admission\.policy: the key is required"),
        ({"admission": {"policy": "count"}}, "threshold: is required with policy 'count'"),
        ({"admission": {"policy": "probability"}}, "probability: is required with policy"),
        (
            {"admission": {"policy": "count", "threshold": 2, "probability": 0.5}},
            "probability: has no meaning with policy 'count'",
        ),
        ({"admission": {"policy": "count", "threshold": 0}}, r"threshold: .* 1\.\.255, got 0"),
        ({"admission": {"policy": "count", "threshold": 256}}, r"1\.\.255, got 256"),
        ({"admission": {"policy": "probability", "probability": 2}}, r"0\.\.1, got 2"),
    ],
)
def test_eviction_and_admission_that_cannot_be_used(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load({"g": settings})


def test_a_new_id_is_admitted_in_one_way() -> None:
    with pytest.raises(ConfigError, match=r"group_settings\.a\.admission: slot 'a' has an"):
        EmbeddingSchema.load(
            {
                "slots_config": {"a": {"dim": 8, "admit_probability": 0.5}},
                "group_settings": {"a": {"admission": {"policy": "count", "threshold": 2}}},
            }
        )
