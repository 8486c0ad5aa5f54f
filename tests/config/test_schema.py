"""The embedding config: what is read, and what each bad file says."""

from __future__ import annotations

import logging
import math
import pickle
from pathlib import Path
from typing import Any

import pytest

from persia.config import EmbeddingSchema, Initialization, Slot, Table
from persia.errors import ConfigError

ORIGINAL = """
feature_index_prefix_bit: 12
slots_config:
  workclass: {dim: 8, embedding_summation: true, sqrt_scaling: false}
  education: {dim: 8}
  history:
    dim: 16
    embedding_summation: false
    sample_fixed_size: 5
feature_groups:
"""


def load(**keys: Any) -> EmbeddingSchema:
    return EmbeddingSchema.load({"slots_config": {"a": {"dim": 8}}, **keys})


def slots(*names: str, **settings: Any) -> dict[str, dict[str, Any]]:
    return {name: {"dim": 8, **settings} for name in names}


def one(**settings: Any) -> Slot:
    return load(slots_config={"a": {"dim": 8, **settings}}).slots["a"]


def test_reads_a_file_of_the_original(tmp_path: Path) -> None:
    path = tmp_path / "embedding_config.yml"
    path.write_text(ORIGINAL)
    schema = EmbeddingSchema.load(path)
    assert list(schema.slots) == ["workclass", "education", "history"]
    assert schema.prefix_bits == 12
    assert schema.strict_ids is False
    assert schema.groups == {"workclass": 0, "education": 1, "history": 2}
    assert [slot.prefix >> 52 for slot in schema.slots.values()] == [1, 2, 3]
    assert [slot.pooling for slot in schema.slots.values()] == ["sum", "sum", "raw"]
    assert schema.slots["history"].sample_fixed_size == 5
    assert schema.tables == (Table(0, 8, None, None), Table(1, 16, None, None))
    assert [slot.table for slot in schema.slots.values()] == [0, 0, 1]


def test_a_schema_is_returned_as_it_is_and_can_be_sent() -> None:
    schema = load()
    assert EmbeddingSchema.load(schema) is schema
    assert pickle.loads(pickle.dumps(schema)) == schema


@pytest.mark.parametrize("spelling", ["slot_config", "slot_configs"])
def test_old_spellings_work_and_say_so(spelling: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"{spelling}.*'slots_config'") as caught:
        schema = EmbeddingSchema.load({spelling: slots("a")})
    assert list(schema.slots) == ["a"]
    assert caught[0].filename == __file__  # Python shows it only where it points at the user


def test_two_spellings_at_once_are_refused() -> None:
    with pytest.raises(ConfigError, match="'slots_config' and 'slot_config' are the same"):
        load(slot_config=slots("b"))


def test_explicit_groups_come_first_in_file_order() -> None:
    schema = load(
        slots_config=slots("a", "b", "c", "d"), feature_groups={"y": ["d"], "x": ["c", "a"]}
    )
    assert schema.groups == {"y": 0, "x": 1, "b": 2}
    assert {name: slot.group for name, slot in schema.slots.items()} == {
        "a": "x",
        "b": "b",
        "c": "x",
        "d": "y",
    }
    assert schema.slots["a"].prefix == schema.slots["c"].prefix == 2 << 56
    assert schema.slots["b"].prefix == 3 << 56


@pytest.mark.parametrize(
    ("settings", "want"),
    [
        ({}, "sum"),
        ({"sqrt_scaling": True}, "sqrt"),
        ({"embedding_summation": True, "sqrt_scaling": True}, "sqrt"),
        ({"embedding_summation": False}, "raw"),
        ({"pooling": "mean"}, "mean"),
        ({"pooling": "mean", "embedding_summation": True, "sqrt_scaling": False}, "mean"),
        ({"pooling": "max"}, "max"),
        ({"pooling": "sqrt", "sqrt_scaling": True}, "sqrt"),
        ({"pooling": "jagged", "embedding_summation": False}, "jagged"),
    ],
)
def test_pooling(settings: dict[str, Any], want: str) -> None:
    assert one(**settings).pooling == want


