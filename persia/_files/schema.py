"""What the signs and rows of a checkpoint mean: features, groups, tables, policies.

The sign of a row says its group by number, and numbers are places in the config of the job that
wrote it. Here is what turns them into names again, whatever the config of the job that reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from persia._core.base.halves import DTYPES
from persia._core.kernels.optim import MAX_DIM, RowOptimizer
from persia._files.entries import NAME
from persia._files.json_reader import FieldPath, Fields, integer
from persia.config import EmbeddingSchema

Policy = tuple[str, str | None, int]

_MAX_STATE_WORDS = 1 << 24
_U32 = (1 << 32) - 1
# Differences that are told; others often follow from the first.
_MAX_TOLD = 3


@dataclass(frozen=True, slots=True)
class SavedTable:
    """How the rows of some groups are kept."""

    dim: int
    dtype: str
    state_words: int
    optimizer: str
    options: Mapping[str, float | bool]
    """Of the optimizer, all of them."""

    policy: int
    """Place in ``SavedSchema.policies``."""

    @staticmethod
    def from_json(fields: Fields, num_policies: int) -> SavedTable:
        """Read the manifest's fields."""
        table = SavedTable(
            dim=fields.integer("dim", 1, MAX_DIM),
            dtype=fields.one_of("dtype", DTYPES),
            state_words=fields.integer("state_words", 0, _MAX_STATE_WORDS),
            optimizer=fields.text("optimizer"),
            options=fields.object("options"),
            policy=fields.integer("policy", 0, num_policies - 1),
        )
        for name, value in table.options.items():
            if not isinstance(value, int | float):
                raise fields.where.at("options").at(name).expected("a number", value)
        fields.done()
        return table


@dataclass(frozen=True, slots=True)
class SavedGroup:
    """Features that share rows; its number is its place in ``SavedSchema.groups``."""

    name: str
    table: str
    hash_stack: tuple[int, int]
    """Rounds, and rows of each round; (0, 0) without one."""


