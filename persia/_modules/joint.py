"""The features of one forward, looked up and pooled together before its modules ask for them.

    open ----> one request, one array, one node of autograd        before the forward
    take ----> a module's own vectors, if its ids are those         its modules, one by one
    close ---> what no module has taken is given up                 behind the forward

Only features with one id per sample are here: every pooling of one vector gives that vector.
The modules of a model then cost a comparison each, and their gradients come in one call.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from persia._modules.lookups import (
    LookedUpFeature,
    OpenLookup,
    hand_over,
    note_lookups,
    of_single,
    pool,
    sum_parts,
)
from persia._modules.requests import AheadRows, put_ahead

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from persia._modules.tables import ModuleTable
    from persia._rpc.messages import Floats

# Ids of these compare as the store knows them; others take the way of a module alone.
_INTEGERS = frozenset((torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8))

# Whether the graph outlives the backward under way. Versions of torch without it do not say.
_keeps_graph: Any = getattr(
    torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True
)
# The hooks, as of activation checkpoints, that a node made now would be subject to.
_saving_hooks: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


@dataclass(slots=True, eq=False)
class JointRows:
    """The vectors of one feature, until its module takes them."""

    rows: AheadRows
    feature: LookedUpFeature
    ids: NDArray[np.int64]  # [N]
    version: int  # of the table; rows that have changed since are looked up again
    vectors: torch.Tensor  # [N, dim]
    is_taken: bool = False
    is_apart: bool = False  # its module has other samples: it took the rows as rows ahead

    def give_up(self) -> int:
        """Do without them; return how many features no module has taken, 0 or 1."""
        if self.is_apart:
            return self.rows.give_up()
        if self.is_taken:
            return 0
        self.is_taken = True
        request, self.feature.request = self.feature.request, None
        if request is not None:
            request.give_up()
        return 1

    def part(self) -> None:
        """Leave the rows, without their vectors, to the lookup of a module."""
        self.is_taken = self.is_apart = True
        self.feature.request = None
        put_ahead(self.rows)


class Joint:
    """What modules take while a forward is under way."""

    def __init__(self, waiting: Sequence[JointRows]) -> None:
        self._waiting: dict[str, list[JointRows]] = {}  # by key of a table
        for one in waiting:
            self._waiting.setdefault(one.rows.table.key, []).append(one)
        self._offsets: torch.Tensor | None = None  # seen to have one id per sample
        self._version = 0

    def take(
        self,
        table: ModuleTable,
        anchor: torch.Tensor | None,
        ids: torch.Tensor,
        offsets: torch.Tensor | None = None,
        *,
        is_pooled: bool = False,
        include_last_offset: bool = False,
    ) -> torch.Tensor | None:
        """Return the vectors [N, dim] of a module's ids, or None if it is to look them up.

        ``offsets`` and what follows are of modules that pool.
        """
        waiting = self._waiting.get(table.key)
        if not waiting or anchor is not table.anchor or not is_usual(ids):
            return None
        values = ids.numpy().reshape(-1)
        for one in waiting:
            if len(values) != len(one.ids) or not (values == one.ids).all():
                continue
            waiting.remove(one)
            if one.version != table.version:
                one.give_up()
                return None
            if is_pooled and not self._has_one_each(ids, offsets, include_last_offset):
                one.part()
                return None
            one.is_taken = True
            return one.vectors
        return None

    def _has_one_each(
        self, ids: torch.Tensor, offsets: torch.Tensor | None, include_last_offset: bool
    ) -> bool:
        """Whether each sample has one id."""
        if offsets is None:
            return ids.dim() == 2 and ids.shape[1] == 1
        count = ids.numel() + include_last_offset
        if ids.dim() != 1 or offsets.numel() != count:
            return False
        if offsets is self._offsets and offsets._version == self._version:
            return True
        if not is_usual(offsets) or offsets.dim() != 1:
            return False
        if not (offsets.numpy() == np.arange(count)).all():
            return False
        if not offsets.is_inference():  # which have no version; modules mostly share offsets
            self._offsets, self._version = offsets, offsets._version
        return True


def is_usual(ids: torch.Tensor) -> bool:
    """Whether ids can be read where they are, and autograd is as it was before the forward."""
    return (
        type(ids) is torch.Tensor
        and ids.dtype in _INTEGERS
        and ids.is_cpu
        and not ids.is_nested
        and torch.is_grad_enabled()
        and _saving_hooks(True) is None
    )


def can_join(anchor: torch.Tensor) -> bool:
    """Whether vectors of a table are what a module would return: f32, of the CPU."""
    return anchor.is_cpu and anchor.dtype is torch.float32 and _saving_hooks is not None


class _Current(threading.local):
    """What the modules of a thread's forward take; None if they look up themselves."""

    joint: Joint | None = None


