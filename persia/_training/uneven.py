"""A pass in which ranks have different numbers of batches.

A rank that has none left takes part in what DDP sends for the others' steps, with gradients
of zero, and ends with the same dense net. Gradients are divided by the number of all ranks,
as ever, and so are those of the embeddings under "mean".

DDP answers for the net only. The optimizer of a rank that has missed steps knows older moments
than the others', which would take the ranks apart in the next pass: it gets theirs.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel


@contextmanager
def uneven_steps(
    model: DistributedDataParallel, optimizer: torch.optim.Optimizer
) -> Iterator[None]:
    """Let this rank make more or fewer steps than others; all ranks enter it.

    The body is the steps, and there is no other collective in it than DDP's. If it raises, or
    its generator is closed, the ranks part as they would without.
    """
    steps = 0

    def count(*_: object) -> None:
        nonlocal steps
        steps += 1

    counting = optimizer.register_step_post_hook(count)
    try:
        with Join([model]):
            yield
    finally:
        counting.remove()
    group = model.process_group
    of_ranks: list[int] = [0] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, steps, group=group)
    most = max(of_ranks)
    if min(of_ranks) == most:
        return
    source = of_ranks.index(most)
    data = io.BytesIO()
    if dist.get_rank(group) == source:
        torch.save(optimizer.state_dict(), data)
    sent: list[bytes] = [data.getvalue()]
    dist.broadcast_object_list(sent, group=group, src=dist.get_global_rank(group, source))
    if steps < most:
        # By way of the CPU: the source's device need not be here.
        state = torch.load(io.BytesIO(sent[0]), map_location="cpu", weights_only=True)
        optimizer.load_state_dict(state)
