"""From ids to vectors and from gradients to steps, as the operators of ``persia.ops`` do it.

    lookup ------> OpenLookup, found by its ticket          forward
    gradient ----> RowGradient, one sum per distinct id     backward
    step --------> one update per request                   the optimizer's step

A ticket is a tensor that autograd saves; the address of its memory finds the lookup, and when
the memory is freed, no gradient can come any more. A gradient whose ticket is not known (a hook
has copied what was saved) or whose lookup has no request any more is applied by its ids alone.

Of an anchor's gradient the first value is the norm of what its table was handed over, and the
second a mark, once for each. Whatever scales gradients between backward and step scales both,
and the step finds the factor in the mark: GradScaler, clipping, averages. What clips values
bounds the norm, which is then below that of the rows, by the number that bounds theirs. The
third is 0, unless the loss has used the anchor itself, as penalties over parameters do.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from persia import env
from persia._core.base.arrays import empty_floats
from persia._core.ids.feature_batch import FeatureBatch
from persia._core.ids.joined_features import PER_ID, POOLINGS, GivenIds
from persia._core.kernels.pooling import PoolCalls
from persia._modules.homes import RowHome, homes_of, separate_rates, store_threads
from persia._modules.requests import AheadRows, RowRequest, take_ahead, take_call
from persia._modules.tables import ModuleTable, note_changes
from persia._rpc.messages import LearningRate, PooledOutput
from persia._training.inflight import Leaf

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from persia._rpc.messages import Floats
    from persia._training.inflight import InFlightBatch

    Maximum = NDArray[np.int32] | None
    # By feature f32 [D, dim], one sum per distinct id; and the norm of each, f32 [T].
    Sums = tuple[list[torch.Tensor], torch.Tensor]

# Gradients without a step, and lookups without a gradient, after which a model is taken for one
# whose rows are forgotten.
PATIENCE = 3
MANY_LOOKUPS = 50

# What an anchor's gradient has in its second place, once for each gradient that was handed
# over. A power of two, so that factors are exact, and too small to count in a norm.
_MARK = 2.0**-30
_MARKS = {torch.float16: 2.0**-10}  # which has no number as small


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
    kept: NDArray[np.bool_] | None = None  # [N] of the ids given, those that are no padding


# Filled by finalizers, which must not take a lock.
_orphans: deque[list[LookedUpFeature]] = deque()


@dataclass(slots=True, eq=False)
class OpenLookup:
    """What an operator has looked up, while a gradient of it may come."""

    features: list[LookedUpFeature]
    vectors: Floats | None = None  # flat, as ``pool`` returns them, if they were pooled ahead

    def __del__(self, orphans: deque[list[LookedUpFeature]] = _orphans) -> None:
        """Have what no gradient has come for released."""
        for feature in self.features:
            if feature.request is not None:
                orphans.append(self.features)
                return


@dataclass(slots=True, eq=False)
class RowGradient:
    """The gradient of a table's rows: one sum per distinct id."""

    ids: NDArray[np.uint64]  # [D]
    sums: torch.Tensor  # [D, dim], f32
    request: RowRequest | None = None  # None: by the ids alone
    place: int = 0

    def detach(self) -> None:
        """Do without the request, which ends if no other gradient can come by it."""
        request, self.request = self.request, None
        if request is not None:
            request.give_up()


# The backward that this thread is in, -1 for none. Versions of torch without it do not say.
_graph_task: Any = getattr(torch._C, "_current_graph_task_id", lambda: -1)

# Called when a step of these tables has been sent.
after_step: list[Callable[[Sequence[ModuleTable]], None]] = []

# By address of the ticket's memory, with what notices its end; changes of one key are atomic.
_open: dict[int, tuple[OpenLookup, weakref.ref[NDArray[np.int64]]]] = {}


def _new_ticket(lookup: OpenLookup) -> torch.Tensor:
    memory = np.zeros(1, np.int64)
    address = memory.ctypes.data

    def drop(_: object) -> None:
        _open.pop(address, None)

    _open[address] = lookup, weakref.ref(memory, drop)
    return torch.from_numpy(memory)


def release_orphans() -> None:
    """Release the lookups whose graph was dropped without a backward."""
    while _orphans:
        try:
            features = _orphans.popleft()
        except IndexError:  # another thread has taken the last ones
            return
        for feature in features:
            request, feature.request = feature.request, None
            if request is not None:
                request.give_up()