@dataclass(frozen=True, slots=True)
class SavedSchema:
    """The meaning of a checkpoint's rows."""

    prefix_bits: int
    groups: tuple[SavedGroup, ...]
    features: Mapping[str, str]
    """Group of each feature."""

    tables: Mapping[str, SavedTable]
    policies: tuple[Policy, ...]
    """Of eviction, by their numbers in the rows; number 0 is plain LRU."""

    @staticmethod
    def of(
        schema: EmbeddingSchema,
        optimizers: Sequence[RowOptimizer],
        policies: Sequence[Policy] = (),
        policy_of_table: Sequence[int] | None = None,
    ) -> SavedSchema:
        """Return what is saved of a config.

        Args:
            schema: The embedding config.
            optimizers: One for each of its tables.
            policies: Those beside plain LRU, as ``EmbeddingStore`` was given them.
            policy_of_table: Numbers by table; None says all are 0.
        """
        numbers = policy_of_table or [0] * len(schema.tables)
        tables = {
            table_name(table.number): SavedTable(
                table.dim,
                table.dtype,
                optimizer.state_words(table.dim),
                optimizer.name,
                dict(optimizer.options),
                number,
            )
            for table, optimizer, number in zip(schema.tables, optimizers, numbers, strict=True)
        }
        slot_of = {slot.group: slot for slot in schema.slots.values()}
        groups = [
            SavedGroup(
                name,
                table_name(slot_of[name].table),
                (slot_of[name].hash_stack_rounds, slot_of[name].hash_stack_size),
            )
            for name in sorted(schema.groups, key=schema.groups.__getitem__)
        ]
        return SavedSchema(
            schema.prefix_bits,
            tuple(groups),
            {slot.name: slot.group for slot in schema.slots.values()},
            tables,
            (("lru", None, 0), *policies),
        )

    def differences(self, other: SavedSchema) -> str:
        """Say what gives a sign another meaning there than here; "" if nothing does."""
        if self.prefix_bits != other.prefix_bits:
            return f"feature_index_prefix_bit is {self.prefix_bits} and {other.prefix_bits}"
        here, there = self._meanings(), other._meanings()
        found = []
        for name in dict.fromkeys([*here, *there]):
            if name not in there or name not in here:
                which = "first" if name in here else "second"
                found.append(f"only the {which} has group {name}")
                continue
            found += [
                f"{what} of group {name} is {value} and {there[name][what]}"
                for what, value in here[name].items()
                if value != there[name][what]
            ]
        more = len(found) - _MAX_TOLD
        return "; ".join(found[:_MAX_TOLD]) + (f"; and {more} more differ" if more > 0 else "")

    def _meanings(self) -> dict[str, dict[str, object]]:
        return {
            group.name: {
                "number": number,
                "table": group.table,
                "hash stack": group.hash_stack,
            }
            for number, group in enumerate(self.groups)
        }

    def to_json(self) -> dict[str, Any]:
        """Return the manifest's fields."""
        return {
            "prefix_bits": self.prefix_bits,
            "groups": [
                {"name": group.name, "table": group.table, "hash_stack": [*group.hash_stack]}
                for group in self.groups
            ],
            "features": dict(self.features),
            "tables": {
                name: {
                    "dim": table.dim,
                    "dtype": table.dtype,
                    "state_words": table.state_words,
                    "optimizer": table.optimizer,
                    "options": dict(table.options),
                    "policy": table.policy,
                }
                for name, table in self.tables.items()
            },
            "policies": [list(policy) for policy in self.policies],
        }

    @staticmethod
    def from_json(fields: Fields) -> SavedSchema:
        """Read the manifest's fields, and check that they agree."""
        prefix_bits = fields.integer("prefix_bits", 1, 63)
        where = fields.where.at("policies")
        policies = tuple(
            _policy(value, where.at(place))
            for place, value in enumerate(fields.array("policies"))
        )
        if not policies or policies[0] != ("lru", None, 0):
            raise where.error('expected ["lru", null, 0] first')
        named = fields.fields("tables")
        tables = {}
        for name in named.names():
            if not NAME.fullmatch(name):
                raise named.where.expected("names of letters, digits and ._-", name)
            tables[name] = SavedTable.from_json(named.fields(name), len(policies))
        groups = tuple(_group(group, tables) for group in fields.objects("groups"))
        names = [group.name for group in groups]
        where = fields.where.at("groups")
        if len(set(names)) < len(names):
            raise where.error("a name comes twice")
        if len(groups) >= 1 << prefix_bits:
            raise where.error(f"{prefix_bits} prefix bits do not hold {len(groups)} groups")
        features = fields.fields("features")
        group_of = {name: features.one_of(name, names) for name in features.names()}
        fields.done()
        return SavedSchema(prefix_bits, groups, group_of, tables, policies)


def table_name(number: int) -> str:
    """Return how files name a table of the embedding config."""
    return f"table{number}"


def _group(fields: Fields, tables: Mapping[str, SavedTable]) -> SavedGroup:
    name = fields.text("name")
    table = fields.one_of("table", tuple(tables))
    rounds, size = fields.array("hash_stack", 2)
    where = fields.where.at("hash_stack")
    fields.done()
    largest = (1 << 63) - 1
    return SavedGroup(
        name, table, (integer(rounds, where, 0, 0xFFFF), integer(size, where, 0, largest))
    )


def _policy(value: object, where: FieldPath) -> Policy:
    if not isinstance(value, list) or len(value) != 3:
        raise where.expected("[policy, clock, ttl]", value)
    policy, clock, ttl = value
    if policy not in ("lru", "lfu"):
        raise where.expected("lru or lfu", policy)
    if clock not in (None, "milliseconds", "steps"):
        raise where.expected("null, milliseconds or steps", clock)
    return policy, clock, integer(ttl, where, 0, (1 << 63) - 1)
