"""What modules ask for: the ids of an operator's features, and requests in flight.

Rows may have been asked for ahead, by ``persia.nn.prefetch``: they are taken if their ids are
the same, one by one, so that a wrong guess costs its lookup and nothing else.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from persia._core.ids.feature_batch import FeatureBatch
from persia._modules.homes import RowHome, homes_of
from persia._modules.tables import ModuleTable
from persia._training.inflight import InFlightBatch, Reason
from persia.errors import DataError, DataTypeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from persia._rpc.messages import Floats


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
        self.num_open -= 1
        if self.num_open <= 0:
            self.release()

    def release(self) -> None:
        """End it without an update, unless it has ended."""
        if self.batch.is_open():
            self.home.tracker.release(self.batch, Reason.ABANDONED)


def ids_of(values: torch.Tensor) -> NDArray[np.uint64]:
    """Return ids of any integer dtype as the store knows them: int64 by its bit pattern."""
    if values.dtype.is_floating_point or values.dtype.is_complex or values.dtype is torch.bool:
        raise DataTypeError(f"ids: expected integers, as int64, got {values.dtype}")
    if values.dtype is torch.uint64:
        values = values.view(torch.int64)
    values = values.detach().to("cpu", torch.int64).contiguous()
    return values.numpy().reshape(-1).view(np.uint64)


@dataclass(slots=True, eq=False)
class GivenIds:
    """The ids of one feature, as they are asked for and, with weights, as they are pooled."""

    asked: FeatureBatch
    pooled: FeatureBatch
    values: NDArray[np.uint64]  # [N], as given
    padding: int | None
    kept: NDArray[np.bool_] | None = None  # of these, those that are no padding; None: all


def split_features(
    tables: Sequence[ModuleTable],
    ids: NDArray[np.uint64],
    offsets: NDArray[np.int64] | None,
    weights: NDArray[np.float32] | None,
    padding: int | None = None,
) -> list[GivenIds]:
    """Return the ids of each feature: one behind the other, all with as many samples.

    Without offsets each sample has one id. ``padding`` is an id that counts nothing.
    """
    kept, raw = None, ids
    if padding is not None:
        kept = ids != np.uint64(padding % (1 << 64))
        if kept.all():
            kept = None
        else:
            before = np.concatenate([np.zeros(1, np.int64), np.cumsum(kept)])
            offsets = before if offsets is None else before[offsets]
            ids = ids[kept]
            weights = None if weights is None else weights[kept]
    found = []
    num_samples = (len(ids) if offsets is None else len(offsets) - 1) // len(tables)
    for place, table in enumerate(tables):
        first = place * num_samples
        if offsets is None:
            asked = FeatureBatch.from_single(table.name, ids[first : first + num_samples])
            found.append(GivenIds(asked, asked, ids[first : first + num_samples], padding))
            continue
        edges = offsets[first : first + num_samples + 1]
        start, stop = int(edges[0]), int(edges[-1])
        if not 0 <= start <= stop <= len(ids):
            raise DataError(
                f"table {table.name!r}: offsets must be in 0..{len(ids)}, got {start} to {stop}"
            )
        edges, values = edges - start, ids[start:stop]
        asked = pooled = FeatureBatch.from_csr(table.name, values, edges)
        if weights is not None:
            pooled = FeatureBatch.from_csr(table.name, values, edges, weights[start:stop])
        found.append(
            GivenIds(asked, pooled, raw if padding is not None else values, padding, kept)
        )
    return found


# --- rows that were asked for ahead -----------------------------------------------------------


@dataclass(slots=True, eq=False)
class AheadRows:
    """The rows of one feature of a batch that the model has not seen yet."""

    table: ModuleTable
    given: GivenIds
    rows: Floats
    request: RowRequest
    place: int  # in the request

    def give_up(self) -> bool:
        """Do without them; False if a lookup has taken them."""
        is_left = drop_ahead(self)
        if is_left:
            self.request.give_up()
        return is_left


_lock = threading.Lock()  # guards the next
_ahead: defaultdict[str, list[AheadRows]] = defaultdict(list)  # by key of a table
# While a loader is prefetched: the lookups of the model for which there were no rows ahead.
missed: list[tuple[ModuleTable, GivenIds]] | None = None


def put_ahead(rows: AheadRows) -> None:
    """Keep rows for the lookup that asks for the same ids."""
    with _lock:
        _ahead[rows.table.key].append(rows)


def drop_ahead(rows: AheadRows) -> bool:
    """Forget rows; False if they were taken."""
    with _lock:
        if rows not in _ahead[rows.table.key]:
            return False
        _ahead[rows.table.key].remove(rows)
        return True


def take_ahead(
    tables: Sequence[ModuleTable], features: Sequence[GivenIds], homes: Sequence[RowHome]
) -> dict[int, AheadRows]:
    """Return, by place, rows asked for with exactly these ids; they are taken then.

    ``homes`` is where the rows of the tables are.
    """
    taken: dict[int, AheadRows] = {}
    if missed is None and not _ahead:
        return taken
    with _lock:
        for place, table in enumerate(tables):
            given = features[place]
            for one in _ahead.get(table.key, ()):
                if (
                    one.request.home is homes[place]
                    and one.request.batch.is_open()
                    and one.given.padding == given.padding
                    and len(one.given.values) == len(given.values)
                    and (one.given.values == given.values).all()
                ):
                    _ahead[table.key].remove(one)
                    taken[place] = one
                    break
            else:
                if missed is not None:
                    missed.append((table, given))
    return taken


def start_recording() -> None:
    """Note lookups without rows ahead from now on."""
    global missed
    missed = []


def take_missed(*, goes_on: bool = True) -> list[tuple[ModuleTable, GivenIds]]:
    """Return the lookups noted since the last call."""
    global missed
    found, missed = missed or [], [] if goes_on else None
    return found


def ask_ahead(features: Sequence[tuple[ModuleTable, GivenIds]]) -> list[AheadRows]:
    """Ask for the rows of a batch to come, for the lookups of its modules."""
    found = ask(features)
    for one in found:
        put_ahead(one)
    return found


def ask(features: Sequence[tuple[ModuleTable, GivenIds]]) -> list[AheadRows]:
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
            batch, rows, size = home.look_up_to_train(asked)
            request = RowRequest(home, batch, tuple(here), size, len(here))
            for number, place in enumerate(here.values()):
                table, given = features[place]
                found[place] = AheadRows(table, given, rows[number], request, number)
    except BaseException:
        for one in found.values():
            one.request.give_up()
        raise
    return [found[place] for place in range(len(features))]
