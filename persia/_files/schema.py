"""What the signs and rows of a checkpoint mean: features, groups, tables, policies.

The sign of a row says its group by number, and numbers are places in the config of the job that
wrote it. Here is what turns them into names again, whatever the config of the job that reads.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from persia._core.base.halves import DTYPES
from persia._core.kernels.optim import MAX_DIM, RowOptimizer
from persia._files.json_models import Record
from persia.config import EVICTION_POLICY, ID_HASH, EmbeddingSchema, list_differences
from persia.config.document import Expect, InvalidValue, Listed, Named, integer

# Of files, folders and tables: what every file system and object store takes as it is.
NAME = "[A-Za-z0-9][A-Za-z0-9._-]{0,199}"
DTYPE = Expect(f"one of {', '.join(DTYPES)}", pattern=f"^({'|'.join(DTYPES)})$")
_MAX_STATE_WORDS = 1 << 24
# Policy, clock and time to live, as ``EmbeddingStore`` takes them.
Policy = Annotated[
    tuple[
        Annotated[str, EVICTION_POLICY],
        Annotated[str, Expect("a clock", pattern="^(milliseconds|steps)$")] | None,
        Annotated[int, integer()],
    ],
    Expect("[policy, milliseconds or steps or null, time to live]", strict=False),
]


@dataclass(frozen=True, slots=True)
class SavedTable(Record):
    """How the rows of some groups are kept."""

    dim: Annotated[int, integer(1, MAX_DIM)]
    dtype: Annotated[str, DTYPE]
    state_words: Annotated[int, integer(0, _MAX_STATE_WORDS)]
    optimizer: str
    # Of the optimizer, all of them.
    options: Named[Annotated[bool | int | float, Expect("a number")]]
    policy: Annotated[int, integer()]  # place in ``SavedSchema.policies``


@dataclass(frozen=True, slots=True)
class SavedGroup(Record):
    """Features that share rows; its number is its place in ``SavedSchema.groups``."""

    name: str
    table: str
    # Rounds, and rows of each round; (0, 0) without one.
    hash_stack: Annotated[
        tuple[Annotated[int, integer(0, 0xFFFF)], Annotated[int, integer()]],
        Expect("[rounds, rows of each]", strict=False),
    ]


@dataclass(frozen=True, slots=True)
class SavedSchema(Record):
    """The meaning of a checkpoint's rows."""

    prefix_bits: Annotated[int, integer(1, 63)]
    groups: Listed[tuple[SavedGroup, ...]]
    features: Named[str]  # group of each feature
    tables: Named[SavedTable]
    # Of eviction, by their numbers in the rows; number 0 is plain LRU.
    policies: Listed[tuple[Policy, ...]]
    # Library whose hashes stand for ids, of each group that has one.
    hashes: Named[Annotated[str, ID_HASH]] = field(
        default_factory=dict, metadata={"optional": True}
    )

    def check(self) -> None:
        """Check the names and numbers by which fields refer to others."""
        if self.policies[:1] != (("lru", None, 0),):
            raise InvalidValue('expected ["lru", null, 0] first', "policies")
        for name, table in self.tables.items():
            if not re.fullmatch(NAME, name):
                raise InvalidValue(f"expected letters, digits and ._-, got {name!a}", "tables")
            if table.policy >= len(self.policies):
                raise InvalidValue(
                    f"expected one of {len(self.policies)} policies, got {table.policy}",
                    *("tables", name, "policy"),
                )
        for number, group in enumerate(self.groups):
            if group.table not in self.tables:
                raise InvalidValue(
                    f"expected one of {', '.join(self.tables)}, got {group.table!a}",
                    *("groups", number, "table"),
                )
        names = {group.name for group in self.groups}
        if len(names) < len(self.groups):
            raise InvalidValue("a name comes twice", "groups")
        if len(names) >= 1 << self.prefix_bits:
            raise InvalidValue(
                f"{self.prefix_bits} prefix bits do not hold {len(names)} groups", "groups"
            )
        members = [("features", *item) for item in self.features.items()]
        members += [("hashes", group, group) for group in self.hashes]
        for key, name, its in members:
            if its not in names:
                raise InvalidValue(
                    f"expected one of {', '.join(sorted(names))}, got {its!a}", key, name
                )

    @staticmethod
    def of(
        schema: EmbeddingSchema,
        optimizers: Sequence[RowOptimizer],
        policies: Sequence[Policy] = (),
        policy_of_table: Sequence[int] | None = None,
    ) -> SavedSchema:
        """Return what is saved of a config; optimizers and numbers of policies are by table."""
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
            {name: slot.id_hash for name, slot in slot_of.items() if slot.id_hash is not None},
        )

    def hash_of(self, group: str) -> str:
        """Return the library whose hashes stand for a group's ids, or "none"."""
        return self.hashes.get(group, "none")

    def differences(self, other: SavedSchema) -> str:
        """Return what gives signs another meaning in the other one; "" if nothing does."""
        bits = [("feature_index_prefix_bit", self.prefix_bits, other.prefix_bits)]
        mine, others = self._meanings(), other._meanings()
        absent = "absent"
        found = [
            (what, mine.get(what, absent), others.get(what, absent))
            for what in dict.fromkeys([*mine, *others])
        ]
        found = [each for each in bits + found if each[1] != each[2]]
        return list_differences(found, "in the first", "in the second")

    def _meanings(self) -> dict[str, object]:
        found: dict[str, object] = {}
        for number, group in enumerate(self.groups):
            of = f"of feature group {group.name}"
            found[f"the number {of}"] = number
            found[f"the table {of}"] = group.table
            found[f"the hash stack {of}"] = group.hash_stack
            found[f"the hash of ids {of}"] = self.hash_of(group.name)
        return found


def table_name(number: int) -> str:
    """Return how files name a table of the embedding config."""
    return f"table{number}"
