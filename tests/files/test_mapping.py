"""W-07: rows follow the names of their features, not the places of these in a config."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from persia._core.kernels.optim import RowOptimizer
from persia._core.store.blocks import RowBlock
from persia._files.mapping import Mapping
from persia._files.open import open_storage
from persia._files.schema import SavedSchema
from persia._rpc.messages import LoadNote
from persia.config import EmbeddingSchema
from persia.errors import CheckpointError, ConfigError
from tests.files.support import block, parts_of
from tests.support import kernels

OLD: dict[str, Any] = {
    "slots_config": {
        "user": {"dim": 4},
        "item": {"dim": 4},
        "last_item": {"dim": 4},
        "tag": {"dim": 3},
    },
    "feature_groups": {"items": ["item", "last_item"]},
}
STACK = {"hash_stack_rounds": 2, "embedding_size": 9}
ALL = {"all": ["item", "last_item", "user"]}
SHIFT = 56


def saved(config: dict[str, Any], optimizer: str = "adagrad", **policies: Any) -> SavedSchema:
    schema = EmbeddingSchema.load(config)
    return SavedSchema.of(schema, [RowOptimizer(optimizer) for _ in schema.tables], **policies)


def changed(**slots: Any) -> dict[str, Any]:
    """Return the old config with other slots; None takes one away."""
    config = copy.deepcopy(OLD)
    for name, slot in slots.items():
        config["slots_config"].pop(name, None)
        if slot is not None:
            config["slots_config"][name] = slot
    return config


def sign(group: int, id_: int) -> int:
    return (group + 1) << SHIFT | id_


def apply(mapping: Mapping, table: str, rows: RowBlock) -> dict[str, RowBlock]:
    return dict(mapping.apply(table, rows))


def test_w07_groups_that_were_renumbered_keep_their_rows() -> None:
    """A feature before the others, one gone, the groups in another order."""
    dims = {"price": 4, "tag": 3, "user": 4, "item": 4}
    new = {"slots_config": {name: {"dim": dim} for name, dim in dims.items()}}
    mapping = Mapping.between(saved(OLD), saved(new))
    names = [group.name for group in mapping.wanted.groups]
    assert mapping.groups == (names.index("item"), names.index("user"), names.index("tag"))
    assert mapping.moves_rows
    assert mapping.notes == (
        LoadNote("new", "features price are new: they start with no rows"),
    )
    rows = block([sign(0, 5), sign(1, 6), sign(0, 2**SHIFT - 1)])
    ((table, found),) = apply(mapping, "table0", rows).items()
    assert table == mapping.wanted.groups[names.index("item")].table
    item, user = mapping.groups[:2]
    assert found.signs.tolist() == [sign(item, 5), sign(user, 6), sign(item, 2**SHIFT - 1)]
    np.testing.assert_array_equal(found.values, rows.values)
    np.testing.assert_array_equal(found.states, rows.states)
    # Every server may own any row now.
    storage = open_storage("memory://renumbered")
    parts = parts_of(storage, rows)
    assert mapping.parts_for(parts, 2, 5) == list(parts)
    storage.remove_folder("")


def test_some_features_alone_can_be_loaded() -> None:
    """Also those alone that are still there."""
    mapping = Mapping.between(saved(OLD), saved(OLD), only={"last_item"})
    gone = Mapping.between(saved(OLD), saved(changed(user=None)))
    assert "features user of the checkpoint" in gone.notes[0].text
    assert mapping.groups == (0, -1, -1)
    rows = block([sign(1, 6), sign(0, 5)])
    for each in (mapping, gone):
        ((_, found),) = apply(each, "table0", rows).items()
        assert found.signs.tolist() == [sign(0, 5)]
        assert apply(each, "table0", block([sign(1, 6)])) == {}
    with pytest.raises(ConfigError, match="features absent are not in both"):
        Mapping.between(saved(OLD), saved(OLD), only={"absent"})


@pytest.mark.parametrize(
    ("new", "message"),
    [
        (changed(tag={"dim": 5}, user={"dim": 8}), "dim .*'tag' is 3 .* 5 here; dim .*'user'"),
        ({**OLD, "group_settings": {"user": {"dtype": "float16"}}}, "dtype .*'user' is fl"),
        ({**OLD, "feature_index_prefix_bit": 12}, "index_prefix_bit is 8 .* and 12 here"),
        (changed(tag={"dim": 3, "hash_stack_config": STACK}), "stack .*'tag' is .0, 0"),
        ({**OLD, "feature_groups": {}}, "'items' .* would be split into 'item' and 'last"),
        ({**OLD, "feature_groups": ALL}, "feature group 'all' would merge 'user', 'items'"),
    ],
)
def test_w07_rows_of_another_meaning_are_refused(new: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Mapping.between(saved(OLD), saved(new))


def test_the_state_of_another_optimizer_starts_from_initial_values() -> None:
    mapping = Mapping.between(saved(OLD), saved(OLD, "adam"))
    said = "were trained by adagrad and are by adam: the state of their rows starts"
    (note,) = mapping.notes  # one, not one for each group
    assert note.kind == "optimizer"
    assert said in note.text
    assert all(repr(group.name) in note.text for group in saved(OLD).groups)
    rows = block([sign(0, 5), sign(1, 6)])
    ((_, found),) = apply(mapping, "table0", rows).items()
    np.testing.assert_array_equal(found.values, rows.values)
    np.testing.assert_array_equal(found.states, [RowOptimizer("adam").new_state(4)] * 2)


def test_uses_and_ages_are_kept_with_their_policy_only() -> None:
    steps, seconds = ("lfu", "steps", 10), ("lfu", "milliseconds", 10)
    before = saved(OLD, policies=[steps], policy_of_table=[1, 1])
    rows = block([sign(0, n) for n in range(20)], policy=1)
    for policies, keeps_uses, keeps_ages in (
        ([steps], True, True),
        ([seconds], True, False),
        ([("lru", "steps", 10)], False, True),
    ):
        after = saved(OLD, policies=policies, policy_of_table=[1, 1])
        mapping = Mapping.between(before, after)
        assert bool(mapping.notes) is not (keeps_uses and keeps_ages)
        ((_, found),) = apply(mapping, "table0", rows).items()
        assert found.policy == 1
        np.testing.assert_array_equal(found.uses, rows.uses * np.uint32(keeps_uses))
        np.testing.assert_array_equal(found.ages, rows.ages * np.uint64(keeps_ages))


def test_a_sign_of_no_group_is_an_error() -> None:
    mapping = Mapping.between(saved(OLD), saved(OLD))
    for strange in (5, sign(3, 5), sign(2, 5)):
        with pytest.raises(CheckpointError, match="is of no group of table0"):
            apply(mapping, "table0", block([sign(0, 1), strange]))


def test_rows_of_another_library_of_kernels_are_refused_by_its_name() -> None:
    one, other = kernels.load("faulty"), kernels.load("faulty", "-DTAG=3")
    schema = EmbeddingSchema.load(OLD)

    def of(name: str) -> SavedSchema:
        options = {} if name == "adagrad" else {"lr": 0.1}
        return SavedSchema.of(schema, [RowOptimizer(name, **options) for _ in schema.tables])

    assert Mapping.between(of(one), of(one)).notes == ()
    for before, after in ((one, other), (one, "adagrad"), ("adagrad", one)):
        message = f"the optimizer of feature group .* is {before} in the checkpoint and {after}"
        with pytest.raises(ConfigError, match=message):
            Mapping.between(of(before), of(after))


def test_rows_of_other_hashes_of_ids_are_refused_by_their_names() -> None:
    one, other = (f"native:hash:{digit * 64}" for digit in "01")

    def of(name: str) -> SavedSchema:
        return saved(changed(tag={"dim": 3} | ({} if name == "none" else {"id_hash": name})))

    assert Mapping.between(of(one), of(one)).notes == ()
    for before, after in ((one, other), (one, "none"), ("none", one)):
        message = (
            f"id_hash of feature group 'tag' is {before} in the checkpoint and {after} here"
        )
        with pytest.raises(ConfigError, match=message):
            Mapping.between(of(before), of(after))
    assert Mapping.between(of(one), of(other), only=("user", "item", "last_item")).notes == ()


def test_rows_scored_by_another_library_are_refused_by_its_name() -> None:
    one, other = (f"native:score:{digit * 64}" for digit in "01")

    def of(kind: str) -> SavedSchema:
        return saved(OLD, policies=[(kind, "steps", 5)], policy_of_table=[1, 1])

    assert Mapping.between(of(one), of(one)).notes == ()
    for before, after in ((one, other), (one, "lfu"), ("lfu", one)):
        message = f"the eviction of feature group .* is {before} in the checkpoint and {after}"
        with pytest.raises(ConfigError, match=message):
            Mapping.between(of(before), of(after))
