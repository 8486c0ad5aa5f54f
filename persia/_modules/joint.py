"""The features of one forward, looked up and pooled together before its modules ask for them.

    open ----> one request, one array, one node of autograd        before the forward
    take ----> a module's own vectors, if its ids are those         its modules, one by one
    close ---> what no module has taken is given up                 behind the forward

Only features with one id per sample are here: every pooling of one vector gives that vector.
The modules of a model then cost a comparison each, and their gradients come in one call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from persia._core.base.arrays import empty_floats
from persia._core.kernels.pooling import PoolCalls
from persia._modules.lookups import (
    LookedUpFeature,
    OpenLookup,
    hand_over,
    note_lookups,
    sum_parts,
    threads,
)
from persia._modules.requests import AheadRows, put_ahead

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from persia._modules.tables import ModuleTable

# Of the forward under way; None if its modules look up themselves.
current: Joint | None = None

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

    def give_up(self) -> bool:
        """Do without them; False if they were taken."""
        if self.is_apart:
            return self.rows.give_up()
        if self.is_taken:
            return False
        self.is_taken = True
        request, self.feature.request = self.feature.request, None
        if request is not None:
            request.give_up()
        return True

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
        if not waiting or anchor is not table.anchor or not _is_usual(ids):
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
        if not _is_usual(offsets) or offsets.dim() != 1:
            return False
        if not (offsets.numpy() == np.arange(count)).all():
            return False
        if not offsets.is_inference():  # which have no version; modules mostly share offsets
            self._offsets, self._version = offsets, offsets._version
        return True


def _is_usual(ids: torch.Tensor) -> bool:
    """Whether ids can be read where they are, and autograd is as it was before the forward."""
    return (
        type(ids) is torch.Tensor
        and ids.dtype in _INTEGERS
        and ids.is_cpu
        and not ids.is_nested
        and torch.is_grad_enabled()
        and _saving_hooks(True) is None
    )


def can_join(table: ModuleTable) -> bool:
    """Whether vectors of a table are what a module would return: f32, of the CPU."""
    anchor = table.anchor
    return anchor.is_cpu and anchor.dtype is torch.float32 and _saving_hooks is not None


def open_joint(rows: Sequence[AheadRows]) -> list[JointRows]:
    """Pool rows that were asked for, one id per sample, and give them to autograd as one."""
    global current
    features = [
        LookedUpFeature(
            one.table, "sum", one.given.pooled, one.rows, None, one.request, one.place
        )
        for one in rows
    ]
    lookup = OpenLookup(features)
    sizes = [feature.ids.batch_size * feature.table.dim for feature in features]
    memory = empty_floats(sum(sizes))
    calls = PoolCalls()
    outputs = []
    begin = 0
    for feature, size in zip(features, sizes, strict=True):
        # Tensors of their own, not views of one: then a model may change them in place.
        out = memory[begin : begin + size].reshape(-1, feature.table.dim)
        calls.pool("sum", feature.rows, None, 1, feature.ids, out)
        outputs.append(torch.from_numpy(out))
        begin += size
    calls.run(threads)
    note_lookups(features)
    vectors = _apply(lookup, outputs, *[feature.table.anchor for feature in features])
    found = [
        JointRows(one, feature, one.given.values.view(np.int64), one.table.version, out)
        for one, feature, out in zip(rows, features, vectors, strict=True)
    ]
    current = Joint(found)
    return found


def close_joint() -> None:
    """Let modules look up themselves again."""
    global current
    current = None


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
