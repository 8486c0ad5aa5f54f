"""From the config of a checkpoint to the config of the job that loads it, by names.

Groups are numbered in the order of the config, and their numbers are in the signs. So a feature
that was added or removed above another one moves its rows to other signs, which other servers
may own. Here signs are rewritten by the names of features; rows of features that are gone are
dropped; what cannot be the same rows any more (another dim, dtype, hash stack, prefix width, a
group split or merged) is refused, with the difference. Where the optimizer is another one, the
state of rows starts from its initial values, and the mapping notes it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from persia._core.kernels.native import is_native
from persia._core.kernels.optim import RowOptimizer
from persia._core.store.blocks import RowBlock
from persia._files.manifest import Part
from persia._files.parts import parts_for, take
from persia._files.schema import Policy, SavedGroup, SavedSchema, SavedTable
from persia._rpc.messages import LoadNote
from persia.errors import CheckpointError, ConfigError

# Instead of the number of a group.
_DROPPED = -1
_UNKNOWN = -2


@dataclass(frozen=True, slots=True)
class Mapping:
    """How rows of a checkpoint become rows of another config."""

    saved: SavedSchema
    wanted: SavedSchema
    # By number of a group in the checkpoint its number now, or -1 if its rows are dropped.
    groups: tuple[int, ...]
    notes: tuple[LoadNote, ...]  # what is dropped, new, or starts from initial values

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
    ) -> Mapping:
        """Find how the rows of ``saved`` are loaded into ``wanted``; refuse all that cannot be.

        With ``only``, these features are loaded, and those that share rows with them.
        """
        match = _Match(saved, wanted)
        match.check_names(only)
        for number, group in enumerate(wanted.groups):
            if only is None or not set(only).isdisjoint(_features(wanted, group.name)):
                match.add(number, group)
        if only is None:
            match.add_removed()
        match.add_restarted()
        if match.problems:
            raise ConfigError(
                "the checkpoint does not fit the embedding config: "
                f"{'; '.join(match.problems)}; give the config that it was saved with, or load "
                "what fits by features=[...]"
            )
        return Mapping(saved, wanted, tuple(match.groups), tuple(dict.fromkeys(match.notes)))

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
        """Return the number that the group of each sign of a table has now, or -1."""
        # By prefix: 0 is no group's, nor is any beyond the last.
        numbers = np.full(len(self.groups) + 2, _UNKNOWN, np.int64)
        for old, new in enumerate(self.groups):
            if self.saved.groups[old].table == table:
                numbers[old + 1] = new
        prefixes = (signs >> np.uint64(64 - self.saved.prefix_bits)).view(np.int64)
        found: NDArray[np.int64] = np.take(numbers, prefixes, mode="clip")
        if len(found) and found.min() == _UNKNOWN:
            sign = signs[int(found.argmin())]
            raise CheckpointError(f"sign {sign:#018x} is of no group of {table}")
        return found

    def signs_of(self, table: str, signs: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return the signs that rows have now, without those that are dropped."""
        new = self.groups_of(table, signs)
        kept = new != _DROPPED
        if not self.moves_rows:
            return signs if kept.all() else signs[kept]
        return self._renumbered(signs[kept], new[kept])

    def _renumbered(
        self, signs: NDArray[np.uint64], groups: NDArray[np.int64]
    ) -> NDArray[np.uint64]:
        """Return the signs that the ids of these have in other groups."""
        shift = np.uint64(64 - self.wanted.prefix_bits)
        ids = signs & ((np.uint64(1) << shift) - np.uint64(1))
        found: NDArray[np.uint64] = ids | ((groups + 1).astype(np.uint64) << shift)
        return found

    def apply(self, table: str, block: RowBlock) -> Iterator[tuple[str, RowBlock]]:
        """Yield a block's rows as they are now, by the table they belong to."""
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
        saved, table = self.saved.tables[old_table], self.wanted.tables[name]
        states, uses, ages = block.states, block.uses, block.ages
        if _restarts(saved, table):
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
            signs=self._renumbered(block.signs, numbers),
            states=states,
            uses=uses,
            ages=ages,
        )


