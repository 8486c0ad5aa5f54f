"""What a list of feature names means: which tables, which groups, which outputs.

A model sends the same features in each batch, so all that follows from their names is
worked out once per list of names and kept. Within a table, groups follow each other in the
order of their first feature in the batch, which also is the order of use of their rows:

    table 0, dim 16   | group of f0, f3 | group of f1 | ...      one array of signs
    table 1, dim 8    | group of f2 |
"""

from __future__ import annotations

import difflib
import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from persia.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from persia.config import EmbeddingSchema, Slot

POOLED = frozenset(("sum", "mean", "sqrt", "max"))


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

    def plan(self, names: tuple[str, ...]) -> BatchPlan:
        """Return the plan of a batch with these features, in this order.

        Raises:
            DataError: If a name is unknown, with the nearest known one, or comes twice.
        """
        plan = self._plans.get(names)
        if plan is None:
            plan = self._build(names)
            if len(self._plans) < self.MAX_KEPT:
                self._plans[names] = plan
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
        plans = tuple(
            TablePlan(
                number,
                self._schema.tables[number].dim,
                tuple(
                    GroupPlan(
                        tuple(places),
                        len(places) == 1 and not slots[places[0]].hash_stack_rounds,
                    )
                    for places in groups.values()
                ),
                num_pooled.get(number, 0),
            )
            for number, groups in tables.items()
        )
        return BatchPlan(names, tuple(features), plans)


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
    """A digest of all that gives a sign and a table number their meaning.

    Two processes with equal fingerprints agree on which group, table and dim a sign belongs
    to. What a slot does with its rows afterwards (pooling) is not part of it, nor is what
    only concerns new rows.
    """
    meaning = {
        "prefix_bits": schema.prefix_bits,
        "groups": schema.groups,
        "group_of": {name: slot.group for name, slot in schema.slots.items()},
        "table_of": {name: slot.table for name, slot in schema.slots.items()},
        "dims": [table.dim for table in schema.tables],
        "hash_stacks": {
            name: (slot.hash_stack_rounds, slot.hash_stack_size)
            for name, slot in schema.slots.items()
            if slot.hash_stack_rounds
        },
    }
    text = json.dumps(meaning, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
