"""Section ``group_settings``: what is read, which tables it makes, what each bad file says."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from persia._core.optim import OPTIONS
from persia._services.plan import schema_fingerprint, tell_apart
from persia.config import EmbeddingSchema, GroupOptimizer, GroupSettings
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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"h": {}}, r"group_settings: unknown group 'h'"),
        ({"a": {}}, r"group_settings: unknown group 'a'.*outside any group"),
        ({"g": {"optimiser": {}}}, r"group_settings\.g: unknown key 'optimiser'.*'optimizer'"),
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
        ({"g": {"optimizer": {"beta1": 1}}}, "beta1 must be below 1"),
        ({"g": {"optimizer": {"original_order": 1}}}, "original_order must be True or False"),
    ],
)
def test_what_cannot_be_used(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(settings)


def test_the_fingerprint_is_of_the_settings_too() -> None:
    settings: list[dict[str, Any] | None] = [
        None,
        {"g": {"optimizer": {}}},
        {"g": {"optimizer": {"lr": 0.5}}},
        {"g": {"optimizer": {"lr": 0.25}}},
        {"g": {"optimizer": {"name": "adam", "lr": 0.25}}},
    ]
    assert len({schema_fingerprint(load(one)) for one in settings}) == len(settings)


def test_which_settings_differ_is_told() -> None:
    one, other = load({"g": {"optimizer": {"lr": 0.5}}}), load({"c": {"optimizer": {}}})
    told = tell_apart(schema_fingerprint(one), schema_fingerprint(other), "here", "there")
    assert "group_settings.c is absent here and {'optimizer'" in told
    assert "group_settings.g is {'optimizer': {'name': None, 'options': {'lr': 0.5}}}" in told
