"""What modules ask for: the ids of an operator's features, and requests in flight.

Rows may have been asked for ahead, by ``persia.nn.prefetch``: they are taken if their ids are
the same, one by one, so that a wrong guess costs its lookup and nothing else. Where a whole
lookup has one id per sample, it is ahead as a whole, pooled: then it is compared at once.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch

from persia._core.ids.joined_features import GivenIds
from persia._modules.homes import RowHome, homes_of
from persia._modules.tables import ModuleTable
from persia._training.inflight import InFlightBatch, Reason
from persia.errors import DataTypeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from persia._rpc.messages import Floats

    Lookup = tuple["ModuleTable", GivenIds]

# Lookups of one forward. One that has more was left by an interrupt, and is over.
_MOST_MISSED = 1024

_lock = threading.Lock()  # guards what is ahead, and how many features of requests are open


@dataclass(slots=True, eq=False)
class RowRequest:
    """One training lookup at one home, until its update or release."""

    home: RowHome
    batch: InFlightBatch
    names: tuple[str, ...]  # of the tables, in the order of the request
    size: int  # samples of the request
    num_open: int  # features whose gradient may yet come by it

    def give_up(self) -> None:
        """Note that one of the features has no use for the request any more."""
        with _lock:
            self.num_open -= 1
            is_over = self.num_open <= 0
        if is_over:
            self.release()

    def release(self) -> None:
        """End it without an update, unless it has ended."""
        if self.batch.is_open():
            self.home.tracker.release(self.batch, Reason.ABANDONED)


def ids_of(values: torch.Tensor, tables: Sequence[str] = ()) -> NDArray[np.uint64]:
    """Return ids of any integer dtype as the store knows them: int64 by its bit pattern.

    ``tables`` are what an error names.
    """
    if values.dtype.is_floating_point or values.dtype.is_complex or values.dtype is torch.bool:
        of = f"table {', '.join(map(repr, tables))}: " if tables else ""
        raise DataTypeError(
            f"{of}ids: expected integers, as int64, got {values.dtype}; write ids.long(), "
            "where no id was rounded before: float32 has integers up to 2**24"
        )
    if values.dtype is torch.uint64:
        values = values.view(torch.int64)
    values = values.detach().to("cpu", torch.int64).contiguous()
    return values.numpy().reshape(-1).view(np.uint64)


# --- rows that were asked for ahead -----------------------------------------------------------


@dataclass(slots=True, eq=False)
class AheadRows:
    """The rows of one feature of a batch that the model has not seen yet."""

    table: ModuleTable
    given: GivenIds
    rows: Floats
    request: RowRequest
    place: int  # in the request
    num_writes: tuple[int, int]  # of the table and of its home, when they were asked for
    num_features: ClassVar[int] = 1

    def is_open(self, home: RowHome) -> bool:
        """Whether a table whose rows are there can be looked up by them."""
        return (
            self.request.home is home
            and self.request.batch.is_open()
            and self.num_writes == (self.table.num_writes, home.num_loads)
        )

    def give_up(self) -> int:
        """Do without them; return how many features no lookup has taken, 0 or 1."""
        if not _drop(_ahead, self.table.key, self):
            return 0
        self.request.give_up()
        return 1


@dataclass(slots=True, eq=False)
class AheadCall:
    """A whole lookup that the model has not made yet, of one id per sample."""

    key: tuple[str, ...]  # of its tables
    ids: NDArray[np.uint64]  # [F * B], of one feature behind the other
    rows: list[AheadRows]  # of each feature; none of these is ahead by itself
    vectors: Floats  # flat: of one feature behind the other, each [B, dim]

    @property
    def num_features(self) -> int:
        return len(self.rows)

    def give_up(self) -> int:
        """Do without it; return how many features no lookup has taken: all, or 0."""
        if not _drop(_calls, self.key, self):
            return 0
        for one in self.rows:
            one.request.give_up()
        return len(self.rows)


class Missed(NamedTuple):
    """Features of one lookup for which there were no rows ahead."""

    features: list[Lookup]
    size: int  # features of the lookup


class _ThreadMissed(threading.local):
    """What belongs to the forward that a thread is in."""

    missed: list[Missed] | None = None


_of_thread = _ThreadMissed()
# While a loader is prefetched: what its model has missed, whatever thread it runs in.
_missed: list[Missed] | None = None
# By key of a table, and by those of a lookup's tables; without empty lists.
_ahead: dict[str, list[AheadRows]] = {}
_calls: dict[tuple[str, ...], list[AheadCall]] = {}


def _drop(waiting: dict[Any, list[Any]], key: Any, one: object) -> bool:
    """Forget what waits under a key; False if it was taken."""
    with _lock:
        is_there = one in waiting.get(key, ())
        if is_there:
            _remove(waiting, key, one)
        return is_there


def _remove(waiting: dict[Any, list[Any]], key: Any, one: object) -> None:
    waiting[key].remove(one)
    if not waiting[key]:
        del waiting[key]


def put_ahead(rows: AheadRows) -> None:
    """Keep rows for the lookup that asks for the same ids."""
    with _lock:
        _ahead.setdefault(rows.table.key, []).append(rows)


def put_call(rows: list[AheadRows], vectors: Floats) -> AheadCall:
    """Keep rows, and their vectors, for the lookup that asks for all of them together."""
    key = tuple([one.table.key for one in rows])
    call = AheadCall(key, np.concatenate([one.given.values for one in rows]), rows, vectors)
    with _lock:
        _calls.setdefault(key, []).append(call)
    return call


def take_call(
    tables: Sequence[ModuleTable],
    ids: NDArray[np.uint64] | Sequence[NDArray[np.uint64]],
    offsets: NDArray[np.int64] | None = None,
) -> AheadCall | None:
    """Return what was looked up ahead for exactly this lookup; it is taken then.

    ``ids`` are of one feature behind the other, or of each. So are samples of ``offsets``.
    """
    if not _calls:
        return None
    key = tuple([table.key for table in tables])
    if key not in _calls:
        return None
    if not isinstance(ids, np.ndarray):
        ids = np.concatenate(ids)
    if offsets is not None:
        is_single = len(offsets) == len(ids) + 1
        if not is_single or not (offsets == np.arange(len(offsets))).all():
            return None
    homes = homes_of(tables)
    with _lock:
        for one in _calls.get(key, ()):
            if (
                len(one.ids) == len(ids)
                and (one.ids == ids).all()
                and all(map(AheadRows.is_open, one.rows, homes))
            ):
                _remove(_calls, key, one)
                return one
    return None


def take_ahead(
    tables: Sequence[ModuleTable], features: Sequence[GivenIds], homes: Sequence[RowHome]
) -> dict[int, AheadRows]:
    """Return, by place, rows asked for with exactly these ids; they are taken then.

    ``homes`` is where the rows of the tables are.
    """
    taken: dict[int, AheadRows] = {}
    if _ahead:
        with _lock:
            for place, table in enumerate(tables):
                given = features[place]
                for one in _ahead.get(table.key, ()):
                    if (
                        one.is_open(homes[place])
                        and one.given.padding == given.padding
                        and len(one.given.values) == len(given.values)
                        and (one.given.values == given.values).all()
                    ):
                        _remove(_ahead, table.key, one)
                        taken[place] = one
                        break
    if len(taken) < len(tables):
        note_missed(
            [
                (table, features[place])
                for place, table in enumerate(tables)
                if place not in taken
            ],
            len(tables),
        )
    return taken


def note_missed(features: list[Lookup], size: int) -> None:
    """Note features of a lookup of ``size`` that were not ahead, for what learns from it."""
    noted = _missed if _of_thread.missed is None else _of_thread.missed
    if noted is None:
        return
    noted.append(Missed(features, size))
    if len(noted) > _MOST_MISSED:
        _of_thread.missed = None


def start_recording() -> None:
    """Note lookups without rows ahead from now on, for a loader that is prefetched."""
    global _missed
    _missed = []


def take_missed(*, goes_on: bool = True) -> list[Missed]:
    """Return the lookups noted since the last call."""
    global _missed
    found, _missed = _missed or [], [] if goes_on else None
    return found


def missed() -> Sequence[Missed]:
    """Return the lookups noted since the last call of ``take_missed``."""
    return _missed or ()


def is_recording() -> bool:
    """Whether a loader is prefetched, which learns what its model looks up."""
    return _missed is not None


def is_in_forward() -> bool:
    """Whether this thread is between ``begin_forward`` and ``end_forward``."""
    return _of_thread.missed is not None


def begin_forward() -> None:
    """Note what a model of this thread looks up by itself from now on."""
    _of_thread.missed = []


def end_forward() -> list[Missed]:
    """Return what was noted since ``begin_forward``; a loader that is prefetched learns it."""
    found, _of_thread.missed = _of_thread.missed or [], None
    noted = _missed
    if noted is not None:
        noted += found
    return found


def ask(features: Sequence[Lookup]) -> list[AheadRows]:
    """Ask for the rows of features: one request per home if no table comes twice.

    They are in the order of the features; what takes them is up to the caller.
    """
    found: dict[int, AheadRows] = {}
    homes = homes_of([table for table, _ in features])
    left = list(range(len(features)))
    try:
        while left:
            home = homes[left[0]]
            here: dict[str, int] = {}
            rest = []
            for place in left:
                name = features[place][0].name
                if name in here or homes[place] is not home:
                    rest.append(place)
                else:
                    here[name] = place
            left = rest
            asked = [features[place][1].asked for place in here.values()]
            num_writes = [features[place][0].num_writes for place in here.values()]
            with home.load_lock:
                num_loads = home.num_loads  # before the lookup, which may see rows of before
                batch, rows, size = home.look_up_to_train(asked)
            request = RowRequest(home, batch, tuple(here), size, len(here))
            for number, place in enumerate(here.values()):
                table, given = features[place]
                writes = num_writes[number], num_loads
                found[place] = AheadRows(table, given, rows[number], request, number, writes)
    except BaseException:
        for one in found.values():
            one.request.give_up()
        raise
    return [found[place] for place in range(len(features))]
