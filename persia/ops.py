"""Operators: ``torch.ops.persia.lookup`` and ``torch.ops.persia.update``.

    lookup(version, anchors, ids, ...)     reads rows, and the version
    gradient(ticket, gradient, ...)        its backward: hands the gradient to the tables
    update(version!, ids, gradient, ...)   steps rows at once, and changes the version

The version is a tensor that stands for the rows: a graph in which rows are looked up, stepped
and looked up again has that order in its data, so that no compiler merges or moves the two.
``persia.nn`` has modules over ``lookup``; ``persia.optim`` steps what ``gradient`` collects.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from persia._core.ids.joined_features import PER_ID, split_features
from persia._modules import joint, lookups, requests
from persia._modules.lookups import LookedUpFeature, TableStep
from persia._modules.tables import find

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["gradient", "lookup", "update"]

_library: Any = torch.library.Library("persia", "DEF")  # type: ignore[no-untyped-call]
_library.define(
    "lookup(Tensor version, Tensor[] anchors, Tensor ids, Tensor? offsets, Tensor? weights, "
    "str[] tables, str[] modes, int[] dims, int? padding, bool trains, bool has_gradient) "
    "-> (Tensor, Tensor)"
)
_library.define(
    "gradient(Tensor ticket, Tensor gradient, Tensor ids, Tensor? offsets, Tensor? weights, "
    "str[] tables, str[] modes, int[] dims, int? padding, bool needs_weights, int call) "
    "-> (Tensor, Tensor)"
)
_library.define(
    "update(Tensor(a!) version, Tensor ids, Tensor gradient, str table, float lr) -> ()"
)

# Called through these, operators need not find their overload.
_lookup_operator = torch.ops.persia.lookup.default
_gradient_operator = torch.ops.persia.gradient.default

# Numbers the lookups of all graphs. Two equal lookups in one graph are merged by compilers; a
# number of its own keeps their gradients apart.
_calls = itertools.count()


def _num_samples(ids: torch.Tensor, offsets: torch.Tensor | None, count: int) -> Any:
    return (ids.numel() if offsets is None else offsets.numel() - 1) // count


def _look_up(
    ids: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    tables: list[str],
    modes: list[str],
    padding: int | None,
    *,
    trains: bool,
    has_gradient: bool,
) -> lookups.OpenLookup:
    found = [find(key) for key in tables]
    edges = None if offsets is None else offsets.detach().to("cpu", torch.int64).numpy()
    values = requests.ids_of(ids, tables)
    if has_gradient and weights is None and padding is None:
        ahead = lookups.ahead(found, values, edges)
        if ahead is not None:
            return ahead
    given = None if weights is None else weights.detach().to("cpu", torch.float32).numpy()
    names = [one.name for one in found]
    features = split_features(names, values, edges, given, padding)
    return lookups.find_rows(found, modes, features, trains=trains, has_gradient=has_gradient)


def _lookup(
    version: torch.Tensor,
    anchors: Sequence[torch.Tensor],
    ids: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    tables: list[str],
    modes: list[str],
    dims: list[int],
    padding: int | None,
    trains: bool,
    has_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    anchor = anchors[0]
    num_samples = _num_samples(ids, offsets, len(tables))
    if not num_samples:
        return anchor.new_empty(0), torch.zeros(1, dtype=torch.int64)
    found = _look_up(
        *(ids, offsets, weights, tables, modes, padding),
        trains=trains,
        has_gradient=has_gradient,
    )
    if anchor.device.type == "cpu":
        vectors, found.vectors = found.vectors, None  # or a lookup would keep what is returned
        out = torch.from_numpy(lookups.pool(found.features) if vectors is None else vectors)
    else:
        out = lookups.pool_on_device(found, anchor.device)
    if padding is not None and modes == [PER_ID]:
        lookups.fill_padding(found.features[0], padding, out)
    ticket = lookups.open_ticket(found, has_gradient=has_gradient)
    return out.to(anchor.dtype), ticket


def _gradient(
    ticket: torch.Tensor,
    gradient: torch.Tensor,
    ids: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    tables: list[str],
    modes: list[str],
    dims: list[int],
    padding: int | None,
    needs_weights: bool,
    call: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_samples = _num_samples(ids, offsets, len(tables))
    if not num_samples:
        of_none = gradient.new_zeros(ids.numel() if needs_weights else 0)
        return gradient.new_zeros(len(tables), 3), of_none
    found = lookups.find_lookup(ticket)
    if found is None:
        given = (ids, offsets, weights, tables, modes, padding)
        found = _look_up(*given, trains=True, has_gradient=True)
    sums = lookups.sum_gradients(found.features, gradient)
    anchors = lookups.hand_over(found.features, sums).to(gradient.dtype)
    if not needs_weights:
        return anchors, gradient.new_zeros(0)
    parts = torch.split(gradient, [num_samples * dim for dim in dims])
    of_weights = [
        lookups.weight_gradient(feature, part.view(num_samples, dim))
        for feature, part, dim in zip(found.features, parts, dims, strict=True)
    ]
    return anchors, torch.cat(of_weights)


def _update(
    version: torch.Tensor, ids: torch.Tensor, gradient: torch.Tensor, table: str, lr: float
) -> None:
    found = find(table)
    features = split_features([found.name], requests.ids_of(ids), None, None)
    asked = features[0].asked
    feature = LookedUpFeature(found, "sum", asked, np.empty((0, found.dim), np.float32))
    (sums,), _ = lookups.sum_gradients([feature], gradient)
    step = TableStep(found, lr)
    step.ids, step.sums = asked.distinct, sums
    lookups.apply([(step, lookups.RowGradient(asked.distinct, sums))], 1)
    version.add_(1)


for _name, _implementation in (
    ("lookup", _lookup),
    ("gradient", _gradient),
    ("update", _update),
):
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _implementation, _key)


def _fake_lookup(
    version: torch.Tensor,
    anchors: list[torch.Tensor],
    ids: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    tables: list[str],
    modes: list[str],
    dims: list[int],
    *_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    size = _num_samples(ids, offsets, len(tables)) * sum(dims)
    return anchors[0].new_empty(size), torch.empty(1, dtype=torch.int64)


def _fake_gradient(
    ticket: torch.Tensor, gradient: torch.Tensor, ids: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    _, _, tables, _, _, _, needs_weights, _ = rest
    size = ids.numel() if needs_weights else 0
    return gradient.new_empty(len(tables), 3), gradient.new_empty(size)


def _fake_update(
    version: torch.Tensor, ids: torch.Tensor, gradient: torch.Tensor, table: str, lr: float
) -> None:
    return None


_register_fake: Any = torch.library.register_fake  # its type is unknown
_register_fake("persia::lookup", _fake_lookup, lib=_library)
_register_fake("persia::gradient", _fake_gradient, lib=_library)
_register_fake("persia::update", _fake_update, lib=_library)


class _Lookup(torch.autograd.Function):
    """``lookup`` with its backward.

    Written out, as what ``torch.library.register_autograd`` makes walks over all arguments
    several times, which takes longer than to look a small feature up.
    """

    @staticmethod
    def forward(
        ctx: Any,
        keys: Any,
        version: torch.Tensor,
        ids: torch.Tensor,
        offsets: torch.Tensor | None,
        weights: torch.Tensor | None,
        options: tuple[Any, ...],
        *anchors: torch.Tensor,
    ) -> Any:
        """Look up by what is registered below autograd; without keys by the function itself."""
        given = (version, anchors, ids, offsets, weights)
        if keys is None:
            out, ticket = _lookup(*given, *options)
        else:
            out, ticket = _below_autograd(keys, *given, *options)
        ctx.save_for_backward(ticket, ids, offsets, weights)
        ctx.features, ctx.call = options[:4], next(_calls)
        return out, ticket

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Hand the gradient over; return those of the weights and of the anchors."""
        ticket, ids, offsets, weights = ctx.saved_tensors
        needs_weights = ctx.needs_input_grad[4]
        is_eager = type(gradients[0]) is torch.Tensor and is_plain()
        operator = _gradient if is_eager else _gradient_operator
        anchors, of_weights = operator(
            *(ticket, gradients[0].contiguous(), ids, offsets, weights),
            *(*ctx.features, needs_weights, ctx.call),
        )
        given = of_weights.to(weights.dtype) if needs_weights else None
        return None, None, None, None, given, None, *anchors.unbind(0)


