"""From the config of a checkpoint to the config of the job that loads it, by names.

Groups are numbered in the order of the config, and their numbers are in the signs. So a feature
that was added or removed above another one moves its rows to other signs, which other servers
may own. Here signs are rewritten by the names of features; rows of features that are gone are
dropped; what cannot be the same rows any more (another dim, dtype, hash stack, prefix width, a
group split or merged) is refused, with the difference. The state of another optimizer means
nothing to this one: it starts anew, and the mapping says so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from persia._core.kernels.optim import RowOptimizer
from persia._core.store.blocks import RowBlock
from persia._files.entries import Part
from persia._files.parts import parts_for, take
from persia._files.schema import Policy, SavedGroup, SavedSchema
from persia.errors import CheckpointError, ConfigError

# Instead of the number of a group.
_DROPPED = -1
_STRANGE = -2


@dataclass(frozen=True, slots=True)
class Mapping:
    """How rows of a checkpoint become rows of another config."""

    saved: SavedSchema
    wanted: SavedSchema
    groups: tuple[int, ...]
    """By number of a group in the checkpoint its number now, or -1 if its rows are dropped."""

    notes: tuple[str, ...]
    """What the user has to know, a sentence each: dropped, new, started anew."""

    @property
    def moves_rows(self) -> bool:
        """Whether signs change, so that rows belong to other buckets than their parts'."""
        return any(new not in (old, _DROPPED) for old, new in enumerate(self.groups))

    @property
    def _keeps_all(self) -> bool:
        """Whether rows are what they were: of the same config, and none is left out."""
        same = self.saved == self.wanted
        return same and self.groups == tuple(range(len(self.wanted.groups)))

    @staticmethod
    def between(
        saved: SavedSchema,
        wanted: SavedSchema,
        *,
        only: Collection[str] | None = None,
        drop_removed: bool = True,
    ) -> Mapping:
        """Find how the rows of ``saved`` are loaded into ``wanted``.

        Args:
            saved: Of the checkpoint.
            wanted: Of the job that loads.
            only: Features whose rows are loaded, with those that share them; None for all.
            drop_removed: Whether rows of features that are no more are dropped, or an error.

        Raises:
            ConfigError: If they cannot be; the message shows every difference.
        """
        problems: list[str] = []
        notes: list[str] = []
        if saved.prefix_bits != wanted.prefix_bits:
            problems.append(
                f"feature_index_prefix_bit is {saved.prefix_bits} in the checkpoint and "
                f"{wanted.prefix_bits} here"
            )
        unknown = sorted(set(only or ()) - (saved.features.keys() & wanted.features.keys()))
        if unknown:
            problems.append(
                f"features {', '.join(unknown)} are not in both: the checkpoint has "
                f"{', '.join(sorted(saved.features))}; here are "
                f"{', '.join(sorted(wanted.features))}"
            )
        groups = [_DROPPED] * len(saved.groups)
        old_number = {group.name: number for number, group in enumerate(saved.groups)}
        for number, group in enumerate(wanted.groups):
            if (only is not None) and not set(only) & set(_features(wanted, group.name)):
                continue
            sources = _sources(saved, wanted, group.name, notes)
            if len(sources) > 1:
                problems.append(
                    f"feature group {group.name!r} would merge {', '.join(map(repr, sources))} "
                    "of the checkpoint, where equal ids have rows of their own"
                )
            for source in sources:
                old = old_number[source]
                if groups[old] != _DROPPED:
                    problems.append(
                        f"feature group {source!r} of the checkpoint would be split into "
                        f"{wanted.groups[groups[old]].name!r} and {group.name!r}"
                    )
                groups[old] = number
                problems += _differences(saved, saved.groups[old], wanted, group)
                notes += _changes(saved, saved.groups[old], wanted, group)
        dropped = [g.name for g, new in zip(saved.groups, groups, strict=True) if new < 0]
        if dropped and only is None:
            names = [n for group in dropped for n in _features(saved, group)]
            sentence = f"features {', '.join(names)} of the checkpoint are not here"
            if drop_removed:
                notes.append(f"{sentence}: their rows are dropped")
            else:
                problems.append(sentence)
        if problems:
            raise ConfigError(
                "the checkpoint does not fit the embedding config: " + "; ".join(problems)
            )
        return Mapping(saved, wanted, tuple(groups), tuple(dict.fromkeys(notes)))

    def parts_for(self, parts: Sequence[Part], server: int, num_servers: int) -> list[Part]:
        """Return the parts with rows that one of ``num_servers`` will own."""
        used = {
            group.table
            for group, new in zip(self.saved.groups, self.groups, strict=True)
            if new != _DROPPED
        }
        near = parts if self.moves_rows else parts_for(parts, server, num_servers)
        return [part for part in near if part.table in used]

    def groups_of(self, table: str, signs: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the number that the group of each sign of a table has now, or -1.

        Raises:
            CheckpointError: If a sign is of no group that has this table.
        """
        # By prefix: 0 is no group's, nor is any beyond the last.
        numbers = np.full(len(self.groups) + 2, _STRANGE, np.int64)
        for old, new in enumerate(self.groups):
            if self.saved.groups[old].table == table:
                numbers[old + 1] = new
        prefixes = (signs >> np.uint64(64 - self.saved.prefix_bits)).view(np.int64)
        found: NDArray[np.int64] = np.take(numbers, prefixes, mode="clip")
        if len(found) and found.min() == _STRANGE:
            sign = signs[int(found.argmin())]
            raise CheckpointError(f"sign {sign:#018x} is of no group of {table}")
        return found

    def signs_of(self, table: str, signs: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return the signs that the rows of these have now, without those that are dropped.

        Raises:
            CheckpointError: If a sign is of no group that has this table.
        """
        new = self.groups_of(table, signs)
        kept = new != _DROPPED
        if not self.moves_rows:
            return signs if kept.all() else signs[kept]
        shift = np.uint64(64 - self.wanted.prefix_bits)
        ids = signs[kept] & ((np.uint64(1) << shift) - np.uint64(1))
        found: NDArray[np.uint64] = ids | ((new[kept] + 1).astype(np.uint64) << shift)
        return found

    def apply(self, table: str, block: RowBlock) -> Iterator[tuple[str, RowBlock]]:
        """Yield a block's rows as they are now, by the table they belong to.

        Raises:
            CheckpointError: If a sign is of no group that has this table.
        """
        new = self.groups_of(table, block.signs)
        if self._keeps_all and block.policy == self.wanted.tables[table].policy:
            yield table, block
            return
        for name in self.wanted.tables:
            members = [
                n for n in set(self.groups) if n >= 0 and self.wanted.groups[n].table == name
            ]
            chosen = np.isin(new, members)
            if not chosen.any():
                continue
            mine, numbers = (block, new) if chosen.all() else (take(block, chosen), new[chosen])
            yield name, self._as_kept(table, name, mine, numbers)

    def _as_kept(
        self, old_table: str, name: str, block: RowBlock, numbers: NDArray[np.int64]
    ) -> RowBlock:
        """Return rows with the signs, the policy and the state of their table now."""
        shift = np.uint64(64 - self.wanted.prefix_bits)
        ids = block.signs & ((np.uint64(1) << shift) - np.uint64(1))
        saved, table = self.saved.tables[old_table], self.wanted.tables[name]
        states, uses, ages = block.states, block.uses, block.ages
        if _restarts(self.saved, old_table, self.wanted, name):
            optimizer = RowOptimizer(table.optimizer, 0.0, **table.options)
            states = np.tile(optimizer.new_state(table.dim), (len(block), 1))
        before: Policy = self.saved.policies[saved.policy]
        after: Policy = self.wanted.policies[table.policy]
        if block.policy != saved.policy:  # a row that was not used since its policy changed
            before = self.saved.policies[block.policy]
        if before[0] != after[0]:
            uses = np.zeros_like(uses)
        if before[1] != after[1]:
            ages = np.zeros_like(ages)
        return dataclasses.replace(
            block,
            policy=table.policy,
            signs=ids | ((numbers + 1).astype(np.uint64) << shift),
            states=states,
            uses=uses,
            ages=ages,
        )


def _features(schema: SavedSchema, group: str) -> list[str]:
    return [name for name, its in schema.features.items() if its == group]


def _sources(
    saved: SavedSchema, wanted: SavedSchema, group: str, notes: list[str]
) -> list[str]:
    """Return the groups of the checkpoint that hold rows of this one's features."""
    names = _features(wanted, group)
    new = [name for name in names if name not in saved.features]
    sources = dict.fromkeys(saved.features[name] for name in names if name in saved.features)
    if new:
        rows = f"rows of group {group!r}" if sources else "no rows"
        notes.append(f"features {', '.join(new)} are new: they start with {rows}")
    return list(sources)


def _differences(
    saved: SavedSchema, old: SavedGroup, wanted: SavedSchema, new: SavedGroup
) -> Iterator[str]:
    before, after = saved.tables[old.table], wanted.tables[new.table]
    for what, x, y in (
        ("dim", before.dim, after.dim),
        ("dtype", before.dtype, after.dtype),
        ("hash stack (rounds, rows)", old.hash_stack, new.hash_stack),
    ):
        if x != y:
            yield f"{what} of feature group {new.name!r} is {x} in the checkpoint and {y} here"


def _changes(
    saved: SavedSchema, old: SavedGroup, wanted: SavedSchema, new: SavedGroup
) -> Iterator[str]:
    before, after = saved.tables[old.table], wanted.tables[new.table]
    if _restarts(saved, old.table, wanted, new.table):
        yield (
            f"feature group {new.name!r} was trained by {before.optimizer} with "
            f"{before.state_words} words of state and is by {after.optimizer} with "
            f"{after.state_words}: the state of its rows starts anew"
        )
    policies = saved.policies[before.policy], wanted.policies[after.policy]
    if policies[0] != policies[1]:
        yield (
            f"eviction of feature group {new.name!r} is {policies[0]} in the checkpoint and "
            f"{policies[1]} here: what cannot be carried over, uses or ages, starts from 0"
        )


def _restarts(saved: SavedSchema, old_table: str, wanted: SavedSchema, table: str) -> bool:
    before, after = saved.tables[old_table], wanted.tables[table]
    return (before.optimizer, before.state_words) != (after.optimizer, after.state_words)
