"""From ids to vectors and from gradients to steps, as the operators of ``persia.ops`` do it.

    lookup ------> OpenLookup, found by its ticket          forward
    gradient ----> RowGradient, one sum per distinct id     backward
    step --------> one update per request                   the optimizer's step

A ticket is a tensor that autograd saves; the address of its memory finds the lookup, and when
the memory is freed, no gradient can come any more. A gradient whose ticket is not known (a hook
has copied what was saved) or whose lookup has no request any more is applied by its ids alone.

Of an anchor's gradient the first value is the norm of what its table was handed over, and the
second a mark, once for each. Whatever scales gradients between backward and step scales both,
and the step finds the factor in the mark: GradScaler, clipping, averages.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from persia._core.base.threads import ThreadPool
from persia._core.ids.feature_batch import FeatureBatch
from persia._core.kernels.pooling import PoolCalls
from persia._modules.homes import RowHome, home_of
from persia._modules.tables import MANY_LOOKUPS, PATIENCE, ModuleTable, marker_of
from persia._rpc.messages import LearningRate
from persia._training.inflight import InFlightBatch, Leaf, Reason
from persia.errors import DataError, DataTypeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from persia._rpc.messages import Floats

    Maximum = NDArray[np.int32] | None

# Pools and sums beside the model's own threads; a pool starts threads when it has work.
_threads = ThreadPool(1)


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


@dataclass(slots=True, eq=False)
class LookedUpFeature:
    """The ids of one feature, and the rows that they were looked up to."""

    table: ModuleTable
    mode: str
    ids: FeatureBatch
    rows: Floats  # [D, dim], of the distinct ids
    maxima: Maximum = None
    request: RowRequest | None = None
    place: int = 0  # in the request


@dataclass(slots=True, eq=False)
class OpenLookup:
    """What an operator has looked up, while a gradient of it may come."""

    features: list[LookedUpFeature]
    has_gradient: bool = False


@dataclass(slots=True, eq=False)
class RowGradient:
    """The gradient of a table's rows: one sum per distinct id."""

    ids: NDArray[np.uint64]  # [D]
    sums: torch.Tensor  # [D, dim], f32
    request: RowRequest | None = None  # None: by the ids alone
    place: int = 0

    def detach(self) -> None:
        """Leave the request to others, or to nobody."""
        request, self.request = self.request, None
        if request is not None:
            request.give_up()


# By address of the ticket's memory; changes of one key are atomic.
_open: dict[int, OpenLookup] = {}
# Filled by finalizers, which must not take a lock.
_orphans: deque[OpenLookup] = deque()


def _new_ticket(lookup: OpenLookup) -> torch.Tensor:
    memory = np.zeros(1, np.int64)
    address = memory.ctypes.data

    def drop() -> None:
        _open.pop(address, None)
        _orphans.append(lookup)

    _open[address] = lookup
    weakref.finalize(memory, drop).atexit = False
    return torch.from_numpy(memory)


def release_orphans() -> None:
    """Release the lookups whose graph was dropped without a backward."""
    while _orphans:
        lookup = _orphans.popleft()
        if not lookup.has_gradient:
            for feature in lookup.features:
                if feature.request is not None:
                    feature.request.release()


# --- forward --------------------------------------------------------------------------------


def ids_of(values: torch.Tensor) -> NDArray[np.uint64]:
    """Return ids of any integer dtype as the store knows them: int64 by its bit pattern."""
    if values.dtype.is_floating_point or values.dtype.is_complex or values.dtype is torch.bool:
        raise DataTypeError(f"ids: expected integers, as int64, got {values.dtype}")
    if values.dtype is torch.uint64:
        values = values.view(torch.int64)
    values = values.detach().to("cpu", torch.int64).contiguous()
    return values.numpy().reshape(-1).view(np.uint64)