@pytest.mark.parametrize(
    ("settings", "other"),
    [
        ({"pooling": "raw", "embedding_summation": True}, "embedding_summation: true"),
        ({"pooling": "sum", "embedding_summation": False}, "embedding_summation: false"),
        ({"pooling": "mean", "sqrt_scaling": True}, "sqrt_scaling: true"),
        ({"pooling": "sqrt", "sqrt_scaling": False}, "sqrt_scaling: false"),
    ],
)
def test_pooling_that_contradicts_the_old_keys(settings: dict[str, Any], other: str) -> None:
    with pytest.raises(ConfigError, match=rf"slots_config\.a\.pooling: .* contradicts {other}"):
        one(**settings)


@pytest.mark.parametrize("settings", [{"embedding_summation": False}, {"pooling": "jagged"}])
def test_sqrt_scaling_without_a_sum_warns(
    settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "persia.config"):
        one(sqrt_scaling=True, **settings)
    assert "slots_config.a.sqrt_scaling has no effect" in caplog.text


def test_hash_stack() -> None:
    slot = one(hash_stack_config={"hash_stack_rounds": 2, "embedding_size": 1000})
    assert (slot.hash_stack_rounds, slot.hash_stack_size) == (2, 1000)
    off = {"hash_stack_config": {"hash_stack_rounds": 0, "embedding_size": 1000}}
    assert (one(**off).hash_stack_rounds, one(**off).hash_stack_size) == (0, 0)
    # A stack of no rounds is none, so it agrees with one that is not given.
    load(slots_config={**slots("a"), **slots("b", **off)}, feature_groups={"g": ["a", "b"]})


def test_row_settings_make_tables() -> None:
    schema = load(
        slots_config={
            "a": {"dim": 8, "initialization": {"method": "normal", "mean": 1}},
            "b": {"dim": 8, "admit_probability": 0.5},
            "c": {
                "dim": 8,
                "initialization": {
                    "method": "normal",
                    "standard_deviation": 0.01,
                    "mean": 1.0,
                },
            },
        }
    )
    normal = Initialization("normal", {"mean": 1.0, "standard_deviation": 0.01})
    assert schema.tables == (Table(0, 8, normal, None), Table(1, 8, None, 0.5))
    assert [slot.table for slot in schema.slots.values()] == [0, 1, 0]


