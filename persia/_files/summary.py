"""What people want to know of the rows of a checkpoint, and of the difference between two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from persia._core.base.halves import widen
from persia._core.store.blocks import RowBlock
from persia._files.manifest import NUM_BUCKETS, Manifest
from persia._files.rows import Progress, no_progress, rows_of
from persia._files.schema import SavedSchema
from persia._files.storage import Storage
from persia.errors import CheckpointError

# Of a diff: rows of one range of buckets of both checkpoints are held at a time.
_DIFF_RANGES = 64


@dataclass(slots=True)
class GroupSummary:
    """The rows of one feature group; norms are Euclidean, of the values."""

    rows: int = 0
    bytes: int = 0  # of signs, values and states
    norm_sum: float = 0.0
    norm_max: float = 0.0
    not_finite: int = 0  # rows with an infinity or a NaN; they are in no norm
    # The longest time since a use, in the clock of the group's policy; 0 without a ttl.
    oldest: int = 0
    # Norm and id of the rows with the largest norms, descending.
    biggest: list[tuple[float, int]] = field(default_factory=list)

    @property
    def norm_mean(self) -> float:
        """Mean norm of the rows that are finite."""
        return self.norm_sum / max(1, self.rows - self.not_finite)


def values_of(block: RowBlock) -> NDArray[np.float32]:
    """Return the values of rows as f32, exactly."""
    if block.dtype == "float32":
        return block.values.astype(np.float32, copy=False)
    return widen(block.values.astype(np.uint16, copy=False).reshape(-1), block.dtype).reshape(
        block.values.shape
    )


def groups_and_ids(
    schema: SavedSchema, signs: NDArray[np.uint64]
) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """Return the group's number and the id of each sign."""
    shift = np.uint64(64 - schema.prefix_bits)
    numbers = (signs >> shift).astype(np.int64) - 1
    strange = (numbers < 0) | (numbers >= len(schema.groups))
    if strange.any():
        raise CheckpointError(f"sign {signs[int(strange.argmax())]:#018x} is of no group")
    return numbers, signs & ((np.uint64(1) << shift) - np.uint64(1))


def summarise(
    storage: Storage,
    manifests: Sequence[Manifest],
    num_biggest: int = 5,
    progress: Progress = no_progress,
) -> dict[str, GroupSummary]:
    """Read all rows of a chain and return what they are like, by feature group."""
    schema = manifests[-1].schema
    found = {group.name: GroupSummary() for group in schema.groups}
    for _, block in rows_of(storage, manifests, progress):
        numbers, ids = groups_and_ids(schema, block.signs)
        norms = np.linalg.norm(values_of(block).astype(np.float64), axis=1)
        for number in np.unique(numbers).tolist():
            mine = numbers == number
            _count(found[schema.groups[number].name], block, mine, norms, ids, num_biggest)
    return found


def _count(
    group: GroupSummary,
    block: RowBlock,
    mine: NDArray[np.bool_],
    norms: NDArray[np.float64],
    ids: NDArray[np.uint64],
    num_biggest: int,
) -> None:
    is_finite = mine & np.isfinite(norms)
    rows = int(mine.sum())
    row_bytes = (block.signs.nbytes + block.values.nbytes + block.states.nbytes) // len(block)
    group.rows += rows
    group.bytes += rows * row_bytes
    group.not_finite += rows - int(is_finite.sum())
    group.norm_sum += float(norms[is_finite].sum())
    group.norm_max = max(group.norm_max, float(norms[is_finite].max(initial=0.0)))
    group.oldest = max(group.oldest, int(block.ages[mine].max(initial=0)))
    places = np.flatnonzero(is_finite)
    largest = places[np.argsort(-norms[places], kind="stable")[:num_biggest]]
    candidates = list(zip(norms[largest].tolist(), ids[largest].tolist(), strict=True))
    group.biggest = sorted([*group.biggest, *candidates], reverse=True)[:num_biggest]


@dataclass(slots=True)
class Difference:
    """Rows of one feature group, by where they are."""

    only_before: int = 0
    only_after: int = 0
    changed: int = 0  # in both, with other values or another state
    equal: int = 0
    largest: float = 0.0  # of the changes of single values


def compare(
    before: tuple[Storage, Sequence[Manifest]],
    after: tuple[Storage, Sequence[Manifest]],
    progress: Progress = no_progress,
) -> dict[str, Difference]:
    """Compare the rows of two chains bit by bit; groups and ids by their numbers."""
    schema = after[1][-1].schema
    found = {group.name: Difference() for group in schema.groups}
    for number in range(_DIFF_RANGES):
        width = NUM_BUCKETS // _DIFF_RANGES
        buckets = (number * width, (number + 1) * width)
        sides = []
        for storage, manifests in (before, after):
            blocks = [
                block for _, block in rows_of(storage, manifests, progress, buckets=buckets)
            ]
            for block in blocks:
                groups_and_ids(schema, block.signs)  # each is of a group
            sides.append(_by_sign(blocks))
        for each in sides[0].keys() | sides[1].keys():
            one, two = sides[0].get(each), sides[1].get(each)
            group = found[schema.groups[(each >> (64 - schema.prefix_bits)) - 1].name]
            if one is None or two is None:
                group.only_after += one is None
                group.only_before += two is None
                continue
            _compare(group, one, two)
    return found


_Row = tuple[NDArray[np.float32], bytes]


def _by_sign(blocks: Sequence[RowBlock]) -> dict[int, _Row]:
    found = {}
    for block in blocks:
        values = values_of(block)
        for place, sign in enumerate(block.signs.tolist()):
            found[sign] = (values[place], block.states[place].tobytes())
    return found


def _compare(group: Difference, one: _Row, two: _Row) -> None:
    is_equal = one[0].tobytes() == two[0].tobytes() and one[1] == two[1]
    group.equal += is_equal
    group.changed += not is_equal
    if not is_equal and one[0].shape == two[0].shape:
        with np.errstate(invalid="ignore"):
            largest = np.abs(one[0].astype(np.float64) - two[0]).max(initial=0.0)
        group.largest = max(group.largest, float(largest))
