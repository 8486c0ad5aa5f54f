"""Fingerprints of embedding configs, and what the difference of two is called."""

from __future__ import annotations

import copy
from typing import Any

from persia.config import EmbeddingSchema, _compare, describe_differences, schema_fingerprint
from tests.config.test_schema import grouped
from tests.support.fixtures import Monkey
from tests.support.services import CONFIG, SCHEMA


def test_w07_the_fingerprint_is_of_what_signs_mean() -> None:
    same = copy.deepcopy(CONFIG)
    same["slots_config"]["sum"]["pooling"] = "mean"
    same["slots_config"]["raw"]["sample_fixed_size"] = 9
    assert schema_fingerprint(EmbeddingSchema.load(same)) == schema_fingerprint(SCHEMA)
    slots = CONFIG["slots_config"]
    for key, value in (
        ("feature_index_prefix_bit", 9),
        ("feature_groups", {}),
        ("slots_config", {"new": {"dim": 4}} | slots),
        ("slots_config", slots | {"mean": {"dim": 8, "pooling": "mean"}}),
    ):
        other = EmbeddingSchema.load(CONFIG | {key: value})
        assert schema_fingerprint(other) != schema_fingerprint(SCHEMA)


def diff(other: dict[str, Any]) -> str:
    one, two = (schema_fingerprint(EmbeddingSchema.load(config)) for config in (CONFIG, other))
    return describe_differences(one, two, "there", "here")


def test_the_difference_of_two_configs_is_named() -> None:
    other = copy.deepcopy(CONFIG)
    other["slots_config"]["mean"]["dim"] = 12
    dim = CONFIG["slots_config"]["mean"]["dim"]
    assert diff(other).startswith(f"slots_config.mean.dim is {dim} there and 12 here")
    assert "row setting" not in diff(other)  # it follows
    other["slots_config"] = copy.deepcopy(CONFIG["slots_config"])
    other["slots_config"]["mean"]["admit_probability"] = 0.5
    assert diff(other) == (
        "the row setting of slot 'mean' (its initialization and admit_probability) is number 0 "
        "there and number 1 here"
    )
    other = {"slots_config": {"new": {"dim": 4}} | CONFIG["slots_config"]}
    assert diff(CONFIG | other).startswith("slots_config.new is absent there and present here;")
    other = {"feature_index_prefix_bit": 9}
    assert diff(CONFIG | other) == "feature_index_prefix_bit is 8 there and 9 here"
    other = copy.deepcopy(CONFIG)
    other["slots_config"]["mean"]["id_hash"] = (hashed := "native:one:" + "0" * 64)
    assert f"slots_config.mean.id_hash is none there and {hashed} here" in diff(other)
    del other["slots_config"]["mean"]["id_hash"]
    other["slots_config"]["stack_max"]["hash_stack_config"]["embedding_size"] = 77
    assert "slots_config.stack_max.hash_stack_config is 3 rounds of 5 rows there" in diff(other)
    assert "3 rounds of 77 rows here" in diff(other)
    slots = CONFIG["slots_config"]
    other = {"slots_config": dict(reversed(slots.items()))}
    assert "in the order of the file, is " in diff(CONFIG | other)


def test_fingerprints_that_say_nothing_are_shown(monkeypatch: Monkey) -> None:
    monkeypatch.setattr(_compare, "_MAX_FINGERPRINT", 10)
    digest = schema_fingerprint(SCHEMA)
    assert len(digest) == 32
    for other in ("other", "[" * 5000, '{"slots": 3}', ""):
        assert (
            describe_differences(digest, other, "a", "b")
            == f"fingerprints {digest} and {other:.80}"
        )


def test_the_fingerprint_is_of_the_settings_too() -> None:
    of_g: list[dict[str, Any]] = [
        {},
        {"optimizer": {}},
        {"eviction": {}},
        {"dtype": "float16"},
        {"dtype": "bfloat16"},
        {"optimizer": {"lr": 0.5}},
        {"optimizer": {"lr": 0.25}},
        {"optimizer": {"name": "adam", "lr": 0.25}},
    ]
    found = [schema_fingerprint(grouped({"g": settings})) for settings in of_g]
    assert len(set(found)) == len(found)
    other = schema_fingerprint(grouped({"c": {"optimizer": {}}}))
    text = describe_differences(found[5], other, "here", "there")
    assert "group_settings.c is absent here and {'optimizer'" in text
    assert "group_settings.g is {'optimizer': {'name': None, 'options': {'lr': 0.5}}}" in text
