"""Whether two processes mean the same by a sign: the fingerprint of an embedding config.

Peers compare fingerprints when they connect. A fingerprint is readable, so that of two which
differ it can be said in what.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from typing import Any

from persia.config._schema import EmbeddingSchema, GroupSettings

# Characters of a fingerprint, which is in every ``hello``; thousands of slots take fewer.
_MAX_FINGERPRINT = 1 << 18
# Differences that a text lists; the first is what has to be changed, and others often follow.
_MAX_LISTED = 3
SAME_EVERYWHERE = (
    "slots, groups and their settings, dims and feature_index_prefix_bit must be the same "
    "everywhere"
)


def schema_fingerprint(schema: EmbeddingSchema) -> str:
    """All that gives a sign and a table number their meaning, as canonical JSON.

    Two processes with equal fingerprints agree on which group, table and dim a sign belongs
    to, and on the group's settings. What a slot does with its rows afterwards (pooling) is not
    part of it, nor is what only concerns new rows. One that would be long is a digest.
    """
    slots = {
        name: [
            *(slot.dim, slot.group, slot.table, slot.hash_stack_rounds, slot.hash_stack_size),
            *([] if slot.id_hash is None else [slot.id_hash]),
        ]
        for name, slot in schema.slots.items()
    }
    meaning = {
        "feature_index_prefix_bit": schema.prefix_bits,
        "groups": sorted(schema.groups, key=schema.groups.__getitem__),
        "slots": slots,
        "settings": _differing_settings(schema),
    }
    text = json.dumps(meaning, sort_keys=True, separators=(",", ":"))
    if len(text) <= _MAX_FINGERPRINT:
        return text
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _differing_settings(schema: EmbeddingSchema) -> dict[str, dict[str, object]]:
    """Return by group those of its settings that are not the defaults, if there are any."""
    usual = dataclasses.asdict(GroupSettings())
    found = {}
    for slot in schema.slots.values():
        plain = dataclasses.asdict(schema.tables[slot.table].settings)
        differing = {key: plain[key] for key in plain if plain[key] != usual[key]}
        if differing:
            found[slot.group] = differing
    return found


def describe_differences(one: str, other: str, at_one: str, at_other: str) -> str:
    """Say what differs between two fingerprints; the places are words such as ``here``."""
    try:
        found = list(_differences(json.loads(one), json.loads(other)))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        found = []  # a digest, or from another version
    listed = list_differences(found, at_one, at_other)
    return listed or f"fingerprints {one:.80} and {other:.80}"


def list_differences(
    found: Iterable[tuple[str, object, object]], at_one: str, at_other: str
) -> str:
    """Return the first differences as one text: what differs, and both values."""
    texts = [f"{what} is {x} {at_one} and {y} {at_other}" for what, x, y in found]
    more = len(texts) - _MAX_LISTED
    return "; ".join(texts[:_MAX_LISTED]) + (f"; and {more} more differ" if more > 0 else "")


def _differences(one: Any, other: Any) -> Iterator[tuple[str, object, object]]:
    """Yield what differs and both values; what may follow from something else comes later."""
    both = one["slots"].keys() & other["slots"].keys()
    facts, its_facts = _facts(one, both), _facts(other, both)
    has_found = False
    for fact in sorted(facts.keys() | its_facts.keys()):
        x, y = facts.get(fact, "absent"), its_facts.get(fact, "absent")
        if x != y:
            has_found = True
            yield fact[1], x, y
    if has_found:
        return  # numbers of row settings follow from any other difference, and from each other
    numbers = [(one["slots"][name][2], other["slots"][name][2], name) for name in both]
    differing = [entry for entry in numbers if entry[0] != entry[1]]
    for x, y, name in sorted(differing, key=lambda entry: (min(entry[:2]), entry[2]))[:1]:
        what = f"the row setting of slot {name!r} (its initialization and admit_probability)"
        yield what, f"number {x}", f"number {y}"


def _facts(meaning: Any, slots: AbstractSet[str]) -> dict[tuple[int, str], object]:
    """Return what a fingerprint says, by rank and name; details of some slots only."""
    facts = {(0, "feature_index_prefix_bit"): meaning["feature_index_prefix_bit"]}
    for name, (dim, group, _, rounds, size, *hashed) in meaning["slots"].items():
        facts[1, f"slots_config.{name}"] = "present"
        if name in slots:
            facts[2, f"slots_config.{name}.dim"] = dim
            facts[2, f"the feature group of slot {name!r}"] = group
            facts[2, f"slots_config.{name}.hash_stack_config"] = _rows(rounds, size)
            facts[2, f"slots_config.{name}.id_hash"] = hashed[0] if hashed else "none"
    for number, group in enumerate(meaning["groups"]):
        facts[3, f"feature group {number}, in the order of the file,"] = group
    for group, settings in meaning["settings"].items():
        facts[4, f"group_settings.{group}"] = settings
    return facts


def _rows(rounds: int, size: int) -> str:
    return f"{rounds} rounds of {size} rows" if rounds else "none"