BAD = {
    "unknown top-level key": (
        {"feature_group": {}},
        "feature_group: unknown key, did you mean 'feature_groups'?",
    ),
    "unknown slot key": (
        {"slots_config": {"a": {"dim": 8, "sample_fix_size": 3}}},
        "slots_config.a.sample_fix_size: unknown key, did you mean 'sample_fixed_size'?",
    ),
    "dim missing": ({"slots_config": {"a": {}}}, "slots_config.a.dim: the key is required"),
    "slot without a mapping": (
        {"slots_config": {"a": None}},
        "slots_config.a: expected a mapping, got nothing",
    ),
    "dim as text": (
        {"slots_config": {"a": {"dim": "8"}}},
        "slots_config.a.dim: expected an integer in 1..65536, got '8'",
    ),
    "dim as bool": (
        {"slots_config": {"a": {"dim": True}}},
        "slots_config.a.dim: expected an integer in 1..65536, got True",
    ),
    "dim 0": (
        {"slots_config": {"a": {"dim": 0}}},
        "slots_config.a.dim: expected an integer in 1..65536, got 0",
    ),
    "dim beyond": (
        {"slots_config": {"a": {"dim": 65537}}},
        "dim: expected an integer in 1..65536, got 65537",
    ),
    "sample_fixed_size 0": (
        {"slots_config": {"a": {"dim": 8, "sample_fixed_size": 0}}},
        "sample_fixed_size: expected an integer in 1..2147483647, got 0",
    ),
    "pooling misspelt": (
        {"slots_config": {"a": {"dim": 8, "pooling": "summ"}}},
        "slots_config.a.pooling: expected one of sum, mean, sqrt, max, raw, jagged, "
        "got 'summ', did you mean 'sum'?",
    ),
    "no slots": ({"slots_config": {}}, "slots_config: expected at least one slot, got none"),
    "slot without a name": ({"slots_config": slots("")}, "expected names for slots, got ''"),
    "group without a name": ({"feature_groups": {"": ["a"]}}, "expected names for groups"),
    "slots absent": ({"slots_config": None}, "slots_config: the key is required"),
    "slots as a list": (
        {"slots_config": [{"a": 1}]},
        "slots_config: expected a mapping, got a list",
    ),
    "key that is no text": (
        {"slots_config": {7: {"dim": 8}}},
        "slots_config: expected names as keys, got 7; put it in quotes",
    ),
    "prefix bits 0": (
        {"feature_index_prefix_bit": 0},
        "feature_index_prefix_bit: expected an integer in 1..63, got 0",
    ),
    "prefix bits 64": (
        {"feature_index_prefix_bit": 64},
        "feature_index_prefix_bit: expected an integer in 1..63, got 64",
    ),
    "index_prefix": (
        {"slots_config": {"a": {"dim": 8, "index_prefix": 3}}},
        "slots_config.a.index_prefix: is computed from the feature groups, got 3",
    ),
    "unknown slot in a group": (
        {"feature_groups": {"g": ["aa"]}},
        "feature_groups.g: unknown slot 'aa', did you mean 'a'?",
    ),
    "slot in two groups": (
        {"feature_groups": {"g": ["a"], "h": ["a"]}},
        "feature_groups.h: slot 'a' is already in group 'g'",
    ),
    "slot twice in a group": (
        {"feature_groups": {"g": ["a", "a"]}},
        "feature_groups.g: slot 'a' is already in group 'g'",
    ),
    "group as text": (
        {"feature_groups": {"g": "a"}},
        "feature_groups.g: expected a list, got 'a'",
    ),
    "ungrouped slot named like a group": (
        {"slots_config": slots("a", "b"), "feature_groups": {"a": ["b"]}},
        "feature_groups.a: slot 'a' is in no group",
    ),
    "hash stack key missing": (
        {"slots_config": {"a": {"dim": 8, "hash_stack_config": {"hash_stack_rounds": 2}}}},
        "slots_config.a.hash_stack_config.embedding_size: the key is required",
    ),
    "hash stack without rows": (
        {
            "slots_config": slots(
                "a", hash_stack_config={"hash_stack_rounds": 2, "embedding_size": 0}
            )
        },
        "embedding_size: 2 rounds need at least 1 row, got 0",
    ),
    "hash stack beyond the index bits": (
        {
            "feature_index_prefix_bit": 60,
            "slots_config": slots(
                "a", hash_stack_config={"hash_stack_rounds": 2, "embedding_size": 9}
            ),
        },
        "slots_config.a.hash_stack_config: 2 rounds of 9 rows do not fit into 4 bits",
    ),
    "admit_probability": (
        {"slots_config": {"a": {"dim": 8, "admit_probability": 1.5}}},
        "slots_config.a.admit_probability: expected a probability in 0..1, got 1.5",
    ),
    "initialization without method": (
        {"slots_config": {"a": {"dim": 8, "initialization": {"mean": 0}}}},
        "slots_config.a.initialization.method: expected one of uniform, normal",
    ),
    "initialization unknown": (
        {"slots_config": {"a": {"dim": 8, "initialization": {"method": "norml"}}}},
        "slots_config.a.initialization: initialization 'norml' is not known; did you mean "
        "'normal'?",
    ),
    "initialization option": (
        {"slots_config": {"a": {"dim": 8, "initialization": {"method": "zeros", "mean": 1}}}},
        "slots_config.a.initialization: initialization zeros has no option 'mean'",
    ),
}