_current = _Current()


def current() -> Joint | None:
    """Return what modules of this thread take now, or None if they look up themselves."""
    return _current.joint


def open_joint(rows: Sequence[AheadRows], vectors: Floats | None = None) -> list[JointRows]:
    """Give rows that were asked for, one id per sample, to autograd as one; pool them before.

    ``vectors`` are those of the rows, if they are pooled already.
    """
    lookup = OpenLookup(of_single(rows), vectors)
    outputs = vectors_of(lookup, [feature.table.anchor for feature in lookup.features])
    found = [
        JointRows(one, feature, one.given.values.view(np.int64), one.table.version, out)
        for one, feature, out in zip(rows, lookup.features, outputs, strict=True)
    ]
    _current.joint = Joint(found)
    return found


def vectors_of(lookup: OpenLookup, anchors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return the vectors [B, dim] of each feature, pooled if need be, by one node of autograd.

    A gradient comes to each as it is, and to none that the loss does not reach. Out of one
    tensor for all, that of each would be copied twice, and zeros be made for the others.
    """
    vectors, lookup.vectors = lookup.vectors, None  # or a lookup would keep what is returned
    memory = pool(lookup.features) if vectors is None else vectors
    outputs = []
    begin = 0
    for feature in lookup.features:
        dim = feature.table.dim
        end = begin + feature.ids.batch_size * dim
        # Tensors of their own, not views of one: then a model may change them in place.
        outputs.append(torch.from_numpy(memory[begin:end].reshape(-1, dim)))
        begin = end
    note_lookups(lookup.features)
    found: tuple[torch.Tensor, ...] = _apply(lookup, outputs, *anchors)
    return found


def close_joint() -> None:
    """Let modules of this thread look up themselves again."""
    _current.joint = None


class _JointLookup(torch.autograd.Function):
    """The vectors of several features, and the gradients of those that a backward reaches."""

    @staticmethod
    def forward(
        ctx: Any, lookup: OpenLookup, outputs: list[torch.Tensor], *_: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.lookup = lookup  # and not the outputs: they have this node, and would not be freed
        ctx.freed = [False] * len(outputs)
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        """Hand over the gradients that there are; return those of the anchors."""
        places = [place for place, one in enumerate(gradients) if one is not None]
        # As saved tensors say it, which would be of all features: of two losses over different
        # features each has a backward of its own.
        if True in [ctx.freed[place] for place in places]:
            raise RuntimeError(
                "Trying to backward through the graph a second time: specify retain_graph=True "
                "in the first backward"
            )
        if not _keeps_graph():
            for place in places:
                ctx.freed[place] = True
        found: list[torch.Tensor | None] = [None] * len(gradients)
        if places:
            features = [ctx.lookup.features[place] for place in places]
            parts = [one.detach().numpy() for one in gradients if one is not None]
            of_anchors = hand_over(features, sum_parts(features, parts)).unbind(0)
            for place, one in zip(places, of_anchors, strict=True):
                found[place] = one
        return None, None, *found


_apply: Any = _JointLookup.apply  # torch has no types of it
