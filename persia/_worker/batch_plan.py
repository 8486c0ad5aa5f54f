"""What a list of feature names means: which tables, which groups, which outputs.

A model sends the same features in each batch, so all that follows from their names is
worked out once per list of names and kept. Within a table, groups follow each other in the
order of their first feature in the batch, which also is the order of use of their rows:

    table 0, dim 16   | group of f0, f3 | group of f1 | ...      one array of signs
    table 1, dim 8    | group of f2 |
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import itertools
import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from persia.config import EmbeddingSchema, GroupSettings, Slot
from persia.errors import DataError

logger = logging.getLogger(__name__)

POOLED = frozenset(("sum", "mean", "sqrt", "max"))

# Batches after which a slot that none of them had is a mistake rather than another loader's.
UNSEEN_AFTER = 200

# Characters of a fingerprint, which is in every ``hello``; thousands of slots take fewer.
_MAX_FINGERPRINT = 1 << 18
# Differences that are told; the first is what has to be changed, and others often follow.
_MAX_TOLD = 3
SAME_EVERYWHERE = (
    "slots, groups and their settings, dims and feature_index_prefix_bit must be the same "
    "everywhere"
)


@dataclass(frozen=True, slots=True)
class FeaturePlan:
    """One feature of the batch."""

    slot: Slot
    table: int  # place in BatchPlan.tables
    group: int  # place in TablePlan.groups
    # Place among the pooled outputs of the table, or -1: raw and jagged have rows instead.
    pooled: int


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """Features that share rows, by their places in the batch, in the batch's order."""

    features: tuple[int, ...]
    # Signs of one feature without a hash stack are distinct as soon as its ids are (unless
    # some were masked); all other groups are merged.
    is_plain: bool


