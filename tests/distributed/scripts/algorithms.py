"""One rank of two that fits a line under each of Bagua's names; rank 0 writes what came out.

Usage: forked.py algorithms.py OUTPUT.json
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from persia import env
from persia._training import checkpoint
from persia._training.dense_step import BeforeStep
from persia._training.ranks import uneven_steps
from persia.distributed import BaguaDistributedOption, get_default_distributed_option

warnings.simplefilter("error")

STEPS = 120
ROWS = 64  # of a batch, over both ranks
WIDTH = 600  # more than one block of codes

NAMES: dict[str, dict[str, Any]] = {
    "gradient_allreduce": {},
    "bytegrad": {"default_bucket_size": 1000},
    "qadam": {"warmup_steps": 30},
    "decentralized": {},
    "low_precision_decentralized": {},
    "async": {"warmup_steps": 32, "communication_interval": 8},
}


def new_model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)
    )


def new_optimizer(name: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    if name == "qadam":
        return torch.optim.Adam(model.parameters(), 0.01)
    return torch.optim.SGD(model.parameters(), 0.05)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step % 8)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    return x, torch.tanh(x[:, :1] + x[:, 1:2])


def fit(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, rows: slice, steps: Iterable[int]
) -> list[float]:
    """Return the mean square error of each batch before its step."""
    losses = []
    for step in steps:
        x, y = batch(step)
        loss = torch.nn.functional.mse_loss(model(x[rows]), y[rows])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def apart(model: torch.nn.Module) -> float:
    """Return the greatest difference of a parameter over the two ranks."""
    mine = flat(model)
    both = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(both, mine)
    return float((both[0] - both[1]).abs().max())


def half_of(rank: int) -> slice:
    return slice(rank * ROWS // 2, (rank + 1) * ROWS // 2)


def run(name: str, rank: int, directory: Path) -> dict[str, Any]:
    model = new_model()
    next(model.parameters()).data += rank  # all begin with what rank 0 has
    own = new_optimizer(name, model)
    option = BaguaDistributedOption(name, **NAMES[name])
    parallel, optimizer = option.convert2distributed_model(model, 2, rank, optimizer=own)
    half = half_of(rank)
    # The last step is one after which parameters are averaged, and the one after is not.
    losses = fit(parallel, own, half, range(STEPS + 1))
    apart_at_average = apart(parallel)
    fit(parallel, own, half, range(1))
    path = checkpoint.save_dense(parallel, directory, f"{name}-{rank}.pt", is_jit=False)
    checkpoint.load_dense(new_model(), path)
    saved = checkpoint.save_dense(optimizer, directory, f"{name}-{rank}.opt", is_jit=False)
    checkpoint.load_dense(new_optimizer(name, new_model()), saved)
    return {
        "same_optimizer": optimizer is own,
        "first": losses[0],
        "last": sum(losses[-8:]) / 8,
        "apart_at_average": apart_at_average,
        "apart_after": apart(parallel),
        "names": sorted(torch.load(path, weights_only=True)),
    }


def kept_batches(rank: int) -> float:
    """Return how far a gradient over two forward passes is from one rank's."""
    parallel, _ = get_default_distributed_option().convert2distributed_model(
        new_model(), 2, rank
    )
    alone = new_model()
    for model, rows in ((parallel, half_of(rank)), (alone, slice(0, ROWS))):
        losses = []
        for step in range(2):
            x, y = batch(step)
            losses.append(torch.nn.functional.mse_loss(model(x[rows]), y[rows]) / 2)
        sum(losses, torch.zeros(())).backward()  # type: ignore[no-untyped-call]
    return max(
        float((a.grad - b.grad).abs().max())
        for a, b in zip(parallel.parameters(), alone.parameters(), strict=True)
        if a.grad is not None and b.grad is not None
    )


def clipped(rank: int) -> dict[str, float]:
    """Return the norm of accumulated, clipped gradients; and how far from one rank's."""
    parallel, _ = get_default_distributed_option().convert2distributed_model(
        new_model(), 2, rank
    )
    alone, norm = new_model(), 0.125
    for model, rows in ((parallel, half_of(rank)), (alone, slice(0, ROWS))):
        for step in range(2):
            x, y = batch(step)
            loss = torch.nn.functional.mse_loss(model(x[rows]), y[rows])
            loss.backward()  # type: ignore[no-untyped-call]
        BeforeStep(max_norm=norm).run(torch.optim.SGD(model.parameters(), 0.1))
    ours, want = (
        torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
        for model in (parallel, alone)
    )
    return {"norm": float(ours.norm()), "from_one_rank": float((ours - want).abs().max())}


def uneven(rank: int, name: str) -> dict[str, float]:
    """Return what two passes of 6 and 4 batches, by a generator, end with.

    The generator holds the context around its ``yield``, as a DataLoader does.
    """
    model, alone = new_model(), new_model()
    own, optimizer = (torch.optim.Adam(m.parameters(), 0.01) for m in (model, alone))
    parallel, _ = BaguaDistributedOption(name).convert2distributed_model(
        model, 2, rank, optimizer=own
    )

    assert isinstance(parallel, torch.nn.parallel.DistributedDataParallel)

    def batches(model: torch.nn.parallel.DistributedDataParallel) -> Iterator[int]:
        with uneven_steps(model, own):
            yield from range(6 - 2 * rank)

    for _ in range(2):
        fit(parallel, own, half_of(rank), batches(parallel))
        for step in range(6):
            x, y = batch(step)
            for rows in (half_of(0), half_of(1))[: 2 if step < 4 else 1]:
                loss = torch.nn.functional.mse_loss(alone(x[rows]), y[rows]) / 2
                loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
    moments = torch.cat([own.state[p]["exp_avg"].reshape(-1) for p in model.parameters()])
    both = [torch.empty_like(moments) for _ in range(2)]
    dist.all_gather(both, moments)
    return {
        "apart": apart(parallel),
        "moments_apart": float((both[0] - both[1]).abs().max()),
        "from_one_rank": float((flat(alone) - flat(parallel)).abs().max()),
    }


def main(output: Path) -> None:
    rank = env.get_rank()
    if rank is None:
        raise SystemExit("start this by torchrun")
    found: dict[str, Any] = {name: run(name, rank, output.parent) for name in NAMES}
    found["kept_batches"] = kept_batches(rank)
    found["clipped"] = clipped(rank)
    found["uneven"] = {name: uneven(rank, name) for name in ("gradient_allreduce", "bytegrad")}
    if rank == 0:
        output.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
