"""Feature names resolved to tables, groups and outputs.

A model sends the same features in each batch, so all that follows from their names is
computed once per list of names and kept. Within a table, groups follow each other in the
order of their first feature in the batch, which also is the order of use of their rows:

    table 0, dim 16   | group of f0, f3 | group of f1 | ...      one array of signs
    table 1, dim 8    | group of f2 |
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable
from dataclasses import dataclass

from persia.config import EmbeddingSchema, Slot
from persia.errors import DataError, did_you_mean

logger = logging.getLogger(__name__)

POOLED = frozenset(("sum", "mean", "sqrt", "max"))

# Batches after which a slot that none of them had is taken for a mistake: until then it may
# come from another data-loader.
UNSEEN_AFTER = 200


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


class BatchPlanner:
    """Resolves lists of feature names; any thread may call it."""

    # A list of names is a few hundred bytes. Beyond this number plans are made again each time.
    MAX_PLANS = 1024

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
            if len(self._plans) < self.MAX_PLANS:
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
            hint = did_you_mean(name, candidates)
            raise DataError(f"feature {name!r} is not in {where}{hint}")
        if name in seen:
            raise DataError(f"feature {name!r} comes twice in one batch, expected once")
        seen.add(name)
