"""The last round of a pass, in which not every rank has a batch.

Ranks that have one step together; the others take part in what DDP sends, with gradients of
zero, and end with the same dense net. Gradients are divided by the number of all ranks, so
that the embeddings' "mean" fits: a batch counts as it does in every other round.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel


class Stateful(Protocol):
    """An optimizer, a GradScaler, or what else remembers its steps."""

    def state_dict(self) -> dict[str, Any]:
        """Return what ``load_state_dict`` takes."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> object:
        """Go on from there."""
        ...


@contextmanager
def last_round(
    model: torch.nn.Module, remembering: Sequence[Stateful], has_batch: Sequence[bool]
) -> Iterator[None]:
    """Step with fewer batches than ranks; all ranks enter it.

    The body is the steps of this rank's batch, or nothing. After it the model and what
    remembers are equal on all ranks again: a rank that missed a step of Adam would drift away
    in the next pass. If the body raises, the ranks part as they would in any round.

    Args:
        model: What ``convert2distributed_model`` returned.
        remembering: The optimizer, and the GradScaler if there is one.
        has_batch: By rank; true of at least one.
    """
    if not isinstance(model, DistributedDataParallel):
        yield
        return
    with Join([model]):
        yield
    rank = dist.get_rank(model.process_group)
    source = list(has_batch).index(True)
    data = io.BytesIO()
    if rank == source:
        torch.save([one.state_dict() for one in remembering], data)
    sent: list[bytes] = [data.getvalue()]
    dist.broadcast_object_list(sent, group=model.process_group, group_src=source)
    if not has_batch[rank]:
        # Through the CPU: the source's device need not be here.
        states = torch.load(io.BytesIO(sent[0]), map_location="cpu", weights_only=True)
        for one, state in zip(remembering, states, strict=True):
            one.load_state_dict(state)