# --- forward --------------------------------------------------------------------------------


def find_rows(
    tables: Sequence[ModuleTable],
    modes: Sequence[str],
    features: Sequence[GivenIds],
    *,
    trains: bool,
    has_gradient: bool,
) -> OpenLookup:
    """Ask for the rows of all features, with one request per home if no table comes twice."""
    release_orphans()
    found: list[LookedUpFeature | None] = [None] * len(tables)
    homes = homes_of(tables)
    left = list(range(len(tables)))
    if has_gradient:
        for place, ahead in take_ahead(tables, features, homes).items():
            given = features[place]
            ids, numbered = given.pooled, ahead.given.pooled
            if ids.offsets is None and ids.weights is None and numbered.offsets is None:
                ids = numbered  # the same, and its ids are numbered already
            found[place] = LookedUpFeature(
                *(tables[place], modes[place], ids, ahead.rows),
                *(None, ahead.request, ahead.place, given.kept),
            )
            left.remove(place)
    while left:
        home = homes[left[0]]
        is_frozen = not tables[left[0]].anchor.requires_grad
        names: dict[str, int] = {}
        for place in left:
            if homes[place] is home and tables[place].anchor.requires_grad is not is_frozen:
                names.setdefault(tables[place].name, place)
        left = [place for place in left if names.get(tables[place].name) != place]
        asked = [features[place].asked for place in names.values()]
        request = None
        if trains and home.trains and not is_frozen:
            batch, rows, size = home.look_up_to_train(asked)
            request = RowRequest(home, batch, tuple(names), size, len(names))
            if not has_gradient:
                request.release()
                request = None
        else:
            rows = home.look_up(asked)
        for number, place in enumerate(names.values()):
            given = features[place]
            found[place] = LookedUpFeature(
                *(tables[place], modes[place], given.pooled, rows[number]),
                *(None, request, number, given.kept),
            )
    return OpenLookup([feature for feature in found if feature is not None])


def ahead(
    tables: Sequence[ModuleTable],
    ids: NDArray[np.uint64],
    offsets: NDArray[np.int64] | None,
) -> OpenLookup | None:
    """Return what was looked up and pooled ahead for exactly these ids, or None."""
    release_orphans()
    call = take_call(tables, ids, offsets)
    return None if call is None else OpenLookup(of_single(call.rows), call.vectors)


def of_single(rows: Sequence[AheadRows]) -> list[LookedUpFeature]:
    """Return rows of one id per sample as features; of one vector every mode is the sum."""
    return [
        LookedUpFeature(
            one.table, "sum", one.given.pooled, one.rows, None, one.request, one.place
        )
        for one in rows
    ]


def pool(features: Sequence[LookedUpFeature]) -> Floats:
    """Return the vectors of features, flat: one behind the other, each [B, dim]."""
    sizes = [feature.ids.batch_size * feature.table.dim for feature in features]
    out = empty_floats(sum(sizes))
    calls = PoolCalls()
    begin = 0
    for feature, size in zip(features, sizes, strict=True):
        target = out[begin : begin + size].reshape(-1, feature.table.dim)
        pooling = POOLINGS[feature.mode]
        feature.maxima = calls.pool(pooling, feature.rows, None, 1, feature.ids, target)
        begin += size
    calls.run(store_threads())
    return out


def pool_on_device(lookup: OpenLookup, device: torch.device) -> torch.Tensor:
    """Return what ``pool`` computes, computed by the device."""
    found = []
    for feature in lookup.features:
        rows = _tensor(feature.rows).to(device, non_blocking=True)
        found.append(_bags(feature, rows).view(-1))
    return torch.cat(found)


def _bags(feature: LookedUpFeature, rows: torch.Tensor) -> torch.Tensor:
    inverse, offsets, weights = _on_device(feature.ids, rows.device)
    if feature.mode == PER_ID and feature.ids.offsets is None:
        return rows[inverse]
    return torch.nn.functional.embedding_bag(
        inverse, rows, offsets, mode=POOLINGS[feature.mode], per_sample_weights=weights
    )


