"""A model of persia.nn, trained over the servers that the environment names.

Usage: modules.py OPTIMIZER STEPS OUTPUT [FOLDER | --HOW,...]. HOW is compiled or
prefetch. Each of several ranks trains its part of every batch, the dense layers under
DistributedDataParallel, and rank 0 writes what it found.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import persia.nn
import persia.optim
from persia.errors import PersiaError
from tests.support.twins import BATCH, DIM, ROWS, Twins, batches, twins


def own_part(batch: tuple[torch.Tensor, ...], rank: int, world_size: int) -> Any:
    size = BATCH // world_size
    return tuple(each[rank * size : (rank + 1) * size] for each in batch)


def train_otherwise(both: Twins, steps: int, how: list[str]) -> dict[str, Any]:
    """Train ours compiled, or with lookups ahead, or both."""
    net: Any = torch.compile(both.ours, fullgraph=True) if "compiled" in how else both.ours
    data: Any = list(batches(steps))
    loader = persia.nn.prefetch(data, both.ours, depth=1) if "prefetch" in how else data
    losses = []
    for users, items, labels in loader:
        both.our_optimizer.zero_grad()
        loss = ((net(users, items) - labels) ** 2).mean()
        loss.backward()
        both.our_optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "ahead": getattr(loader, "num_hits", 0)}


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


def use_before_an_optimizer() -> dict[str, Any]:
    """Write rows and look them up while the servers know no optimizer, and then again."""
    module, ids = persia.nn.Embedding("late", 2, num_embeddings=3), torch.arange(3)
    module.weight.copy_(torch.arange(6.0).view(3, 2))
    found = {}
    try:
        module(ids)
    except PersiaError as exc:
        found["refused"] = f"{type(exc).__name__}: {exc}"
    persia.optim.Adagrad(module.parameters(), lr=0.1)
    found["late"] = module(ids).detach()
    return found


def export(both: Twins, path: str) -> dict[str, Any]:
    """Export a model by all ranks; return what each got, and the scores of this one."""
    ids = torch.arange(ROWS)
    numbers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(numbers, persia.nn.export(both.ours, path, (ids.view(-1, 1), ids)))
    both.ours.eval()
    scores = both.ours(ids.view(-1, 1), ids).detach()
    both.ours.train()
    return {"numbers": numbers, "scores": scores}


def rows_by_id(both: Twins) -> dict[str, Any]:
    """Read, write, count and drop rows of a table, and look one up again."""
    table = both.ours.user.table
    found = {"read": torch.from_numpy(table.read(torch.arange(ROWS))), "before": len(table)}
    table.write([3, 1 << 40], torch.ones(2, DIM))
    found["written"] = both.ours.user(torch.tensor([[3], [1 << 40]])).detach()
    found["deleted"] = table.delete([3, 4, 1 << 41])
    found["ids"] = sorted(key for key, _ in table)
    return found


def main() -> None:
    optimizer, steps, output, *folder = sys.argv[1:]
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    if world_size == 1 and optimizer == "adagrad":  # the servers' only one, from then on
        found = use_before_an_optimizer()
    both = twins(optimizer)
    torch.manual_seed(rank)  # as scripts do to shuffle by rank
    for turn in range(world_size if world_size > 1 else 0):
        if turn == rank:  # the others configure servers that have rows
            both.ours.user(torch.arange(ROWS).view(-1, 1))
        dist.barrier()
    if folder and folder[0].startswith("--"):
        found |= train_otherwise(both, int(steps), folder.pop()[2:].split(","))
    else:
        found["losses"] = train(both, int(steps), rank, world_size)
    found |= state(both)
    if folder and world_size > 1:
        found |= export(both, folder[0] + "-versions/net")
    if folder:
        persia.nn.save(both.ours, folder[0], both.our_optimizer)
        train(both, 3, rank, world_size, seed=2)
        found["after"] = state(both)
        persia.nn.load(both.ours, folder[0], both.our_optimizer)
        found["loaded"] = state(both)
        train(both, 3, rank, world_size, seed=2)
        found["again"] = state(both)
    if world_size == 1:
        found |= rows_by_id(both)
    if rank == 0:
        torch.save(found, output)
    if world_size > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
