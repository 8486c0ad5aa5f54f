"""The embedding config: what is read, and what each bad file says."""

from __future__ import annotations

import logging
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import yaml

from persia._core.kernels.optim import OPTIONS
from persia.config import (
    EmbeddingSchema,
    GroupAdmission,
    GroupEviction,
    GroupOptimizer,
    GroupSettings,
    Initialization,
    Slot,
    TableSettings,
    schema_fingerprint,
)
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
    assert schema.tables == (TableSettings(0, 8, None, None), TableSettings(1, 16, None, None))
    assert [slot.table for slot in schema.slots.values()] == [0, 0, 1]


@pytest.mark.parametrize("spelling", ["slot_config", "slot_configs"])
def test_old_spellings_work_and_say_so(spelling: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"{spelling}.*'slots_config'") as caught:
        schema = EmbeddingSchema.load({spelling: slots("a")})
    assert list(schema.slots) == ["a"]
    assert caught[0].filename == __file__  # Python shows it only where it points at the user


def test_explicit_groups_come_first_in_file_order() -> None:
    schema = load(
        slots_config=slots("a", "b", "c", "d"), feature_groups={"y": ["d"], "x": ["c", "a"]}
    )
    assert schema.groups == {"y": 0, "x": 1, "b": 2}
    assert [slot.group for slot in schema.slots.values()] == ["x", "b", "x", "y"]
    assert schema.slots["a"].prefix == schema.slots["c"].prefix == 2 << 56
    assert schema.slots["b"].prefix == 3 << 56


@pytest.mark.parametrize(
    ("keys", "want"),
    [
        ("", "sum"),
        ("sqrt_scaling: true", "sqrt"),
        ("embedding_summation: true, sqrt_scaling: true", "sqrt"),
        ("embedding_summation: false", "raw"),
        ("pooling: mean, embedding_summation: true, sqrt_scaling: false", "mean"),
        ("pooling: max", "max"),
        ("pooling: sqrt, sqrt_scaling: true", "sqrt"),
        ("pooling: jagged, embedding_summation: false", "jagged"),
    ],
)
def test_pooling(keys: str, want: str) -> None:
    assert one(**yaml.safe_load(f"{{{keys}}}")).pooling == want


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
    with pytest.raises(ConfigError, match="'slots_config' and 'slot_config' are the same"):
        load(slot_config=slots("b"))


@pytest.mark.parametrize("settings", [{"embedding_summation": False}, {"pooling": "jagged"}])
def test_sqrt_scaling_without_a_sum_warns(
    settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "persia.config"):
        one(sqrt_scaling=True, **settings)
    assert "slots_config.a.sqrt_scaling: has no effect" in caplog.text


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"sample_fixed_size": 3}, "a.sample_fixed_size: has no effect with pooling 'sum'"),
        (
            {"pooling": "jagged", "sample_fixed_size": 3},
            "a.sample_fixed_size: has no effect with pooling 'jagged'",
        ),
        ({"admit_probability": 0}, "a.admit_probability: is 0, so no new id ever gets a row"),
    ],
)
def test_what_old_and_frozen_slots_have_is_warned_of(
    keys: dict[str, Any], line: str, caplog: pytest.LogCaptureFixture
) -> None:
    one(**keys)
    (text,) = caplog.messages
    assert text.startswith(f"embedding config: slots_config.{line}")


def test_a_group_that_admits_no_id_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    grouped({"g": {"admission": {"policy": "probability", "probability": 0.0}}})
    assert "group_settings.g.admission.probability: is 0, so no new id" in caplog.text