_apply: Any = _Lookup.apply  # torch has no types of it


def _below_autograd(keys: Any, *arguments: Any) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return _lookup_operator.redispatch(keys & torch._C._after_autograd_keyset, *arguments)


def _lookup_with_autograd(
    keys: Any,
    version: torch.Tensor,
    anchors: list[torch.Tensor],
    ids: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    *options: Any,
) -> Any:
    if _needs_gradient(anchors, weights):
        return _apply(keys, version, ids, offsets, weights, options, *anchors)
    return _below_autograd(keys, version, anchors, ids, offsets, weights, *options)


def _needs_gradient(anchors: Sequence[torch.Tensor], weights: torch.Tensor | None) -> bool:
    if not torch.is_grad_enabled():
        return False
    return (weights is not None and weights.requires_grad) or any(
        anchor.requires_grad for anchor in anchors
    )


_library.impl("lookup", _lookup_with_autograd, "Autograd", with_keyset=True)


def is_plain() -> bool:
    """Whether nothing looks at what is called but autograd: no tracer, transform or mode."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._are_functorch_transforms_active()
        and torch._C._get_tracing_state() is None
    )


def look_up(
    version: torch.Tensor,
    anchors: Sequence[torch.Tensor],
    ids: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    *options: Any,
) -> torch.Tensor:
    """Return the vectors of ``lookup``, in eager mode without torch's dispatcher.

    To find an operator takes as long as to look a small feature up.
    """
    found: torch.Tensor
    if (
        torch.compiler.is_compiling()
        or type(ids) is not torch.Tensor
        or anchors[0].is_meta
        or not is_plain()
    ):
        found, _ = lookup(version, anchors, ids, offsets, weights, *options)
    elif _needs_gradient(anchors, weights):
        found, _ = _apply(None, version, ids, offsets, weights, options, *anchors)
    else:
        with torch.no_grad():  # weights may have a gradient that is not asked for
            found, _ = _lookup(version, anchors, ids, offsets, weights, *options)
    return found


def look_up_apart(
    anchors: Sequence[torch.Tensor],
    ids: torch.Tensor,
    offsets: torch.Tensor | None,
    tables: list[str],
    modes: list[str],
) -> tuple[torch.Tensor, ...] | None:
    """Return the vectors [B, dim] of each feature for training, as tensors of their own.

    None where that is not what ``look_up`` would do in eager mode on the CPU, without weights.
    """
    if torch.compiler.is_compiling() or not all(map(joint.can_join, anchors)):
        return None
    if not joint.is_usual(ids) or not is_plain() or not _num_samples(ids, offsets, len(tables)):
        return None
    found = _look_up(ids, offsets, None, tables, modes, None, trains=True, has_gradient=True)
    return joint.vectors_of(found, anchors)


lookup = torch.ops.persia.lookup
gradient = torch.ops.persia.gradient
update = torch.ops.persia.update