def fill_padding(feature: LookedUpFeature, padding: int, out: torch.Tensor) -> None:
    """Put the row of the padding id where it was asked for; lookups do not train it."""
    (home,) = homes_of([feature.table])
    place = weakref.ref(home), home.num_loads
    if feature.table.padding_place not in (None, place):
        feature.table.padding_rows.clear()  # they are of a context's, or of before a load
    feature.table.padding_place = place
    row = feature.table.padding_rows.get(padding)
    if row is None:
        ids = np.array([padding % (1 << 64)], np.uint64)
        (row,) = home.look_up([FeatureBatch.from_single(feature.table.name, ids)])
        feature.table.padding_rows[padding] = row
    if row.any() and feature.kept is not None:
        places = torch.from_numpy(~feature.kept).to(out.device)
        out.view(-1, feature.table.dim)[places] = _tensor(row).to(out)


def _tensor(rows: Floats) -> torch.Tensor:
    """Return rows as a tensor; a copy, if they came in a message and must not be written."""
    return torch.from_numpy(rows if rows.flags.writeable else rows.copy())


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
    note_lookups(lookup.features)
    return _new_ticket(lookup)


def note_lookups(features: Sequence[LookedUpFeature]) -> None:
    """Count lookups that train, and say of many without a backward what may be wrong."""
    for feature in features:
        if not feature.table.anchor.requires_grad:
            continue
        pending = feature.table.pending
        pending.num_lookups += 1
        if pending.num_lookups - pending.num_followed == MANY_LOOKUPS:
            feature.table.warn(
                f"{MANY_LOOKUPS} lookups of a model in training mode had no backward, so its "
                "rows do not learn: is the output detached, or the loss computed without it? "
                "Evaluate in model.eval() and under torch.no_grad()"
            )


def find_lookup(ticket: torch.Tensor) -> OpenLookup | None:
    """Return the lookup of a ticket, or None if it was copied or is of another process."""
    found = _open.get(ticket.data_ptr())
    return None if found is None else found[0]


# --- backward -------------------------------------------------------------------------------


def sum_gradients(features: Sequence[LookedUpFeature], gradient: torch.Tensor) -> Sums:
    """Return the sums of the features of a flat gradient.

    In it features are one behind the other, each [B, dim].
    """
    gradient = gradient.detach().float().reshape(-1)
    sizes = [feature.ids.batch_size * feature.table.dim for feature in features]
    if gradient.device.type != "cpu":
        found = [
            _sum_on_device(feature, part.view(-1, feature.table.dim))
            for feature, part in zip(features, torch.split(gradient, sizes), strict=True)
        ]
        return found, torch.stack(torch._foreach_norm(found))
    array = gradient.contiguous().numpy()
    parts = []
    begin = 0
    for feature, size in zip(features, sizes, strict=True):
        parts.append(array[begin : begin + size].reshape(-1, feature.table.dim))
        begin += size
    return sum_parts(features, parts)


def sum_parts(features: Sequence[LookedUpFeature], parts: Sequence[Floats]) -> Sums:
    """Return the sums of gradients f32 [B, dim] by feature, whose rows may lie apart."""
    calls = PoolCalls()
    found = []
    sizes = [feature.ids.num_distinct * feature.table.dim for feature in features]
    memory = empty_floats(sum(sizes))  # one behind the other, as the rows of a request are
    begin = 0
    for feature, part, size in zip(features, parts, sizes, strict=True):
        sums = memory[begin : begin + size].reshape(-1, feature.table.dim)
        begin += size
        calls.begin_sums(sums)
        pooling = POOLINGS[feature.mode]
        calls.pool_grad(pooling, part, None, 1, feature.ids, feature.maxima, None, sums)
        found.append(torch.from_numpy(sums))
    return found, torch.from_numpy(calls.run_with_norms(store_threads()))


def _sum_on_device(feature: LookedUpFeature, gradient: torch.Tensor) -> torch.Tensor:
    rows = _tensor(feature.rows).to(gradient.device).requires_grad_()
    with torch.enable_grad():
        (sums,) = torch.autograd.grad(_bags(feature, rows), rows, gradient)
    return sums.detach()