@pytest.mark.parametrize(("keys", "message"), BAD.values(), ids=BAD.keys())
def test_bad_keys_and_values_name_their_place(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(**keys)
    assert str(caught.value).startswith("embedding config: ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "first", "second", "message"),
    [
        ("dim", 8, 16, "dim of 'a' is 8 and of 'b' is 16"),
        ("admit_probability", 0.5, None, "admit_probability of 'a' is 0.5 and of 'b' is None"),
        (
            "initialization",
            {"method": "zeros"},
            {"method": "constant", "value": 0},
            "initialization of 'a' is {'method': 'zeros'} and of 'b' is "
            "{'method': 'constant', 'value': 0.0}",
        ),
        (
            "hash_stack_config",
            {"hash_stack_rounds": 2, "embedding_size": 10},
            {"hash_stack_rounds": 2, "embedding_size": 11},
            "hash_stack_config of 'a' is {'hash_stack_rounds': 2, 'embedding_size': 10} and "
            "of 'b' is {'hash_stack_rounds': 2, 'embedding_size': 11}",
        ),
    ],
)
def test_w16_slots_of_a_group_must_agree(
    setting: str, first: object, second: object, message: str
) -> None:
    config = {
        "a": {"dim": 8, setting: first},
        "b": {"dim": 8, setting: second},
    }
    assert len(load(slots_config=config).groups) == 2
    with pytest.raises(ConfigError) as caught:
        load(slots_config=config, feature_groups={"g": ["a", "b"]})
    assert str(caught.value) == (
        f"embedding config: feature_groups.g: slots of a group share rows, but {message}"
    )


def test_slots_of_a_group_may_pool_differently() -> None:
    schema = load(
        slots_config={"a": {"dim": 8}, "b": {"dim": 8, "pooling": "raw"}},
        feature_groups={"g": ["a", "b"]},
    )
    assert schema.slots["a"].prefix == schema.slots["b"].prefix


def test_w06_more_groups_than_the_prefix_holds_are_refused() -> None:
    names = [f"f{number}" for number in range(256)]
    schema = load(slots_config=slots(*names[:255]))
    prefixes = [slot.prefix for slot in schema.slots.values()]
    assert prefixes == [(number + 1) << 56 for number in range(255)]
    with pytest.raises(ConfigError) as caught:
        load(slots_config=slots(*names))
    assert str(caught.value) == (
        "embedding config: feature_index_prefix_bit: 8 bits hold 255 groups, got 256; "
        "at least 9 bits are needed"
    )
    assert len(load(slots_config=slots(*names), feature_index_prefix_bit=9).groups) == 256


def test_w07_groups_keep_their_names_beside_their_numbers() -> None:
    # Numbers are positional, so names must be kept with rows.
    before = load(slots_config=slots("a", "b"))
    after = load(slots_config=slots("new", "a", "b"))
    assert before.groups["a"] != after.groups["a"]
    assert before.groups == {"a": 0, "b": 1}


# --- initial values ----------


def test_parameters_of_an_initialization_are_filled_in() -> None:
    assert Initialization("uniform", {"lower": -1}).options == {"lower": -1.0, "upper": 0.01}
    assert Initialization("zeros", {}).options == {}


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("gamma", {"shape": 1.0}, "gamma: scale must be a number, it was not given"),
        ("uniform", {"lower": 1.0, "upper": 1.0}, "lower must be below upper"),
        ("uniform", {"low": 1.0}, "no option 'low'; did you mean 'lower'"),
        ("normal", {"mean": math.nan}, "mean must be finite"),
        ("normal", {"mean": "0"}, "mean must be a number, got '0'"),
    ],
)
def test_an_initialization_that_cannot_be_used(
    method: str, options: dict[str, float], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Initialization(method, options)