def test_files_of_the_original_have_the_usual_size_anywhere(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one(sample_fixed_size=10, embedding_summation=True)
    assert caplog.messages == []


def test_hash_stack() -> None:
    slot = one(hash_stack_config={"hash_stack_rounds": 2, "embedding_size": 1000})
    assert (slot.hash_stack_rounds, slot.hash_stack_size) == (2, 1000)
    off = {"hash_stack_config": {"hash_stack_rounds": 0, "embedding_size": 1000}}
    assert (one(**off).hash_stack_rounds, one(**off).hash_stack_size) == (0, 0)
    # A stack of no rounds is none, so it agrees with one that is not given.
    load(slots_config={**slots("a"), **slots("b", **off)}, feature_groups={"g": ["a", "b"]})


def test_row_settings_make_tables() -> None:
    own = {"mean": 1.0, "standard_deviation": 0.01}
    schema = load(
        slots_config={
            "a": {"dim": 8, "initialization": {"method": "normal", "mean": 1}},
            "b": {"dim": 8, "admit_probability": 0.5},
            "c": {"dim": 8, "initialization": {"method": "normal", **own}},
        }
    )
    normal = Initialization("normal", own)
    assert schema.tables == (TableSettings(0, 8, normal, None), TableSettings(1, 8, None, 0.5))
    assert [slot.table for slot in schema.slots.values()] == [0, 1, 0]


STACK = "slots_config: {a: {dim: 8, hash_stack_config: {hash_stack_rounds: 2, "

BAD = [
    ("feature_group: {}", "feature_group: unknown key, did you mean 'feature_groups'?"),
    ("slots_config: {a: {dim: 8, sample_fix_size: 3}}", "did you mean 'sample_fixed_size'?"),
    ("slots_config: {a: {}}", "slots_config.a.dim: the key is required"),
    ("slots_config: {a: {dim: true}}", "a.dim: expected an integer in 1..65536, got True"),
    ("slots_config: {a: {dim: 0}}", "a.dim: expected an integer in 1..65536, got 0"),
    ("slots_config: {a: {dim: 65537}}", "a.dim: expected an integer in 1..65536, got 65537"),
    ("slots_config: {a: {dim: 8, sample_fixed_size: 0}}", "sample_fixed_size: expected"),
    ("slots_config: {a: {dim: 8, pooling: raw, padding: left}}", "padding: expected"),
    (
        "slots_config: {a: {dim: 8, padding: front}}",
        "a.padding: 'front' has a meaning with pooling 'raw' only, got 'sum'",
    ),
    ("slots_config: {a: {dim: 8, pooling: summ}}", "slots_config.a.pooling: expected 'sum', "),
    ("slots_config: {}", "slots_config: expected at least one slot, got none"),
    ("slots_config: {'': {dim: 8}}", "expected names for slots, got ''"),
    ("feature_groups: {'': [a]}", "expected names for groups"),
    ("feature_index_prefix_bit: 0", "_prefix_bit: expected an integer in 1..63, got 0"),
    ("feature_index_prefix_bit: 64", "_prefix_bit: expected an integer in 1..63, got 64"),
    ("slots_config: {a: {dim: 8, index_prefix: 3}}", "a.index_prefix: is computed from"),
    ("feature_groups: {g: [aa]}", "feature_groups.g: unknown slot 'aa', did you mean 'a'?"),
    ("feature_groups: {g: [a], h: [a]}", "groups.h: slot 'a' is already in group 'g'"),
    ("feature_groups: {g: [users]}", "unknown slot 'users'; slots_config has a"),
    ("feature_groups: {g: [a, a]}", "feature_groups.g: slot 'a' is already in group 'g'"),
    (
        "{slots_config: {a: {dim: 8}, b: {dim: 8}}, feature_groups: {a: [b]}}",
        "feature_groups.a: slot 'a' is in no group",
    ),
    (f"{STACK}}}}}}}", "slots_config.a.hash_stack_config.embedding_size: the key is required"),
    (f"{STACK}embedding_size: 0}}}}}}", "embedding_size: 2 rounds need at least 1 row, got 0"),
    (f"feature_index_prefix_bit: 60\n{STACK}embedding_size: 9}}}}}}", "do not fit into 4 bits"),
    (
        "slots_config: {a: {dim: 8, id_hash: md5}}",
        "a.id_hash: expected native:<name>:<sha256> ",
    ),
    ("slots_config: {a: {dim: 8, admit_probability: 1.5}}", "a.admit_probability: expected a"),
    ("slots_config: {a: {dim: 8, initialization: {mean: 0}}}", "a.initialization.method: "),
    ("slots_config: {a: {dim: 8, initialization: {method: norml}}}", "did you mean 'normal'?"),
    (
        "slots_config: {a: {dim: 8, initialization: {method: 'native:x'}}}",
        "a.initialization: expected native:<name>:<sha256> of a library, got 'native:x'",
    ),
]


@pytest.mark.parametrize(("text", "message"), BAD)
def test_bad_keys_and_values_name_their_place(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(**yaml.safe_load(text))
    assert str(caught.value).startswith("embedding config: ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "first", "second"),
    [
        ("dim", 8, 16),
        ("admit_probability", 0.5, None),
        ("initialization", {"method": "zeros"}, {"method": "constant", "value": 0}),
        ("id_hash", "native:one:" + "0" * 64, None),
        (
            "hash_stack_config",
            {"hash_stack_rounds": 2, "embedding_size": 10},
            {"hash_stack_rounds": 2, "embedding_size": 11},
        ),
    ],
)
def test_w16_slots_of_a_group_must_agree(setting: str, first: object, second: object) -> None:
    config = {
        "a": {"dim": 8, setting: first},
        "b": {"dim": 8, "pooling": "raw", setting: second},
    }
    assert len(load(slots_config=config).groups) == 2
    with pytest.raises(ConfigError, match=f"feature_groups.g: .*but {setting} of 'a' is .* of"):
        load(slots_config=config, feature_groups={"g": ["a", "b"]})
    config["b"][setting] = first
    schema = load(slots_config=config, feature_groups={"g": ["a", "b"]})
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


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("gamma", {"shape": 1.0}, "gamma: scale must be a number, it was not given"),
        ("uniform", {"lower": 1.0, "upper": 1.0}, "lower must be below upper"),
        ("uniform", {"low": 1.0}, "no option 'low', did you mean 'lower'"),
        ("normal", {"mean": math.nan}, "mean must be finite"),
        ("normal", {"mean": "0"}, "mean must be a number, got '0'"),
    ],
)
def test_an_initialization_that_cannot_be_used(
    method: str, options: dict[str, float], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Initialization(method, options)
    assert Initialization("uniform", {"lower": -1}).options == {"lower": -1.0, "upper": 0.01}


def test_an_initialization_by_a_library_needs_it_in_servers_only() -> None:
    name = "native:absent:" + "0" * 64
    assert Initialization(name, {"scale": 1}).options == {"scale": 1.0}
    with pytest.raises(ConfigError, match=f"initialization {name}: scale must be a number"):
        Initialization(name, {"scale": "1"})


# --- group_settings ---------------------------------------------------------------------------


def grouped(settings: dict[str, Any] | None) -> EmbeddingSchema:
    """Slots a and b in group g, c and d by themselves, all of one dim."""
    return load(
        slots_config=slots(*"abcd"), feature_groups={"g": ["a", "b"]}, group_settings=settings
    )


def test_a_group_with_an_optimizer_has_a_table_to_itself() -> None:
    schema = grouped({"g": {"optimizer": {"lr": 1}}, "c": {"optimizer": {"lr": 1.0}}})
    assert [schema.slots[name].table for name in "abcd"] == [0, 0, 1, 2]
    changed = GroupSettings(GroupOptimizer(None, {"lr": 1.0}))
    assert [table.settings for table in schema.tables] == [changed, changed, GroupSettings()]
    assert pickle.loads(pickle.dumps(schema)) == schema
    assert schema_fingerprint(EmbeddingSchema.load(schema)) == schema_fingerprint(schema)


def test_settings_that_say_nothing_change_nothing_but_for_a_learning_rate() -> None:
    plain = grouped(None)
    assert len(plain.tables) == 1
    assert grouped({"g": {}, "c": {"optimizer": None}}) == plain
    schema = grouped({"c": {"optimizer": {}}})
    assert [slot.table for slot in schema.slots.values()] == [0, 0, 1, 0]


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
    with pytest.raises(ConfigError, match=r"one of sgd, .*did you mean 'rowwise_adagrad'\?"):
        GroupOptimizer("rowise_adagrad", {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h: {}", r"group_settings\.h: unknown group"),
        ("a: {}", r"group_settings\.a: unknown group.*outside any group"),
        ("g: {optimiser: {}}", r"settings\.g\.optimiser: unknown key.*'optimizer'"),
        ("g: {optimizer: {name: 3}}", r"g\.optimizer\.name: expected one of sgd, "),
        ("g: {optimizer: {name: adem}}", r"g\.optimizer: .*did you mean 'adam'"),
        ("g: {optimizer: {name: sgd}}", r"g\.optimizer: sgd: lr .* not given"),
        ("g: {optimizer: {momentum: 1, name: adam}}", "adam has no option 'momentum'"),
        ("g: {optimizer: {weight_deca: 1}}", "option 'weight_deca'.*'weight_decay'"),
        ("g: {optimizer: {lr: -1}}", "lr must be at least 0, got -1"),
        ("g: {optimizer: {beta1: 1}}", "beta1 must be below 1"),
        ("g: {optimizer: {original_order: 1}}", "original_order must be True or False"),
        ("g: {dtype: f16}", r"g\.dtype: expected 'float32', .*got 'f16'"),
        (
            "g: {eviction: {policy: fifo}}",
            r"g\.eviction\.policy: expected lru, lfu, or native:",
        ),
        ("g: {eviction: {ttl_seconds: 0}}", r"eviction\.ttl_seconds: expected 0\.001\.\."),
        ("g: {eviction: {ttl_seconds: .nan}}", "ttl_seconds: expected"),
        ("g: {eviction: {ttl_seconds: .inf}}", "ttl_seconds: expected"),
        ("g: {eviction: {ttl_steps: 0}}", "ttl_steps: expected an integer in 1"),
        ("g: {eviction: {ttl_seconds: 1, ttl_steps: 1}}", "a row has one time to live"),
        ("g: {admission: {}}", r"g\.admission\.policy: the key is required"),
        ("g: {admission: {policy: count}}", "threshold: is required with policy 'count'"),
        ("g: {admission: {policy: probability}}", "probability: is required with policy"),
        ("g: {admission: {policy: count, probability: 0.5, threshold: 2}}", "has no meaning"),
        ("g: {admission: {policy: count, threshold: 1}}", r"threshold: .* 2\.\.255, got 1"),
        ("g: {admission: {policy: count, threshold: 256}}", r"2\.\.255, got 256"),
        ("g: {optimizer: {learning_rate: 1}}", "'learning_rate', write lr"),
        ("g: {optimizer: {name: adam, betas: [0, 0]}}", "'betas', write beta1 and beta2"),
        ("g: {admission: {policy: probability, probability: 2}}", r"0\.\.1, got 2"),
    ],
)
def test_settings_that_cannot_be_used(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        grouped(yaml.safe_load(f"{{{text}}}"))


def test_a_dtype_splits_tables_and_slots_of_one_dtype_share_theirs() -> None:
    schema = grouped({"g": {"dtype": "float16"}, "c": {"dtype": "bfloat16"}})
    assert [schema.slots[name].table for name in "abcd"] == [0, 0, 1, 2]
    assert [table.dtype for table in schema.tables] == ["float16", "bfloat16", "float32"]
    assert len(grouped({name: {"dtype": "float16"} for name in "gcd"}).tables) == 1


# --- eviction and admission -----------------------------------------------------------------


def test_tables_are_split_by_eviction_and_admission() -> None:
    schema = grouped(
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


def test_times_to_live_are_milliseconds_or_steps() -> None:
    assert GroupEviction().kind() == ("lru", None, 0)
    assert GroupEviction("lfu", 0.25).kind() == ("lfu", "milliseconds", 250)
    assert GroupEviction(ttl_steps=7).kind() == ("lru", "steps", 7)


def test_a_policy_may_name_a_library() -> None:
    name = "native:score:" + "0a" * 32
    schema = grouped({"g": {"eviction": {"policy": name, "ttl_steps": 7}}})
    eviction = schema.tables[schema.slots["a"].table].settings.eviction
    assert eviction is not None
    assert eviction.kind() == (name, "steps", 7)
    for wrong in ("native:score", name[:-1], name + "0", "native:a-b:" + "0" * 64):
        with pytest.raises(ConfigError, match=r"policy: expected lru, lfu, or native:"):
            grouped({"g": {"eviction": {"policy": wrong}}})


def test_a_new_id_is_admitted_in_one_way() -> None:
    with pytest.raises(ConfigError, match=r"group_settings\.a\.admission: slot 'a' has an"):
        load(
            slots_config=slots("a", admit_probability=0.5),
            group_settings={"a": {"admission": {"policy": "count", "threshold": 2}}},
        )