class _Match:
    """The groups of a checkpoint matched with those of a job, by the names of features."""

    def __init__(self, saved: SavedSchema, wanted: SavedSchema) -> None:
        self._saved = saved
        self._wanted = wanted
        self._number = {group.name: number for number, group in enumerate(saved.groups)}
        self.groups = [_DROPPED] * len(saved.groups)
        self.problems: list[str] = []
        self.notes: list[LoadNote] = []
        self._restarted: dict[str, list[str]] = {}  # groups, by what became of their optimizer

    def check_names(self, only: Collection[str] | None) -> None:
        """Check the width of prefixes, and that both have the features that are asked for."""
        saved, wanted = self._saved, self._wanted
        if saved.prefix_bits != wanted.prefix_bits:
            self._differ("feature_index_prefix_bit", saved.prefix_bits, wanted.prefix_bits)
        unknown = sorted(set(only or ()) - (saved.features.keys() & wanted.features.keys()))
        if unknown:
            self.problems.append(
                f"features {', '.join(unknown)} are not in both: the checkpoint has "
                f"{', '.join(sorted(saved.features))}; here are "
                f"{', '.join(sorted(wanted.features))}"
            )

    def add(self, number: int, group: SavedGroup) -> None:
        sources = self._sources(group.name)
        if len(sources) > 1:
            self.problems.append(
                f"feature group {group.name!r} would merge {', '.join(map(repr, sources))} "
                "of the checkpoint, where equal ids have rows of their own"
            )
        for source in sources:
            old = self._number[source]
            if self.groups[old] != _DROPPED:
                self.problems.append(
                    f"feature group {source!r} of the checkpoint would be split into "
                    f"{self._wanted.groups[self.groups[old]].name!r} and {group.name!r}"
                )
            self.groups[old] = number
            self._compare(self._saved.groups[old], group)

    def add_removed(self) -> None:
        """Note the features that the job does not have."""
        pairs = zip(self._saved.groups, self.groups, strict=True)
        removed = [group.name for group, new in pairs if new == _DROPPED]
        names = [name for group in removed for name in _features(self._saved, group)]
        if removed:
            self._note(
                "other",
                f"features {', '.join(names)} of the checkpoint are not here: their rows are "
                "dropped",
            )

    def add_restarted(self) -> None:
        """Note the groups whose optimizer is another one, those with one change together."""
        for change, groups in self._restarted.items():
            self._note(
                "optimizer",
                f"feature groups {first_names(groups)} were {change}: the state of their rows "
                "starts from its initial values",
            )

    def _note(self, kind: str, text: str) -> None:
        self.notes.append(LoadNote(kind, text))

    def _differ(self, what: str, before: object, after: object) -> None:
        self.problems.append(f"{what} is {before} in the checkpoint and {after} here")

    def _sources(self, group: str) -> list[str]:
        """Return the groups of the checkpoint that hold rows of a group's features."""
        names, known = _features(self._wanted, group), self._saved.features
        new = [name for name in names if name not in known]
        sources = dict.fromkeys(known[name] for name in names if name in known)
        if new:
            rows = f"rows of group {group!r}" if sources else "no rows"
            self._note("new", f"features {', '.join(new)} are new: they start with {rows}")
        return list(sources)

    def _compare(self, old: SavedGroup, new: SavedGroup) -> None:
        """Note what has changed of one group, and what makes its rows unusable."""
        before, after = self._saved.tables[old.table], self._wanted.tables[new.table]
        name = f"feature group {new.name!r}"
        for what, x, y in (
            ("dim", before.dim, after.dim),
            ("dtype", before.dtype, after.dtype),
            ("hash stack (rounds, rows)", old.hash_stack, new.hash_stack),
            ("id_hash", self._saved.hash_of(old.name), self._wanted.hash_of(new.name)),
        ):
            if x != y:
                self._differ(f"{what} of {name}", x, y)
        natives = [one for one in (before.optimizer, after.optimizer) if is_native(one)]
        if natives and before.optimizer != after.optimizer:
            # Another library of the same width may mean something else by each word.
            self._differ(f"the optimizer of {name}", before.optimizer, after.optimizer)
        elif _restarts(before, after):
            change = f"trained by {before.optimizer} and are by {after.optimizer}"
            if before.optimizer == after.optimizer:
                # Another form of it, as with one sum for a row.
                change += f", with {before.state_words} words of state and {after.state_words}"
            self._restarted.setdefault(change, []).append(new.name)
        policies = self._saved.policies[before.policy], self._wanted.policies[after.policy]
        kinds = [policy for policy, _, _ in policies]
        if any(map(is_native, kinds)) and kinds[0] != kinds[1]:
            # By another scorer a class means something else.
            self._differ(f"the eviction of {name}", *kinds)
        elif policies[0] != policies[1]:
            self._note(
                "other",
                f"eviction of {name} is {policies[0]} in the checkpoint and {policies[1]} "
                "here: what cannot be carried over, uses or ages, starts from 0",
            )


def first_names(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"{', '.join(map(repr, names[:4]))}{more}"


def _features(schema: SavedSchema, group: str) -> list[str]:
    return [name for name, its in schema.features.items() if its == group]


def _restarts(before: SavedTable, after: SavedTable) -> bool:
    """Whether the optimizer's state of rows means nothing to another table's optimizer."""
    return (before.optimizer, before.state_words) != (after.optimizer, after.state_words)