def weight_gradient(feature: LookedUpFeature, gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a feature's weights [N]: of each, vector times gradient."""
    inverse, _, _ = _on_device(feature.ids, gradient.device)
    lengths = torch.from_numpy(feature.ids.lengths().astype(np.int64)).to(gradient.device)
    rows = _tensor(feature.rows).to(gradient.device)
    per_id = torch.repeat_interleave(gradient.float(), lengths, dim=0)
    found = (per_id * rows[inverse]).sum(1)
    if feature.kept is None:
        return found
    padded = found.new_zeros(len(feature.kept))
    padded[torch.from_numpy(feature.kept).to(found.device)] = found
    return padded


def hand_over(features: Sequence[LookedUpFeature], sums: Sums) -> torch.Tensor:
    """Add gradients to what tables have for the next step; return the anchors' parts [T, 3]."""
    found, norms = sums
    for feature, one in zip(features, found, strict=True):
        table = feature.table
        if not table.anchor.requires_grad:
            continue  # one of several, and frozen
        pending = table.pending
        if pending.num_marks and table.anchor.grad is None:
            pending.drop()  # the anchor's was cleared, by zero_grad of a model or an optimizer
        if pending.has_ended:
            if not pending.num_marks and table.anchor.grad is not None:
                pending.num_marks = len(pending.gradients)  # a user has set the anchor's
            _drop_unconfirmed(table)
            pending.has_ended = False
        if pending.num_marks:
            _scale_as_the_anchor(table)
        pending.num_followed = pending.num_lookups
        pending.num_backwards += 1
        if pending.num_backwards >= PATIENCE:
            _warn_of_patience(table)
        if table.after_backward is None:
            table.after_backward = note_accumulated
        # A second backward through the same lookup has no request of its own.
        request, feature.request = feature.request, None
        pending.gradients.append(RowGradient(feature.ids.distinct, one, request, feature.place))
    _note_end_of_backward([feature.table for feature in features])
    marks = [_MARKS.get(feature.table.anchor.dtype, _MARK) for feature in features]
    if norms.device.type == "cpu":
        for feature, norm in zip(features, norms.tolist(), strict=True):
            feature.table.pending.norm = norm
    is_one = len(set(marks)) == 1  # nothing that a device would have to be waited for
    of_marks = torch.full_like(norms, marks[0]) if is_one else norms.new_tensor(marks)
    return torch.stack([norms, of_marks, torch.zeros_like(norms)], 1)


def _note_end_of_backward(tables: Sequence[ModuleTable]) -> None:
    """Have it noted when the backward under way has ended: anchors have their gradients then.

    One of some inputs only (``backward(inputs=...)``, ``autograd.grad``) leaves other anchors
    as they were, though it has come to what looked up for all of them.
    """

    def ended() -> None:
        for table in tables:
            table.pending.has_ended = True

    if _graph_task() != -1:
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(ended)


def _drop_unconfirmed(table: ModuleTable) -> None:
    """Forget what was handed over and has not come to the anchor."""
    pending = table.pending
    for one in pending.gradients[pending.num_marks :]:
        one.detach()
    del pending.gradients[pending.num_marks :]


def _warn_of_patience(table: ModuleTable) -> None:
    """Say of gradients without a step what is missing."""
    pending = table.pending
    if table.optimizer is None:
        pending.drop()
        table.warn(
            "its rows have had gradients and no step, so they do not learn: write optimizer = "
            "persia.optim.Adagrad(persia.nn.sparse_parameters(model), lr=0.05), after "
            "persia.nn.convert if it is used, and optimizer.step() behind loss.backward()"
        )
    elif pending.num_backwards == MANY_LOOKUPS:
        table.warn(
            f"{MANY_LOOKUPS} gradients of its rows were added up and none was stepped: call "
            "step() of its optimizer of persia.optim behind loss.backward()"
        )


def _scale_as_the_anchor(table: ModuleTable) -> None:
    """Apply what has scaled the anchor's gradient since the last backward.

    As clipping of each of several batches does, or zero_grad(set_to_none=False).
    """
    gradient, pending = table.anchor.grad, table.pending
    if gradient is None:
        return
    for one in pending.gradients:
        one.sums = _as_the_anchor(table, one.sums, gradient)
    with torch.no_grad():
        gradient[1] = _MARKS.get(gradient.dtype, _MARK) * pending.num_marks


def _as_the_anchor(
    table: ModuleTable, sums: torch.Tensor, gradient: torch.Tensor
) -> torch.Tensor:
    """Return sums scaled and bounded as the gradient of their anchor was."""
    pending, gradient = table.pending, gradient.detach()
    whole = _MARKS.get(gradient.dtype, _MARK) * max(pending.num_marks, 1)
    if gradient.device.type != "cpu":
        # Without a look at them, which would wait for the device: no value is above the norm.
        sums, limit = sums * (gradient[1].float() / whole), gradient[0].float()
        is_alone = pending.num_marks and (env.get_world_size() or 1) == 1
        return sums.clamp(-limit, limit) if is_alone else sums
    largest, mark, used = gradient.tolist()
    if abs(used) > 0.0:  # and no NaN, as of a norm that is none
        table.warn(
            "the loss uses its parameter, as penalties over parameters do, or something adds "
            "to its gradient: it is an anchor, which has no row; for a penalty on rows write "
            "weight_decay= of the optimizer of persia.optim"
        )
    if (factor := mark / whole) != 1.0:
        sums = sums * factor
    norm = pending.norm * factor
    if largest < norm and pending.num_marks:
        num_ranks = env.get_world_size() or 1  # over which DDP averages norms
        if num_ranks == 1 and largest < norm * (1.0 - 4 * torch.finfo(gradient.dtype).eps):
            return sums.clamp(-largest, largest)
        if largest * num_ranks < norm and num_ranks > 1:
            table.warn(
                "torch.nn.utils.clip_grad_value_ clips no rows of several ranks; write "
                "max_row_norm= or max_norm= of the optimizer of persia.optim"
            )
    return sums


def note_accumulated(table: ModuleTable) -> None:
    """Put the norm of all that was handed over into the anchor's gradient, after a backward."""
    pending = table.pending
    num_marks = pending.num_marks = len(pending.gradients)
    if num_marks < 2:
        return
    gradient = table.anchor.grad
    if gradient is None:
        return
    norm = torch.linalg.vector_norm(merged(table).sums)
    if norm.device.type == "cpu":
        pending.norm = float(norm)
    with torch.no_grad():
        # As if all of it had been handed over at once: one mark.
        gradient[1] /= num_marks
        gradient[0] = norm.to(gradient.device) * gradient[1] / _MARKS.get(gradient.dtype, _MARK)
    pending.num_marks = 1


def merged(table: ModuleTable) -> RowGradient:
    """Return all that was handed over as one gradient, in which each id comes once."""
    pending = table.pending
    given: list[RowGradient] = pending.gradients
    if len(given) == 1:
        only: RowGradient = given[0]
        return only
    every = FeatureBatch.from_single(table.name, np.concatenate([one.ids for one in given]))
    inverse = torch.from_numpy(every.inverse.astype(np.int64)).to(given[0].sums.device)
    sums = given[0].sums.new_zeros(every.num_distinct, table.dim)
    sums.index_add_(0, inverse, torch.cat([one.sums for one in given]))
    for one in given:
        one.detach()
    found = RowGradient(every.distinct, sums)
    pending.gradients = [found]
    return found


# --- the step -------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class TableStep:
    """How one table steps."""

    table: ModuleTable
    lr: float
    max_row_norm: float | None = None
    max_norm: float | None = None
    ids: NDArray[np.uint64] = field(init=False)
    sums: torch.Tensor = field(init=False)

    def scale(self) -> RowGradient:
        """Apply what has scaled the anchor's gradient since, and the table's own clipping."""
        table = self.table
        if table.pending.num_marks:  # else a user has set the anchor's gradient
            _drop_unconfirmed(table)
        given = table.pending.gradients
        gradient: RowGradient = given[0] if len(given) == 1 else merged(table)
        self.ids, self.sums = gradient.ids, gradient.sums
        anchor = table.anchor.grad
        if anchor is not None:
            self.sums = _as_the_anchor(table, self.sums, anchor)
        if self.max_row_norm is not None:
            norms = torch.linalg.vector_norm(self.sums, dim=1, keepdim=True)
            self.sums = self.sums * (self.max_row_norm / (norms + 1e-6)).clamp(max=1.0)
        if self.max_norm is not None:
            norm = torch.linalg.vector_norm(self.sums)
            self.sums = self.sums * (self.max_norm / (norm + 1e-6)).clamp(max=1.0)
        return gradient


def has_pending(table: ModuleTable) -> bool:
    """Whether a table has gradients that no step has used."""
    return bool(table.pending.gradients) and table.pending.num_backwards > 0


def awaits_gradient(table: ModuleTable) -> bool:
    """Whether a table was looked up for training and had no gradient since."""
    return table.pending.num_lookups > table.pending.num_followed


def num_lookups(tables: Iterable[ModuleTable]) -> int:
    """Return how many lookups for training tables have had."""
    return sum([table.pending.num_lookups for table in tables])


def step(steps: Sequence[TableStep], num_ranks: int) -> None:
    """Step the rows of tables by what was handed over: each row once, one update per request.

    Gradients are divided by ``num_ranks``. They stay with the table until they are cleared, as
    the gradient of a parameter does.
    """
    given = [(one, one.scale()) for one in steps if one.table.pending.gradients]
    apply(given, num_ranks)
    tables = [one.table for one, _ in given]
    for table in tables:
        table.pending.num_backwards = 0
    for listener in list(after_step):
        listener(tables)


def apply(steps: Sequence[tuple[TableStep, RowGradient]], num_ranks: int) -> None:
    """Step rows by the sums of each ``TableStep``, which are of the distinct ids beside it."""
    release_orphans()
    separate_rates({one.table: one.lr for one, _ in steps})
    by_request: dict[int, tuple[RowRequest, dict[int, TableStep]]] = {}
    alone: dict[int, tuple[RowHome, list[tuple[TableStep, RowGradient]]]] = {}
    homes = homes_of([one.table for one, _ in steps])
    for (one, gradient), home in zip(steps, homes, strict=True):
        request, gradient.request = gradient.request, None
        known = by_request.get(id(request))
        if known is not None and known[0].home is home:
            known[1][gradient.place] = one
        elif request is not None and request.home is home and request.batch.is_open():
            by_request[id(request)] = request, {gradient.place: one}
        else:
            alone.setdefault(id(home), (home, []))[1].append((one, gradient))
    for home, parts in alone.values():
        features = [
            FeatureBatch.from_csr(
                part.table.name, gradient.ids, np.array([0, len(gradient.ids)], np.int64)
            )
            for part, gradient in parts
        ]
        batch, _, size = home.look_up_to_train(features)
        new = RowRequest(home, batch, tuple(x.name for x in features), size, len(parts))
        by_request[id(new)] = new, {place: part for place, (part, _) in enumerate(parts)}
    by_home: dict[int, tuple[RowHome, list[tuple[RowRequest, dict[int, TableStep]]]]] = {}
    for request, places in by_request.values():
        by_home.setdefault(id(request.home), (request.home, []))[1].append((request, places))
    for home, updates in by_home.values():
        _send(home, updates, num_ranks)
    note_changes([one.table for one, _ in steps])


def _send(
    home: RowHome, updates: Sequence[tuple[RowRequest, dict[int, TableStep]]], num_ranks: int
) -> None:
    """Queue the updates of requests at one home."""
    engine = home.engine
    engine.raise_failure()
    if home.session is not None:
        for _, places in updates:
            for one in places.values():
                home.check_optimizer(one.table)
    claimed: list[InFlightBatch] = []
    try:
        for request, places in updates:
            home.tracker.submit(request.batch)
            claimed.append(request.batch)
            _fill(request, places)
            engine.pack(request.batch)
    except BaseException:
        engine.discard(claimed)
        raise
    # Gradients are those of each rank's own loss, as delay compensation has to know.
    engine.submit(claimed, 1.0, num_ranks)


def _fill(request: RowRequest, places: dict[int, TableStep]) -> None:
    """Give a request the gradients of its tables."""
    home = request.home
    gradients: list[tuple[Leaf, torch.Tensor | None]] = []
    rates = []
    for place, name in enumerate(request.names):
        one = places.get(place)
        if one is None:
            gradients.append((Leaf(name, _NO_TENSOR), None))
            continue
        slot, sums = home.slots[name], one.sums
        if slot.output is PooledOutput:
            sums = home.fit_gradient(name, sums, request.size)
        gradients.append((Leaf(name, sums), sums))
        rates.append(LearningRate(slot.table, one.lr))
        for padding in list(one.table.padding_rows):
            if (one.ids == np.uint64(padding % (1 << 64))).any():
                del one.table.padding_rows[padding]  # it was trained by other means
    if len(devices := {x.device for _, x in gradients if x is not None}) > 1:
        # One copy brings all to the host.
        there = next(one for one in devices if one.type != "cpu")
        gradients = [(leaf, None if x is None else x.to(there)) for leaf, x in gradients]
    request.batch.gradients, request.batch.rates = gradients, tuple(rates)


_NO_TENSOR = torch.empty(0)  # of a feature without a gradient
