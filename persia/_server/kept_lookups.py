"""Signs and row numbers of training lookups, kept for the update that follows.

Between processes an update would have to send each sign once more, and with it the row number
that the lookup has just sent: at dim 16 and two bytes a value, a quarter of all bytes. So the
caller gives its lookup a ref, and the update names the ref in place of both:

    lookup(ref, signs)      rows                       signs and numbers stay here
    update(ref, gradients)  in the order of the signs  or of ``places`` among them

A ref that is not known any more is an UnknownRef that has changed nothing; the caller sends the
signs then. So what is kept may be dropped at any time, and nothing of it outlives the process.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace

from persia._rpc.messages import (
    Numbers,
    Signs,
    TableGradients,
    TableRows,
    TableSigns,
)
from persia.errors import StoreError, UnknownRef

# Bounds of what is kept: signs, of 24 bytes each with their order by shard, and seconds, after
# which a batch was abandoned.
MOST_SIGNS = 1 << 24
LONGEST_S = 600.0
# What a lookup and each of its tables take beside their signs, at least: in signs.
LOOKUP_SIGNS = 16
TABLE_SIGNS = 16

_Table = tuple[Signs, Numbers | None]


class KeptLookups:
    """The lookups whose update is to come, oldest first; any thread may call it."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, most_signs: int = MOST_SIGNS
    ) -> None:
        self._clock, self._most_signs = clock, most_signs
        self._lock = threading.Lock()  # guards the next two
        self._lookups: OrderedDict[tuple[int, int], tuple[float, dict[int, _Table]]] = (
            OrderedDict()
        )
        self._num_signs = 0  # with those that stand for the rest

    def keep(
        self,
        ref: tuple[int, int],
        tables: Sequence[TableSigns],
        replies: Sequence[TableRows],
    ) -> list[TableRows]:
        """Keep what was looked up, in place of an earlier lookup of this ref.

        Returns the replies without their hints.
        """
        kept = {
            asked.table: (asked.signs, reply.hints)
            for asked, reply in zip(tables, replies, strict=True)
        }
        now = self._clock()
        with self._lock:
            self._drop(ref)
            self._lookups[ref] = now, kept
            self._num_signs += _num_signs(kept)
            while self._lookups:
                oldest, (began_at, _) = next(iter(self._lookups.items()))
                if self._num_signs <= self._most_signs and began_at >= now - LONGEST_S:
                    break
                self._drop(oldest)
        return [TableRows(reply.table, reply.rows, None) for reply in replies]

    def with_signs(
        self, ref: tuple[int, int], tables: Sequence[TableGradients]
    ) -> tuple[TableGradients, ...]:
        """Return the gradients of an update with signs and hints of the lookup that it names.

        Raises:
            UnknownRef: If the lookup is not kept.
            StoreError: If that table was not in it, or a place is beyond its signs.
        """
        with self._lock:
            found = self._lookups.get(ref)
        if found is None:
            raise UnknownRef(
                f"no lookup is kept under ref {ref}: send the signs of the update",
                method="update",
            )
        return tuple([_with_signs(part, found[1]) for part in tables])

    def drop(self, ref: tuple[int, int]) -> None:
        """Forget a lookup, whose update is applied."""
        with self._lock:
            self._drop(ref)

    def _drop(self, ref: tuple[int, int]) -> None:
        # The lock is held.
        found = self._lookups.pop(ref, None)
        if found is not None:
            self._num_signs -= _num_signs(found[1])


def _num_signs(kept: dict[int, _Table]) -> int:
    """Return how many signs take the memory of a lookup."""
    return LOOKUP_SIGNS + sum([TABLE_SIGNS + len(signs) for signs, _ in kept.values()])


def _with_signs(part: TableGradients, kept: dict[int, _Table]) -> TableGradients:
    """Return a table of an update with its signs, unless it has brought them."""
    if len(part.signs):
        return part
    if part.table not in kept:
        raise StoreError(f"an update: table {part.table} was not in the lookup that it names")
    signs, hints = kept[part.table]
    places = part.places
    if places is not None:
        highest = int(places.max(initial=0))
        if len(places) and highest >= len(signs):
            raise StoreError(
                f"table {part.table}: expected places below {len(signs)}, as many signs as the "
                f"lookup had, got {highest}"
            )
        signs, hints = signs[places], None if hints is None else hints[places]
    return replace(part, signs=signs, hints=hints)
