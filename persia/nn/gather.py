"""One lookup for all embeddings of a converted model, from what its forward is given.

    forward of the model --ids--> one lookup of all tables, and of one id per sample one pooling
       module of one table        takes its vectors or rows, if they are of its ids

A model calls its embeddings one after another, and each lookup and update of a few thousand ids
costs as much in calls as in work. Where the ids are among the arguments is learnt as
``persia.nn.prefetch`` learns it; nothing is looked up before its time, so results are the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from persia import ops
from persia._modules import joint, requests
from persia.nn.recipes import PATIENCE, Leaves, Recipes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from persia._modules.joint import JointRows
    from persia._modules.requests import AheadRows

# Tables below which nothing is gained.
_FEW = 2


def gather(model: nn.Module) -> None:
    """Look up together what the modules of a model look up in one forward, from now on."""
    for hook in model._forward_pre_hooks.values():
        if isinstance(getattr(hook, "__self__", None), Gather):
            return
    own = Gather()
    model.register_forward_pre_hook(own.begin, with_kwargs=True)
    model.register_forward_hook(own.end)


class Gather:
    """Hooks around the forward of a model; a copy begins without what was learnt."""

    def __init__(self) -> None:
        self.recipes = Recipes()
        self.is_closed = False  # it is of no use for this model
        self._num_wrong = 0  # forwards for which rows were asked in vain
        # Of the forward under way, or of one that has raised.
        self._leaves: Leaves | None = None
        self._rows: list[AheadRows] = []
        self._joint: list[JointRows] = []

    def __reduce__(self) -> tuple[type[Gather], tuple[()]]:
        return Gather, ()

    def begin(self, model: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Ask for the rows of a forward."""
        if torch.compiler.is_compiling() or self.is_closed:
            return
        if not model.training or not torch.is_grad_enabled():
            return
        if self._leaves is not None:
            self._finish()
        if requests.missed is not None:
            return  # a loader is prefetched, or this is a part of another such model
        if not ops.is_plain():
            return
        self._leaves = Leaves((args, kwargs))
        if len(self.recipes) >= _FEW:
            self._rows, self._joint = self.recipes.open_joint(self._leaves)
        requests.start_recording()

    def end(self, model: nn.Module, args: Any, output: Any) -> None:
        """Learn from a forward."""
        if not torch.compiler.is_compiling() and self._leaves is not None:
            self._finish()

    def _finish(self) -> None:
        leaves, self._leaves = self._leaves, None
        rows: list[AheadRows | JointRows] = [*self._rows]
        if self._joint:
            joint.close_joint()
            rows += [one for one in self._joint if one.is_apart or not one.is_taken]
            for one in self._joint:
                if one.is_apart:
                    self.recipes.part(one)
        self._rows, self._joint = [], []
        missed = requests.take_missed(goes_on=False)
        if leaves is None:
            return
        self._num_wrong += self.recipes.note_batch(leaves, rows, missed) > 0
        is_lost = self.recipes.num_failed >= PATIENCE and len(self.recipes) < _FEW
        self.is_closed = is_lost or self._num_wrong >= PATIENCE
