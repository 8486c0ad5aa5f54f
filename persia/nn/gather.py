"""One lookup for all embeddings of a converted model, from what its forward is given.

    forward of the model --ids--> one lookup of all tables, and of one id per sample one pooling
       module of one table        takes its vectors or rows, if they are of its ids

A model calls its embeddings one after another, and each lookup and update of a few thousand ids
costs as much in calls as in work. Where the ids are among the arguments is learnt as
``persia.nn.prefetch`` learns it; nothing is looked up before its time, so results are the same.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
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
    model.register_forward_hook(own.end, always_call=True)


@dataclass(slots=True)
class _Forward:
    """A forward under way."""

    leaves: Leaves
    rows: list[AheadRows] = field(default_factory=list)
    joint: list[JointRows] = field(default_factory=list)


class _Forwards(threading.local):
    """The forward of one model that a thread is in."""

    forward: _Forward | None = None


class Gather:
    """Hooks around the forward of a model; a copy begins without what was learnt."""

    def __init__(self) -> None:
        self.recipes = Recipes()
        self.is_closed = False  # it is of no use for this model
        self._num_wrong = 0  # forwards for which rows were asked in vain
        self._of_thread = _Forwards()

    def __reduce__(self) -> tuple[type[Gather], tuple[()]]:
        return Gather, ()

    def begin(self, model: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Ask for the rows of a forward."""
        if torch.compiler.is_compiling() or self.is_closed:
            return
        if not model.training or not torch.is_grad_enabled():
            return
        self._finish()  # one that an interrupt has ended
        if requests.is_in_forward() or not ops.is_plain():
            return  # this is a part of another such model
        forward = self._of_thread.forward = _Forward(Leaves((args, kwargs)))
        if len(self.recipes) >= _FEW:
            forward.rows, forward.joint = self.recipes.open_joint(forward.leaves)
        requests.begin_forward()

    def end(self, model: nn.Module, args: Any, output: Any) -> None:
        """Learn from a forward, also from one that has raised."""
        if not torch.compiler.is_compiling():
            self._finish()

    def _finish(self) -> None:
        forward, self._of_thread.forward = self._of_thread.forward, None
        if forward is None:
            return
        rows: list[AheadRows | JointRows] = [*forward.rows]
        if forward.joint:
            joint.close_joint()
            rows += [one for one in forward.joint if one.is_apart or not one.is_taken]
            for one in forward.joint:
                if one.is_apart:
                    self.recipes.part(one)
        missed = requests.end_forward()
        self._num_wrong += self.recipes.note_batch(forward.leaves, rows, missed) > 0
        is_lost = self.recipes.num_failed >= PATIENCE and len(self.recipes) < _FEW
        self.is_closed = is_lost or self._num_wrong >= PATIENCE