@dataclass(frozen=True, slots=True)
class TablePlan:
    """One table that the batch touches."""

    number: int  # the schema's
    dim: int
    groups: tuple[GroupPlan, ...]
    num_pooled: int
    # Its features, group after group, and their prefixes.
    places: tuple[int, ...]
    prefixes: tuple[int, ...]
    is_plain: bool  # all groups are


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One list of feature names, resolved against the schema."""

    names: tuple[str, ...]
    features: tuple[FeaturePlan, ...]
    tables: tuple[TablePlan, ...]


class Planner:
    """Resolves lists of feature names; any thread may call it."""

    # A list of names is a few hundred bytes; a caller who draws them at random gets plans
    # all the same, only not kept.
    MAX_KEPT = 1024

    def __init__(self, schema: EmbeddingSchema) -> None:
        self._schema = schema
        self._plans: dict[tuple[str, ...], BatchPlan] = {}
        self._unseen = set(schema.slots)
        self._numbers = itertools.count(1)  # of batches; a step of it is one for all threads

    def plan(self, names: tuple[str, ...]) -> BatchPlan:
        """Return the plan of a batch with these features, in this order.

        Raises:
            DataError: If a name is unknown, with the nearest known one, or comes twice.
        """
        plan = self._plans.get(names)
        if plan is None:
            plan = self._build(names)
            if not self._plans and (missing := self._unseen - set(names)):
                logger.info(
                    "the first batch has no %s, of %d slots in the embedding config: the model "
                    "gets that many embeddings fewer",
                    _listed(missing),
                    len(self._schema.slots),
                )
            self._unseen -= set(names)
            if len(self._plans) < self.MAX_KEPT:
                self._plans[names] = plan
        if next(self._numbers) == UNSEEN_AFTER and self._unseen:
            logger.warning(
                "none of the first %d batches has %s, of %d slots in the embedding config: if "
                "the model needs them, data-loaders have to send them; if not, take them out",
                UNSEEN_AFTER,
                _listed(self._unseen),
                len(self._schema.slots),
            )
        return plan

    def _build(self, names: tuple[str, ...]) -> BatchPlan:
        check_names(names, self._schema.slots, "the embedding config")
        slots = [self._schema.slots[name] for name in names]
        tables: dict[int, dict[str, list[int]]] = {}  # number -> group -> places
        num_pooled: dict[int, int] = {}
        features = []
        for place, slot in enumerate(slots):
            groups = tables.setdefault(slot.table, {})
            groups.setdefault(slot.group, []).append(place)
            pooled = -1
            if slot.pooling in POOLED:
                pooled = num_pooled.get(slot.table, 0)
                num_pooled[slot.table] = pooled + 1
            table = list(tables).index(slot.table)
            features.append(FeaturePlan(slot, table, list(groups).index(slot.group), pooled))
        plans = []
        for number, groups in tables.items():
            order = tuple(place for places in groups.values() for place in places)
            group_plans = tuple(
                GroupPlan(
                    tuple(places),
                    len(places) == 1 and not slots[places[0]].hash_stack_rounds,
                )
                for places in groups.values()
            )
            plan = TablePlan(
                number,
                self._schema.tables[number].dim,
                group_plans,
                num_pooled.get(number, 0),
                order,
                tuple(slots[place].prefix for place in order),
                all(group.is_plain for group in group_plans),
            )
            plans.append(plan)
        return BatchPlan(names, tuple(features), tuple(plans))


def _listed(names: Iterable[str]) -> str:
    """Name the first five."""
    names = sorted(names)
    return ", ".join(map(repr, names[:5])) + (", ..." if names[5:] else "")


def check_names(names: Iterable[str], known: Iterable[str], where: str) -> None:
    """Check that each name is in ``known`` and comes once.

    Raises:
        DataError: If not, naming the feature, and the nearest known name.
    """
    candidates = list(known)
    seen: set[str] = set()
    for name in names:
        if name not in candidates:
            near = difflib.get_close_matches(name, candidates, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise DataError(f"feature {name!r} is not in {where}{hint}")
        if name in seen:
            raise DataError(f"feature {name!r} comes twice in one batch, expected once")
        seen.add(name)


def schema_fingerprint(schema: EmbeddingSchema) -> str:
    """All that gives a sign and a table number their meaning, as canonical JSON.

    Two processes with equal fingerprints agree on which group, table and dim a sign belongs
    to, and on the group's settings. What a slot does with its rows afterwards (pooling) is not
    part of it, nor is what only concerns new rows. Of unequal ones ``tell_apart`` says what
    differs, except where one would be so long that it is a digest.
    """
    slots = {
        name: [slot.dim, slot.group, slot.table, slot.hash_stack_rounds, slot.hash_stack_size]
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


def tell_apart(one: str, other: str, at_one: str, at_other: str) -> str:
    """Say what differs between two fingerprints, with both values.

    Args:
        one: A fingerprint.
        other: Another one.
        at_one: Where the first is from, such as ``here``.
        at_other: Where the second is from.
    """
    try:
        found = list(_differences(json.loads(one), json.loads(other)))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        found = []  # a digest, or from another version
    if not found:
        return f"fingerprints {one:.80} and {other:.80}"
    told = [f"{what} is {x} {at_one} and {y} {at_other}" for what, x, y in found[:_MAX_TOLD]]
    more = len(found) - len(told)
    return "; ".join(told) + (f"; and {more} more differ" if more else "")


def _differences(one: Any, other: Any) -> Iterator[tuple[str, object, object]]:
    """Yield what differs and both values; what may follow from something else comes later."""
    key = "feature_index_prefix_bit"
    if one[key] != other[key]:
        yield key, one[key], other[key]
    slots, others = one["slots"], other["slots"]
    for name in sorted(slots.keys() ^ others.keys()):
        is_in_one = name in slots
        words = ("present", "absent") if is_in_one else ("absent", "present")
        yield f"slots_config.{name}", *words
    both = sorted(slots.keys() & others.keys())
    for name in both:
        (dim, group, _, *stack), (its_dim, its_group, _, *its_stack) = slots[name], others[name]
        for what, x, y in (
            (f"slots_config.{name}.dim", dim, its_dim),
            (f"the feature group of slot {name!r}", group, its_group),
            (f"slots_config.{name}.hash_stack_config", _rows(*stack), _rows(*its_stack)),
        ):
            if x != y:
                yield what, x, y
    for number, (x, y) in enumerate(zip(one["groups"], other["groups"], strict=False)):
        if x != y:
            yield f"feature group {number}, in the order of the file,", x, y
            break
    settings, its_settings = one["settings"], other["settings"]
    for group in sorted(settings.keys() | its_settings.keys()):
        x, y = settings.get(group, "absent"), its_settings.get(group, "absent")
        if x != y:
            yield f"group_settings.{group}", x, y
    for name in both:
        x, y = slots[name][2], others[name][2]
        if x != y:
            what = f"the number of slot {name!r}'s dim, initialization and admit_probability"
            yield what, x, y


def _rows(rounds: int, size: int) -> str:
    return f"{rounds} rounds of {size} rows" if rounds else "none"