def split_features(
    tables: Sequence[ModuleTable],
    ids: NDArray[np.uint64],
    offsets: NDArray[np.int64] | None,
    weights: NDArray[np.float32] | None,
) -> list[tuple[FeatureBatch, FeatureBatch]]:
    """Return each feature's ids as they are asked for, without weights, and as they are pooled.

    Features lie one behind the other, all with as many samples; without offsets of one id each.
    """
    count = len(tables)
    found = []
    num_samples = (len(ids) if offsets is None else len(offsets) - 1) // count
    for place, table in enumerate(tables):
        first = place * num_samples
        if offsets is None:
            asked = FeatureBatch.from_single(table.name, ids[first : first + num_samples])
            found.append((asked, asked))
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
        found.append((asked, pooled))
    return found


def find_rows(
    tables: Sequence[ModuleTable],
    modes: Sequence[str],
    features: Sequence[tuple[FeatureBatch, FeatureBatch]],
    *,
    trains: bool,
    has_gradient: bool,
) -> OpenLookup:
    """Ask for the rows of all features, with one request per home if no table comes twice."""
    release_orphans()
    found: list[LookedUpFeature | None] = [None] * len(tables)
    left = list(range(len(tables)))
    while left:
        home = home_of(tables[left[0]])
        names: dict[str, int] = {}
        for place in left:
            table = tables[place]
            if table.name not in names and home_of(table) is home:
                names[table.name] = place
        left = [place for place in left if names.get(tables[place].name) != place]
        asked = [features[place][0] for place in names.values()]
        request = None
        if trains and home.trains:
            batch, rows = home.look_up_to_train(asked)
            size = max(1, asked[0].batch_size)
            request = RowRequest(home, batch, tuple(names), size, len(names))
            if not has_gradient:
                request.release()
                request = None
        else:
            rows = home.look_up(asked)
        for number, place in enumerate(names.values()):
            found[place] = LookedUpFeature(
                tables[place],
                modes[place],
                features[place][1],
                rows[number],
                None,
                request,
                number,
            )
    return OpenLookup([feature for feature in found if feature is not None])


def pool(lookup: OpenLookup, out: Floats) -> None:
    """Fill ``out``, features one behind the other, each [B, dim]."""
    calls = PoolCalls()
    begin = 0
    for feature in lookup.features:
        end = begin + feature.ids.batch_size * feature.table.dim
        target = out[begin:end].reshape(-1, feature.table.dim)
        feature.maxima = calls.pool(feature.mode, feature.rows, None, 1, feature.ids, target)
        begin = end
    calls.run(_threads)


def pool_on_device(lookup: OpenLookup, device: torch.device) -> torch.Tensor:
    """Return what ``pool`` computes, computed by the device."""
    found = []
    for feature in lookup.features:
        rows = torch.from_numpy(feature.rows).to(device, non_blocking=True)
        inverse, offsets, weights = _on_device(feature.ids, device)
        found.append(
            torch.nn.functional.embedding_bag(
                inverse, rows, offsets, mode=feature.mode, per_sample_weights=weights
            ).view(-1)
        )
    return torch.cat(found)


