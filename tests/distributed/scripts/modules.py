"""A model of persia.nn, trained over the servers that the environment names.

Usage: modules.py OPTIMIZER STEPS OUTPUT [FOLDER]. Each of several ranks trains its part of
every batch, the dense layers under DistributedDataParallel, and rank 0 writes what it found.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import persia.nn
from tests.support.twins import BATCH, ROWS, Twins, batches, twins


def own_part(batch: tuple[torch.Tensor, ...], rank: int, world_size: int) -> Any:
    size = BATCH // world_size
    return tuple(each[rank * size : (rank + 1) * size] for each in batch)


def train(both: Twins, steps: int, rank: int, world_size: int, seed: int = 1) -> list[float]:
    """Train ours; return the losses of this rank."""
    net: nn.Module = both.ours
    if world_size > 1:
        net = nn.parallel.DistributedDataParallel(net)
    losses = []
    for batch in batches(steps, seed):
        users, items, labels = own_part(batch, rank, world_size)
        both.our_optimizer.zero_grad()
        loss = ((net(users, items) - labels) ** 2).mean()
        loss.backward()
        both.our_optimizer.step()
        losses.append(loss.item())
        if world_size > 1:
            both.ours.user.table.read([])  # waits for this rank's updates
            dist.barrier()
    return losses


def state(both: Twins) -> dict[str, torch.Tensor]:
    ids = torch.arange(ROWS)
    both.ours.eval()
    found = {
        "user": both.ours.user(ids.view(-1, 1)).detach(),
        "item": both.ours.item(ids).detach(),
        "top": both.ours.top.weight.detach().clone(),
    }
    both.ours.train()
    return found


def main() -> None:
    optimizer, steps, output, *folder = sys.argv[1:]
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        dist.init_process_group("gloo")
    both = twins(optimizer)
    torch.manual_seed(rank)  # as scripts do to shuffle by rank
    found: dict[str, Any] = {"losses": train(both, int(steps), rank, world_size)}
    found |= state(both)
    if folder:
        persia.nn.save(both.ours, folder[0], both.our_optimizer)
        train(both, 3, rank, world_size, seed=2)
        found["after"] = state(both)
        persia.nn.load(both.ours, folder[0], both.our_optimizer)
        found["loaded"] = state(both)
        train(both, 3, rank, world_size, seed=2)
        found["again"] = state(both)
    if rank == 0:
        torch.save(found, output)
    if world_size > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