def _on_device(
    ids: FeatureBatch, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    offsets = ids.offsets
    edges = np.arange(ids.batch_size) if offsets is None else offsets[:-1].astype(np.int64)
    inverse = torch.from_numpy(ids.inverse.astype(np.int64)).to(device, non_blocking=True)
    weights = None if ids.weights is None else torch.from_numpy(ids.weights.copy()).to(device)
    return inverse, torch.from_numpy(edges).to(device, non_blocking=True), weights


def open_ticket(lookup: OpenLookup, *, has_gradient: bool) -> torch.Tensor:
    """Return the ticket of a lookup; one without gradients is not remembered."""
    if not has_gradient:
        return torch.zeros(1, dtype=torch.int64)
    for feature in lookup.features:
        table = feature.table
        table.num_lookups += 1
        if table.num_lookups == MANY_LOOKUPS:
            table.warn(
                f"{MANY_LOOKUPS} lookups of a model in training mode had no backward, so its rows "
                "do not learn: is the output detached, or the loss computed without it? Evaluate "
                "in model.eval() under torch.no_grad()"
            )
    return _new_ticket(lookup)


def find_lookup(ticket: torch.Tensor) -> OpenLookup | None:
    """Return the lookup of a ticket, or None if it was copied or is of another process."""
    return _open.get(ticket.data_ptr())


# --- backward -------------------------------------------------------------------------------


def sum_gradient(feature: LookedUpFeature, gradient: torch.Tensor) -> torch.Tensor:
    """Return the sum of a feature's gradient [B, dim] per distinct id, f32 [D, dim]."""
    dim = feature.table.dim
    if gradient.device.type == "cpu":
        sums = np.empty((feature.ids.num_distinct, dim), np.float32)
        calls = PoolCalls()
        calls.begin_sums(sums)
        array = gradient.detach().to(torch.float32).contiguous().numpy()
        calls.pool_grad(feature.mode, array, None, 1, feature.ids, feature.maxima, None, sums)
        calls.run(_threads)
        return torch.from_numpy(sums)
    return _sum_on_device(feature, gradient.detach().float())


def _sum_on_device(feature: LookedUpFeature, gradient: torch.Tensor) -> torch.Tensor:
    device, ids = gradient.device, feature.ids
    rows = torch.from_numpy(feature.rows).to(device).requires_grad_()
    inverse, offsets, weights = _on_device(ids, device)
    with torch.enable_grad():
        out = torch.nn.functional.embedding_bag(
            inverse, rows, offsets, mode=feature.mode, per_sample_weights=weights
        )
        (sums,) = torch.autograd.grad(out, rows, gradient)
    return sums.detach()


def weight_gradient(feature: LookedUpFeature, gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a feature's weights [N]: of each, vector times gradient."""
    inverse, _, _ = _on_device(feature.ids, gradient.device)
    lengths = torch.from_numpy(feature.ids.lengths().astype(np.int64)).to(gradient.device)
    rows = torch.from_numpy(feature.rows).to(gradient.device)
    per_id = torch.repeat_interleave(gradient.float(), lengths, dim=0)
    return (per_id * rows[inverse]).sum(1)


def hand_over(feature: LookedUpFeature, sums: torch.Tensor) -> torch.Tensor:
    """Add a gradient to what its table has for the next step; return the anchor's part."""
    table = feature.table
    if table.anchor.grad is None and table.num_marks:
        drop_gradients(table)  # the anchor's was cleared: by zero_grad, of whichever optimizer
    table.num_lookups = 0
    table.num_backwards += 1
    if table.optimizer is None and table.num_backwards >= PATIENCE:
        drop_gradients(table)
        table.warn(
            "rows have had gradients and no step, so they do not learn: write optimizer = "
            "persia.optim.Adagrad(persia.nn.sparse_parameters(model), lr=0.05), and "
            "optimizer.step() behind loss.backward()"
        )
    table.gradients.append(
        RowGradient(feature.ids.distinct, sums, feature.request, feature.place)
    )
    norm = torch.linalg.vector_norm(sums)
    return torch.stack([norm, norm.new_tensor(marker_of(table.anchor.dtype))])


def note_accumulated(table: ModuleTable) -> None:
    """Put the norm of all that was handed over into the anchor's gradient, after a backward."""
    gradient = table.anchor.grad
    table.num_marks = len(table.gradients)
    if gradient is None or len(table.gradients) < 2:
        return
    num_marks = table.num_marks
    norm = torch.linalg.vector_norm(merged(table).sums)
    mark = marker_of(gradient.dtype)
    with torch.no_grad():
        # In units of one mark, as if all had been handed over at once.
        gradient[1] /= num_marks
        gradient[0] = norm.to(gradient.device) * gradient[1] / mark
    table.num_marks = 1


def drop_gradients(table: ModuleTable) -> None:
    """Forget what was handed over and not stepped."""
    for gradient in table.gradients:
        gradient.detach()
    table.gradients.clear()
    table.num_marks = 0


def merged(table: ModuleTable) -> RowGradient:
    """Return all that was handed over as one gradient, in which each id comes once."""
    given = table.gradients
    if len(given) == 1:
        return given[0]
    every = FeatureBatch.from_single(table.name, np.concatenate([one.ids for one in given]))
    inverse = torch.from_numpy(every.inverse.astype(np.int64)).to(given[0].sums.device)
    sums = given[0].sums.new_zeros(every.num_distinct, table.dim)
    sums.index_add_(0, inverse, torch.cat([one.sums for one in given]))
    for one in given:
        one.detach()
    table.gradients = [RowGradient(every.distinct, sums)]
    return table.gradients[0]


# --- the step -------------------------------------------------------------------------------


@dataclass(slots=True)
class TableStep:
    """How one table steps."""

    table: ModuleTable
    lr: float
    max_row_norm: float | None = None
    max_norm: float | None = None
    sums: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    def scale(self) -> RowGradient:
        """Apply what has happened to the anchor's gradient since, and the table's own clipping."""
        table = self.table
        gradient = merged(table)
        self.sums = gradient.sums
        anchor = table.anchor.grad
        if anchor is not None:
            factor = anchor[1].float() / (marker_of(anchor.dtype) * max(table.num_marks, 1))
            if anchor.device.type != "cpu":
                self.sums = self.sums * factor.to(self.sums.device)
            elif (number := float(factor)) != 1.0:
                self.sums = self.sums * number
        if self.max_row_norm is not None:
            norms = torch.linalg.vector_norm(self.sums, dim=1, keepdim=True)
            self.sums = self.sums * (self.max_row_norm / (norms + 1e-6)).clamp(max=1.0)
        if self.max_norm is not None:
            norm = torch.linalg.vector_norm(self.sums)
            self.sums = self.sums * (self.max_norm / (norm + 1e-6)).clamp(max=1.0)
        return gradient


def step(steps: Sequence[TableStep], reduction: float) -> None:
    """Step the rows of tables by what was handed over: each row once, one update per request.

    Gradients are divided by ``reduction``. What they are applied to stays with the table, as the
    gradient of a parameter does, until it is cleared.
    """
    release_orphans()
    by_request: dict[int, tuple[RowRequest, dict[int, TableStep]]] = {}
    alone: dict[int, tuple[RowHome, list[tuple[TableStep, RowGradient]]]] = {}
    for one in steps:
        if not one.table.gradients:
            continue
        gradient = one.scale()
        request, gradient.request = gradient.request, None
        if (
            request is not None
            and request.batch.is_open()
            and home_of(one.table) is request.home
        ):
            by_request.setdefault(id(request), (request, {}))[1][gradient.place] = one
            continue
        home = home_of(one.table)
        alone.setdefault(id(home), (home, []))[1].append((one, gradient))
    for home, parts in alone.values():
        features = [
            FeatureBatch.from_csr(
                part.table.name, gradient.ids, np.array([0, len(gradient.ids)], np.int64)
            )
            for part, gradient in parts
        ]
        batch, _ = home.look_up_to_train(features)
        size = max(len(gradient.ids) for _, gradient in parts)
        new = RowRequest(home, batch, tuple(x.name for x in features), size, len(parts))
        by_request[id(new)] = new, {place: part for place, (part, _) in enumerate(parts)}
    for request, places in by_request.values():
        _send(request, places, reduction)


def _send(request: RowRequest, places: dict[int, TableStep], reduction: float) -> None:
    home, batch = request.home, request.batch
    home.engine.raise_failure()
    home.tracker.submit(batch)
    gradients: list[tuple[Leaf, torch.Tensor | None]] = []
    rates = []
    for place, name in enumerate(request.names):
        one = places.get(place)
        sums = None if one is None else home.fit_gradient(name, one.sums, request.size)
        gradients.append(
            (Leaf(name, batch_tensor if (batch_tensor := sums) is not None else _NONE), sums)
        )
        if one is not None:
            rates.append(LearningRate(home.slots[name].table, one.lr))
    batch.gradients = gradients
    batch.rates = tuple(rates)
    home.engine.submit([batch], reduction)
    for one in places.values():
        one.table.note_step()


_NONE = torch.empty(0)


def is_finite(table: ModuleTable) -> bool:
    """Whether all that was handed over is finite."""
    return all(math.isfinite(float(one.sums.sum())) for one in table.gradients)
